# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Write the hints in errors of `qk_norm_rope`: what a call with such shapes may have meant.

A hint says in which layout of q it is right. The same shapes may have another layout, in which the call would then
fit, and rotate by the number of a head or of a batch. tests/api/test_rope_hints.py follows every hint.
"""

from __future__ import annotations

import math

from torch import Tensor


def joined(hints: list[str]) -> str:
    """Return what stands behind an error's text."""
    return f": {'; '.join(hints)}" if hints else ""


def hints_for_k(q: Tensor, k: Tensor) -> list[str]:
    """Say how k gets q's batches and positions, and D."""
    if k.shape[-1] != q.shape[-1]:
        return hints_to_split(q, "q")
    if k.ndim != q.ndim:
        return []
    return [
        _hint_to_transpose(q, *names, by_heads=True, other=other)
        for names, other in ((("q", "k"), None), (("q",), "k"), (("k",), "q"))
        if _leading(q, "q" in names) == _leading(k, "k" in names)
    ]


def _leading(x: Tensor, is_turned: bool) -> tuple[int, ...]:
    """Return the batches and positions of heads, which may come before the sequence."""
    return *x.shape[:-3], x.shape[-2 if is_turned else -3]


def hints_to_split(x: Tensor, name: str) -> list[str]:
    """Say how heads are split that may be one dimension."""
    if x.ndim != 3:
        return []
    names = _names(name)
    them = "them" if len(names) > 1 else "it"
    return [f"if {_are(names, '(B, T, H * D)')}, view {them} as (B, T, H, D)"]


def _hint_to_transpose(x: Tensor, *names: str, by_heads: bool, other: str | None = None) -> str:
    """Write how the sequence comes before the heads, or else behind the batch. other: a tensor in which it is there."""
    layout = "(T, B, H, D)" if not by_heads else "(B, H, T, D)" if x.ndim == 4 else "(H, T, D)"
    first = x.ndim - 3 if by_heads else 0
    calls = " and ".join(f"{name}.transpose({first}, {first + 1})" for name in names)
    condition = _are(names, layout)
    if other is not None:
        condition += f" and {_are_as_taken(x, other)}"
    return f"if {condition}, pass {calls}"


def _are_as_taken(x: Tensor, *names: str) -> str:
    return _are(names, "(B, T, H, D)" if x.ndim == 4 else "(T, H, D)")


def _are(names: tuple[str, ...], layout: str) -> str:
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} {layout}"


def _names(name: str) -> tuple[str, ...]:
    """Name all heads of the call that has heads of this name."""
    return ("x",) if name == "x" else ("q", "k")


def hints_for_columns(table: Tensor, half: int, q: Tensor, q_name: str) -> list[str]:
    """Say which rotary_dim may be meant by a table of fewer columns than half of it."""
    columns = table.shape[-1] if table.ndim else 0
    if not 0 < columns < half:
        return []
    names = _names(q_name)
    each = f"{columns}, if they are one for each rotated element, or " if columns % 2 == 0 else ""
    values = f"{each}{2 * columns}, if one for each pair"
    condition = f"{_are_as_taken(q, *names)} and a part of each head is rotated"
    return [f"if {condition}, pass rotary_dim={values}", *hints_to_split(q, q_name)]


def hints_for_table(cos: Tensor, q: Tensor, q_name: str) -> list[str]:
    """Say how a table with extents of 1 has two dimensions, beside position_ids."""
    *leading, columns = cos.shape
    if not 0 < math.prod(leading) == max(leading, default=0):
        return []
    condition = f"{_are_as_taken(q, *_names(q_name))} and row i is of position i"
    return [f"if {condition}, view cos and sin as ({max(leading)}, {columns})"]


def hints_for_rows(cos: Tensor, q: Tensor, length: int, batch: int, q_name: str) -> list[str]:
    """Say how q and a table of other rows than q's positions come together."""
    *leading, columns = cos.shape
    names = _names(q_name)
    are_as_taken = _are_as_taken(q, *names)

    def has(*sizes: int) -> bool:
        return [size for size in leading if size != 1] == [size for size in sizes if size != 1]

    def has_rows(length: int, batch: int) -> bool:
        return has(length) or has(batch, length)

    hints = []
    if has(length):
        hints.append(f"if {are_as_taken}, view cos and sin as ({length}, {columns})")
    elif has(batch, length) or leading == [batch * length]:
        of_each = "each sequence has rows of its own, one sequence behind another"
        shape = f"({batch}, {length}, {columns})"
        hints.append(f"if {are_as_taken} and {of_each}, view cos and sin as {shape}")
    if len(leading) == 1 and leading[0] > length:
        is_table = f"if {are_as_taken} and row i is of position i"
        hints.append(f"{is_table}, pass cos[p:p + {length}] for positions from p on, or position_ids")
    if has_rows(q.shape[-2], batch):
        hints.append(_hint_to_transpose(q, *names, by_heads=True))
    if q.ndim == 4 and has_rows(q.shape[0], q.shape[1]):
        hints.append(_hint_to_transpose(q, *names, by_heads=False))
    if q.ndim == 3 and has_rows(q.shape[1], q.shape[0]):
        hints += hints_to_split(q, q_name)
    return hints
