# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Arrange the tensors of a call of `qk_norm_rope` under a level of reproducibility (arrange.py): rows are like packed
ones or copied, and sequences of one step become the steps of one sequence, so one kernel takes any T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilegym_rmsnorm.backends.cutile.host.arrange import is_like_packed
from tilegym_rmsnorm.call.layout import View, arranged, in_shape_of, packed
from tilegym_rmsnorm.ops.rope.spec import OF_BACKWARD


def bind_arranged_rope(function: Any, spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
    """Bind the function of a backend for tensors like these. Its results are new, contiguous, and of the call's
    shapes."""
    *rows, q_weight, k_weight, cos, sin, positions = tensors[:OF_BACKWARD]
    batch, length = tensors[0].shape[:2]
    is_one_step = length == 1 < batch
    views = [_of_rows(each, is_one_step) for each in rows]
    views += [_at_16_bytes(each) for each in (q_weight, k_weight)]
    # of one step: a row for each sequence, or one for all, unless positions choose
    shares_tables = is_one_step and positions is None and cos.shape[0] == 1
    views += [_of_table(each, batch if shares_tables else None) for each in (cos, sin)]
    views.append(_of_positions(positions, batch if is_one_step else None))
    views += [None] * (len(tensors) - len(views))  # what gradients of weights are added to
    return arranged(function, spec, tensors, views, _in_shapes_of_rows if is_one_step else None, *wanted)


def _in_shapes_of_rows(tensors: Any, results: Any) -> Any:
    """Give the results of q and of k, a forward's or a backward's, the shapes of the first two tensors."""
    made = (
        None if each is None else in_shape_of(rows, each)
        for rows, each in zip(tensors, results[:2], strict=False)
    )
    return (*made, *results[2:])


def _of_rows(rows: Tensor | None, is_one_step: bool) -> View:
    if rows is None:
        return None
    if not is_like_packed(rows.transpose(0, 1) if is_one_step else rows):
        return (lambda rows: packed(rows).transpose(0, 1)) if is_one_step else packed
    return (lambda rows: rows.transpose(0, 1)) if is_one_step else None


def _at_16_bytes(tensor: Tensor | None) -> View:
    return None if tensor is None or tensor.data_ptr() & 15 == 0 else packed


def _of_table(table: Tensor, count: int | None) -> View:
    """count: rows that one row of the table stands for."""
    if not is_like_packed(table if count is None else table.expand(count, -1)):
        return packed if count is None else lambda table: packed(table.expand(count, -1))
    return None if count is None else lambda table: table.expand(count, -1)


def _of_positions(positions: Tensor | None, count: int | None) -> View:
    """count: sequences of one step."""
    if positions is None or count is None:
        return _at_16_bytes(positions)
    return lambda positions: packed(positions.expand(count, 1)).view(1, count)
