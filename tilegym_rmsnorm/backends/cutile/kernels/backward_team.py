# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward of wide rows, each held in the registers of a team of blocks. The mathematics is that of backward.py.

x and dy of a row of more than 16384 elements, and its sum of dw, mostly do not fit the registers of one block. Here
MEMBERS blocks share the rows, each with the same columns of every row of its team, so x and dy are read once:
2048x65536 in 312 us on an H100, where backward_split_reread, which reads them twice, took 437. A row needs one number
from all of its columns, the sum of its products: team.py adds it up.

    backward_team             rows by gathers
    backward_pipelined_team   rows by TMA: a block's next row comes into shared memory while it sums this one and waits
                              for its team (4096x18432 in 165.0 us instead of 182.8)

Of the latter, RSTD_AHEAD has each row's rstd come with the row before, so that nothing waits for it: 159.6. Where an SM
holds three blocks, they have no registers for that, nor for the weight, which they load again for each row:
4096x32768 in 287.2 us instead of 291.9.

PACKED, with RSTD_AHEAD: one block of 8 warps an SM holds 16384 columns of 16 bits, by the loop of pipelined.py. It
loads the weight again for each row, and adds the row to dw before the team's sum: no registers would hold its terms
until then. So two blocks share a row of 32768, not eight: on an H200 in bfloat16 4096x32768 takes 220.0 us instead of
234.7, 2048x65536 226.2 instead of 248.2 (cuda-tile 1.7.0, tileiras 13.4.92).
"""

import cuda.tile as ct

from .backward import row_gradients
from .pdl import wait_and_signal
from .pipelined import add_row_by_tma
from .rows import (
    column_tiles_of,
    load_part_of_row,
    load_row,
    not_hoisted,
    rstd_ahead,
    store_part_of_row,
    store_row,
    with_divisor,
)
from .team import join_team, member_of
from .tiles import AS_COMPILED, ConstBool, ConstInt, added, order_of, zeros_like


def backward_team(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    board,  # (more than M, SLOTS), int32: EMPTY, written
    inv_n,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    MEMBERS: ConstInt,
    SLOTS: ConstInt,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    WARPS: ConstInt,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P * MEMBERS,). Team k walks rows k, k + P, ...; its member m holds PIECES tiles of columns of each."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, d_residual = with_divisor(d_residual_out, DIVISOR), with_divisor(d_residual, DIVISOR)
    wait_and_signal(DEPENDENT)
    first, team = join_team(board, MEMBERS, SLOTS)
    tcolumns = column_tiles_of(member_of(team), WIDTH, PIECES)
    weights = (weight,) if HAS_WEIGHT else ()
    # without a level not: some teams of 20480 columns and more spill
    ORDER = order_of((x, dy) + weights + d_residual_out, DIVISOR, WARPS) if IN_ORDER else AS_COMPILED
    arrays = (dx, dy, x, weights, rstd, d_residual_out, d_residual)
    NUMBERS, HOW = (inv_n, offset), (LATENCY, False, False, ROUND_XHAT, False, ORDER)
    tdw = zeros_like(tcolumns)
    for row in range(first, x.shape[0], ct.num_blocks(0) // MEMBERS):
        where = (row, member_of(team), tcolumns, EVEN)
        tterms = row_gradients(load_row, store_row, arrays, where, NUMBERS, PIECES, HOW, team=team)
        tdw = added(tdw, tterms)
    if HAS_DW:
        store_row(dw_partial, (first, member_of(team), tcolumns, EVEN), tdw)


def backward_pipelined_team(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    board,  # (more than M, SLOTS), int32: EMPTY, written
    inv_n,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    MEMBERS: ConstInt,
    SLOTS: ConstInt,
    DIVISOR: ConstInt,
    PACKED: ConstBool,
    RSTD_AHEAD: ConstBool,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    WARPS: ConstInt,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: as backward_team's."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, d_residual = with_divisor(d_residual_out, DIVISOR), with_divisor(d_residual, DIVISOR)
    wait_and_signal(DEPENDENT)
    first, team = join_team(board, MEMBERS, SLOTS)
    tcolumns = column_tiles_of(member_of(team), WIDTH, PIECES)
    weights = (weight,) if HAS_WEIGHT else ()
    ORDER = order_of((x, dy) + weights + d_residual_out, DIVISOR, WARPS) if IN_ORDER else AS_COMPILED
    arrays = (dx, dy, x, weights, rstd, d_residual_out, d_residual)
    NUMBERS = (inv_n, offset)
    tdw = zeros_like(tcolumns)
    tahead = (rstd_ahead(rstd, first),) if RSTD_AHEAD else ()
    for row in range(first, x.shape[0], ct.num_blocks(0) // MEMBERS):
        tnext = (rstd_ahead(rstd, row + ct.num_blocks(0) // MEMBERS),) if RSTD_AHEAD else ()
        where = (row, member_of(team), tcolumns if RSTD_AHEAD else not_hoisted(tcolumns, row), EVEN)
        if PACKED:
            HOW = (LATENCY, PACKED, ROUND_XHAT, ORDER)
            tdw = add_row_by_tma(arrays, where, tdw, tahead[0], NUMBERS, HOW, team)
        else:
            # rounding leaves no registers for pairs
            HOW = (LATENCY, False, not ROUND_XHAT, ROUND_XHAT, False, ORDER)
            tterms = row_gradients(
                load_part_of_row, store_part_of_row, arrays, where, NUMBERS, PIECES, HOW, tahead, team
            )
            tdw = added(tdw, tterms)
        tahead = tnext
    if HAS_DW:
        store_row(dw_partial, (first, member_of(team), tcolumns, EVEN), tdw)
