# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "torch": the reference itself. Any device and any floating dtypes; many kernels, so slow."""

from __future__ import annotations

import torch
from torch import Tensor

from tilegym_rmsnorm.reference import add_rms_norm_torch, gradients_torch, rms_norm_forward_torch
from tilegym_rmsnorm.registry import Request, Unusable, register_impl
from tilegym_rmsnorm.spec import Gradients, Outputs, Spec, Tensors, Wanted

IMPLEMENTATION = __name__


def unusable(request: Request | None) -> Unusable | None:
    """Always None: plain PyTorch runs wherever torch does."""
    return None


@register_impl("rms_norm_forward", "torch")
@torch.no_grad()
def rms_norm_forward(spec: Spec, tensors: Tensors) -> Outputs:
    x, weight, bias, residual = tensors
    if residual is None:
        y, rstd = rms_norm_forward_torch(
            x,
            weight,
            spec.eps,
            bias=bias,
            offset=spec.offset,
            casting=spec.casting,
            out_dtype=spec.y_dtype,
        )
        return y.contiguous(), rstd, None
    y, residual_out, rstd = add_rms_norm_torch(
        x,
        residual,
        weight,
        spec.eps,
        alpha=spec.alpha,
        residual_dtype=spec.residual_dtype,
        bias=bias,
        offset=spec.offset,
        casting=spec.casting,
        out_dtype=spec.y_dtype,
    )
    return y.contiguous(), rstd.reshape(-1), residual_out.contiguous()


@register_impl("rms_norm_backward", "torch")
@torch.no_grad()
def rms_norm_backward(spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
    x, dy, weight, rstd, d_residual_out = tensors
    dx, d_residual, dw, db = gradients_torch(
        x,
        dy,
        weight,
        rstd,
        d_residual_out,
        wanted,
        offset=spec.offset,
        casting=spec.casting,
        alpha=spec.alpha,
    )
    return _packed(dx), _packed(d_residual), dw, db


def _packed(rows: Tensor | None) -> Tensor | None:
    """PyTorch's operations keep the order of strides that they are given."""
    return None if rows is None else rows.contiguous()
