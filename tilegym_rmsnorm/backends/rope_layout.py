# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arrange the tensors of `qk_norm_rope` in the shapes that backends take (contract.py): as views where possible."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilegym_rmsnorm.backends.layout import View, is_packed, packed


def rope_views(tensors: tuple[Any, ...]) -> list[View]:
    """Arrange the checked tensors of a forward or of a backward: heads, (B, T, H, D) or (T, H, D), and behind them
    q_weight, k_weight, cos, sin and position_ids."""
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    views = [None if each is None else _view_of_heads(each) for each in heads]
    views += [None if each is None or is_packed(each) else packed for each in (q_weight, k_weight)]
    # Together: a backend asks one of them how many rows there are.
    is_shared = positions is None and cos.ndim == 3 and _is_shared(cos) and _is_shared(sin)
    views += [_view_of_table(each, is_shared) for each in (cos, sin)]
    return [*views, None if positions is None else _view_of_positions(positions)]


def _view_of_heads(x: Tensor) -> View:
    n, strides = x.shape[-1], x.stride()
    is_readable = strides[-1] == 1 and all(
        extent == 1 or stride >= n for extent, stride in zip(x.shape[:-1], strides[:-1], strict=True)
    )
    if x.ndim == 4:
        return None if is_readable else packed
    return (lambda x: x[None]) if is_readable else lambda x: packed(x)[None]


def _view_of_table(table: Tensor, is_shared: bool) -> View:
    columns = table.shape[-1]

    def view(table: Tensor) -> Tensor:
        rows = table[0] if is_shared else table.reshape(-1, columns)
        return rows if rows.stride(-1) == 1 and rows.stride(0) >= columns else packed(rows)

    is_as_taken = table.ndim == 2 and table.stride(-1) == 1 and table.stride(0) >= columns
    return None if is_as_taken else view


def _is_shared(tensor: Tensor) -> bool:
    """Whether all batches have the same rows."""
    return tensor.shape[0] == 1 or tensor.stride(0) == 0


def _view_of_positions(positions: Tensor) -> View:
    is_flat, is_shared = positions.ndim == 1, positions.ndim == 2 and _is_shared(positions)

    def view(positions: Tensor) -> Tensor:
        rows = positions[None] if is_flat else positions[:1] if is_shared else positions
        return rows if is_packed(rows) else packed(rows)

    return None if not is_flat and not is_shared and is_packed(positions) else view
