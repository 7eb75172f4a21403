# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of folded attention: with norms of this package, and why a call is not folded."""

import logging
import warnings

import pytest
import torch
from attention_classes import Attention, D, assert_same, both_of, given
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from tilegym_rmsnorm import RMSNorm, patch_model, unpatch_model

Configured = RMSNorm.configured(eps=1e-3, casting="llama")
SOURCE = """
def forward(self, x, tables):
    shape = (*x.shape[:-1], -1, 8)
    q = self.first(self.q_proj(x).view(shape)).transpose(1, 2)
    k = self.second(self.k_proj(x).view(shape)).transpose(1, 2)
    cos, sin = tables
    q, k = apply_rotary(q, k, cos, sin)
    return q, k
"""


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def base_with(make):
    class WithNorms(Attention):
        def __init__(self):
            super().__init__()
            self.first, self.second = make(), make()
            for norm in (self.first, self.second):
                torch.nn.init.normal_(norm.weight, 1.0, 0.3)

    return WithNorms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: RMSNorm(D),
        lambda: RMSNorm(D, eps=0.1, offset=1.0),
        lambda: RMSNorm(D, casting="llama", backend="torch"),
        lambda: Configured(D),
    ],
)
def test_norms_of_this_package(class_of, folded, make, dtype):
    cls = class_of(SOURCE, base=base_with(make), apply_rotary=rotary)
    original, ours = both_of(cls, dtype)
    assert type(ours.first) is type(original.first)
    assert_same(original, ours, given(dtype))
    assert len(folded) == 1
    for norm in (original.first, ours.first, original.second, ours.second):
        norm.eps = 0.5
    assert_same(original, ours, given(dtype))
    assert len(folded) == 2 and folded[1]["eps"] == 0.5
    unpatch_model(ours)
    assert type(ours) is cls and type(ours.first) is type(original.first)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: RMSNorm(D, bias=True),
            "its first, of class RMSNorm, is not patched: it has a bias, or parts",
        ),
        (
            lambda: RMSNorm(D, out_dtype=torch.float32),
            "its first, of class RMSNorm, is not patched: it has an out",
        ),
    ],
)
def test_norms_of_this_package_that_compute_more(class_of, make, reason):
    module = class_of(SOURCE, base=base_with(make), apply_rotary=rotary)()
    report = patch_model(module, patch_layers=True)
    assert not report.attention and report.declined[-1].reason.startswith(reason)


def test_a_norm_of_this_package_beside_another(class_of):
    module = class_of(SOURCE, apply_rotary=rotary)()
    module.second = RMSNorm(D)
    report = patch_model(module, patch_layers=True)
    assert report.declined[-1].reason == "its first and second compute different norms"


def with_tables(change):
    def with_them(module, arguments):
        arguments["tables"] = tuple(map(change, arguments["tables"]))

    return with_them


def replaced_rotary(module, arguments):
    type(module).mro()[1].forward.__globals__["apply_rotary"] = lambda q, k, cos, sin: (q, k)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module, _: module.first.register_forward_hook(lambda *_: None), "it has hooks, or a forward"),
        (lambda module, _: setattr(module, "second", RMSNorm(D)), "the norms of q and k are not computed alike"),
        (lambda module, _: setattr(module.second, "variance_epsilon", 0.5), "the norms of q and k differ in eps"),
        (lambda module, _: module.double(), "no kernel has its eps, torch.float64 and a weight of torch.float64"),
        (with_tables(lambda table: table.bfloat16()), "no one call rounds q and k as the norms and the rotary"),
        (with_tables(lambda table: table[:, :1]), "q, k, cos and sin have other shapes than one call takes"),
        (with_tables(lambda table: table.requires_grad_()), "cos or sin requires grad"),
        (replaced_rotary, "its rotary embedding was replaced"),
    ],
)  # fmt: skip
def test_a_call_that_is_not_folded_says_so_once(class_of, folded, caplog, monkeypatch, change, reason):
    from tilegym_rmsnorm.integrations.huggingface import norms

    monkeypatch.setattr(norms, "_told", set())
    _, ours = both_of(class_of(SOURCE, apply_rotary=rotary))
    arguments = given()
    change(ours, arguments)
    if next(ours.parameters()).dtype is torch.float64:
        arguments = given(torch.float64)
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        for _ in range(2):
            ours(**arguments)
    assert not folded
    told = [each.getMessage() for each in caplog.records if "runs apart" in each.getMessage()]
    name = type(ours.second if "alike" in reason else ours.first).__name__
    assert len(told) == 1 and told[0].startswith(f"{name} runs apart from the rotary embedding: {reason}")


def test_torch_jit_trace(class_of, folded):
    original, ours = both_of(class_of(SOURCE, apply_rotary=rotary))
    arguments = given()
    x, tables = arguments["x"], arguments["tables"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(ours, (x, tables), check_trace=False)
    assert len(folded) == 1
    other = torch.randn_like(x)
    torch.testing.assert_close(traced(other, tables), original(other, tables))


def test_a_folded_call_says_nothing(class_of, folded, caplog):
    _, ours = both_of(class_of(SOURCE, apply_rotary=rotary))
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        ours(**given())
    assert len(folded) == 1 and not any("runs apart" in each.getMessage() for each in caplog.records)
    assert isinstance(ours.first, LlamaRMSNorm)
