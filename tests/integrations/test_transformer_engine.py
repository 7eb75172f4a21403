# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""TransformerEngine's RMSNorm: state dict, dtypes, arithmetic against float64."""

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU

from tilegym_rmsnorm.integrations.transformer_engine import RMSNorm


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
def test_input_is_taken_in_the_dtype_of_the_weight(dtype, weight_dtype):
    torch.manual_seed(0)
    norm = RMSNorm(64, dtype=weight_dtype, device=DEVICE)
    x = torch.randn(5, 64, device=DEVICE).to(dtype).requires_grad_()
    y = norm(x)
    assert y.dtype == weight_dtype
    torch.testing.assert_close(y, norm(x.detach().to(weight_dtype)))
    y.sum().backward()
    assert x.grad.dtype == dtype and norm.weight.grad.dtype == weight_dtype


def test_weight_and_state_dict():
    for zero_centered in (False, True):
        norm = RMSNorm((4, 8), zero_centered_gamma=zero_centered)
        assert torch.equal(norm.weight.cpu(), torch.full((4, 8), 1.0 - zero_centered))
        assert list(norm.state_dict()) == ["weight", "_extra_state"]
    other = RMSNorm((4, 8), zero_centered_gamma=True)
    other.load_state_dict({**norm.state_dict(), "weight": torch.ones(4, 8)})
    other.load_state_dict({"weight": torch.ones(4, 8)})  # as torch.nn.RMSNorm saves it
    assert other.weight.all() and RMSNorm(8, device="meta").weight.is_meta
    with pytest.raises(RuntimeError, match="weight"):
        other.load_state_dict({"_extra_state": torch.empty(0)})


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_weight_on_meta_gets_memory(is_asked_for, zero_centered):
    """When the parameters are reset, or at the first call, as in TransformerEngine."""
    norm = RMSNorm(8, device="meta", zero_centered_gamma=zero_centered, sequence_parallel=True)
    x = torch.randn(3, 8, device=DEVICE)
    assert norm(x.to("meta")).is_meta and norm.weight.is_meta
    if is_asked_for:
        norm.reset_parameters()
        assert torch.equal(norm.weight, torch.full((8,), 1.0 - zero_centered, device=DEVICE))
    y = norm(x)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), None, 1e-5))
    assert isinstance(norm.weight, torch.nn.Parameter) and norm.weight.sequence_parallel is True
    y.sum().backward()
    assert norm.weight.grad is not None


def test_what_megatron_reads():
    norm = RMSNorm(8, sequence_parallel=True)
    assert norm.sequence_parallel is True and norm.weight.sequence_parallel is True
    assert not hasattr(RMSNorm(8).weight, "sequence_parallel")
    assert norm.eps == 1e-5 and norm.zero_centered_gamma is False and "eps=1e-05" in repr(norm)


def test_old_names():
    assert RMSNorm(hidden_size=8, params_dtype=BF16).weight.dtype == BF16
    with pytest.warns(DeprecationWarning, match="defer_init is deprecated"):
        RMSNorm(8).reset_parameters(defer_init=True)
    with pytest.raises(
        RuntimeError, match="expected one of normalized_shape and hidden_size, .*; neither are"
    ):
        RMSNorm()
    with pytest.raises(RuntimeError, match="; both are given"):
        RMSNorm(8, hidden_size=8)
    with pytest.raises(RuntimeError, match="expected one of dtype and params_dtype"):
        RMSNorm(8, dtype=BF16, params_dtype=BF16)


@pytest.mark.parametrize("margin", [4, {"forward": 0, "backward": 4}])
def test_a_margin_is_refused(margin):
    RMSNorm(8, sm_margin=0 if margin == 4 else {"forward": 0})
    with pytest.raises(ValueError, match="sm_margin: expected 0, got .*; tilegym_rmsnorm.set_sm_margin"):
        RMSNorm(8, sm_margin=margin)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="autocast of CUDA")
def test_autocast_casts_to_its_dtype():
    norm, x = RMSNorm(64), torch.randn(5, 64, device=DEVICE)
    with torch.autocast("cuda", dtype=BF16):
        y = norm(x)
    assert y.dtype == BF16 and torch.equal(y, RMSNorm(64, dtype=BF16)(x.to(BF16)))
