# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms of a model that are RMSNorm of this package take part in layers, and stay as they are."""

import copy
import pickle

import pytest
import torch
from hf_models import ARCHITECTURES, TOKENS, results
from torch import nn

from tilegym_rmsnorm import RMSNorm, patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface import classes, norms

N = 32


class Layer(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(N), make(N)
        self.mix, self.mlp = nn.Linear(N, N), nn.Linear(N, N)
        for norm in (self.first, self.second):
            for parameter in norm.parameters():
                nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x):
        h = x + self.mix(self.first(x))
        residual = h
        h = self.second(h)
        return residual + self.mlp(h)


class Own(RMSNorm):
    """Derived without a forward of its own."""


class Doubled(RMSNorm):
    def forward(self, x, residual=None):
        return 2 * super().forward(x, residual)


TAKEN = {
    "as it is": RMSNorm,
    "gemma": RMSNorm.configured(offset=1.0, eps=1e-6),
    "llama": RMSNorm.configured(casting="llama", eps=1e-5),
    "offset": lambda n: RMSNorm(n, offset=0.25),
    "no weight": RMSNorm.configured(elementwise_affine=False),
    "residual options": RMSNorm.configured(residual_alpha=0.5, residual_dtype=torch.float64),
    "backend": RMSNorm.configured(backend="torch"),
    "derived": Own,
}
LEFT = {
    "bias": (RMSNorm.configured(bias=True), "has a bias, or parts"),
    "heads": (lambda n: RMSNorm(n, heads=4), "has a weight for each head"),
    "dims": (lambda n: RMSNorm((4, n)), "normalizes several dimensions"),
    "out_dtype": (RMSNorm.configured(out_dtype=torch.float32), "has an out_dtype"),
    "forward": (Doubled, "has a forward of its own"),
}


def step(layer, x):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.float().square().sum().backward()
    return y, [x.grad, *(parameter.grad for parameter in layer.parameters())]


def check_alike(ours, original, x):
    (y, gradients), (expected, others) = step(ours, x), step(original, x)
    assert y.dtype is expected.dtype and torch.equal(y, expected)
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:  # the gradient of the sum is rounded once
            rounding = 3e-2 if torch.bfloat16 in (x.dtype, one.dtype) else 1e-5
            torch.testing.assert_close(one, other, rtol=0, atol=rounding * other.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TAKEN)
def test_layers_add_in_them(residuals, kind, dtype, weight_dtype):
    original = Layer(TAKEN[kind]).to(dtype)
    for norm in (original.first, original.second):
        norm.to(weight_dtype)
    ours = copy.deepcopy(original)
    before = [type(part) for part in ours.modules()]
    report = patch_model(ours, patch_layers=True)
    assert [each.norms for each in report.layers] == [("second",)] and report.already == 2
    assert not report.patched and not report.apart and not report.declined
    assert [type(part) for part in ours.modules()][1:] == before[1:]
    check_alike(ours, original, torch.randn(2, 3, N).to(dtype))
    assert residuals == [True]
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        check_alike(again, original, torch.randn(2, 3, N).to(dtype))
    assert residuals == [True] * 3
    assert unpatch_model(ours).counts["restored"] == 1
    assert [type(part) for part in ours.modules()] == before


@pytest.mark.parametrize("kind", LEFT)
def test_those_that_compute_more_are_called(residuals, kind):
    make, reason = LEFT[kind]
    original = Layer(make)
    ours = copy.deepcopy(original)
    report = patch_model(ours, patch_layers=True)
    assert not report.layers and report.already == 2
    assert norms.norm_patch(ours.first) is None and norms.why_not_own(ours.first) == reason
    check_alike(ours, original, torch.randn(2, 4, N))
    assert not residuals


@pytest.mark.parametrize("change", ["bias", "offset", "eps", "out_dtype", "backend", "hook", "weight"])
def test_options_that_are_changed_later_count(residuals, change):
    original = Layer(RMSNorm)
    ours = copy.deepcopy(original)
    patch_model(ours, patch_layers=True)
    for layer in (original, ours):
        norm = layer.second
        if change == "bias":
            norm.bias = nn.Parameter(torch.linspace(-1, 1, N))
        elif change == "hook":
            norm.register_forward_hook(lambda module, given, y: 2 * y)
        elif change == "weight":
            norm.weight = nn.Parameter(torch.linspace(-1, 1, N, dtype=torch.float64))
        else:
            setattr(
                norm,
                change,
                {"offset": 3.0, "eps": 0.5, "out_dtype": torch.float64, "backend": "torch"}[change],
            )
    if change == "out_dtype":
        ours.mlp, original.mlp = copy.deepcopy(ours.mlp).double(), copy.deepcopy(original.mlp).double()
    check_alike(ours, original, torch.randn(2, 3, N))
    assert residuals == ([True] if change in ("offset", "eps", "backend") else [])


def test_norms_that_are_computed_alike_have_one_patch():
    """Attention runs two norms in one call where they have the same."""
    one, other = RMSNorm(N, eps=1e-6), RMSNorm.configured(bias=False)(N)
    assert norms.norm_patch(one) is norms.norm_patch(other) is not None
    for changed in (RMSNorm(N, offset=1.0), RMSNorm(N, casting="llama"), RMSNorm(N, backend="torch")):
        assert norms.norm_patch(changed) is not norms.norm_patch(one)
    assert norms.norm_patch(nn.RMSNorm(N)) is None and norms.norm_patch(torch.relu) is None
    patched = nn.RMSNorm(N)
    patch_model(patched)
    assert norms.norm_patch(patched) is classes.patch_of(type(patched))


def test_compiled_without_a_graph_break(residuals):
    torch._dynamo.reset()
    original = Layer(RMSNorm.configured(offset=0.125))
    ours = pickle.loads(pickle.dumps(original))
    patch_model(ours, patch_layers=True)
    x = torch.randn(2, 3, N)
    expected = original(x)
    assert torch.equal(torch.compile(ours, fullgraph=True, backend="eager")(x), expected)
    norms._own_patches.clear()  # as in a process that loads a patched model
    torch._dynamo.reset()
    assert torch.equal(torch.compile(ours, fullgraph=True, backend="eager")(x), expected)


def test_attention_takes_them():
    """Norms of q and k that are RMSNorm, as a model gets them from `RMSNorm.configured` in the place of its class."""
    (case,) = (each for each in ARCHITECTURES if each.name == "Qwen3")
    original = case.built()
    for layer in original.model.layers:
        for name in ("q_norm", "k_norm"):
            norm = RMSNorm.configured(eps=1e-6, casting="llama")(8)
            nn.init.normal_(norm.weight, 1.0, 0.3)
            setattr(layer.self_attn, name, norm)
    ours = copy.deepcopy(original)
    report = patch_model(ours, patch_layers=True, backend="torch")
    assert report.counts["attention"] == report.counts["layers"] == 2 and not report.declined
    (expected, gradients), (logits, own) = (results(each, {"input_ids": TOKENS}) for each in (original, ours))
    assert torch.equal(logits, expected)
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-5)
    unpatch_model(ours)
    assert type(ours.model.layers[0].self_attn.q_norm) is type(original.model.layers[0].self_attn.q_norm)


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        (RMSNorm(8, bias=True), RMSNorm(8), "its q_norm, of class RMSNorm, is not patched: it has a bias, or parts"),
        (RMSNorm(8, eps=1e-6), RMSNorm(8, offset=1.0), "its q_norm and k_norm compute different norms"),
        (RMSNorm(8), RMSNorm(8, casting="llama"), "its q_norm and k_norm compute different norms"),
        (RMSNorm(8), nn.RMSNorm(8), "its q_norm and k_norm compute different norms"),
        (
            RMSNorm(8),
            RMSNorm(8, heads=4),
            "its k_norm, of class RMSNorm, is not patched: it has a weight for each head",
        ),
    ],
    ids=["bias", "offset", "casting", "PyTorch's", "heads"],
)  # fmt: skip
def test_attention_declines_others(q, k, reason):
    (case,) = (each for each in ARCHITECTURES if each.name == "Qwen3")
    attention = case.built().model.layers[0].self_attn
    attention.q_norm, attention.k_norm = q, k
    report = patch_model(attention, patch_layers=True)
    assert [each.reason for each in report.declined] == [reason] and not report.attention
