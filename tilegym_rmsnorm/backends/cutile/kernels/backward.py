# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward of RMSNorm in cuTile: a dx kernel that leaves partial sums, and a dw kernel that adds them.

For row i of x (M x N), in float32, with xhat = x * rstd:

    dx = (dy * (weight + offset) - xhat * c) * rstd      c = mean_j(xhat * dy * (weight + offset))
    dw = sum_i dy * xhat                                 db = sum_i dy, which is summed as dw is

Behind a residual x is what was normalized, and dx is not all of its gradient: residual.py.

The kernels compute it with rstd moved to dy, six instructions an element instead of eight, two of them fused:

    h = dy * rstd      g = h * (weight + offset)      c = mean_j(x * g)
    dx = g - x * (c * rstd^2)                         dw = sum_i h * x

(So g holds rstd here, and not in reference.py.) The range is narrower than the first form's: dx and dw are right where
dy * rstd and dy * (weight + offset) times rstd and times rstd^2 are 0 or between 1.2e-38 and 3.4e38. Above that dx is
infinite or NaN: with x of 1e-20, dy of 1 and no eps; an eps of 1e-12 allows dy * (weight + offset) of 1e26. Below it dx
loses its second term and dw its digits: with x of 1e10 and dy of 1e-26; x of 1e9 allows dy of 1e-19.

dx needs one row at a time, dw all of them. So P tile blocks walk the rows (block b takes rows b, b + P, b + 2P, ...),
write dx, and keep the sum of *their* rows of h * x in registers. Each writes that sum once, as row b of
`dw_partial` (P x N, float32). `sum_partials` then adds the P rows in a fixed order and rounds once. Nothing is added by
atomics: the order of every addition follows from indices alone, so dw has the same bits on every run. (Where P is 1
there is nothing to add: launcher.py passes dw in the place of dw_partial.)

How a row is held decides the kernel; plans/ says which serves which shape:

    backward_rows     one row per step, gathered into register tiles
    backward_tiles    one or several rows per step, as 2-D tiles, which TMA can load
    backward_pipelined
                      (pipelined.py) one row per step, which TMA brings while the one before is summed
    backward_team     (backward_team.py) wide rows, each shared by several blocks
    backward_split    (split.py) few rows: blocks for dx and blocks for dw side by side
    backward_reread   (reread.py) dx alone, of rows that neither registers nor a team hold
    backward_means, backward_strips
                      (two_pass.py) wide rows that those do not serve: c first, then strips of columns

Where the architecture has programmatic dependent launch (DEPENDENT), every kernel is launched while the one before it
in the stream is still running, and begins by waiting for it: what is saved is the launch. Nothing is read before.

M, offset and 1/N are run-time values; tile extents, dtypes and the switches in capitals are compiled in. Without a
weight (HAS_WEIGHT False) or without need for dw (HAS_DW False) the arguments `weight` and `dw_partial` are
placeholders, neither read nor written. ROUND_XHAT is casting="llama": dw then sums dy times xhat as the forward
rounded it; dx never rounds xhat.
"""

import cuda.tile as ct

from .heads import (
    count_tiles,
    load_optional_at,
    load_rstd_at,
    load_scale_at,
    load_tiles_at,
    place_of_tile,
    store_partials_at,
    store_tile_at,
    zeros_of_tiles,
)
from .residual import (
    NO_RESIDUAL_GRADIENTS,
    load_d_residual_out,
    residual_with_divisor,
    store_d_residual,
    with_d_residual_out,
)
from .team import sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    column_tiles,
    factor_of_x,
    load_row,
    multiplied,
    packed_row_as_float32,
    products_lane_by_lane,
    row_as_float32,
    row_of_terms_of_dw,
    rows_of,
    store_row,
    sum_of_products,
    with_divisor,
    zero_row,
)
from .weights import load_scale


def h_and_g(tdy, trstd, tscale):
    """dy * rstd, and that times tscale; without a weight tscale is empty."""
    th = tuple(t * trstd for t in ct.static_iter(tdy))
    tg = th
    if len(tscale) > 0:
        tg = multiplied(th, tscale)
    return th, tg


def row_gradients(
    arrays,
    row,
    tcolumns,
    inv_n,
    offset,
    OF_ROW,
    PIECES,
    LATENCY,
    PACKED=False,
    residual_gradients=NO_RESIDUAL_GRADIENTS,
    HAS_DB=False,
    team=(),
):
    """Writes dx of one row, by gathers, and returns its terms of dw, which the compiler leaves out where nobody uses
    them, and behind them, if HAS_DB, those of db.

    OF_ROW is (EVEN, HAS_WEIGHT, ROUND_XHAT), here and in pipelined.py and backward_team.py. In a loop the compiler
    hoists the load of weight. PACKED keeps x and dy in their own 16 bits while the products are summed.
    residual_gradients: d_residual_out and d_residual (residual.py). team, of a block that holds a part of the row
    (backward_team.py): the board, which part, MEMBERS and SLOTS.
    """
    dx, dy, x, weight, rstd = arrays
    EVEN, HAS_WEIGHT, ROUND_XHAT = OF_ROW
    d_residual_out, d_residual = residual_gradients
    tstored_x = load_row(x, row, tcolumns, EVEN, LATENCY)
    tstored_dy = load_row(dy, row, tcolumns, EVEN, LATENCY)
    td_residual_out = load_d_residual_out(d_residual_out, row, tcolumns, EVEN, LATENCY)
    trstd = ct.load(rstd, row, shape=())
    tscale = ()
    if HAS_WEIGHT:
        tscale = load_scale(weight, tcolumns, offset, EVEN)

    tx, tdy = row_as_float32(tstored_x), row_as_float32(tstored_dy)
    th, tg = h_and_g(tdy, trstd, tscale)
    total = sum_of_products(tx, tg, PIECES)
    if len(team) > 0:
        board, member, MEMBERS, SLOTS = team
        total = sum_of_team(board, row, member, total, MEMBERS, SLOTS)
    tfactor = factor_of_x(total * inv_n, trstd)
    if PACKED:
        tx, tdy = packed_row_as_float32(tstored_x), packed_row_as_float32(tstored_dy)
        th, tg = h_and_g(tdy, trstd, tscale)

    td = tuple(tx[k] * tfactor + tg[k] for k in ct.static_iter(range(len(tcolumns))))
    td = with_d_residual_out(td, td_residual_out)
    tdx = store_d_residual(d_residual, row, tcolumns, td, EVEN)
    store_row(dx, row, tcolumns, tdx, EVEN)
    tterms = row_of_terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT)
    if HAS_DB:
        tterms = tterms + tdy
    return tterms


def zeros_of_partials(tcolumns, HAS_DB):
    """Sums of dw before the first row, and behind them, if there is db, those of db."""
    tsums = zero_row(tcolumns)
    if HAS_DB:
        tsums = tsums + zero_row(tcolumns)
    return tsums


def store_partials(dw_partial, db_partial, p, tcolumns, tsums, EVEN, HAS_DW):
    """Writes such sums as row p of dw_partial and of db_partial, of those that there are."""
    if HAS_DW:
        store_row(dw_partial, p, tcolumns, tsums, EVEN)
    if len(db_partial) > 0:
        store_row(db_partial[0], p, tcolumns, tsums[len(tcolumns) :], EVEN)


def backward_rows(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32: written. Where P is 1 launcher.py passes dw itself, of weight's dtype
    dy,  # (M, N), any row stride, or (B, T, H, N), any strides
    x,  # as dy
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    db_partial,  # () or (as dw_partial,)
    inv_n,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    REST: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    PACKED: ConstBool,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    SHORT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P,). The next kernel may be launched as soon as every block runs: its blocks wait for this one's end.

    SHORT adds a way without the loop, whose pipeline takes longer to fill than one row to compute. For dx alone of few
    rows: 16x4096 in 1.93 us instead of 2.24 (H100, bfloat16, cuda-tile 1.7.0, tileiras 13.4.92).
    """
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, db_partial = with_divisor(d_residual_out, DIVISOR), with_divisor(db_partial, DIVISOR)
    residual_gradients = (d_residual_out, residual_with_divisor(d_residual, DIVISOR))
    arrays = (dx, dy, x, weight, rstd)
    OF_ROW = (EVEN, HAS_WEIGHT, ROUND_XHAT)
    tcolumns = column_tiles(WIDTH, PIECES, REST)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()

    HAS_DB = len(db_partial) > 0
    if SHORT and rows_of(x) <= ct.num_blocks(0):
        tsums = row_gradients(
            arrays, ct.bid(0), tcolumns, inv_n, offset, OF_ROW, PIECES, 1, PACKED, residual_gradients, HAS_DB
        )
        store_partials(dw_partial, db_partial, ct.bid(0), tcolumns, tsums, EVEN, HAS_DW)
    else:
        tsums = zeros_of_partials(tcolumns, HAS_DB)
        for row in range(ct.bid(0), rows_of(x), ct.num_blocks(0)):
            tterms = row_gradients(
                arrays,
                row,
                tcolumns,
                inv_n,
                offset,
                OF_ROW,
                PIECES,
                LATENCY,
                PACKED,
                residual_gradients,
                HAS_DB,
            )
            tsums = added(tsums, tterms)
        store_partials(dw_partial, db_partial, ct.bid(0), tcolumns, tsums, EVEN, HAS_DW)


def store_gradients(dx, d_residual, place, tx, tg, tfactor, td_residual_out, SHAPE, TMA):
    """Writes dx of a tile, and d_residual where that is an array of its own (residual.py)."""
    for k in ct.static_iter(range(len(tx))):
        td = tx[k] * tfactor + tg[k]
        if len(td_residual_out) > 0:
            td = td + td_residual_out[k]
        if len(d_residual) == 2:
            store_tile_at(d_residual[0], place, k, td, SHAPE, TMA)
        if len(d_residual) > 0:
            td = td * d_residual[-1]
        store_tile_at(dx, place, k, td, SHAPE, TMA)


def backward_tiles(
    dx,  # (M, N), or heads (B, T, H, N): written
    dw_partial,  # (P, N), or PER_HEAD (P, H * N), float32, or dw of its own dtype where P is 1: written
    dy,  # as dx, any strides but of columns
    x,  # as dy
    weight,  # (N,), or PER_HEAD (H, N)
    rstd,  # (M,), or (B * T * H,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or (as dx, alpha)
    db_partial,  # () or (as dw_partial,)
    inv_n,
    offset,
    ROWS: ConstInt,
    HEADS: ConstInt,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    PIECES: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    PER_HEAD: ConstBool,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P,), or PER_HEAD (P * tiles along H,). Each row is PIECES tiles side by side (heads.py), and what lies
    past the last row or column adds 0 to every sum. launcher.py returns PER_HEAD dw as (H, N), once `sum_partials` has
    added the P rows of H * N.

    The next kernel is not let in early, because the compiler would have to keep the loop's stores on one side of that
    signal: it would order them with each other, and a step would wait for the one before."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, db_partial = with_divisor(d_residual_out, DIVISOR), with_divisor(db_partial, DIVISOR)
    d_residual = residual_with_divisor(d_residual, DIVISOR)
    SHAPE = (ROWS, HEADS, WIDTH)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    first = place_of_tile(x, ct.bid(0), SHAPE)
    tscale = ()
    if HAS_WEIGHT:
        tscale = load_scale_at(weight, first, offset, SHAPE, PIECES, TMA, DIVISOR, PER_HEAD)

    tdw = zeros_of_tiles(SHAPE, PIECES)
    tdb = zeros_of_tiles(SHAPE, len(db_partial) * PIECES)
    for i in range(ct.bid(0), count_tiles(x, SHAPE), ct.num_blocks(0)):
        place = place_of_tile(x, i, SHAPE)
        trstd = load_rstd_at(rstd, x, place, SHAPE, TMA)
        tx = load_tiles_at(x, place, SHAPE, PIECES, LATENCY, TMA, DIVISOR)
        tdy = load_tiles_at(dy, place, SHAPE, PIECES, LATENCY, TMA, DIVISOR)
        td_residual_out = load_optional_at(d_residual_out, place, SHAPE, PIECES, LATENCY, TMA, DIVISOR)
        th, tg = h_and_g(tdy, trstd, tscale)
        tproducts = products_lane_by_lane(tx, tg, PIECES)
        tfactor = factor_of_x(ct.sum(tproducts, axis=1, keepdims=True) * inv_n, trstd)

        store_gradients(dx, d_residual, place, tx, tg, tfactor, td_residual_out, SHAPE, TMA)
        if HAS_DW:
            tterms = row_of_terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT)
            tdw = added(tdw, tterms)
        if len(db_partial) > 0:
            tdb = added(tdb, tdy)

    if HAS_DW:
        store_partials_at(dw_partial, x, first, tdw, SHAPE, PER_HEAD)
    if len(db_partial) > 0:
        store_partials_at(db_partial[0], x, first, tdb, SHAPE, PER_HEAD)
