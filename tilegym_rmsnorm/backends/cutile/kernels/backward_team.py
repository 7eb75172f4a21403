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

from .backward import h_and_g, row_gradients
from .pipelined import add_row_by_tma
from .residual import residual_with_divisor, times_alpha, with_d_residual_out
from .team import join_team, sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    column_tiles_of,
    factor_of_x,
    load_part_of_row,
    not_hoisted,
    paired_row_as_float32,
    row_as_float32,
    row_of_terms_of_dw,
    rstd_ahead,
    store_part_of_row,
    store_row,
    sum_of_products,
    with_divisor,
    zero_row,
)
from .weights import load_scale


def part_gradients(arrays, row, tcolumns, tahead, inv_n, offset, OF_ROW, LATENCY, residual_gradients, team):
    """Writes dx of a block's part of one row, by TMA, and returns its terms of dw. tahead: the row's rstd, if it is
    here already; tcolumns serve the weight alone."""
    dx, dy, x, weight, rstd = arrays
    d_residual_out, d_residual = residual_gradients
    EVEN, HAS_WEIGHT, ROUND_XHAT = OF_ROW
    board, member, MEMBERS, SLOTS = team
    tstored_x = load_part_of_row(x, row, member, tcolumns, LATENCY)
    tstored_dy = load_part_of_row(dy, row, member, tcolumns, LATENCY)
    td_residual_out = ()
    if len(d_residual_out) > 0:
        td_residual_out = load_part_of_row(d_residual_out[0], row, member, tcolumns, LATENCY)
    if len(tahead) > 0:
        trstd = tahead[0]
    else:
        trstd = ct.load(rstd, row, shape=())
    tscale = ()
    if HAS_WEIGHT:
        tscale = load_scale(weight, tcolumns, offset, EVEN)

    if ROUND_XHAT:  # rounding leaves no registers for pairs
        tx, tdy = row_as_float32(tstored_x), row_as_float32(tstored_dy)
    else:
        tx, tdy = paired_row_as_float32(tstored_x), paired_row_as_float32(tstored_dy)
    th, tg = h_and_g(tdy, trstd, tscale)
    total = sum_of_products(tx, tg, len(tcolumns))
    total = sum_of_team(board, row, member, total, MEMBERS, SLOTS)
    tfactor = factor_of_x(total * inv_n, trstd)

    td = tuple(tx[k] * tfactor + tg[k] for k in ct.static_iter(range(len(tcolumns))))
    td = with_d_residual_out(td, td_residual_out)
    if len(d_residual) == 2:
        store_part_of_row(d_residual[0], row, member, td)
    store_part_of_row(dx, row, member, times_alpha(td, d_residual))
    return row_of_terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT)


def add_part(
    arrays, row, tdw, tcolumns, tahead, inv_n, offset, OF_ROW, LATENCY, PACKED, residual_gradients, team
):
    """Write a part's dx; return tdw plus its terms."""
    if PACKED:
        tsums = add_row_by_tma(
            arrays[:4],
            row,
            tdw,
            tahead[0],
            tcolumns,
            inv_n,
            offset,
            OF_ROW,
            LATENCY,
            PACKED,
            residual_gradients,
            team,
        )
    else:
        tplaces = tcolumns
        if len(tahead) == 0:
            tplaces = not_hoisted(tcolumns, row)
        tterms = part_gradients(
            arrays, row, tplaces, tahead, inv_n, offset, OF_ROW, LATENCY, residual_gradients, team
        )
        tsums = added(tdw, tterms)
    return tsums


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
    DEPENDENT: ConstBool,
):
    """Grid: (P * MEMBERS,). Team k walks rows k, k + P, ...; its member m holds PIECES tiles of columns of each."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out = with_divisor(d_residual_out, DIVISOR)
    residual_gradients = (d_residual_out, residual_with_divisor(d_residual, DIVISOR))
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    first, team = join_team(board, MEMBERS, SLOTS)
    tcolumns = column_tiles_of(team[1], WIDTH, PIECES)
    arrays = (dx, dy, x, weight, rstd)
    OF_ROW = (EVEN, HAS_WEIGHT, ROUND_XHAT)
    tdw = zero_row(tcolumns)
    for row in range(first, x.shape[0], ct.num_blocks(0) // MEMBERS):
        tterms = row_gradients(
            arrays,
            row,
            tcolumns,
            inv_n,
            offset,
            OF_ROW,
            PIECES,
            LATENCY,
            residual_gradients=residual_gradients,
            team=team,
        )
        tdw = added(tdw, tterms)
    if HAS_DW:
        store_row(dw_partial, first, tcolumns, tdw, EVEN)


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
    DEPENDENT: ConstBool,
):
    """Grid: as backward_team's."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out = with_divisor(d_residual_out, DIVISOR)
    residual_gradients = (d_residual_out, residual_with_divisor(d_residual, DIVISOR))
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    first, team = join_team(board, MEMBERS, SLOTS)
    tcolumns = column_tiles_of(team[1], WIDTH, PIECES)
    arrays = (dx, dy, x, weight, rstd)
    OF_ROW = (EVEN, HAS_WEIGHT, ROUND_XHAT)
    tdw = zero_row(tcolumns)
    tahead = ()
    if RSTD_AHEAD:
        tahead = (rstd_ahead(rstd, first),)
    for row in range(first, x.shape[0], ct.num_blocks(0) // MEMBERS):
        tnext = ()
        if RSTD_AHEAD:
            tnext = (rstd_ahead(rstd, row + ct.num_blocks(0) // MEMBERS),)
        tdw = add_part(
            arrays,
            row,
            tdw,
            tcolumns,
            tahead,
            inv_n,
            offset,
            OF_ROW,
            LATENCY,
            PACKED,
            residual_gradients,
            team,
        )
        tahead = tnext
    if HAS_DW:
        store_row(dw_partial, first, tcolumns, tdw, EVEN)
