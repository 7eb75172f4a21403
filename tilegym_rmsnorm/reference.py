# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in plain PyTorch: the specification that every backend is checked against.

Per row i of x (M x N), with weight w and offset o (0 for Llama, 1 for Gemma):

    rstd_i = 1 / sqrt(mean_j x_ij^2 + eps)     xhat = x * rstd             y = xhat * (w + o) + bias
    g = dy * (w + o)                           c_i = mean_j(xhat * g)      dx = (g - xhat * c) * rstd
    dw_j = sum_i dy_ij * xhat_ij               db_j = sum_i dy_ij

With a residual r, x stands above for residual_out = alpha * x + r, rounded to a dtype of its own; d_residual_out, its
own gradient, is added to dx, which is then the gradient of r, and times alpha that of x. A weight (H, N) has a row for
each head, x's dimension before the normalized one: dw and db are sums over the others.

All of it is computed in float32 for half types, and in float64 where any input is float64, and each result is rounded
once. With casting="llama" xhat is also rounded to the dtype of what is normalized before it meets the weight: in y, and
in dw (dy * round(xhat)). dx never sees that rounding. No weight means a factor of 1, whatever the offset.

Every function takes any device, any leading dimensions (M is their product) and is differentiable. None checks what it
is given: call/arguments.py does, in front of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import (
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
    dtype_of,
)
from tilegym_rmsnorm.call.watched import counts_without_grad, is_compiled


def default_eps(dtype: torch.dtype) -> float:
    """What eps=None means: the machine epsilon of the precision that computes, as for `F.rms_norm`."""
    return torch.finfo(compute_dtype(dtype)).eps


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which tensors of `dtype` are computed."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def joint_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The precision in which these tensors are computed together: that of the widest of them, complex if any is."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = promoted(dtype, tensor.dtype)
    return dtype


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """`torch.promote_types` of the floating and complex dtypes that are taken.

    Made of comparisons: torch.export records a call of torch.promote_types as a node that nothing can run, and in
    torch.compiler.nested_compile_region Dynamo cannot guard on a dictionary that has dtypes as keys.
    """
    if dtype == other:
        return dtype
    is_wide = torch.float64 in (compute_dtype(dtype), compute_dtype(other))
    if dtype.is_complex or other.is_complex:
        return torch.complex128 if is_wide else torch.complex64
    return torch.float64 if is_wide else torch.float32


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """1 / sqrt(mean of x^2 over the last dimension + eps), shape (M,), float32 (float64 for float64 x)."""
    return rstd_torch(x, eps, 1).reshape(-1)


def rstd_torch(x: Tensor, eps: float | None, dims: int) -> Tensor:
    """The same over the last `dims` dimensions, with an extent of 1 in the place of each."""
    return _rstd(x.to(compute_dtype(x.dtype)), eps, dims)


def residual_sum(x: Tensor, residual: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    """alpha * x + residual, formed in float32 (float64 where one of them is) and rounded once, to `dtype`."""
    return wide_sum(x, residual, alpha).to(dtype)


def rms_norm_forward_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """y of x's shape, of out_dtype or x's, and rstd (M,). weight and bias have shape (N,), or (H, N) on (*, H, N)."""
    spec = Spec(x.shape[-1], default_eps(x.dtype) if eps is None else eps, offset, casting, y_dtype=out_dtype)
    y, rstd, _ = forward_torch((x, weight, bias, None), spec)
    return y, rstd.reshape(-1)


def forward_torch(tensors: ForwardTensors, spec: Spec, dims: int = 1) -> Outputs:
    """All the results of one call over the last `dims` dimensions, whose shape weight and bias have, or one more for
    heads: y, of x's shape; rstd, with an extent of 1 in the place of each normalized dimension; residual_out, None
    without a residual. tensors: x, weight, bias, residual.

    Nothing is flattened, so that tensors that are sharded or jagged in the middle can pass.
    """
    x, weight, bias, residual = tensors
    y_dtype, residual_out = x.dtype if spec.y_dtype is None else spec.y_dtype, None
    if residual is None:
        # Once: where PyTorch derives the gradient of x, it is rounded as often.
        wide = x.to(compute_dtype(x.dtype))
    else:
        total, dtype = wide_sum(x, residual, spec.alpha), spec.residual_dtype
        x = residual_out = total.to(dtype)
        # The gradient of what is normalized is not rounded on its way to the sum.
        wide = rounded_value(total, dtype).to(compute_dtype(dtype))
    rstd = _rstd(wide, spec.eps, dims)
    dtype = joint_dtype(x, weight, bias)
    xhat = round_xhat(wide.to(dtype) * rstd.to(dtype), x.dtype, spec.casting)
    y = xhat if weight is None else xhat * (weight.to(dtype) + spec.offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(y_dtype), rstd, residual_out


def wide_sum(x: Tensor, residual: Tensor, alpha: float) -> Tensor:
    """alpha * x + residual in the precision in which they are computed together."""
    dtype = joint_dtype(x, residual)
    x, residual = x.to(dtype), residual.to(dtype)
    return (x if alpha == 1.0 else alpha * x) + residual


def _rstd(wide: Tensor, eps: float | None, dims: int) -> Tensor:
    mean_square = wide.square().mean(dim=_last(dims), keepdim=True)
    return torch.rsqrt(mean_square + (default_eps(wide.dtype) if eps is None else eps))


def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
) -> tuple[Tensor, Tensor | None]:
    """dx and dw of a call without a residual, of the dtypes of x and weight. The rest as for `gradients_torch`."""
    spec, wanted = Spec(x.shape[-1], 0.0, offset, casting), Wanted(x.dtype, dw=dtype_of(weight))
    dx, _, dw, _ = gradients_torch((x, dy, weight, rstd, None), spec, wanted)
    return dx, dw


def gradients_torch(tensors: BackwardTensors, spec: Spec, wanted: Wanted, dims: int = 1) -> Gradients:
    """All the gradients of one call over the last `dims` dimensions, of the shapes of their tensors; those that are not
    wanted are None. tensors: x, dy, weight, rstd, d_residual_out.

    x is what was normalized; dy and d_residual_out have its shape. rstd is the forward's, (M,) or with an extent of 1
    in the place of each normalized dimension. db has weight's shape, that of a row without one.
    """
    x, dy, weight, rstd, d_residual_out = tensors
    dtype = joint_dtype(x, weight, dy, d_residual_out)
    rstd, dy = rstd.to(dtype), dy.to(dtype)
    if rstd.ndim != x.ndim:
        rstd = rstd.reshape(*x.shape[:-dims], *(1,) * dims)
    xhat = x.to(dtype) * rstd
    vector_shape = x.shape[-dims:] if weight is None else weight.shape
    d_residual = dw = db = None
    dx: Any = None  # of a call it is always wanted
    if wanted.dx is not None or wanted.d_residual is not None:
        g = dy if weight is None else dy * (weight.to(dtype) + spec.offset)
        c = (xhat * g).mean(dim=_last(dims), keepdim=True)
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
    """dy summed over the dimensions before its last ones, which are `shape`, in the precision `computed`, and rounded
    to `dtype`. dy that is not dense is copied first: AOTAutograd makes the gradients of a graph contiguous, and the
    order of a sum follows the strides."""
    dy = dy.contiguous()[None]  # sum() would take no dimensions for all of them
    return dy.sum(tuple(range(dy.ndim - len(shape))), dtype=computed).to(dtype)


def _last(dims: int) -> tuple[int, ...]:
    return tuple(range(-dims, 0))


def round_xhat(xhat: Tensor, dtype: torch.dtype, casting: str) -> Tensor:
    """xhat, with casting="llama" rounded to `dtype` (x's) but kept in its own. Gradients do not see that rounding."""
    return rounded_value(xhat, dtype) if casting == "llama" else xhat


def rounded_value(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` rounded to `dtype` but kept in its own. Gradients do not see that rounding."""
    if dtype == value.dtype:
        return value
    fixed = value.detach()
    rounded = fixed.to(dtype)
    if dtype.itemsize == 2 and is_compiled():
        # torch.compile drops a rounding that a widening follows, and views between them; not arithmetic on its bits.
        rounded = (~~rounded.view(torch.int16)).view(dtype)
    rounded = rounded.to(value.dtype)
    if not (torch.is_grad_enabled() or counts_without_grad()):
        return rounded
    # The difference is exact, and so is the sum. PyTorch's gradient of a rounding is rounded as well, and can overflow.
    # Of an infinity it is no number; what is rounded to one stays it.
    return value + (rounded - fixed).nan_to_num(0.0, math.inf, -math.inf)
