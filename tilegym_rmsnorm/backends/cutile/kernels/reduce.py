# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The last kernel of a backward: dw, and db, from the partial rows that the kernel before it leaves (backward.py)."""

import cuda.tile as ct

from .pdl import wait_for_launch_before
from .rows import load_tile, load_vector, with_divisor
from .tiles import ConstBool, ConstInt


def store_sum(arrays, j, ROWS, WIDTH, DIVISOR, ADDS):
    """Writes the sum of the rows of (P, N) partial, in tile j of columns, as tile j of total; ADDS: adds it there."""
    total, partial = arrays
    tsum = ct.zeros((ROWS, WIDTH), dtype=ct.float32)
    for i in range(ct.cdiv(partial.shape[0], ROWS)):
        tsum = tsum + load_tile(partial, (i, j), (ROWS, WIDTH), 4, False, DIVISOR)
    tsum = ct.sum(tsum, axis=0)
    if ADDS:
        tsum = load_vector(total, j, WIDTH, False, DIVISOR) + tsum
    ct.store(total, (j,), ct.astype(tsum, total.dtype), allow_tma=False)


def sum_partials(
    dw,  # (N,), written; where ADDS says so float32, added to
    dw_partial,  # (P, N), float32
    db,  # () or ((N,) written, (P, N) float32): db and db_partial
    ROWS: ConstInt,
    WIDTH: ConstInt,
    DIVISOR: ConstInt,
    DEPENDENT: ConstBool,
    ADDS: ConstInt,
):
    """Grid: (cdiv(N, WIDTH), 2 if there is db else 1). Lane (r, j) adds rows r, r + ROWS, r + 2 ROWS, ... in that
    order, then the ROWS lanes are added. ADDS: 1 adds to dw, 2 to db, 3 to both."""
    dw, dw_partial = with_divisor((dw, dw_partial), DIVISOR)
    j = ct.bid(0)
    if DEPENDENT:
        wait_for_launch_before(j)
        ct.grid_dependency_control_launch_dependents()
    if len(db) > 0 and ct.bid(1) > 0:
        store_sum(with_divisor(db, DIVISOR), j, ROWS, WIDTH, DIVISOR, ADDS >= 2)
    else:
        store_sum((dw, dw_partial), j, ROWS, WIDTH, DIVISOR, ADDS % 2 == 1)
