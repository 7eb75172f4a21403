# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The reference against what it specifies: ATen, Hugging Face's formulas, numerical derivatives. And the tolerances
of helpers.py against mistakes that they must catch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, FP16, FP32, FP64, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.call.arithmetic import default_eps, promoted
from tilegym_rmsnorm.ops.norm.reference import (
    compute_rms_norm_rstd_torch,
    residual_sum,
    rms_norm_backward_torch,
    rms_norm_forward_torch,
)


def _double(*size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=FP64).requires_grad_()


def _backward_from(x, dy, weight, offset=0.0, casting="once", eps=1e-3):
    return rms_norm_backward_torch(
        x, dy, weight, compute_rms_norm_rstd_torch(x, eps), offset=offset, casting=casting
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [(7,), (3, 5), (2, 3, 1), (2, 1, 3, 4)])
def test_float64_agrees_with_aten_and_its_autograd(size, offset):
    x, dy, weight = _double(*size), _double(*size, seed=1), _double(size[-1], seed=2)
    expected = F.rms_norm(x, size[-1:], weight + offset, 1e-3)
    expected_dx, expected_dw = torch.autograd.grad(expected, (x, weight), dy)

    y, rstd = rms_norm_forward_torch(x, weight, 1e-3, offset=offset)
    dx, dw = rms_norm_backward_torch(x, dy, weight, rstd, offset=offset)

    assert rstd.shape == (x.numel() // size[-1],)
    for got, want in ((y, expected), (dx, expected_dx), (dw, expected_dw)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("casting", ["once", "llama"])
def test_derivatives_are_right_numerically(casting):
    x, dy, weight, bias = _double(3, 5), _double(3, 5, seed=1), _double(5, seed=2), _double(5, seed=3)

    def forward(x, weight, bias):
        return rms_norm_forward_torch(x, weight, 1e-3, bias=bias, offset=1.0, casting=casting)[0]

    def backward(x, dy, weight):
        return _backward_from(x, dy, weight, 1.0, casting)

    assert torch.autograd.gradcheck(forward, (x, weight, bias))
    assert torch.autograd.gradcheck(backward, (x, dy, weight))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("casting", ["once", "llama"])
def test_any_pair_of_dtypes_is_within_budget(dtype, weight_dtype, casting):
    inputs = make_inputs(33, 100, dtype, weight_dtype, offset=1.0, casting=casting)
    x, dy, weight, eps, offset, _ = inputs
    y, rstd = rms_norm_forward_torch(x, weight, eps, offset=offset, casting=casting)
    dx, dw = rms_norm_backward_torch(x, dy, weight, rstd, offset=offset, casting=casting)
    assert_within(expected_results(inputs), y=y, rstd=rstd, dx=dx, dw=dw)


@pytest.mark.parametrize("dtypes", [(FP32, FP64), (FP64, FP32), (BF16, FP64)])
def test_a_float64_tensor_makes_the_computation_float64(dtypes):
    x, dy, weight, eps, *_ = make_inputs(9, 33, dtypes[0], dtypes[1])
    y, rstd = rms_norm_forward_torch(x, weight, eps)
    dx, dw = rms_norm_backward_torch(x, dy, weight, rstd)
    assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, weight.dtype)
    assert rstd.dtype == (FP64 if x.dtype == FP64 else FP32)

    y64 = rms_norm_forward_torch(x.double(), weight.double(), eps)[0]
    dx64, dw64 = rms_norm_backward_torch(x.double(), dy.double(), weight.double(), rstd.double())
    torch.testing.assert_close(y, y64.to(x.dtype))  # not bit by bit: rstd is rounded to float32 on the way
    assert torch.equal(dx, dx64.to(x.dtype))
    assert torch.equal(dw, dw64.to(weight.dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_llama_casting_is_hugging_face_llama(dtype):
    x, _, weight, eps, *_ = make_inputs(65, 256, dtype, dtype, casting="llama")
    wide = x.float()
    hidden = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    expected = weight * hidden.to(dtype)
    assert torch.equal(rms_norm_forward_torch(x, weight, eps, casting="llama")[0], expected)
    assert not torch.equal(rms_norm_forward_torch(x, weight, eps, casting="once")[0], expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_offset_one_is_hugging_face_gemma(dtype):
    x, _, weight, eps, *_ = make_inputs(65, 256, dtype, dtype, offset=1.0)
    wide = x.float()
    expected = (
        wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    ).type_as(x)
    assert torch.equal(rms_norm_forward_torch(x, weight, eps, offset=1.0)[0], expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_eps_none_is_atens(dtype):
    x = (1e-4 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))).to(dtype)  # eps outweighs x^2
    assert default_eps(dtype) == torch.finfo(FP64 if dtype == FP64 else FP32).eps
    torch.testing.assert_close(rms_norm_forward_torch(x, None)[0], F.rms_norm(x, (64,)))


def test_no_weight_is_a_factor_of_one_whatever_the_offset():
    x, dy, *_ = make_inputs(9, 33, FP32, None)
    y, rstd = rms_norm_forward_torch(x, None, 1e-3, offset=1.0)
    assert torch.equal(y, rms_norm_forward_torch(x, torch.ones(33, device=x.device), 1e-3)[0])
    dx, dw = rms_norm_backward_torch(x, dy, None, rstd, offset=1.0)
    assert dw is None
    assert torch.equal(dx, rms_norm_backward_torch(x, dy, torch.ones(33, device=x.device), rstd)[0])


def _swap_two_rows_of_rstd(x, dy, weight, rstd):
    return rms_norm_backward_torch(x, dy, weight, rstd[[1, 0, *range(2, len(rstd))]])


def _drop_the_last_row_of_dw(x, dy, weight, rstd):
    return rms_norm_backward_torch(x, dy, weight, rstd)[0], rms_norm_backward_torch(
        x[:-1], dy[:-1], weight, rstd[:-1]
    )[1]


def _sum_dw_in_bfloat16(x, dy, weight, rstd):
    rows = (dy.float() * x.float() * rstd[:, None]).bfloat16()
    return rms_norm_backward_torch(x, dy, weight, rstd)[0], rows.sum(0).to(weight.dtype)


def _forget_the_correction_of_dx(x, dy, weight, rstd):
    dx = (dy.float() * weight.float() * rstd[:, None]).to(x.dtype)
    return dx, rms_norm_backward_torch(x, dy, weight, rstd)[1]


def _divide_by_the_padded_width(x, dy, weight, rstd):
    padded = F.pad(x, (0, 1)), F.pad(dy, (0, 1)), F.pad(weight, (0, 1))
    dx, dw = rms_norm_backward_torch(*padded, rstd)
    return dx[:, :-1], dw[:-1]


@pytest.mark.parametrize(
    "mistake",
    [
        _swap_two_rows_of_rstd,
        _drop_the_last_row_of_dw,
        _sum_dw_in_bfloat16,
        _forget_the_correction_of_dx,
        _divide_by_the_padded_width,
    ],
)
def test_the_tolerances_catch(mistake):
    inputs = make_inputs(1000, 127, BF16, FP32)
    x, dy, weight, eps, *_ = inputs
    dx, dw = mistake(x, dy, weight, compute_rms_norm_rstd_torch(x, eps))
    with pytest.raises(AssertionError, match="beyond the tolerance"):
        assert_within(expected_results(inputs), dx=dx, dw=dw)


@pytest.mark.parametrize("change", [{"eps": 1.1e-3}, {"offset": 1e-2}])
def test_the_tolerances_catch_a_wrong_parameter_of_the_forward(change):
    inputs = make_inputs(100, 127, BF16, FP32)
    wrong = inputs._replace(**change)
    y, rstd = rms_norm_forward_torch(wrong.x, wrong.weight, wrong.eps, offset=wrong.offset)
    with pytest.raises(AssertionError, match="beyond the tolerance"):
        assert_within(expected_results(inputs), y=y, rstd=rstd)


def test_promoted_dtypes_are_those_of_pytorch():
    dtypes = FP16, BF16, FP32, FP64, torch.complex64, torch.complex128
    for dtype, other in itertools.product(dtypes, dtypes):
        assert promoted(dtype, other) is torch.promote_types(dtype, other), (dtype, other)


@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, FP16, FP32), repeat=2)), ids=str)
def test_a_sum_of_one_pass_has_the_bits_of_one_in_float32(dtypes):
    x, residual = (
        (torch.randn(300, 77) * torch.exp2(torch.randint(-20, 14, (300, 1)))).to(each) for each in dtypes
    )
    dtype = torch.promote_types(*dtypes)
    expected = (x.float() + residual.float()).to(dtype)
    assert torch.equal(residual_sum(x, residual, 1.0, dtype), expected)
    wide = residual_sum(x, residual, 1.0, FP32)
    assert torch.equal(wide, x.float() + residual.float()), "not rounded in between"
