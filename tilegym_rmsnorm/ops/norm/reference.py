# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in plain PyTorch: the specification that every backend is checked against.

Per row i of x (M x N), with weight w and offset o (0 for Llama, 1 for Gemma):

    rstd_i = 1 / sqrt(mean_j x_ij^2 + eps)     xhat = x * rstd             y = xhat * (w + o) + bias
    g = dy * (w + o)                           c_i = mean_j(xhat * g)      dx = (g - xhat * c) * rstd
    dw_j = sum_i dy_ij * xhat_ij               db_j = sum_i dy_ij

With a residual r, replace x above by residual_out = alpha * x + r, rounded to a dtype of its own. Its own gradient,
d_residual_out, is added to dx. Then dx is the gradient of r, and alpha * dx the gradient of x. A weight (H, N) has a
row for each head, where H is x's dimension before the normalized one: dw and db are sums over the other dimensions.

Computation is in float32 for half types, in float64 where any input is float64, and each result is rounded once. With
casting="llama" xhat is also rounded, to the dtype of the normalized tensor, before it is multiplied by the weight in y,
and by dy in dw. dx ignores that rounding. Without a weight the factor is 1, whatever the offset.

Every function takes any device and any leading dimensions (M is their product), and is differentiable. The functions
check no arguments: ops/norm/checks.py does, before they are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import (
    compute_dtype,
    default_eps,
    joint_dtype,
    last_dimensions,
    round_xhat,
    rounded_value,
    rstd_of_wide,
    rstd_torch,
)
from tilegym_rmsnorm.call.spec import dtype_of
from tilegym_rmsnorm.ops.norm.spec import (
    NORM_OPS,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.reproducibility import tell_of_operations


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """Compute 1 / sqrt(mean of x^2 over the last dimension + eps), shape (M,), float32 (float64 for float64 x)."""
    return rstd_torch(x, eps, 1).reshape(-1)


def residual_sum(x: Tensor, residual: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    """Compute alpha * x + residual in float32 (float64 beside float64), rounded once, to `dtype`."""
    if alpha == 1.0 and dtype == torch.promote_types(x.dtype, residual.dtype):
        return x + residual  # PyTorch adds 16 bits in float32 too: one pass over memory instead of four
    return wide_sum(x, residual, alpha).to(dtype)


def rms_norm_forward_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
) -> tuple[Tensor, Tensor]:
    """Compute y, of x's shape and dtype, and rstd (M,). weight, bias: (N,), or (H, N) for x (*, H, N)."""
    spec = Spec(x.shape[-1], default_eps(x.dtype) if eps is None else eps, offset, casting)
    y, rstd, _ = forward_torch((x, weight, bias, None), spec)
    return y, rstd.reshape(-1)


def forward_torch(tensors: ForwardTensors, spec: Spec, dims: int = 1) -> Outputs:
    """Compute y, of x's shape, rstd, with an extent of 1 for each normalized dimension, and residual_out, None without
    a residual. tensors: x, weight, bias, residual. The last `dims` dimensions are normalized. weight and bias have
    their shape, or one dimension more for heads.

    Nothing is flattened, so tensors may be sharded or jagged in the middle.
    """
    x, weight, bias, residual = tensors
    tell_of_operations(NORM_OPS[0], spec, x)
    y_dtype, residual_out = x.dtype if spec.y_dtype is None else spec.y_dtype, None
    if residual is None:
        # Cast once: where PyTorch derives the gradient of x, each cast rounds it once.
        wide = x.to(compute_dtype(x.dtype))
    else:
        total, dtype = wide_sum(x, residual, spec.alpha), spec.residual_dtype
        x = residual_out = total.to(dtype)
        # From the unrounded sum, so that the gradient of residual_out is not rounded on its way to the sum.
        wide = rounded_value(total, dtype).to(compute_dtype(dtype))
    rstd = rstd_of_wide(wide, spec.eps, dims)
    dtype = joint_dtype(x, weight, bias)
    xhat = round_xhat(wide.to(dtype) * rstd.to(dtype), x.dtype, spec.casting)
    y = xhat if weight is None else xhat * (weight.to(dtype) + spec.offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(y_dtype), rstd, residual_out


def wide_sum(x: Tensor, residual: Tensor, alpha: float) -> Tensor:
    """Compute alpha * x + residual in the joint dtype of x and residual, not rounded."""
    dtype = joint_dtype(x, residual)
    x, residual = x.to(dtype), residual.to(dtype)
    return (x if alpha == 1.0 else alpha * x) + residual


def rms_norm_backward_torch(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, *, offset: float = 0.0, casting: str = "once"
) -> tuple[Tensor, Tensor | None]:
    """Compute dx and dw of a call without a residual, in the dtypes of x and weight. The rest as `gradients_torch`."""
    spec, wanted = Spec(x.shape[-1], 0.0, offset, casting), Wanted(x.dtype, dw=dtype_of(weight))
    dx, _, dw, _ = gradients_torch((x, dy, weight, rstd, None), spec, wanted)
    return dx, dw


def gradients_torch(tensors: BackwardTensors, spec: Spec, wanted: Wanted, dims: int = 1) -> Gradients:
    """Compute the wanted gradients of a call over the last `dims` dimensions, each of its tensor's shape; others are
    None. tensors: x, dy, weight, rstd, d_residual_out.

    x is the normalized tensor; dy and d_residual_out have its shape. rstd is the forward's, (M,) or with an extent of 1
    for each normalized dimension. db has weight's shape, without a weight that of a row.
    """
    x, dy, weight, rstd, d_residual_out = tensors
    tell_of_operations(NORM_OPS[1], spec, x)
    dtype = joint_dtype(x, weight, dy, d_residual_out)
    rstd, dy = rstd.to(dtype), dy.to(dtype)
    if rstd.ndim != x.ndim:
        rstd = rstd.reshape(*x.shape[:-dims], *(1,) * dims)
    xhat = x.to(dtype) * rstd
    vector_shape = x.shape[-dims:] if weight is None else weight.shape
    d_residual = dw = db = None
    dx: Any = None  # not None in a call, where dx is always wanted
    if wanted.dx is not None or wanted.d_residual is not None:
        g = dy if weight is None else dy * (weight.to(dtype) + spec.offset)
        c = (xhat * g).mean(dim=last_dimensions(dims), keepdim=True)
        d = (g - xhat * c) * rstd
        if d_residual_out is not None:
            d = d + d_residual_out.to(dtype)
        if wanted.dx is not None:
            dx = (d if spec.alpha == 1.0 else spec.alpha * d).to(wanted.dx)
        if wanted.d_residual is not None:
            d_residual = d.to(wanted.d_residual)
    if wanted.dw is not None:
        dw = sum_of_rows(dy * round_xhat(xhat, x.dtype, spec.casting), vector_shape, dtype, wanted.dw)
    if wanted.db is not None:
        db = sum_of_rows(dy, vector_shape, dtype, wanted.db)
    return dx, d_residual, dw, db


def sum_of_rows(dy: Tensor, shape: tuple[int, ...], computed: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Sum dy over the dimensions before its last ones, `shape`, in dtype `computed`, and round to `dtype`. dy is made
    contiguous first: AOTAutograd makes the gradients of a graph contiguous, and the order of a sum follows strides."""
    dy = dy.contiguous()[None]  # so that sum() never gets an empty tuple, which means all dimensions
    return dy.sum(tuple(range(dy.ndim - len(shape))), dtype=computed).to(dtype)
