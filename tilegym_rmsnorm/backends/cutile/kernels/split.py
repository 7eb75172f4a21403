# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward's first kernel with two kinds of blocks, dx by rows and dw by columns.

No block waits for another: dw needs rstd but no row's c, so a block that owns a strip of columns reads x and dy itself.
Both are read once from memory and again from L2, where one kind of block finds what the other just read. It pays where
that is cheaper than what backward_rows does instead:

    few rows      a launch as wide as the GPU, without temporary rows: 16x4096 in 2.3 us instead of 3.9, 1024x4096 in
                  12.0 instead of 14.2 (bfloat16, an H100)
    wide rows     more than 16384 columns of x, dy and a sum of dw do not fit a block's registers. Of many such rows
                  each has a team of blocks (backward_team.py), where a GPU, or a part of one, runs so many at once

dw_partial gets a row for every slab of rows, and sum_partials adds them as always; where one slab is all, that row is
dw itself. Slabs follow one another in launch order, so that what is in flight at a time, one slab or two, fits L2 (as
long as P stays below its bound: then Split.slab_tiles makes slabs taller). The kernel is for calls that need dw, so
there is a weight; dx alone of rows that no team holds has backward_reread.
"""

import cuda.tile as ct

from .backward import row_gradients
from .formula import terms_of_dw
from .pdl import wait_for_launch_before
from .reread import chunked_row_gradients
from .rows import (
    column_tiles,
    gather_gradient_tiles,
    load_gradient_tiles,
    load_row,
    store_row,
    store_sum_of_rows,
    with_divisor,
)
from .tiles import ConstBool, ConstInt, added, at_least_zero, order_of, zeros


def strip_of_dw(dw_partial, dy, x, rstd, k, j, tiles_in_slab, shape, LATENCY, OF_STRIP):
    """Sums dy * xhat over the rows of slab k in column strip j, tile after tile, into row k of dw_partial.

    OF_STRIP is (GATHERS, EVEN, ROUND_XHAT, DIVISOR). GATHERS: all of a tile is asked for at once; in place of rows past
    the last one it is read again, with a dy of 0; a product that is NaN in spite of that is NaN or infinite in the last
    row too. Without, tiles that read 0 there, each load behind a branch: faster where chunks of wide rows are issued
    ahead (the setting `gathers` says which). EVEN: every column of every strip is one of x's.
    """
    GATHERS, EVEN, ROUND_XHAT, DIVISOR = OF_STRIP
    ROWS, STRIP = shape
    tcolumns = j * STRIP + ct.arange(STRIP, dtype=ct.int32)
    tdw = zeros(shape, 1)
    first = at_least_zero(k * tiles_in_slab)
    for i in range(first, ct.minimum(first + tiles_in_slab, ct.cdiv(x.shape[0], ROWS))):
        if GATHERS:
            trows = i * ROWS + ct.arange(ROWS, dtype=ct.int32)
            trows_of_x = ct.minimum(trows, x.shape[0] - 1)
            tx, tdy, trstd = gather_gradient_tiles(x, dy, rstd, trows_of_x, tcolumns, EVEN, LATENCY)
            # not the terms below: their addition would no longer be one instruction with their product
            tdy = ct.where((trows < x.shape[0])[:, None], tdy, 0.0)
        else:
            tx, tdy, trstd = load_gradient_tiles(x, dy, rstd, (i, j), shape, LATENCY, False, DIVISOR)
        tdw = added(tdw, terms_of_dw((tx,), (tdy,), (tdy * trstd,), trstd, x.dtype, ROUND_XHAT))
    store_sum_of_rows(dw_partial, (k, j), tdw[0])


def backward_split(
    dx,  # (M, N), x's dtype: written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    inv_n,
    offset,
    tiles_in_slab,  # of ROWS rows each
    ROWS: ConstInt,
    STRIP: ConstInt,
    WIDTH: ConstInt,
    REST: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    EVEN_STRIPS: ConstBool,
    DIVISOR: ConstInt,
    ROUND_XHAT: ConstBool,
    WARPS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (strips + slab, P), with strips = cdiv(N, STRIP), slab = tiles_in_slab * ROWS and P = cdiv(M, slab).

    A row of WIDTH + REST lanes stays in registers, and strips, which take longest, come first. Where P is 1, a grid of
    (strips + M, 1) is enough.
    """
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    b = ct.bid(0)
    k = ct.bid(1)
    if DEPENDENT:
        wait_for_launch_before(b + k)
        ct.grid_dependency_control_launch_dependents()
    strips = ct.cdiv(x.shape[1], STRIP)
    slab = tiles_in_slab * ROWS
    strips_before = ct.minimum(b, strips)

    if b < strips:
        OF_STRIP = (True, EVEN_STRIPS, ROUND_XHAT, DIVISOR)
        strip_of_dw(
            dw_partial, dy, x, rstd, k, strips_before, tiles_in_slab, (ROWS, STRIP), LATENCY, OF_STRIP
        )
    else:
        row = at_least_zero(k * slab + b - strips_before)
        if row < x.shape[0]:
            # there is a weight: without one nothing needs dw. A row is loaded once, so no latency is to hide.
            arrays, where = (dx, dy, x, (weight,), rstd, (), ()), (row, 0, column_tiles(WIDTH, 1, REST), EVEN)
            HOW = (1, False, False, ROUND_XHAT, False, order_of((x, dy, weight), DIVISOR, WARPS))
            row_gradients(load_row, store_row, arrays, where, (inv_n, offset), 1, HOW)


def backward_split_reread(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    inv_n,
    offset,
    tiles_in_slab,  # of ROWS rows each
    ROWS: ConstInt,
    STRIP: ConstInt,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    EVEN_STRIPS: ConstBool,
    GATHERS: ConstBool,
    DIVISOR: ConstInt,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: as backward_split's. Rows go in chunks of WIDTH, twice, and both kinds of blocks alternate, so that a
    slab's two readings lie close together."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, d_residual = with_divisor(d_residual_out, DIVISOR), with_divisor(d_residual, DIVISOR)
    b = ct.bid(0)
    k = ct.bid(1)
    if DEPENDENT:
        wait_for_launch_before(b + k)
        ct.grid_dependency_control_launch_dependents()
    strips = ct.cdiv(x.shape[1], STRIP)
    slab = tiles_in_slab * ROWS
    # spread evenly: b is a strip where b * strips / blocks passes a whole number
    strips_before = b * strips // (strips + slab)

    if (b + 1) * strips // (strips + slab) > strips_before:
        OF_STRIP = (GATHERS, EVEN_STRIPS, ROUND_XHAT, DIVISOR)
        strip_of_dw(
            dw_partial, dy, x, rstd, k, strips_before, tiles_in_slab, (ROWS, STRIP), LATENCY, OF_STRIP
        )
    else:
        row = at_least_zero(k * slab + b - strips_before)
        if row < x.shape[0]:
            arrays = (dx, dy, x, (weight,), rstd, d_residual_out, d_residual)
            chunked_row_gradients(arrays, row, (inv_n, offset), WIDTH, (LATENCY, False, DIVISOR))
