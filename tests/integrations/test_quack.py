# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""quack's names: what is returned in which dtype, arithmetic against float64, and what quack gets wrong."""

import pytest
import torch
from helpers import BF16, DEVICE, FP32

import tilegym_rmsnorm
from tilegym_rmsnorm.integrations import quack as ours


def reference(x, weight=None, bias=None, residual=None, eps=1e-6, offset=0.0, residual_dtype=None):
    """quack's `rmsnorm_ref` in float64, with the sum rounded to residual_dtype."""
    x = x.double()
    if residual is not None:
        x = x + residual.double()
        x = x + (x.detach().to(residual_dtype).double() - x.detach())  # rounded; the gradient is not
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight.double() + offset)
    return y if bias is None else y + bias.double(), x


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("residual_dtype", [None, FP32])
@pytest.mark.parametrize("prenorm", [False, True])
def test_residual_bias_and_heads(prenorm, residual_dtype, heads):
    torch.manual_seed(0)
    shape = (2, 5, 4, 16) if heads else (7, 16)
    of_weight = (4, 16) if heads else (16,)
    x, residual = (torch.randn(shape, device=DEVICE).to(BF16).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(of_weight, device=DEVICE).requires_grad_() for _ in range(2))
    leaves = x, weight, bias, residual
    results = ours.rmsnorm(
        *leaves, out_dtype=FP32, residual_dtype=residual_dtype, prenorm=prenorm, weight_offset=1.0
    )
    results = results if prenorm else (results,)
    expected = reference(*leaves, offset=1.0, residual_dtype=residual_dtype or BF16)[: len(results)]
    assert [each.dtype for each in results] == [FP32, residual_dtype or BF16][: len(results)]
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    gradients = [torch.randn_like(each) for each in results]
    got = torch.autograd.grad(results, leaves, gradients)
    want = torch.autograd.grad(expected, leaves, [each.double() for each in gradients])
    for each, other in zip(got, want, strict=True):
        tolerance = 1e-2 if each.dtype == BF16 else 1e-4
        torch.testing.assert_close(each, other, rtol=tolerance, atol=tolerance)


def test_residual_out_has_the_dtype_of_the_residual():
    x, residual = torch.randn(3, 8, dtype=BF16), torch.randn(3, 8)
    assert ours.rmsnorm(x, residual=residual, prenorm=True)[1].dtype == FP32
    assert ours.rmsnorm(residual, residual=x, prenorm=True)[1].dtype == BF16


@pytest.mark.parametrize("residual_dtype", [None, FP32])
def test_without_a_residual_prenorm_keeps_the_gradient_of_x(residual_dtype):
    """quack 0.6.5 drops that of its second result."""
    x = torch.randn(3, 8, dtype=BF16, requires_grad=True)
    y, same = ours.rmsnorm(x, residual_dtype=residual_dtype, prenorm=True)
    assert torch.equal(same, x) and same.dtype == (residual_dtype or BF16)
    alone = torch.autograd.grad(ours.rmsnorm(x).sum(), x)[0]
    both = torch.autograd.grad(y.sum() + 3 * same.sum(), x)[0]
    torch.testing.assert_close(both, alone + 3)


def test_what_quack_crashes_at():
    x, bias = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(ours.rmsnorm(x, None, bias), ours.rmsnorm(x) + bias)
    assert ours.rmsnorm(x.double()).dtype == torch.float64
    assert ours.rmsnorm(x[:0], bias).shape == (0, 8)


def test_refused():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="weight_offset: expected 0 without a weight, got 1.0"):
        ours.rmsnorm(x, weight_offset=1.0)
    with pytest.raises(TypeError, match="residual_dtype: expected None or a dtype of"):
        ours.rmsnorm(x, residual_dtype=torch.int32, prenorm=True)


@pytest.mark.parametrize("affine", [True, False])
def test_module(affine):
    norm = ours.QuackRMSNorm(8, elementwise_affine=affine, dtype=BF16)
    assert isinstance(norm, torch.nn.RMSNorm) and norm.eps == 1e-6
    assert list(norm.state_dict()) == list(torch.nn.RMSNorm(8, elementwise_affine=affine).state_dict())
    x = torch.randn(3, 8, dtype=BF16)
    assert torch.equal(norm(x), tilegym_rmsnorm.rms_norm(x, 8, norm.weight, 1e-6))
    assert ours.QuackRMSNorm(8, 1e-5).eps == 1e-5


# The forward and the backward, each by itself


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("residual_dtype", ["none", BF16, FP32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_halves_are_those_of_rmsnorm(has_bias, residual_dtype, heads):
    torch.manual_seed(0)
    shape = (5, 4, 16) if heads else (7, 16)
    x, residual, dy = (torch.randn(shape, device=DEVICE).to(BF16) for _ in range(3))
    weight, bias = (torch.randn(shape[1:], device=DEVICE) for _ in range(2))
    has_residual = residual_dtype != "none"
    residual, bias = residual if has_residual else None, bias if has_bias else None
    options = {"residual_dtype": residual_dtype if has_residual else None, "weight_offset": 1.0}
    y, summed, rstd = ours.rmsnorm_fwd(x, weight, bias, residual, store_rstd=True, **options)
    leaves = [None if each is None else each.clone().requires_grad_() for each in (x, weight, bias, residual)]
    results = ours.rmsnorm(*leaves, prenorm=True, **options)
    assert torch.equal(y, results[0]) and torch.equal(summed, results[1]) and summed.dtype == results[1].dtype
    assert rstd.shape == shape[:-1] and rstd.dtype == FP32
    assert ours.rmsnorm_fwd(x, weight)[2] is None

    d_summed = torch.randn(shape, device=DEVICE).to(summed.dtype) if has_residual else None
    given = [leaf for leaf in leaves if leaf is not None]
    outputs, dys = (results, (dy, d_summed)) if has_residual else (results[:1], (dy,))
    expected = iter(torch.autograd.grad(outputs, given, dys))
    want = [None if leaf is None else next(expected) for leaf in leaves]
    got = ours.rmsnorm_bwd(summed, weight, dy, rstd, d_summed, has_bias, has_residual, 1.0)
    for each, other in zip(got, want, strict=True):
        assert (each is None) == (other is None)
        if each is not None:
            torch.testing.assert_close(each.to(other.dtype), other)
    assert got[0].dtype == summed.dtype


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_wider_gradient_of_the_sum_gives_a_wider_one_of_the_residual(has_residual):
    """One rounding is made: what is cast from dx has lost bits."""
    torch.manual_seed(0)
    x, dy, d_summed = torch.randn(7, 16, dtype=BF16), torch.randn(7, 16, dtype=BF16), torch.randn(7, 16)
    weight, rstd = torch.randn(16), ours.rmsnorm_fwd(x, store_rstd=True)[2]
    dx, dw, db, dresidual = ours.rmsnorm_bwd(x, weight, dy, rstd, d_summed, has_residual=has_residual)
    assert (dx.dtype, dw.dtype, db, dresidual.dtype) == (BF16, FP32, None, FP32)
    assert torch.equal(dresidual.to(BF16), dx) and not torch.equal(dresidual, dx.float())
    wide = ours.rmsnorm_bwd(x.float(), weight, dy.float(), rstd, d_summed)
    torch.testing.assert_close(dresidual, wide[0])
    torch.testing.assert_close(dw, wide[1])
    assert ours.rmsnorm_bwd(x, None, dy, rstd, d_summed)[1] is None


def test_halves_refused():
    x, rstd = torch.randn(3, 8), torch.ones(3)
    for function, given in ((ours.rmsnorm_fwd, (x, None)), (ours.rmsnorm_bwd, (x, None, x, rstd))):
        with pytest.raises(ValueError, match="weight_offset: expected 0 without a weight, got 1.0"):
            function(*given, weight_offset=1.0)
    with pytest.raises(ValueError, match=r"rstd: expected shape \(3,\), got \(2,\)"):
        ours.rmsnorm_bwd(x, None, x, rstd[:2])
    with pytest.raises(TypeError, match="dresidual_out: expected a torch.Tensor, got float"):
        ours.rmsnorm_bwd(x, None, x, rstd, 1.0)
