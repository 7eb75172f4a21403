# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The forward of wide rows: several blocks, a team, hold each row in their registers, and add up its sum through global
memory (team.py). The mathematics is that of forward.py.

A row of more than 32768 float32 elements fits the registers of no block, and one of more than 16384 only if nothing
else runs on its SM, which then has nothing to read while it sums and writes. MEMBERS blocks share it, each with a part
small enough that an SM holds several, so x is read once, and while some sum and write others read: float32 2048x65536
in 364 us on an H100, where forward_reread, which reads x twice, took 505.
"""

from .forward import normalize_row
from .pdl import wait_and_signal
from .rows import column_tiles_of, has_aligned_rows, with_divisor
from .team import join_team, member_of
from .tiles import ConstBool, ConstInt, order_of


def forward_team(
    y,  # (M, N): written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride
    weight,  # (N,)
    residual,  # () or (as x, (M, N) written, alpha)
    bias,  # () or ((N,),)
    board,  # (more than M, SLOTS), int32: EMPTY, written
    inv_n,
    eps,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    MEMBERS: ConstInt,
    SLOTS: ConstInt,
    DIVISOR: ConstInt,
    PACKED: ConstBool,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    JOINT_WEIGHT: ConstBool,
    WARPS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (M * MEMBERS,). A block computes PIECES tiles of columns of one row and ends: blocks that walk rows, as
    those of backward_team do, were slower. The signal to the next kernel comes first."""
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    residual, bias = with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    wait_and_signal(DEPENDENT)
    row, team = join_team(board, MEMBERS, SLOTS)
    where = (row, member_of(team), column_tiles_of(member_of(team), WIDTH, PIECES), EVEN)
    weights = (weight,) if HAS_WEIGHT else ()
    arrays = (y, rstd, x, weights, residual, bias)
    ALIGNED = has_aligned_rows(x, DIVISOR)
    ORDER = order_of((x,) + weights + residual[:1], DIVISOR, WARPS)
    HOW = (LATENCY, ALIGNED, PACKED, ROUND_XHAT, False, JOINT_WEIGHT, False, ORDER)
    normalize_row(arrays, where, (inv_n, eps, offset), PIECES, HOW, team)
