# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Records of a checked call, `Spec`, `Call` and `Wanted`, and the types of its tensors by position.

backends/contract.py has their shapes and strides, as a backend is given them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Casting = Literal["once", "llama"]  # see `rms_norm`
_Maybe = Tensor | None
ForwardTensors = tuple[Tensor, _Maybe, _Maybe, _Maybe]  # x, weight, bias, residual
BackwardTensors = tuple[Tensor, Tensor, _Maybe, Tensor, _Maybe]  # x, dy, weight, rstd, d_residual_out
Outputs = tuple[Tensor, Tensor, _Maybe]  # y, rstd, residual_out
Gradients = tuple[Tensor, _Maybe, _Maybe, _Maybe]  # dx, d_residual, dw, db


class Spec(NamedTuple):
    """The numbers and torch.dtypes of a call. With a residual, alpha * x + residual is rounded to residual_dtype, and
    that is normalized."""

    n: int  # elements that are normalized together
    eps: float  # not used in a backward
    offset: float
    casting: str
    alpha: float = 1.0
    y_dtype: torch.dtype | None = None  # None: x's
    residual_dtype: Any = None  # torch.dtype of residual_out; None exactly where there is no residual
    heads: int = 0  # rows of weight and bias; 0 where all rows of x share one


class Call(NamedTuple):
    """A checked call without its tensors, so that known_calls.py can keep it."""

    spec: Spec
    backend: str | None  # as it was asked for: a name, "auto", or None for the one in effect
    # The backend's functions, each None as long as nobody needs it.
    forward: Callable[[Spec, ForwardTensors], Outputs] | None = None
    backward: Callable[[Spec, BackwardTensors, Wanted], Gradients] | None = None
    dtype: torch.dtype | None = None  # of the tensor that is normalized


class Wanted(NamedTuple):
    """The dtypes of the gradients that a backward returns, dx in all of them; None: not wanted. d is the gradient of
    what was normalized, d_residual_out added: dx is alpha * d, d_residual is d."""

    dx: torch.dtype
    d_residual: torch.dtype | None = None
    dw: torch.dtype | None = None
    db: torch.dtype | None = None


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
        return 1.0, Wanted(residual_dtype if residual_dtype is not None and needs_d_residual else x_dtype)
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
