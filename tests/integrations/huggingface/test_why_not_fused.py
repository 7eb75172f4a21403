# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms of rewritten layers that run apart from the residual add: the log says so once, and the report what is known
beforehand."""

import logging

import pytest
import torch
from hf_norms import N
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import RMSNorm, patch_model
from tilegym_rmsnorm.integrations.huggingface import norms
from tilegym_rmsnorm.integrations.huggingface.report import elided


class Layer(nn.Module):
    def __init__(self, make=LlamaRMSNorm):
        super().__init__()
        self.norm, self.mlp = make(N), nn.Linear(N, N)

    def forward(self, x, residual):
        total = residual + x
        x = self.norm(total)
        return total + x


class Mine(Tensor):
    def __add__(self, other):
        return self.as_subclass(Tensor) - other


@pytest.fixture(autouse=True)
def told(monkeypatch, caplog):
    """Collect INFO messages about norms that run apart."""
    monkeypatch.setattr(norms, "_told", set())
    caplog.set_level(logging.INFO, "tilegym_rmsnorm")
    return lambda: [each.message for each in caplog.records if "apart" in each.message]


def rows(dtype=torch.float32):
    return torch.randn(3, N).to(dtype)


def prefixed(reason, name="LlamaRMSNorm"):
    return [f"{name} runs apart from the residual add: {reason}"]


CALLS = {
    "float64": (
        lambda: (rows().double(), rows()),
        "no kernel has its eps, torch.float64 and a weight of torch.float32",
    ),
    "shapes": (lambda: (rows(), rows()[:1]), "the two that it adds differ in shape or device"),
    "numbers": (lambda: (rows(), 1.0), "it adds what is no floating tensor"),
    "order": (
        lambda: (torch.randn(N, 3).T, rows()),
        "the dimensions of one that it adds do not lie in memory in their order",
    ),
    "subclass": (lambda: (rows().as_subclass(Mine), rows()), "it adds a Mine"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_tensors_that_it_cannot_add(told, kind):
    layer, another = Layer(), Layer()
    patch_model(nn.ModuleList([layer, another]), patch_layers=True)
    layer(rows(), rows())
    assert told() == []
    make, reason = CALLS[kind]
    for _ in range(2):
        layer(*make())
        another(*make())
    assert told() == prefixed(reason)


CHANGES = {
    "hook": (lambda norm: norm.register_forward_hook(lambda *_: None), "it has hooks, or a forward of its own"),
    "forward": (lambda norm: setattr(norm, "forward", torch.neg), "it has hooks, or a forward of its own"),
    "derived": (
        lambda norm: setattr(norm, "__class__", type("Derived", (type(norm),), {"forward": lambda self, x: x})),
        "its class has a forward of its own",
    ),
    "call": (
        lambda norm: setattr(norm, "__class__", type("Derived", (type(norm),), {"__call__": lambda self, x: x})),
        "its class has a __call__ of its own",
    ),
    "zero": (
        lambda norm: setattr(norm, "weight", nn.Parameter(torch.empty(0))),
        f"its weight has shape (0,) where rows have ({N},)",
    ),
    "eps": (
        lambda norm: setattr(norm, "variance_epsilon", torch.tensor(1.0)),
        "no kernel has its eps, torch.float32 and a weight of torch.float32",
    ),
    "none": (lambda norm: setattr(norm, "weight", None), "no kernel has its weight, its eps and torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_norms_that_cannot_add(told, kind):
    layer = Layer()
    patch_model(layer, patch_layers=True)
    change, reason = CHANGES[kind]
    change(layer.norm)
    for _ in range(2):
        try:
            layer(rows(), rows())
        except (RuntimeError, TypeError):
            assert kind in ("zero", "none")  # as the original's
    assert told() == prefixed(reason, type(layer.norm).__name__)


def test_hooks_of_all_modules_and_norms_that_are_put_in_its_place(told):
    layer = Layer()
    patch_model(layer, patch_layers=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    layer(rows(), rows())
    handle.remove()
    layer.norm = nn.Tanh()
    layer(rows(), rows())
    assert told() == [*prefixed("a hook sees all modules"), *prefixed("it is not patched", "Tanh")]


def test_it_is_not_told_where_nobody_reads_it(told, caplog):
    layer = Layer()
    patch_model(layer, patch_layers=True)
    layer.norm.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "tilegym_rmsnorm"):
        layer(rows(), rows())
    assert told() == [] and not norms._told
    layer(rows(), rows())
    assert len(told()) == 1


def test_nothing_is_told_while_dynamo_traces(told):
    torch._dynamo.reset()
    layer = Layer()
    patch_model(layer, patch_layers=True)
    layer.norm.register_forward_hook(lambda *_: None)
    x, residual = rows(), rows()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, residual), layer(x, residual))
    assert len(told()) == 1


def reported(change, make=LlamaRMSNorm):
    model = nn.Sequential(Layer(make), Layer(make))
    change(model[1].norm)
    report = patch_model(model, patch_layers=True)
    assert report.counts["layers"] == 2 and report.counts["apart"] == len(report.apart)
    return report


def test_the_report_lists_what_would_run_apart():
    report = reported(lambda norm: norm.register_forward_pre_hook(lambda *_: None))
    assert report.apart == (("1", "Layer", "norm: it has hooks, or a forward of its own"),)
    assert "\nrun apart: 1\n     1 Layer (norm: it has hooks, or a forward of its own): 1" in str(report)
    report = reported(lambda norm: norm.register_forward_pre_hook(lambda *_: None), RMSNorm)
    assert [each.reason for each in report.apart] == ["norm: it has hooks, or a forward of its own"]
    report = reported(lambda norm: setattr(norm, "weight", nn.Parameter(torch.empty(0))))
    assert [each.reason for each in report.apart] == ["norm: its weight has no elements now, as under ZeRO-3"]
    report = reported(lambda norm: norm.double())
    assert [each.reason for each in report.apart] == ["norm: no kernel takes its weight of torch.float64"]
    assert reported(lambda norm: None).apart == ()


LONG = "computes no arithmetic that is known: to((weight * to((to(x, float32) * rsqrt((mean(square(to(x, float32))) + "


def test_reasons_are_not_cut_inside_a_parenthesis():
    short = "calls f(x[0], {1: 2})"
    assert elided(short) == short
    for deep in range(1, 12):
        text = f"its forward calls {'f(a, ' * deep}{'x' * 150}{')' * deep} + {'y' * 20}"
        shorter = elided(text)
        assert len(shorter) <= 200 and shorter.endswith("y" * 20)
        assert all(shorter.count(one) == shorter.count(other) for one, other in ("()", "[]"))
        if len(text) > 200:
            assert "f(a, " * (deep - 2) in shorter and "..." in shorter
    assert elided(f"{'words ' * 50}") == f"{('words ' * 33).strip()} ..."
    for open_ended in (LONG, f"{'(' * 300}", f"{')' * 300}", "a" * 300):
        assert len(elided(open_ended)) <= 204


def test_a_norm_of_a_long_arithmetic_is_reported_whole():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(N))

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            z = y.to(x.dtype) * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
            z = z.to(x.dtype) * torch.rsqrt(z.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
            return self.weight * z

    (declined,) = patch_model(Norm()).declined
    assert declined.reason.startswith("its forward computes no arithmetic that is known: (weight * (")
    assert len(declined.reason) <= 200 and declined.reason.count("(") == declined.reason.count(")") > 3
