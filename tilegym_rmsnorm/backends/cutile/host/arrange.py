# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Arrange the tensors of a call under a level of reproducibility, so that one compiled kernel takes a row whatever rows
are around it and wherever it lies.

cuda-tile compiles a kernel for what it knows of each array: that 16 bytes divide its address and its strides, and that
an extent is 1. What it knows of addresses and strides decides how threads load a row, hence in which order it is added.
So rows are read where they are if they are like packed ones, else from a packed copy. (B, T, H, N) beside one weight
for all is read where it is if each row is added as one of (M, N) is. Where rows end between 16 bytes, a lone one gets a
second one, of zeros, which adds nothing to dw: alone its begin says nothing of others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilegym_rmsnorm.backends.cutile.host.launcher import LARGEST_STRIDE, fits_kernels
from tilegym_rmsnorm.backends.cutile.plans.rules import adds_heads_as_rows
from tilegym_rmsnorm.call.layout import View, arranged, in_shape_of, packed, strides_of_packed
from tilegym_rmsnorm.reproducibility import DEVICE

ROWS, VECTOR, RSTD = "rows", "vector", "rstd"
FORWARD, BACKWARD = (ROWS, VECTOR, VECTOR, ROWS), (ROWS, ROWS, VECTOR, RSTD, ROWS)  # as in ops/norm/spec.py


def bind_arranged(function: Any, spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
    """Bind the function of a backend for tensors like these. Its results are new, contiguous, and of the call's
    shapes."""
    kinds = BACKWARD if wanted else FORWARD
    known = [(each, kind) for each, kind in zip(tensors, kinds, strict=False) if each is not None]
    heads = next((each.shape[0] for each, kind in known if kind == VECTOR and each.ndim == 2), 0)
    m = tensors[0].numel() // spec.n
    lead: tuple[int, ...] = (m,)
    if heads:
        lead = 1, m // heads, heads
    elif adds_heads_as_rows(spec.n) and math.prod(tensors[0].shape[1:]) <= LARGEST_STRIDE:
        # Tiles of heads share a sum over rows otherwise than those of rows.
        has_sums = bool(wanted) and (wanted[0].dw is not None or wanted[0].db is not None)
        if not (has_sums and spec.reproducible & DEVICE):
            lead = tuple(tensors[0].shape[:-1])
    is_whole = all(kind != ROWS or spec.n * each.itemsize & 15 == 0 for each, kind in known)
    is_lone = m == (heads or 1) and not is_whole
    views = [
        None if each is None else _view(each, kind, (*lead, spec.n), is_lone)
        for each, kind in zip(tensors, kinds, strict=False)
    ]
    views += [None] * (len(tensors) - len(views))  # what dw is added to
    count = 2 if wanted else 3  # of results with M rows: dx and d_residual; y, rstd and residual_out

    def shaped(tensors: Any, results: Any) -> Any:
        return (*(_of_call(tensors[0], each, is_lone) for each in results[:count]), *results[count:])

    return arranged(function, spec, tensors, views, shaped, *wanted)


def _view(tensor: Tensor, kind: str, shape: tuple[int, ...], is_lone: bool) -> View:
    if is_lone and kind != VECTOR:
        shape = (2, *shape[1:]) if len(shape) == 2 else (1, 2, *shape[2:])
        return lambda each: _with_zeros(each).view(shape if kind == ROWS else -1)
    if kind != ROWS:
        return None if tensor.data_ptr() & 15 == 0 else packed
    if not is_like_packed(tensor):
        return lambda rows: packed(rows).view(shape)
    if tensor.shape == shape:
        return None
    return lambda rows: packed(rows).view(shape) if not rows.is_contiguous() else rows.view(-1).view(shape)


def is_like_packed(rows: Tensor) -> bool:
    """Whether cuda-tile knows as much of an array of rows as of a packed one at a multiple of 16 bytes."""
    if not fits_kernels(rows):
        return False
    wholes = [stride * rows.itemsize & 15 == 0 for stride in rows.stride()]
    of_packed = [stride * rows.itemsize & 15 == 0 for stride in strides_of_packed(rows.shape)]
    # The stride of an extent of 1 counts too. Where rows end between 16 bytes, that of packed arrays may be any.
    are_whole = rows.shape[-1] * rows.itemsize & 15 == 0
    return rows.data_ptr() & 15 == 0 and all(
        own == other or (extent == 1 and not are_whole)
        for own, other, extent in zip(wholes, of_packed, rows.shape, strict=True)
    )


def _with_zeros(tensor: Tensor) -> Tensor:
    """Copy a tensor, and as many zeros behind it."""
    found = tensor.new_zeros((2, tensor.numel()))
    found[0].view(tensor.shape).copy_(tensor)
    return found


def _of_call(x: Tensor, made: Tensor | None, is_lone: bool) -> Tensor | None:
    """Return a result with M rows in the shape of x; rstd stays (M,)."""
    if made is None:
        return None
    is_rstd = made.ndim == 1
    if is_lone:
        made = made.view(2, -1)[0].clone()
    return made if is_rstd or made.shape == x.shape else in_shape_of(x, made)
