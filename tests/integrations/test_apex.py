# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Apex's names: state dicts, dtypes, and arithmetic against the formula of its CUDA kernel and float64."""

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU

from tilegym_rmsnorm.integrations import apex as ours


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
def test_the_dtype_of_y_and_its_rounding_are_apexs(dtype, weight_dtype):
    """Its CUDA kernel: `gamma * V(x * rstd)`, V the dtype of y: input's, of the mixed function weight's."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(32, 256, device=DEVICE).to(dtype),
        torch.randn(256, device=DEVICE).to(weight_dtype),
    )
    xhat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    functions = {dtype: ours.fused_rms_norm_affine, weight_dtype: ours.mixed_dtype_fused_rms_norm_affine}
    for v, function in functions.items():
        y = function(x, weight, 256)
        expected = (weight.float() * xhat.to(v).float()).to(v)
        assert y.dtype == v
        if v == FP32:
            torch.testing.assert_close(y, expected)
        elif v == dtype:  # but for rows whose rstd has another last bit
            assert (y == expected).float().mean() > 0.99
        else:  # y narrower than x, or of the other 16 bits: rounded once, and Apex twice
            torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(v).eps, atol=2e-7)


def test_several_dimensions():
    norm = ours.FusedRMSNorm([3, 8])
    assert norm.eps == 1e-5 and norm.weight.shape == (3, 8)
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (3, 8), norm.weight, 1e-5))


@pytest.mark.parametrize("affine", [True, False])
def test_module(affine):
    norm = ours.FusedRMSNorm(8, elementwise_affine=affine, memory_efficient=True)
    assert norm.normalized_shape == torch.Size([8]) and norm.eps == 1e-5 and norm.memory_efficient
    assert list(norm.state_dict()) == (["weight"] if affine else [])
    x = torch.randn(3, 8, dtype=BF16)
    y = norm(x)
    assert y.dtype == BF16 and torch.equal(y, ours.fused_rms_norm(x, 8, 1e-5))
    assert f"elementwise_affine={affine}" in repr(norm)


def test_mixed_module():
    norm = ours.MixedFusedRMSNorm(8)
    assert isinstance(norm, ours.FusedRMSNorm) and list(norm.state_dict()) == ["weight"]
    x = torch.randn(3, 8, dtype=BF16, requires_grad=True)
    y = norm(x)
    assert y.dtype == FP32
    y.sum().backward()
    assert x.grad.dtype == BF16 and norm.weight.grad.dtype == FP32
    assert norm.to(BF16)(x.float()).dtype == BF16


def test_refused():
    with pytest.warns(UserWarning, match="MixedFusedRMSNorm does not take elementwise_affine"):
        ours.MixedFusedRMSNorm(8, elementwise_affine=True)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="elementwise_affine=False is not supp"):
        ours.MixedFusedRMSNorm(8, elementwise_affine=False)
    with pytest.raises(TypeError, match="MixedFusedRMSNorm: unexpected arguments bias"):
        ours.MixedFusedRMSNorm(8, bias=True)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="autocast of CUDA")
def test_autocast_casts_to_its_dtype():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    with torch.autocast("cuda", dtype=BF16):
        y, mixed = (
            ours.fused_rms_norm_affine(x, weight, 8),
            ours.mixed_dtype_fused_rms_norm_affine(x, weight, 8),
        )
    expected = ours.fused_rms_norm_affine(x.to(BF16), weight.to(BF16), 8)
    assert torch.equal(y, expected) and torch.equal(mixed, expected)


def test_a_width_of_numpy():
    width = pytest.importorskip("numpy").int64(8)
    assert ours.FusedRMSNorm(width).normalized_shape == (8,)
