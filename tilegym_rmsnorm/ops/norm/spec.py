# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the records of a checked call of `rms_norm`, `Spec` and `Wanted`, and the order of its tensors.

A backend receives *rows*: x, residual, dy and d_residual_out have one shape in a call, each its own dtype and strides.
The shape is (M, N), with a last stride of 1 and a row stride of at least N. Where the weight is per-head, or leading
dimensions are not evenly spaced, the shape is (B, T, H, N), with a last stride of 1 and any other strides but 0. y,
residual_out, dx and d_residual are new, contiguous, and have that shape too. weight, bias, dw and db are contiguous,
(N,), or (H, N) where the weight is per-head. rstd is contiguous, (M,) with M the product of the leading dimensions,
float32 (float64 for float64 x). spec and wanted give the dtypes of the results.

A backward may get a sixth tensor, of dw's shape: it adds dw to that in place, and nobody reads the dw that it returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import Facts, Maybe, dtype_of

ForwardTensors = tuple[Tensor, Maybe, Maybe, Maybe]  # x, weight, bias, residual
BackwardTensors = tuple[Tensor, Tensor, Maybe, Tensor, Maybe]  # x, dy, weight, rstd, d_residual_out
Outputs = tuple[Tensor, Tensor, Maybe]  # y, rstd, residual_out
Gradients = tuple[Tensor, Maybe, Maybe, Maybe]  # dx, d_residual, dw, db, of a backend
WantedGradients = tuple[Maybe, Maybe, Maybe, Maybe]  # the same, where dx may not be wanted


class Spec(NamedTuple):
    """Numbers and torch.dtypes of a call. With a residual, alpha * x + residual is rounded to residual_dtype, then
    normalized."""

    n: int  # elements normalized together: a row
    eps: float  # not used in a backward
    offset: float
    casting: str
    alpha: float = 1.0
    y_dtype: torch.dtype | None = None  # None: x's dtype
    residual_dtype: Any = None  # torch.dtype of residual_out; None exactly where there is no residual
    heads: int = 0  # H of a per-head weight and bias, (H, n); 0 where one weight serves all rows of x
    reproducible: int = 0  # flags of the level, see reproducibility.py

    @property
    def ops(self) -> tuple[str, str]:
        """Names of the forward and of the backward."""
        return NORM_OPS

    def facts(self, tensors: Any, wanted: Wanted | None = None) -> Facts:
        """Return the facts of a forward, or with `wanted` of a backward, from its tensors."""
        rows: tuple[Any, ...]
        others: tuple[Any, ...]
        if wanted is None:
            x, weight, bias, residual = tensors
            has_bias, has_residual, rows = bias is not None, residual is not None, (x, residual)
            others = dtype_of(bias), dtype_of(residual), self.y_dtype, self.residual_dtype
        else:
            x, dy, weight, _, d_residual_out = tensors
            has_residual = d_residual_out is not None or self.residual_dtype is not None
            has_bias, rows = wanted.db is not None, (x, dy, d_residual_out)
            others = dy.dtype, dtype_of(d_residual_out), *wanted
        parts = parts_of(has_residual, has_bias, self.heads > 0)
        return (x.dtype, dtype_of(weight), *others), rows, parts


class Wanted(NamedTuple):
    """Dtypes of the gradients that a backward returns, None for a gradient that is not wanted. With d the gradient of
    the normalized tensor plus d_residual_out, dx is alpha * d and d_residual is d. Backends always write dx: it is None
    only where db is wanted alone, a sum that no backend is asked for."""

    dx: torch.dtype | None
    d_residual: torch.dtype | None = None
    dw: torch.dtype | None = None
    db: torch.dtype | None = None

    @property
    def why_no_backend(self) -> str | None:
        """Reason why no backend is asked for these gradients; None where one is."""
        return "db alone is a sum" if self.dx is None else None


# Bits of the number by which the backward op is told the wanted gradients.
DX, DW, DB, D_RESIDUAL = 1, 2, 4, 8


def wanted_of(
    needs: tuple[bool, ...], alpha: float, dtypes: tuple[torch.dtype | None, ...]
) -> tuple[float, Wanted]:
    """Choose the alpha and the arrays of a backward: dx and d_residual are two arrays only where both are needed and
    differ. Otherwise the one array dx is both. needs, dtypes: of x, residual, weight and bias."""
    needs_dx, needs_d_residual, needs_dw, needs_db = needs
    x_dtype, residual_dtype, weight_dtype, bias_dtype = dtypes
    of_vectors = weight_dtype if needs_dw else None, bias_dtype if needs_db else None
    if needs_dx:
        is_one = not needs_d_residual or (alpha == 1.0 and x_dtype == residual_dtype)
        return alpha, Wanted(x_dtype, None if is_one else residual_dtype, *of_vectors)
    if needs_d_residual:
        return 1.0, Wanted(residual_dtype, None, *of_vectors)  # with alpha 1 dx is d_residual
    return 1.0, Wanted(x_dtype if needs_dw else None, None, *of_vectors)  # nobody reads dx


def as_needed(
    needs: tuple[bool, ...], gradients: WantedGradients, bias_shape: tuple[int, ...]
) -> WantedGradients:
    """Return to autograd the gradients of x, residual, weight and bias, from those that `wanted_of` chose."""
    dx, d_residual, dw, db = gradients
    if needs[1] and d_residual is None:
        d_residual = dx
    return dx if needs[0] else None, d_residual, dw, None if db is None else db.view(bias_shape)


def shape_of_rstd(x: Tensor, dims: int) -> tuple[int, ...]:
    """Return the shape of rstd in the library ops: that of x, with an extent of 1 for each normalized dimension."""
    return (*x.shape[:-dims], *(1,) * dims)


def parts_of(has_residual: bool, has_bias: bool, has_heads: bool) -> tuple[str, ...]:
    """Name the parts of a call other than x and one weight for all rows, for logs and errors."""
    if not (has_residual or has_bias or has_heads):
        return ()
    named = ("residual", has_residual), ("bias", has_bias), ("weights of heads", has_heads)
    return tuple(name for name, is_there in named if is_there)


class ForwardFunction(Protocol):
    """Compute y, rstd and residual_out from x, weight, bias and residual."""

    def __call__(self, spec: Spec, tensors: ForwardTensors, /) -> Outputs: ...


class BackwardFunction(Protocol):
    """Compute dx, d_residual, dw and db from x, dy, weight, rstd and d_residual_out. x is the normalized tensor:
    residual_out where there was a residual."""

    def __call__(self, spec: Spec, tensors: BackwardTensors, wanted: Wanted, /) -> Gradients: ...


NORM_OPS = "rms_norm_forward", "rms_norm_backward"
