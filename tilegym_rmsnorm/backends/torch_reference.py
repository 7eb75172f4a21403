# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the formulas in PyTorch as backend "torch": it runs on any device and floating dtypes, slowly, by many
kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.contract import Request, Unusable
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.ops.norm.reference import forward_torch, gradients_torch
from tilegym_rmsnorm.ops.norm.spec import (
    NORM_BACKWARD,
    NORM_FORWARD,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import (
    ROPE_BACKWARD,
    ROPE_FORWARD,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)

IMPLEMENTATION = __name__


def unusable(request: Request | None) -> Unusable | None:
    """Return None always: PyTorch's operations run wherever torch does."""
    return None


@register_impl(NORM_FORWARD, "torch")
@torch.no_grad()
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    y, rstd, residual_out = forward_torch(tensors, spec)
    return y.contiguous(), rstd.reshape(-1), _packed(residual_out)


@register_impl(NORM_BACKWARD, "torch")
@torch.no_grad()
def rms_norm_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    dx, d_residual, dw, db = gradients_torch(tensors, spec, wanted)
    return dx.contiguous(), _packed(d_residual), dw, db


@register_impl(ROPE_FORWARD, "torch")
@torch.no_grad()
def qk_norm_rope_forward(spec: RopeSpec, tensors: RopeTensors) -> RopeOutputs:
    q_out, k_out = rope_forward_torch(tensors, spec)
    return q_out.contiguous(), _packed(k_out)


@register_impl(ROPE_BACKWARD, "torch")
@torch.no_grad()
def qk_norm_rope_backward(spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted) -> RopeGradients:
    dq, dk, dq_weight, dk_weight = rope_gradients_torch(tensors, spec, wanted)
    return dq.contiguous(), _packed(dk), dq_weight, dk_weight


def _packed(rows: Tensor | None) -> Tensor | None:
    """Make a result contiguous: PyTorch's operations keep the order of their input's strides."""
    return None if rows is None else rows.contiguous()
