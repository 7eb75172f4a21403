# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What a call asks of a backend, once it has passed all checks.

A backend implements two functions, which `register_impl` names (registry.py). Each runs every call, or composes it of a
plain one and PyTorch's operations (backends/composed.py):

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

from typing import Any, Literal, NamedTuple

Casting = Literal["once", "llama"]  # see `rms_norm`
Tensors = tuple[Any, ...]
Outputs = tuple[Any, Any, Any]  # y, rstd, residual_out
Gradients = tuple[Any, Any, Any, Any]  # dx, d_residual, dw, db


class Spec(NamedTuple):
    """dtypes are torch's. With a residual, alpha * x + residual is rounded to residual_out's dtype, and normalized."""

    n: int  # elements that are normalized together
    eps: float
    offset: float
    casting: str
    alpha: float = 1.0
    y_dtype: Any = None  # None: x's
    residual_dtype: Any = None  # of residual_out; None without a residual


class Wanted(NamedTuple):
    """The dtypes of the gradients that a backward returns; None: not wanted. d is the gradient of what was normalized,
    d_residual_out added: dx is alpha * d, d_residual is d."""

    dx: Any
    d_residual: Any = None
    dw: Any = None
    db: Any = None


# The same as one number, of which the library ops are given the sum.
DX, DW, DB, D_RESIDUAL = 1, 2, 4, 8


def parts_of(has_residual: bool, has_bias: bool, has_heads: bool) -> tuple[str, ...]:
    """What a call has beside x and one weight for all rows, in words for the log."""
    if not (has_residual or has_bias or has_heads):
        return ()
    named = ("residual", has_residual), ("bias", has_bias), ("weights of heads", has_heads)
    return tuple(name for name, is_there in named if is_there)
