# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in plain PyTorch: the specification that every backend is checked against.

Per row i of x (M x N), with weight w and offset o (0 for Llama, 1 for Gemma):

    rstd_i = 1 / sqrt(mean_j x_ij^2 + eps)     xhat = x * rstd             y = xhat * (w + o) + bias
    g = dy * (w + o)                           c_i = mean_j(xhat * g)      dx = (g - xhat * c) * rstd
    dw_j = sum_i dy_ij * xhat_ij

All of it is computed in float32 for half types and in the inputs' own precision for float32 and float64 (the wider of
x's and weight's), and each result is rounded once, to the dtype of the tensor that it belongs to. With casting="llama"
xhat is also rounded to x's dtype before it meets the weight: in y, and in dw (dy * round(xhat)). dx never sees that
rounding. No weight means a factor of 1, whatever the offset.

Every function takes any device, any leading dimensions (M is their product) and is differentiable. None checks what it
is given: `tilegym_rmsnorm.api` does, in front of the two that are public.
"""

from __future__ import annotations

import torch
from torch import Tensor

CASTINGS = ("once", "llama")


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
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """1 / sqrt(mean of x^2 over the last dimension + eps), shape (M,), float32 (float64 for float64 x)."""
    return _rstd(x.to(compute_dtype(x.dtype)), eps, (-1,)).reshape(-1)


def rms_norm_forward_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
) -> tuple[Tensor, Tensor]:
    """y of x's shape and dtype, and rstd (M,). weight and bias have shape (N,)."""
    y, rstd = _forward(x, weight, eps, bias, offset, casting, dims=1)
    return y, rstd.reshape(-1)


def rms_norm_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
    dims: int = 1,
) -> Tensor:
    """y alone, of x's shape and dtype, over the last `dims` dimensions, whose shape weight and bias have.

    Nothing is flattened, so that tensors that are sharded or jagged in the middle can pass.
    """
    return _forward(x, weight, eps, bias, offset, casting, dims)[0]


def _forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    bias: Tensor | None,
    offset: float,
    casting: str,
    dims: int,
) -> tuple[Tensor, Tensor]:
    """y, and rstd with an extent of 1 in the place of each normalized dimension."""
    # Once: where PyTorch derives the gradient of x, it is rounded as often.
    wide = x.to(compute_dtype(x.dtype))
    rstd = _rstd(wide, eps, tuple(range(-dims, 0)))
    dtype = joint_dtype(x, weight, bias)
    xhat = round_xhat(wide.to(dtype) * rstd.to(dtype), x.dtype, casting)
    y = xhat if weight is None else xhat * (weight.to(dtype) + offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype), rstd


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
    """dx of x's shape and dtype, and dw (N,) of weight's dtype, None without a weight.

    dy has x's shape; rstd (M,) comes from the forward or from `compute_rms_norm_rstd_torch`.
    """
    dtype = joint_dtype(x, weight)
    rstd, dy = _per_row(rstd, x, dtype), dy.to(dtype)
    xhat = x.to(dtype) * rstd
    g = dy if weight is None else dy * (weight.to(dtype) + offset)
    c = (xhat * g).mean(dim=-1, keepdim=True)
    dx = (g - xhat * c) * rstd
    dw = None
    if weight is not None:
        dw = (dy * round_xhat(xhat, x.dtype, casting)).reshape(-1, x.shape[-1]).sum(dim=0).to(weight.dtype)
    return dx.to(x.dtype), dw


def _per_row(rstd: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return rstd.to(dtype).reshape(*x.shape[:-1], 1)


def round_xhat(xhat: Tensor, dtype: torch.dtype, casting: str) -> Tensor:
    """xhat, with casting="llama" rounded to `dtype` (x's) but kept in its own. Gradients do not see that rounding."""
    if casting != "llama":
        return xhat
    fixed = xhat.detach()
    rounded = fixed.to(dtype)
    if dtype.itemsize == 2 and torch.compiler.is_compiling():
        # torch.compile drops a rounding that a widening follows, and views between them; not arithmetic on its bits.
        rounded = (~~rounded.view(torch.int16)).view(dtype)
    rounded = rounded.to(xhat.dtype)
    # The difference is exact, and so is the sum. PyTorch's gradient of a rounding is rounded as well, and can overflow.
    return xhat + (rounded - fixed) if torch.is_grad_enabled() else rounded
