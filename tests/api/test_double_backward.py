# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""First and second derivatives of each op's calls, numerically, in float64; and second ones behind kernels."""

from __future__ import annotations

import pytest
import torch
from every_op import each_smooth_kind
from helpers import DEVICE, FP32, FP64
from torch.autograd import gradcheck, gradgradcheck


@pytest.mark.parametrize("is_op", [False, True], ids=["function", "op"])
@each_smooth_kind
def test_numerically(op, kind, is_op):
    call = op.make(kind)
    function = call.by_op if is_op else call.public
    checked = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, call.recorded(), **checked)
    assert gradgradcheck(function, call.recorded())


@each_smooth_kind
def test_of_one_output(op, kind):
    call = op.make(kind)
    for output in range(len(call.dys)) if len(call.dys) > 1 else ():
        assert gradgradcheck(lambda *given, output=output: call.public(*given)[output], call.recorded())


@each_smooth_kind
def test_behind_kernels(op, kind, backend):
    """The gradient of a penalty on gradients, against the reference in float64."""

    def penalty(dtype, name):
        call = op.make(kind)
        leaves = [each.to(dtype).requires_grad_() for each in call.leaves.values()]
        results = call.public(*leaves, backend=name)
        first = torch.autograd.grad(sum((each**2).sum() for each in results), leaves, create_graph=True)
        return torch.autograd.grad(sum((each**2).sum() for each in first), leaves)

    for one, other in zip(penalty(FP32, backend), penalty(FP64, "torch"), strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=1e-4, atol=1e-4)
        assert one.device.type == DEVICE.type
