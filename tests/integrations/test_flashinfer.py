# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""flashinfer's functions: signatures, and values beside its arithmetic in float64."""

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32
from peer_signatures import installed_signature, signature

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.integrations import flashinfer as ours

N = 256
SIGNATURES = {  # of flashinfer 0.7.2
    "rmsnorm": "(input, weight, eps=1e-06, out=None, enable_pdl=None)",
    "gemma_rmsnorm": "(input, weight, eps=1e-06, out=None, enable_pdl=None)",
    "fused_add_rmsnorm": "(input, residual, weight, eps=1e-06, enable_pdl=None)",
    "gemma_fused_add_rmsnorm": "(input, residual, weight, eps=1e-06, enable_pdl=None)",
}
OFFSETS = {"rmsnorm": 0.0, "gemma_rmsnorm": 1.0, "fused_add_rmsnorm": 0.0, "gemma_fused_add_rmsnorm": 1.0}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert signature(getattr(ours, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_the_installed_one(name):
    assert installed_signature("flashinfer", "norm/__init__.py", name) == SIGNATURES[name]


def given(dtype, *shape):
    torch.manual_seed(0)
    rows = [torch.randn(*shape, N, device=DEVICE).mul(3).to(dtype) for _ in range(2)]
    return *rows, torch.rand(N, device=DEVICE).add(0.5).to(dtype)


def norm(x, weight, offset, eps=1e-6):
    """In float64, where nothing is rounded."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def differing(got, expected):
    """The share of elements that are not those of `expected`, rounded once."""
    return (got != expected.to(got.dtype)).float().mean().item()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["rmsnorm", "gemma_rmsnorm"])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_norm(name, dtype, shape):
    x, _, weight = given(dtype, *shape)
    expected = norm(x, weight, OFFSETS[name])
    y = getattr(ours, name)(x, weight)
    assert y.dtype == dtype and differing(y, expected) < 0.01
    out = torch.full_like(x, torch.nan)
    assert getattr(ours, name)(x, weight, 1e-6, out, True) is out and torch.equal(out, y)
    wide = getattr(ours, name)(x, weight, out=torch.empty_like(x, dtype=FP32))
    torch.testing.assert_close(wide, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
def test_fused_add_normalizes_the_sum_before_it_is_rounded(name, dtype):
    x, residual, weight = given(dtype, 37)
    total = x.double() + residual.double()
    rounded = rms_norm(x, N, weight, 1e-6, residual=residual, offset=OFFSETS[name])[0]
    assert getattr(ours, name)(x, residual, weight) is None
    assert torch.equal(residual, total.float().to(dtype))
    expected = norm(total, weight, OFFSETS[name])
    assert differing(x, expected) < 0.01 < 0.1 < differing(rounded, expected)


def test_gradients_of_fused_add():
    """flashinfer has none."""
    leaves = [each.double().requires_grad_() for each in given(FP32, 5)]

    def by_adapter(x, residual, weight):
        x, residual = x * 1, residual * 1
        ours.fused_add_rmsnorm(x, residual, weight)
        return x, residual

    def by_formula(x, residual, weight):
        return norm(x + residual, weight, 0.0), x + residual

    found = [
        torch.autograd.grad(sum(each.sin().sum() for each in call(*leaves)), leaves)
        for call in (by_adapter, by_formula)
    ]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "change", [{"out": torch.ones(2, N)}, {"out": 1.0}, {"weight": None}, {"input": [1.0]}]
)
def test_what_is_refused(change):
    arguments = {"input": torch.randn(3, N), "weight": torch.ones(N)} | change
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(change))}: expected .*, got "):
        ours.rmsnorm(**arguments)


def test_nothing_is_changed_where_fused_add_is_refused():
    x, residual = torch.randn(3, N), torch.randn(2, N)
    before = x.clone(), residual.clone()
    with pytest.raises(ValueError, match="residual: expected the shape of input"):
        ours.fused_add_rmsnorm(x, residual, torch.ones(N))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
