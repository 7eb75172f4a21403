# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The second kernel of a backward: dw as the sum of the partial rows that the first kernel leaves (backward.py)."""

import cuda.tile as ct

from .pdl import wait_for_launch_before
from .tiles import ConstBool, ConstInt, load_tile, with_divisor


def sum_partials(
    dw,  # (N,), weight's dtype: written
    dw_partial,  # (P, N), float32
    ROWS: ConstInt,
    WIDTH: ConstInt,
    DIVISOR: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (cdiv(N, WIDTH),). Lane (r, j) adds rows r, r + ROWS, r + 2 ROWS, ... in that order, then the ROWS lanes
    are added."""
    dw, dw_partial = with_divisor((dw, dw_partial), DIVISOR)
    j = ct.bid(0)
    tdw = ct.zeros((ROWS, WIDTH), dtype=ct.float32)
    if DEPENDENT:
        wait_for_launch_before(j)
        ct.grid_dependency_control_launch_dependents()

    for i in range(ct.cdiv(dw_partial.shape[0], ROWS)):
        tdw = tdw + load_tile(dw_partial, (i, j), (ROWS, WIDTH), 4, False, DIVISOR)

    ct.store(dw, (j,), ct.astype(ct.sum(tdw, axis=0), dw.dtype), allow_tma=False)
