# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe a call's tensors to the selector: the dtype that it goes by, and the form (plans/problem.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.plans.problem import Form
from tilegym_rmsnorm.backends.cutile.plans.rules import heads_of_form

LARGEST_STRIDE = 2**31 - 1  # kernels see strides as int32


def form_of(
    rows: Iterable[Tensor | None],
    dtypes: Iterable[torch.dtype | None],
    residual: bool,
    bias: bool,
    per_head: bool,
    d_residual: bool = False,
) -> tuple[torch.dtype, Form]:
    """The widest dtype, and the form, of a call that reads these arrays of rows and writes rows of these dtypes.
    Registers hold what is widest; rows of the narrowest say where 16 bytes begin."""
    read = [each for each in rows if each is not None]
    x = read[0]
    found = [x.dtype, *(each.dtype for each in read[1:]), *(each for each in dtypes if each is not None)]
    widest, narrowest = max(found, key=lambda each: each.itemsize), min(each.itemsize for each in found)
    has_heads, heads = x.ndim == 4, 0
    if has_heads:
        heads = x.shape[2] if per_head else heads_of_form(x.shape[3], x.shape[2])
    form = Form(
        residual,
        bias,
        heads,
        per_head,
        narrowest if narrowest < widest.itemsize else 0,
        has_heads and not all(map(begins_as_packed, read)),
        d_residual,
    )
    return widest, form


def fits_kernels(rows: Tensor) -> bool:
    """Whether kernels can count in the strides of an array of rows."""
    return all(stride <= LARGEST_STRIDE for stride in rows.stride())


def begins_as_packed(rows: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes if packed rows do, and only then."""
    strides = [
        stride for stride, extent in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if extent > 1
    ]
    offsets = rows.data_ptr()
    for stride in strides:
        offsets |= stride * rows.itemsize
    return (offsets & 15 == 0) == (rows.shape[-1] * rows.itemsize & 15 == 0)
