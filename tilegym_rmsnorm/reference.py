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
is given: api.py and unrecorded.py do, in front of them.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from tilegym_rmsnorm.spec import Casting, Gradients, Wanted

CASTINGS = get_args(Casting)


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
    return _rstd(x.to(compute_dtype(x.dtype)), eps, (-1,)).reshape(-1)


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
    y, rstd = _forward(x, weight, eps, bias, offset, casting, out_dtype, dims=1)
    return y, rstd.reshape(-1)


def rms_norm_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype | None = None,
    dims: int = 1,
) -> Tensor:
    """y alone, of x's shape, over the last `dims` dimensions, whose shape weight and bias have, or one more for heads.

    Nothing is flattened, so that tensors that are sharded or jagged in the middle can pass.
    """
    return _forward(x, weight, eps, bias, offset, casting, out_dtype, dims)[0]


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    alpha: float = 1.0,
    residual_dtype: torch.dtype,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype | None = None,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, of out_dtype or x's, residual_out, and rstd with an extent of 1 in the place of each normalized dimension. The
    rest as for `rms_norm_torch`."""
    total = wide_sum(x, residual, alpha)
    residual_out = total.to(residual_dtype)
    # The gradient of what is normalized is not rounded on its way to the sum.
    wide = rounded_value(total, residual_dtype).to(compute_dtype(residual_dtype))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    y, rstd = _forward(residual_out, weight, eps, bias, offset, casting, out_dtype, dims, wide)
    return y, residual_out, rstd


def wide_sum(x: Tensor, residual: Tensor, alpha: float) -> Tensor:
    """alpha * x + residual in the precision in which they are computed together."""
    dtype = joint_dtype(x, residual)
    x, residual = x.to(dtype), residual.to(dtype)
    return (x if alpha == 1.0 else alpha * x) + residual


def _forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    bias: Tensor | None,
    offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
    dims: int,
    wide: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y, and rstd with an extent of 1 in the place of each normalized dimension. wide: x as it is computed with."""
    if wide is None:
        # Once: where PyTorch derives the gradient of x, it is rounded as often.
        wide = x.to(compute_dtype(x.dtype))
    rstd = _rstd(wide, eps, tuple(range(-dims, 0)))
    dtype = joint_dtype(x, weight, bias)
    xhat = round_xhat(wide.to(dtype) * rstd.to(dtype), x.dtype, casting)
    y = xhat if weight is None else xhat * (weight.to(dtype) + offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype if out_dtype is None else out_dtype), rstd


def _rstd(wide: Tensor, eps: float | None, dims: tuple[int, ...]) -> Tensor:
    mean_square = wide.square().mean(dim=dims, keepdim=True)
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
    wanted = Wanted(x.dtype, None, None if weight is None else weight.dtype)
    dx, _, dw, _ = gradients_torch(x, dy, weight, rstd, None, wanted, offset=offset, casting=casting)
    return dx, dw


def gradients_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    wanted: Wanted,
    *,
    offset: float,
    casting: str,
    alpha: float = 1.0,
) -> Gradients:
    """All the gradients of one call, of the shapes of their tensors; those that are not wanted are None.

    x is what was normalized; dy and d_residual_out have its shape. rstd (M,) is the forward's, or from
    `compute_rms_norm_rstd_torch`. db has weight's shape, (N,) without one.
    """
    dtype = joint_dtype(x, weight, dy, d_residual_out)
    rstd, dy = _per_row(rstd, x, dtype), dy.to(dtype)
    xhat = x.to(dtype) * rstd
    vector_shape = x.shape[-1:] if weight is None else weight.shape
    dx = d_residual = dw = db = None
    if wanted.dx is not None or wanted.d_residual is not None:
        g = dy if weight is None else dy * (weight.to(dtype) + offset)
        c = (xhat * g).mean(dim=-1, keepdim=True)
        d = (g - xhat * c) * rstd
        if d_residual_out is not None:
            d = d + d_residual_out.to(dtype)
        if wanted.dx is not None:
            dx = (d if alpha == 1.0 else alpha * d).to(wanted.dx)
        if wanted.d_residual is not None:
            d_residual = d.to(wanted.d_residual)
    if wanted.dw is not None:
        product = dy * round_xhat(xhat, x.dtype, casting)
        dw = product.reshape(-1, *vector_shape).sum(dim=0).to(wanted.dw)
    if wanted.db is not None:
        db = dy.reshape(-1, *vector_shape).sum(dim=0).to(wanted.db)
    return dx, d_residual, dw, db


def sum_of_rows(dy: Tensor, shape: tuple[int, ...], computed: torch.dtype, dtype: torch.dtype) -> Tensor:
    """db, where nothing else forms it: dy summed over the dimensions before its last ones, which are `shape`, in the
    precision `computed`, and rounded to `dtype`. dy that is not dense is copied first: AOTAutograd makes the gradients
    of a graph contiguous, and the order of a sum follows the strides."""
    dy = dy.contiguous()[None]  # sum() would take no dimensions for all of them
    return dy.sum(tuple(range(dy.ndim - len(shape))), dtype=computed).to(dtype)


def _per_row(rstd: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return rstd.to(dtype).reshape(*x.shape[:-1], 1)


def round_xhat(xhat: Tensor, dtype: torch.dtype, casting: str) -> Tensor:
    """xhat, with casting="llama" rounded to `dtype` (x's) but kept in its own. Gradients do not see that rounding."""
    return rounded_value(xhat, dtype) if casting == "llama" else xhat


def rounded_value(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` rounded to `dtype` but kept in its own. Gradients do not see that rounding."""
    if dtype == value.dtype:
        return value
    fixed = value.detach()
    rounded = fixed.to(dtype)
    if dtype.itemsize == 2 and torch.compiler.is_compiling():
        # torch.compile drops a rounding that a widening follows, and views between them; not arithmetic on its bits.
        rounded = (~~rounded.view(torch.int16)).view(dtype)
    rounded = rounded.to(value.dtype)
    # A graph that is recorded without grad may run with it. `is_compiling` comes first: Dynamo cannot ask the others.
    is_recorded = (
        torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
    )
    if not torch.is_grad_enabled() and not is_recorded:
        return rounded
    # The difference is exact, and so is the sum. PyTorch's gradient of a rounding is rounded as well, and can overflow.
    # Of an infinity it is no number; what is rounded to one stays it.
    return value + (rounded - fixed).nan_to_num(0.0, math.inf, -math.inf)
