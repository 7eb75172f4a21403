# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""First and second derivatives of each kind of call, numerically, in float64; and second ones behind kernels."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, FP32, FP64
from torch.autograd import gradcheck, gradgradcheck
from variants import Variant, make, options

from tilegym_rmsnorm import rms_norm

# No dtype of 16 bits: what is rounded has no numerical derivative.
KINDS = {
    "plain": Variant(FP64, (3, 5)),
    "bias": Variant(FP64, (3, 5), bias_dtype=FP64),
    "residual": Variant(FP64, (3, 5), residual_dtype=FP64),
    "alpha": Variant(
        FP64, (3, 5), residual_dtype=FP64, alpha=-0.3, bias_dtype=FP64, offset=1.0, casting="llama"
    ),
    "no weight": Variant(FP64, (3, 5), "none", residual_dtype=FP64),
    "weights of heads": Variant(FP64, (2, 3, 2, 5), "heads", bias_dtype=FP64, layout="heads"),
    "all of it": Variant(FP64, (2, 1, 2, 4), "heads", FP64, FP64, FP64, None, 0.5, FP64, 1.0, layout="mixed"),
}


def differentiable(variant, backend):
    inputs = make(variant._replace(weight_dtype=FP64))
    names = [name for name in ("x", "weight", "bias", "residual") if getattr(inputs, name) is not None]
    tensors = [getattr(inputs, name).double().requires_grad_() for name in names]

    def norm(*tensors):
        given = inputs._replace(**dict(zip(names, tensors, strict=True)))
        return rms_norm(
            given.x, variant.n, given.weight, variant.eps, **options(variant, given), backend=backend
        )

    return norm, tensors


@pytest.mark.parametrize("kind", KINDS)
def test_numerically(kind):
    norm, tensors = differentiable(KINDS[kind], "torch")
    assert gradcheck(norm, tensors)
    assert gradgradcheck(norm, tensors)


@pytest.mark.parametrize("output", [0, 1])
def test_of_one_output(output):
    norm, tensors = differentiable(KINDS["alpha"], "torch")
    assert gradgradcheck(lambda *tensors: norm(*tensors)[output], tensors)


BEHIND_KERNELS = ["plain", "residual", "alpha", "weights of heads", "all of it"]


@pytest.mark.parametrize("kind", BEHIND_KERNELS)
def test_behind_kernels(kind, backend):
    """The gradient of a penalty on gradients, against the reference in float64."""
    variant = KINDS[kind]

    def penalty(dtype, backend):
        single = variant._replace(out_dtype=None)
        norm, tensors = differentiable(single, backend)
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        outputs = norm(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        first = torch.autograd.grad(sum((o**2).sum() for o in outputs), tensors, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), tensors)

    for one, other in zip(penalty(FP32, backend), penalty(FP64, "torch"), strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=1e-4, atol=1e-4)
        assert one.device.type == DEVICE.type
