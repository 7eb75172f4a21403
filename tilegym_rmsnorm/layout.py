# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The layouts in which backends are given tensors (spec.py): views where there are any, else copies."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(x: Tensor, n: int) -> Tensor:
    """x as (M, N) with last stride 1 and a row stride of at least N: a view where one exists, else a copy."""
    rows = x if x.ndim == 2 and x.shape[1] == n else x.reshape(-1, n)
    row_stride, stride = rows.stride()
    if stride == 1 and row_stride >= n:
        return rows
    return packed(rows)


def as_vector(vector: Tensor | None) -> Tensor | None:
    """A weight or bias over all normalized dimensions as (N,), contiguous."""
    if vector is None:
        return None
    if vector.ndim != 1:
        vector = vector.reshape(-1)
    return vector if vector.stride(0) == 1 else packed(vector)


def packed(tensor: Tensor) -> Tensor:
    """A contiguous copy. contiguous() returns tensors with a dimension of 1 as they are, whatever its stride."""
    return tensor.clone(memory_format=torch.contiguous_format)
