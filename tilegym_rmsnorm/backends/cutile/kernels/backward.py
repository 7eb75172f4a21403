# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward of RMSNorm in cuTile: a dx kernel that leaves partial sums, and a dw kernel that adds them.

For row i of x (M x N), in float32, with xhat = x * rstd:

    dx = (dy * (weight + offset) - xhat * c) * rstd      c = mean_j(xhat * dy * (weight + offset))
    dw = sum_i dy * xhat                                 db = sum_i dy, which is summed as dw is

Behind a residual x is what was normalized, and dx is not all of its gradient: residual.py.

formula.py has rstd moved to dy: six instructions an element instead of eight, two of them fused:

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
there is nothing to add: host/norm.py passes dw in the place of dw_partial.)

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

from .formula import factor_of_x, gradient, h_and_g, terms_of_dw
from .heads import (
    beside_rows,
    count_tiles,
    load_columns_at,
    load_optional_at,
    load_rstd_at,
    load_tiles_at,
    place_of_tile,
    rows_in,
    store_partials_at,
    store_tiles_at,
)
from .pdl import wait_and_signal
from .residual import store_gradients
from .rows import column_tiles, load_row, rows_of, store_row, store_sums, with_divisor
from .team import sum_of_team
from .tiles import (
    AS_COMPILED,
    ConstBool,
    ConstInt,
    added,
    order_of,
    order_of_tiles,
    packed_row_as_float32,
    paired_row_as_float32,
    row_as_float32,
    sum_of_products,
    zeros,
    zeros_like,
)
from .weights import load_scale, scale_of


def row_gradients(load, store, arrays, where, NUMBERS, PIECES, HOW, tahead=(), team=()):
    """Write dx of one row, and return its terms of dw, which the compiler leaves out where nobody uses them, and behind
    them, if HAS_DB, those of db.

    load, store: by gathers or by TMA (rows.py), where TMA's rows may be widened in pairs, PAIRED. HOW is (LATENCY,
    PACKED, PAIRED, ROUND_XHAT, HAS_DB, ORDER), ORDER that of `sum_of_lanes`. In a loop the compiler hoists the load of
    weight. PACKED keeps x and dy in their own 16 bits while the products are summed. tahead: the row's rstd, if it is
    here already. team: of a block that holds a part of the row (team.py).
    """
    dx, dy, x, weights, rstd, d_residual_out, d_residual = arrays
    inv_n, offset = NUMBERS
    LATENCY, PACKED, PAIRED, ROUND_XHAT, HAS_DB, ORDER = HOW
    tstored_x, tstored_dy = load(x, where, LATENCY), load(dy, where, LATENCY)
    td_residual_out = load(d_residual_out[0], where, LATENCY) if len(d_residual_out) > 0 else ()
    trstd = tahead[0] if len(tahead) > 0 else ct.load(rstd, where[0], shape=())
    tscale = load_scale(weights, where, offset)

    if PAIRED:
        tx, tdy = paired_row_as_float32(tstored_x), paired_row_as_float32(tstored_dy)
    else:
        tx, tdy = row_as_float32(tstored_x), row_as_float32(tstored_dy)
    th, tg = h_and_g(tdy, trstd, tscale)
    total = sum_of_team(sum_of_products(tx, tg, PIECES, ORDER), where[0], team)
    tfactor = factor_of_x(total * inv_n, trstd)
    if PACKED:
        tx, tdy = packed_row_as_float32(tstored_x), packed_row_as_float32(tstored_dy)
        th, tg = h_and_g(tdy, trstd, tscale)

    store_gradients(store, where, dx, d_residual, gradient(tx, tfactor, tg), td_residual_out)
    tterms = terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT)
    return tterms + tdy if HAS_DB else tterms


def backward_rows(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32: written. Where P is 1 host/norm.py passes dw itself, of weight's dtype
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
    WARPS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (P,). The next kernel may be launched as soon as every block runs: its blocks wait for this one's end.

    SHORT adds a way without the loop, whose pipeline takes longer to fill than one row to compute. For dx alone of few
    rows: 16x4096 in 1.93 us instead of 2.24 (H100, bfloat16, cuda-tile 1.7.0, tileiras 13.4.92).
    """
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, db_partial = with_divisor(d_residual_out, DIVISOR), with_divisor(db_partial, DIVISOR)
    d_residual = with_divisor(d_residual, DIVISOR)
    weights = (weight,) if HAS_WEIGHT else ()
    arrays = (dx, dy, x, weights, rstd, d_residual_out, d_residual)
    NUMBERS, partials, HAS_DB = (inv_n, offset), (dw_partial, db_partial), len(db_partial) > 0
    # The compiler holds rows that begin between 16 bytes as it does the weight, which begins at 16: by another order
    # rows go through shared memory (3001 columns, bfloat16: 28 barriers a row instead of 22).
    ORDER = order_of((x, dy) + weights + d_residual_out, 16 if HAS_WEIGHT else DIVISOR, WARPS)
    tcolumns = column_tiles(WIDTH, PIECES, REST)
    wait_and_signal(DEPENDENT)

    if SHORT and rows_of(x) <= ct.num_blocks(0):
        HOW = (1, PACKED, False, ROUND_XHAT, HAS_DB, ORDER)
        where = (ct.bid(0), 0, tcolumns, EVEN)
        tsums = row_gradients(load_row, store_row, arrays, where, NUMBERS, PIECES, HOW)
        store_sums(store_row, (ct.bid(0), 0, tcolumns, EVEN), partials, tsums, HAS_DW)
    else:
        HOW = (LATENCY, PACKED, False, ROUND_XHAT, HAS_DB, ORDER)
        tsums = zeros_like(tcolumns + tcolumns if HAS_DB else tcolumns)
        for row in range(ct.bid(0), rows_of(x), ct.num_blocks(0)):
            where = (row, 0, tcolumns, EVEN)
            tterms = row_gradients(load_row, store_row, arrays, where, NUMBERS, PIECES, HOW)
            tsums = added(tsums, tterms)
        store_sums(store_row, (ct.bid(0), 0, tcolumns, EVEN), partials, tsums, HAS_DW)


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
    WARPS: ConstInt,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P,), or PER_HEAD (P * tiles along H,). Each row is PIECES tiles side by side (heads.py), and what lies
    past the last row or column adds 0 to every sum. host/norm.py returns PER_HEAD dw as (H, N), once `sum_partials` has
    added the P rows of H * N.

    The next kernel is not let in early, because the compiler would have to keep the loop's stores on one side of that
    signal: it would order them with each other, and a step would wait for the one before."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, db_partial = with_divisor(d_residual_out, DIVISOR), with_divisor(db_partial, DIVISOR)
    d_residual = with_divisor(d_residual, DIVISOR)
    SHAPE, HOW = (ROWS, HEADS, WIDTH), (LATENCY, TMA, DIVISOR)
    weights = (weight,) if HAS_WEIGHT else ()
    arrays = (x, dy) + weights + d_residual_out
    ORDER = order_of_tiles(arrays, WIDTH, DIVISOR, WARPS) if IN_ORDER else AS_COMPILED
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    first = place_of_tile(x, ct.bid(0), SHAPE)
    tweight = load_columns_at(weights, first, SHAPE, PIECES, HOW, PER_HEAD)
    tscale = beside_rows(scale_of(tweight, offset), SHAPE, PER_HEAD)

    tdw = zeros((rows_in(SHAPE), WIDTH), PIECES)
    tdb = tdw if len(db_partial) > 0 else ()
    for i in range(ct.bid(0), count_tiles(x, SHAPE), ct.num_blocks(0)):
        place = place_of_tile(x, i, SHAPE)
        trstd = load_rstd_at(rstd, x, place, SHAPE, TMA)
        tx = load_tiles_at(x, place, SHAPE, PIECES, HOW)
        tdy = load_tiles_at(dy, place, SHAPE, PIECES, HOW)
        td_residual_out = load_optional_at(d_residual_out, place, SHAPE, PIECES, HOW)
        th, tg = h_and_g(tdy, trstd, tscale)
        tfactor = factor_of_x(sum_of_products(tx, tg, PIECES, ORDER, 1) * inv_n, trstd)

        for k in ct.static_iter(range(PIECES)):
            td = gradient(tx[k : k + 1], tfactor, tg[k : k + 1])
            where, tof_residual = (place, k, SHAPE, TMA), td_residual_out[k : k + 1]
            store_gradients(store_tiles_at, where, dx, d_residual, td, tof_residual)
        tdw = added(tdw, terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT))
        tdb = added(tdb, tdy)

    where, partials = (x, first, SHAPE, PER_HEAD), (dw_partial, db_partial)
    store_sums(store_partials_at, where, partials, tdw + tdb, HAS_DW)
