# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Compiling ahead: the few batch sizes that together need every kernel that any batch size needs.

cuda-tile compiles a kernel anew for an extent that is 1, a multiple of 16, or neither. The extents that vary are M and
P, the rows of dw_partial; which variant serves depends on the size class of M besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tilegym_rmsnorm import policy
from tilegym_rmsnorm.backends.cutile.launch import NAMES, Backward, Forward, plan_for
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.problem import Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES, MOST_ROWS, SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine

EPS = 1e-6


def warm(
    machine: Machine, n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, casting: str = "once"
) -> None:
    """Launch every kernel of the forward and of the backward of rows of n elements, on arrays that hold anything."""
    weight = None if weight_dtype is None else machine.empty((n,), weight_dtype)
    op, sm_margin = "dx" if weight is None else "backward", policy.get_sm_margin()
    sm_count = policy.sms_left(machine.facts.sm_count, sm_margin)
    for size in SIZES:
        weight_name = None if weight_dtype is None else NAMES[weight_dtype]
        allowed = Policy(policy.teams(), sm_margin)
        problem = Problem(op, n, NAMES[dtype], weight_name, size, machine.facts, casting, allowed)
        forward = Forward(machine, plan_for(problem._replace(op="forward")))
        backward = Backward(machine, plan_for(problem))
        first = backward.plan.first

        def partial_rows(m: int, first: Variant = first) -> int:
            return first.partial_rows(m, n, sm_count) if op == "backward" else 1  # no array has P rows

        for m in rows_to_warm(n, size, first, sm_count, partial_rows):
            x, rstd = machine.empty((m, n), dtype), machine.empty((m,), torch.float32)
            forward(x, weight, EPS, 0.0)
            backward(x, x, weight, rstd, 0.0)


def rows_to_warm(
    n: int, size: str, variant: Variant, sm_count: int, partial_rows: Callable[[int], int]
) -> list[int]:
    """Numbers of rows of one size class that have every pair of kinds of M and P that any number of it has.

    P is tiles / k rounded up, for the k that leaves at most B blocks, so it goes through the upper part of 1..B once
    while the tiles go from (k - 1) B to k B, and a smaller part for each larger k. From k = 16 on every P comes with
    every kind of M; so 18 times B tiles, from where the class begins, and from where B changes, have all there is.

    A split backward begins with the k of its slab, however few the blocks are. With 16 rows or more in a slab every P
    comes with every kind of M, and the first 18 slabs have every kind of P; a smaller one has a k below 16.
    """
    rows = rows_of_class(size, n)
    rows_of_tile = variant.rows
    tiles_in_slab = variant.slab // variant.rows if isinstance(variant, Split) else 0
    blocks = variant.most_partial_rows(sm_count)
    stop = min(rows.stop, MOST_ROWS + 1)
    kinds: dict[tuple[str, str], int] = {}
    for start in (rows.start, max(rows.start, FEW_TILES * sm_count * rows_of_tile + 1)):
        end = start + 18 * max(blocks, tiles_in_slab) * rows_of_tile
        for m in _one_of_each_kind(range(start, min(end, stop)), rows_of_tile):
            kinds.setdefault((_kind(m), _kind(partial_rows(m))), m)
    return sorted(kinds.values())


def _one_of_each_kind(rows: range, rows_of_tile: int) -> Iterator[int]:
    """For each number of row tiles the smallest M of each kind that makes so many."""
    low = rows.start
    while low < rows.stop:
        high = min(-(-low // rows_of_tile) * rows_of_tile, rows.stop - 1)
        multiple = -(-low // 16) * 16
        if multiple <= high:
            yield multiple
        if low != multiple:
            yield low
        elif low < high:
            yield low + 1
        if low == 1 < high:
            yield 2
        low = high + 1


def _kind(extent: int) -> str:
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"
