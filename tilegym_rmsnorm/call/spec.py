# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Records of a checked call, `Spec`, `Call` and `Wanted`; the functions of a backend and their tensors.

A backend implements two functions, which `register_impl` names (backends/registry.py). Each runs every call, or
composes it of a plain one and PyTorch's operations (backends/around_kernels.py):

    forward(spec, tensors) -> (y, rstd, residual_out)            tensors: x, weight, bias, residual
    backward(spec, tensors, wanted) -> (dx, d_residual, dw, db)  tensors: x, dy, weight, rstd, d_residual_out

The arrays of rows, x, residual, dy and d_residual_out, have one shape in a call, each its own dtype and strides: (M, N)
with a last stride of 1 and any row stride of at least N, or, where the leading dimensions of one of them are not evenly
spaced, or the weight is per-head, (B, T, H, N) with a last stride of 1 and any other strides but 0. y, residual_out, dx
and d_residual are new, contiguous, and of that shape. weight, bias, dw and db are (N,), contiguous; weight and dw, and
with them bias and db, are (H, N) where the weight is per-head. rstd is (M,), contiguous, float32 (float64 for float64
x), M the product of the leading dimensions. In a backward x is what was normalized: residual_out where there was a
residual. What is None is not there, or not wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Casting = Literal["once", "llama"]  # see `rms_norm`
Tensors = tuple[Any, ...]
Outputs = tuple[Any, Any, Any]  # y, rstd, residual_out
Gradients = tuple[Any, Any, Any, Any]  # dx, d_residual, dw, db


class Spec(NamedTuple):
    """The numbers and torch.dtypes of a call. With a residual, alpha * x + residual is rounded to residual_dtype, and
    that is normalized."""

    n: int  # elements that are normalized together
    eps: float  # not used in a backward
    offset: float
    casting: str
    alpha: float = 1.0
    y_dtype: Any = None  # None: x's
    residual_dtype: Any = None  # of residual_out; None without a residual
    heads: int = 0  # rows of weight and bias; 0 where all rows of x share one


class Call(NamedTuple):
    """A checked call without its tensors, so that known_calls.py can keep it."""

    spec: Spec
    backend: str | None  # as it was asked for: a name, "auto", or None for the one in effect
    forward: Callable[..., Outputs] | None = (
        None  # the backend's functions, each None as long as nobody needs it
    )
    backward: Callable[..., Gradients] | None = None
    dtype: torch.dtype | None = None  # of the tensor that is normalized


class Wanted(NamedTuple):
    """The dtypes of the gradients that a backward returns; None: not wanted. d is the gradient of what was normalized,
    d_residual_out added: dx is alpha * d, d_residual is d."""

    dx: Any
    d_residual: Any = None
    dw: Any = None
    db: Any = None


# The same as one number, of which the backward op is given the sum.
DX, DW, DB, D_RESIDUAL = 1, 2, 4, 8


def arrays_of_d(
    needs: tuple[bool, bool], alpha: float, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> tuple[float, Wanted]:
    """The alpha and the arrays with which a backward gives dx and d_residual: two only where both are needed and
    differ. Else d_residual is the array dx. needs, dtypes: of x and residual."""
    (needs_dx, needs_d_residual), (x_dtype, residual_dtype) = needs, dtypes
    if (
        not needs_dx
    ):  # d_residual takes the place of dx, which it is where alpha is 1; beside dw alone nobody reads it
        return 1.0, Wanted(residual_dtype if needs_d_residual else x_dtype)
    is_one = not needs_d_residual or (alpha == 1.0 and x_dtype == residual_dtype)
    return alpha, Wanted(x_dtype, None if is_one else residual_dtype)


def shape_of_rstd(x: Tensor, dims: int) -> tuple[int, ...]:
    """The shape of rstd in the library ops: an extent of 1 in the place of each normalized dimension."""
    return (*x.shape[:-dims], *(1,) * dims)


def parts_of(has_residual: bool, has_bias: bool, has_heads: bool) -> tuple[str, ...]:
    """The parts that a call has beside x and one weight for all rows, in words for the log."""
    if not (has_residual or has_bias or has_heads):
        return ()
    named = ("residual", has_residual), ("bias", has_bias), ("weights of heads", has_heads)
    return tuple(name for name, is_there in named if is_there)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
