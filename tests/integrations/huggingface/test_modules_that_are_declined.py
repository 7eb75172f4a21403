# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms that are left as they are for what their module or class is, and classes that could refuse a patch."""

import copy
import types

import pytest
import torch
from hf_models import ARCHITECTURES, TOKENS
from hf_norms import LLAMA, N, changed, norm_of, rows
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tilegym_rmsnorm import patch_model, unpatch_model


class Meta(type):
    pass


class Named(LlamaRMSNorm):
    def __init_subclass__(cls, *, kind, **kwargs):  # which a derived class without a kind makes raise
        super().__init_subclass__(**kwargs)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class StaticNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))

    @staticmethod
    def _norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return (self._norm(x.float()) * self.weight).to(x.dtype)


def looked_up(self, name):
    return object.__getattribute__(self, name)


def parametrized(norm):
    return nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())


def frozen(self, name, value):
    if "_parameters" in self.__dict__ and "variance_epsilon" in self.__dict__:
        raise AttributeError(f"{name} is frozen")
    nn.Module.__setattr__(self, name, value)


@pytest.mark.parametrize(
    "cls",
    [
        type("OtherNorm", (LlamaRMSNorm,), {"__setattr__": frozen}),
        type("OtherNorm", (LlamaRMSNorm,), {"__class__": property(lambda self: LlamaRMSNorm)}),
        type("OtherNorm", (LlamaRMSNorm,), {"__slots__": ("note",)}),
        type("OtherNorm", (Named,), {}, kind="has no subclass without it"),
    ],
    ids=["setattr", "property", "slots", "init_subclass"],
)
def test_a_class_that_lets_nothing_be_set_or_derived(cls):
    model = nn.Sequential(norm_of(), cls(N), norm_of())
    expected = model(rows())
    assert patch_model(model).counts["patched"] == 3
    assert torch.equal(model(rows()), expected) and "tilegym_rmsnorm: llama" in repr(model[1])
    assert torch.equal(copy.deepcopy(model)(rows()), expected)
    assert unpatch_model(model).counts["restored"] == 3 and type(model[1]) is cls


def test_a_registry_of_classes_does_not_see_the_patched_ones():
    registered = []

    class Registry:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            registered.append(cls)

    model = LLAMA.built()
    for module in (model.model.norm, model.model.layers[0]):
        module.__class__ = type(type(module).__name__, (Registry, type(module)), {})
    del registered[:]
    report = patch_model(model, patch_layers=True)
    assert report.counts["patched"] == 5 and report.counts["layers"] == 2 and not registered
    derived = type("Derived", (type(model.model.norm),), {})  # as fully_shard derives one
    assert registered == [derived]


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (lambda: changed(forward=lambda x: x), "its forward was replaced on the module"),
        (lambda: changed(forward=types.MethodType(T5LayerNorm.forward, norm_of())), "its forward was replaced"),
        (lambda: changed(variance_epsilon=torch.tensor(1e-6)), "its variance_epsilon is no finite number"),
        (lambda: changed(variance_epsilon=None), "its variance_epsilon is no finite number"),
        (lambda: changed(variance_epsilon=-1e-9), "its variance_epsilon is no finite number of at least 0"),
        (lambda: changed(variance_epsilon=float("inf")), "its variance_epsilon is no finite number"),
        (lambda: parametrized(norm_of()), "it is parametrized"),
        (lambda: changed(weight=nn.Parameter(torch.ones(2, N))), "its weight is no tensor of one dimension"),
        (lambda: changed(weight=nn.UninitializedParameter()), "its weight is no tensor of one dimension"),
        (lambda: changed(weight=None), "it has no weight"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"__call__": lambda self, x: x})(N), "its class has a __call__"),
        (lambda: Meta("OtherNorm", (LlamaRMSNorm,), {})(N), "its class has a metaclass, a _call_impl or"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"_call_impl": lambda self, x: x})(N), "its class has a metaclass"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"__getattribute__": looked_up})(N), "its class has a metaclass"),
        (lambda: type("OtherNorm", (LlamaRMSNorm,), {"forward": lambda self, x: x})(N), "its forward has no source"),
    ],
)  # fmt: skip
def test_what_is_declined_stays_as_it_is(norm, reason):
    norm = norm()
    before = type(norm), dict(norm.__dict__)
    report = patch_model(nn.Sequential(norm))
    assert not report.patched and report.declined[0].name == "0"
    assert report.declined[0].reason.startswith(reason)
    assert (type(norm), norm.__dict__) == before


def test_a_static_method_that_was_replaced_on_the_module():
    norm = StaticNorm()
    assert patch_model(norm).counts["patched"] == 1
    unpatch_model(norm)
    norm._norm = lambda x: 0 * x
    (declined,) = patch_model(norm).declined
    assert declined.reason == "its _norm was replaced on the module"


def test_norms_that_tp_plan_wrapped_and_attention_around_them():
    """from_pretrained(tp_plan="auto") wraps so, with the plan that Qwen3 has for its norms of q and k."""
    styles = pytest.importorskip("transformers.distributed.tensor_parallel")
    (case,) = (case for case in ARCHITECTURES if case.name == "Qwen3")
    model = case.built()
    names = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_norm", "k_norm")]
    plan = dict.fromkeys(names, "replicated_with_grad_allreduce")
    assert (
        plan.items()
        <= {
            name.replace("*", str(i)): style
            for i in range(2)
            for name, style in model.tp_plan.items()
            if "norm" in name
        }.items()
    )
    styles.apply_tensor_parallelism(model, None, plan)
    expected = model(TOKENS).logits
    report = patch_model(model, patch_layers=True)
    assert report.counts["patched"] == 5 and report.counts["layers"] == 2 and not report.attention
    wrapped = "tp_plan of transformers shards it, or wraps its forward"
    assert {each.name: each.reason for each in report.declined} == {
        **dict.fromkeys(names, wrapped),
        **{
            f"model.layers.{i}.self_attn": f"its q_norm, of class Qwen3RMSNorm, is not patched: {wrapped}"
            for i in range(2)
        },
    }
    assert torch.equal(model(TOKENS).logits, expected)


def test_layers_and_attention_that_tp_plan_wrapped():
    pytest.importorskip("transformers.distributed.tensor_parallel")
    (case,) = (case for case in ARCHITECTURES if case.name == "Qwen3")
    model = case.built()
    for layer in model.model.layers:
        layer._is_hooked = layer.self_attn._is_hooked = True
    report = patch_model(model, patch_layers=True)
    assert report.counts["patched"] == 9 and not report.layers and not report.attention
    reasons = {each.class_name: each.reason for each in report.declined}
    wrapped = "tp_plan of transformers shards it, or wraps its forward"
    assert reasons == {"Qwen3DecoderLayer": wrapped, "Qwen3Attention": wrapped}


GRAPH = "it is a graph, not code: patch the model before it is scripted or traced"


@pytest.mark.parametrize(
    "made",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, rows()),
        torch.fx.symbolic_trace,
        lambda model: torch.export.export(model, (rows(),)).module(),
    ],
    ids=["script", "trace", "fx", "export"],
)
@pytest.mark.parametrize("is_root", [True, False], ids=["alone", "in a model"])
def test_graphs_are_named(made, is_root):
    inner = nn.Sequential(nn.Linear(N, N))
    inner.add_module("norm", norm_of())
    graph = made(inner)
    model = graph if is_root else nn.Sequential(nn.Linear(N, N), graph)
    report = patch_model(model, patch_layers=True)
    assert report.declined == (("" if is_root else "1", type(graph).__name__, GRAPH),)
    assert "patch the model before it is scripted or traced" in str(report)
    other = nn.Sequential(made(nn.Sequential(nn.Linear(N, N))), norm_of())
    assert patch_model(other).counts["patched"] == 1 and not patch_model(other).declined
