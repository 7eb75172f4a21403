# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten: what it takes of F.rms_norm and nn.RMSNorm, with which values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten_cases import EPS, MARKS, fused, fused_backward, kernels, norm_of, overridden, results, taken
from helpers import BF16, DEVICE, FP16, FP32, assert_within, expected_results, make_inputs
from torch.utils.checkpoint import checkpoint

from tilegym_rmsnorm import override_aten
from tilegym_rmsnorm.integrations import aten
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD
from tilegym_rmsnorm.settings import KERNEL_BACKENDS

pytestmark = MARKS


@pytest.mark.parametrize("kernel_backend", KERNEL_BACKENDS, indirect=True)
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.usefixtures("poisoned_empty")
def test_values(dtype, eps, has_weight):
    inputs = make_inputs(5, 100, dtype, dtype if has_weight else None, eps=EPS if eps is None else eps)
    with overridden() as override:
        found = results(inputs, eps)
        assert taken(override) == (1, 1)
    assert_within(expected_results(inputs), **found)


@pytest.mark.usefixtures("poisoned_empty")
def test_several_dimensions_and_strides():
    """x as a slice, weight as rows of another tensor, a transposed gradient: values, shapes, and contiguous results."""
    inputs = make_inputs(15, 32, BF16, BF16)
    x = torch.stack([inputs.x] * 3, 1)[:, 1].view(3, 5, 4, 8)
    weight = torch.stack([inputs.weight.view(4, 8)] * 2, 1)[:, 0]
    dy = inputs.dy.view(3, 5, 4, 8).transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(t.is_contiguous() for t in (x, weight, dy))
    with overridden() as override:
        y, rstd = fused(x, (4, 8), weight, inputs.eps)
        dx, dw = fused_backward(dy, x, (4, 8), rstd, weight, (True, True))
        assert taken(override) == (1, 1)
    assert rstd.shape == (3, 5, 1, 1) and rstd.dtype == FP32
    assert dw.shape == (4, 8) and all(t.is_contiguous() for t in (y, rstd, dx, dw))
    flat = {"y": y.view(15, 32), "rstd": rstd.flatten(), "dx": dx.view(15, 32), "dw": dw.flatten()}
    assert_within(expected_results(inputs), **flat)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
def test_output_mask(mask, has_weight):
    inputs = make_inputs(5, 32, FP32, FP32 if has_weight else None)
    with overridden() as override:
        _, rstd = fused(inputs.x, (32,), inputs.weight, inputs.eps)
        found = fused_backward(inputs.dy, inputs.x, (32,), rstd, inputs.weight, mask)
        assert taken(override) == (1, 1)
    assert [t is not None for t in found] == [mask[0], mask[1] and has_weight]
    given = {name: t for name, t in zip(("dx", "dw"), found, strict=True) if t is not None}
    assert_within(expected_results(inputs), **given)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = norm_of(3, 16), norm_of(16, requires_grad=False)
    with overridden() as override:
        F.rms_norm(x, (16,), weight).sum().backward()
        assert taken(override) == (1, 1)
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_module_trains(is_checkpointed):
    """Weights agree with ATen's, within float32."""

    def weights_after(steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.SiLU(), torch.nn.RMSNorm(16, eps=1e-5)
        ).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = norm_of(6, 8, requires_grad=False)
        for _ in range(steps):
            y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            (y - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    theirs = weights_after(3)
    with overridden() as override:
        ours = weights_after(3)
        assert taken(override) == (6 * (1 + is_checkpointed), 6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        override_aten()


def test_another_device():
    for wrong in (False, None):  # as if it were a switch
        with pytest.raises(
            ValueError, match=f"got {wrong}; undo\\(\\) of what override_aten returned ends it"
        ):
            override_aten(wrong)
    with pytest.raises(ValueError, match="device_type: expected 'cuda' or 'cpu', got \\[\\]$"):
        override_aten([])
    for wrong in (0, torch.zeros(2), torch.ones(2), torch.ones(2).numpy()):  # == would ask each element
        with pytest.raises(ValueError, match="^device_type: expected 'cuda' or 'cpu', got ") as raised:
            override_aten(wrong)
        assert "ends it" not in str(raised.value)
    with pytest.raises(ValueError, match="got device\\(type='cpu'\\): pass its type$"):
        override_aten(torch.device("cpu"))
    with pytest.raises(ValueError, match="device_type: expected 'cuda' or 'cpu', got 'mps'"):
        override_aten("mps")


def test_releases_that_lack_something(monkeypatch):
    with monkeypatch.context() as without:
        without.delattr(torch.library, "get_kernel")
        with pytest.raises(RuntimeError, match=r"get_kernel, which PyTorch has from 2\.9 on"):
            overridden()
    monkeypatch.setitem(aten.ATEN_SCHEMAS, ATEN_BACKWARD, "(Tensor input) -> Tensor")
    with pytest.raises(RuntimeError, match=r"knows aten::_fused_rms_norm_backward as PyTorch 2\.9"):
        overridden()


def test_no_half_a_patch(monkeypatch):
    """The second registration fails: the first one is taken back."""
    before, impl = kernels(), torch.library.Library.impl

    def fails_once(self, op, *arguments, **options):
        if op == ATEN_BACKWARD:
            raise RuntimeError("no")
        impl(self, op, *arguments, **options)

    monkeypatch.setattr(torch.library.Library, "impl", fails_once)
    with pytest.raises(RuntimeError, match="no"):
        overridden()
    assert kernels() == before
