# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward of wide rows, each held in the registers of a team of blocks. The mathematics is that of backward.py.

x and dy of a row of more than 16384 elements, and its sum of dw, mostly do not fit the registers of one block. Here
MEMBERS blocks share the rows, each with the same columns of every row of its team, so x and dy are read once:
2048x65536 in 312 us on an H100, where backward_split, which reads them twice, took 437. What a row needs from all of
its columns is one number, the sum of its products: team.py adds it up.

By TMA a block's next row comes into shared memory while it sums this one and waits for its team: 4096x18432 in 165.0 us
instead of 182.8. Then nothing may wait for rstd either: AHEAD, each row's comes with the row before, 159.6. Where an SM
holds three blocks, they have no registers for that, nor for the weight, which they read again for each row: 4096x32768
in 287.2 us instead of 291.9.

PACKED, by TMA and AHEAD: one block of 8 warps an SM holds 16384 columns of 16 bits, by the loop of pipelined.py. It
reads the weight again for each row, and adds the row to dw before the team's sum: no registers would hold its terms
until then. So two blocks share a row of 32768, not eight: on an H200 in bfloat16 4096x32768 takes 220.0 us instead of
234.7, 2048x65536 226.2 instead of 248.2 (cuda-tile 1.7.0, tileiras 13.4.92).
"""

import cuda.tile as ct

from .backward import row_gradients
from .pipelined import add_row_by_tma
from .team import take_ticket
from .tiles import ConstBool, ConstInt, column_tiles_of, columns_again, rstd_ahead, store_row, with_divisor


def backward_team(
    dx,  # (M, N), x's dtype: written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
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
    TMA: ConstBool,
    PACKED: ConstBool,
    AHEAD: ConstBool,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P * MEMBERS,). Team k walks rows k, k + P, ...; its member m holds PIECES tiles of columns of each."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    ticket = take_ticket(board)
    member = ticket % MEMBERS
    tcolumns = column_tiles_of(member, WIDTH, PIECES)
    arrays = (dx, dy, x, weight, rstd)
    SWITCHES = (EVEN, HAS_WEIGHT, ROUND_XHAT)
    tdw = tuple(ct.zeros(t.shape, dtype=ct.float32) for t in ct.static_iter(tcolumns))
    tahead = ()
    if AHEAD:
        tahead = (rstd_ahead(rstd, ticket // MEMBERS),)
    team = (board, member, MEMBERS, SLOTS)
    for row in range(ticket // MEMBERS, x.shape[0], ct.num_blocks(0) // MEMBERS):
        tnext = ()
        if AHEAD:
            tnext = (rstd_ahead(rstd, row + ct.num_blocks(0) // MEMBERS),)
        if PACKED:
            tdw = add_row_by_tma(
                arrays[:4], row, tdw, tahead[0], tcolumns, inv_n, offset, SWITCHES, LATENCY, PACKED, team
            )
        else:
            tplaces = tcolumns
            if TMA and not AHEAD:
                tplaces = columns_again(tcolumns, row)
            tterms = row_gradients(
                arrays,
                row,
                tplaces,
                inv_n,
                offset,
                SWITCHES,
                PIECES=PIECES,
                LATENCY=LATENCY,
                TMA=TMA,
                tahead=tahead,
                team=team,
            )
            tdw = tuple(tdw[k] + tterms[k] for k in ct.static_iter(range(len(tcolumns))))
        tahead = tnext
    if HAS_DW:
        store_row(dw_partial, ticket // MEMBERS, tcolumns, tdw, EVEN)
