# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of folded attention: with norms of this package, and why a call is not folded. Norms of q and k that it would
run at the place of the rotation: their modules and conditions, and that results lie in memory, and require gradients,
as the original's do."""

import logging
import warnings

import pytest
import torch
from attention_classes import Attention, D, assert_same, both_of, given
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

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


OF_FIRST = """
def forward(self, x, tables):
    shape = (*x.shape[:-1], -1, 8)
    cos, sin = tables
    q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
    if self.is_on:
        q = self.first(q)
        k = self.second(k)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    q, k = rotary(q, k, cos, sin)
    return q, k
"""
BETWEEN = "    q, k = rotary"
IN_PLACE = "    w = self.child(raw)\n"


class Odd:
    """True each second time that it is asked."""

    asked = 0

    def __bool__(self):
        self.asked += 1
        return self.asked % 2 == 1


class Changing(nn.Module):
    def forward(self, x):
        return x.mul_(1.5).add_(1.0)


class Lazy(nn.Module):
    """Returns no tensor."""

    def forward(self, x):
        return (each.mul_(1.5).add_(1.0) for each in (x, x))


class Noisy(LlamaRMSNorm):
    """Draws its weight each time."""

    @property
    def weight(self):
        return self._parameters["weight"] + torch.rand(D)


class Made(Attention):
    is_on = True

    def __init__(self):
        super().__init__()
        self.child, self.scale = nn.Dropout(0.5), 1.0


class WithInner(Made):
    def __init__(self):
        super().__init__()
        self.child, self.inner = nn.Identity(), Made()
        self.inner.child = Changing()


class WithProperty(Made):
    def __init__(self):
        super().__init__()
        self.norm = self._modules.pop("first")

    @property
    def first(self):
        self.scale += 1
        return self.norm


class WithNoise(Made):
    def __init__(self):
        super().__init__()
        self.first.__class__ = self.second.__class__ = Noisy


class WithLazy(Made):
    def __init__(self):
        super().__init__()
        self.child = Lazy()


@pytest.mark.parametrize(
    ("base", "before", "between", "reason"),
    [
        (WithInner, "    self, raw = self.inner, q\n", IN_PLACE, "its forward binds self to something else"),
        (WithInner, "    import math as self\n    raw = q\n", IN_PLACE, "its forward binds self to something else"),
        (WithProperty, "", "    cos = cos * self.scale\n", "its forward calls first, which its class defines"),
        (WithNoise, "", "    cos = self.child(cos)\n", "its first has properties, which would be read later"),
        (
            WithLazy,
            "    both = self.child(q)\n",
            "    a, b = both\n",
            "its forward uses what child returns between a norm and its rotation, and a Lazy may return what is no",
        ),
    ],
)  # fmt: skip
def test_modules_that_are_declined(class_of, base, before, between, reason):
    text = OF_FIRST.replace("    if self", before + "    if self").replace(BETWEEN, between + BETWEEN)
    cls = class_of(text.replace("rotary", "apply_rotary"), base=base, apply_rotary=apply_rotary_pos_emb)
    original, ours = cls(), cls()
    report = patch_model(ours, patch_layers=True, backend="torch")
    outputs = []
    for each in (original, ours):
        if isinstance(each, WithProperty):
            each.scale = 1.0
        torch.manual_seed(0)
        with torch.no_grad():
            try:
                outputs.append(each(**given()))
            except (AttributeError, TypeError) as error:
                outputs.append((torch.zeros(len(str(error))),))
    assert all(map(torch.equal, *outputs))
    assert not report.attention and report.declined[-1].reason.startswith(reason)


def test_a_condition_is_asked_once(class_of, folded):
    original, ours = both_of(class_of(OF_FIRST, base=Made))
    for each in (original, ours):
        each.is_on = Odd()
    for _ in range(3):
        assert_same(original, ours, given())
        assert original.is_on.asked == ours.is_on.asked
    assert len(folded) == 2


def over_heads(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def test_three_dimensions_that_were_transposed(class_of, folded):
    """The norm is one over heads, of which there are as many as elements in a head."""
    text = """
def forward(self, x, tables):
    q = self.q_proj(x[0]).view(5, 4, 8).repeat(1, 2, 1)
    k = self.k_proj(x[0]).view(5, 2, 8).repeat(1, 4, 1)
    q = self.first(q).transpose(1, 2)
    k = self.second(k).transpose(1, 2)
    cos, sin = tables
    q, k = rotary(q, k, cos[0], sin[0])
    return q, k
"""
    assert_same(*both_of(class_of(text, over_heads)), given())
    assert not folded
    text = text.replace("(1, 2)", "transposed(1, 2)").replace(".transposetransposed(1, 2)", "")
    assert_same(*both_of(class_of(text, over_heads)), given())
    assert len(folded) == 1


@pytest.mark.parametrize("frozen", ["q", "k", "both"])
def test_q_or_k_that_requires_no_grad(class_of, folded, frozen):
    original, ours = both_of(class_of(OF_FIRST, base=Made))
    for each in (original, ours):
        parts = {"q": [each.q_proj, each.first], "k": [each.k_proj, each.second], "both": [each]}[frozen]
        for part in parts:
            part.requires_grad_(False)
    outputs = [each(**given()) for each in (original, ours)]
    assert all(map(torch.equal, *outputs))
    assert [each.requires_grad for each in outputs[1]] == [each.requires_grad for each in outputs[0]]
    assert len(folded) == (frozen == "both")
    with torch.no_grad():
        assert_same(original, ours, given())
    assert len(folded) == 1 + (frozen == "both")


def partly(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_rot, q_pass, k_rot, k_pass = q[..., :width], q[..., width:], k[..., :width], k[..., width:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


LAYOUTS = ["X", "X.clone()", "X.transpose(0, 1).contiguous().transpose(0, 1)", "X[:, :1].expand(X.shape)"]
ORDERS = [  # how X becomes the rotated tensor: (B, H, T, D), or (B, T, H, D) where unsqueeze_dim is 2
    ("self.NORM(X).transpose(1, 2)", 1),
    ("self.NORM(X.transpose(1, 2))", 1),
    ("self.NORM(X.transpose(1, 2).contiguous())", 1),
    ("self.NORM(X)", 2),
    ("self.NORM(X.transpose(1, 2)).transpose(1, 2)", 2),
    ("self.NORM(X.transpose(1, 2).contiguous()).transpose(1, 2)", 2),
]


@pytest.mark.parametrize("norm", [LlamaRMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("rotary", [apply_rotary_pos_emb, partly])
@pytest.mark.parametrize(("order", "dim"), ORDERS)
def test_layouts_of_rotated_q_and_k(class_of, folded, order, dim, rotary, norm):
    """A forward may call view, which asks for the strides."""

    class Base(Made):
        def __init__(self):
            super().__init__()
            self.first, self.second = norm(D, eps=1e-6), norm(D, eps=1e-6)

    for count, layout in enumerate(LAYOUTS, 1):
        text = "def forward(self, x, tables):\n    shape = (*x.shape[:-1], -1, 8)\n    cos, sin = tables\n"
        for name, of_norm in (("q", "first"), ("k", "second")):
            text += f"    x_{name} = self.{name}_proj(x).view(shape)\n"
            text += f"    {name} = {layout}\n".replace("X", f"x_{name}")
            text += f"    {name} = {order}\n".replace("NORM", of_norm).replace("X", name)
        text += f"    q, k = rotary(q, k, cos, sin, {dim})\n    return q, k\n"
        original, ours = both_of(class_of(text, rotary, base=Base))
        for tokens in (5, 1):
            arguments = given()
            arguments["x"] = arguments["x"][:, :tokens]
            arguments["tables"] = tuple(each[:, :tokens] for each in arguments["tables"])
            outputs = [each(**arguments) for each in (original, ours)]
            for one, other in zip(*outputs, strict=True):
                torch.testing.assert_close(other, one)
                strides = [
                    [stride for n, stride in zip(each.shape, each.stride(), strict=True) if n > 1]
                    for each in (one, other)
                ]
                assert strides[0] == strides[1], (layout, tokens)
        assert len(folded) == 2 * count


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda norm: norm.register_forward_hook(lambda *_: None), "it has hooks, or a forward of its own"),
        (lambda norm: norm.double(), "no kernel has its eps, torch.float32 and a weight of torch.float64"),
        (lambda norm: setattr(norm, "weight", nn.Parameter(torch.ones(1))), "its weight has shape (1,)"),
        (lambda norm: setattr(norm, "__class__", nn.RMSNorm), "the norms of q and k are not computed alike"),
    ],
)
def test_the_norm_that_is_the_reason_is_named(class_of, folded, caplog, monkeypatch, name, change, reason):
    from tilegym_rmsnorm.integrations.huggingface import folding

    told = []
    monkeypatch.setattr(folding, "tell_fallback", lambda kind, norm, reason: told.append((norm, reason)))
    _, ours = both_of(class_of(OF_FIRST, base=Made))
    norm = getattr(ours, name)
    change(norm)
    norm.normalized_shape, norm.eps = (D,), 1e-6
    ours(**given())
    ((named, why),) = told
    assert named is norm and why.startswith(reason)
