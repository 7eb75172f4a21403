# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backward of RMSNorm in Triton. Per row, in float32, with o the offset (without a weight, weight + o is 1):

    xhat = x * rstd        g = dy * (weight + o)        c = mean(xhat * g)        dx = (g - xhat * c) * rstd
    dw = sum over rows of dy * xhat

P walks over the rows each keep the float32 sum of their rows of dy * xhat in registers and write it to their own row of
dw_partial; a second kernel sums those rows. No atomics: dw has the same bits on every run.

    backward_dx           dx and dw_partial, x and dy held in registers: whole rows, or a strip of columns with c given
    backward_dx_reread    the same for whole rows too wide for that: loaded again (from L2, mostly) once c is known
    backward_c            c alone, for rows of which not even the sums fit; strips of columns follow
    backward_dw           dw: the rows of dw_partial summed in a fixed order and rounded once

A row in registers is a tuple of TILES tiles: tx, tdy, tscale (weight + o) and tdw, at tcolumns where tmasks are true.

x and dy (M, N) have any row stride; weight and dw (N,), dx (M, N) and the float32 rstd and c (M,) and dw_partial (P, N)
are contiguous; weight_ptr is None without a weight, dw_partial_ptr where no dw is needed. ROUND_XHAT (casting="llama")
rounds xhat to x's dtype in dw, not in dx. ALIGN divides the row strides of x and dy.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    as_multiplied,
    column_mask,
    load_columns,
    load_scale,
    tile_mask,
    tile_pointers,
)


@triton.jit
def column_tiles(strip, N: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, STRIPS: tl.constexpr):
    """The columns of TILES tiles side by side, from column strip * WIDTH on, and which of these columns exist."""
    tcolumns = ()
    tmasks = ()
    for k in tl.static_range(TILES):
        tcolumns = tcolumns + (strip * WIDTH + k * WIDTH + tl.arange(0, WIDTH),)
        # As if this were the last strip: which one it is, the compiler does not know.
        tmasks = tmasks + (column_mask(tcolumns[k], (STRIPS + k) * WIDTH, N),)
    return tcolumns, tmasks


@triton.jit
def load_scales(weight_ptr, offset, tcolumns, tmasks):
    tscale = ()
    for k in tl.static_range(len(tcolumns)):
        tscale = tscale + (load_scale(weight_ptr, offset, tcolumns[k], tmasks[k], ""),)
    return tscale


@triton.jit
def tile_masks(rows, tcolumn_masks, M, ROWS: tl.constexpr):
    tmasks = ()
    for k in tl.static_range(len(tcolumn_masks)):
        tmasks = tmasks + (tile_mask(rows, tcolumn_masks[k], M, ROWS),)
    return tmasks


@triton.jit
def load_x_and_dy(x_ptr, x_row_stride, dy_ptr, dy_row_stride, rows, tcolumns, tmasks):
    """x and dy of these rows, as tiles of their own dtypes. What lies outside reads 0, and so adds 0 to every sum."""
    tx = ()
    tdy = ()
    for k in tl.static_range(len(tcolumns)):
        x_pointers = tile_pointers(x_ptr, rows, x_row_stride, tcolumns[k])
        tx = tx + (tl.load(x_pointers, mask=tmasks[k], other=0.0),)
        dy_pointers = tile_pointers(dy_ptr, rows, dy_row_stride, tcolumns[k])
        tdy = tdy + (tl.load(dy_pointers, mask=tmasks[k], other=0.0),)
    return tx, tdy


@triton.jit
def mean_of_products(tx, tdy, tscale, trstd, N: tl.constexpr):
    """c of each row, as (ROWS, 1). The products of all tiles are added first: then one reduction does for the row."""
    tproducts = tl.zeros(tx[0].shape, tl.float32)
    for k in tl.static_range(len(tx)):
        tproducts += tx[k].to(tl.float32) * trstd * (tdy[k].to(tl.float32) * tscale[k][None, :])
    return tl.sum(tproducts, axis=1)[:, None] / N


@triton.jit
def store_dx(dx_ptr, rows, N: tl.constexpr, tcolumns, tmasks, tx, tdy, tscale, trstd, tc):
    for k in tl.static_range(len(tx)):
        txhat = tx[k].to(tl.float32) * trstd
        tg = tdy[k].to(tl.float32) * tscale[k][None, :]
        tl.store(tile_pointers(dx_ptr, rows, N, tcolumns[k]), (tg - txhat * tc) * trstd, mask=tmasks[k])


@triton.jit
def accumulate_dw(tdw, tx, tdy, trstd, x_ptr, ROUND_XHAT: tl.constexpr):
    """tdw with dy * xhat added element by element. The rows of a tile are added to each other after the last step."""
    tsums = ()
    for k in tl.static_range(len(tx)):
        txhat = as_multiplied(tx[k].to(tl.float32) * trstd, x_ptr, ROUND_XHAT)
        tsums = tsums + (tdw[k] + tdy[k].to(tl.float32) * txhat,)
    return tsums


@triton.jit(do_not_specialize=["M", "x_row_stride", "dy_row_stride"])
def backward_dx(
    x_ptr,
    dy_ptr,
    weight_ptr,
    rstd_ptr,
    c_ptr,
    dx_ptr,
    dw_partial_ptr,
    M,
    x_row_stride,
    dy_row_stride,
    offset,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    STRIPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (P * STRIPS,). c_ptr None: whole rows, STRIPS is 1. Otherwise strips of one tile, TILES is 1."""
    walk = tl.program_id(0).to(tl.int64) // STRIPS
    strip = tl.program_id(0) % STRIPS
    x_row_stride = aligned(x_row_stride, ALIGN)
    dy_row_stride = aligned(dy_row_stride, ALIGN)
    tcolumns, tcolumn_masks = column_tiles(strip, N, WIDTH, TILES, STRIPS)
    tscale = load_scales(weight_ptr, offset, tcolumns, tcolumn_masks)
    tdw = (tl.zeros((ROWS, WIDTH), tl.float32),) * TILES

    steps = tl.cdiv(M.to(tl.int64), ROWS)
    walks = tl.num_programs(0) // STRIPS
    for step in tl.range(walk, steps, walks, num_stages=STAGES):
        rows = step * ROWS + tl.arange(0, ROWS)
        trstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        tmasks = tile_masks(rows, tcolumn_masks, M, ROWS)
        tx, tdy = load_x_and_dy(x_ptr, x_row_stride, dy_ptr, dy_row_stride, rows, tcolumns, tmasks)
        if c_ptr is None:
            tc = mean_of_products(tx, tdy, tscale, trstd, N)
        else:
            tc = tl.load(c_ptr + rows, mask=rows < M, other=0.0)[:, None]
        store_dx(dx_ptr, rows, N, tcolumns, tmasks, tx, tdy, tscale, trstd, tc)
        tdw = accumulate_dw(tdw, tx, tdy, trstd, x_ptr, ROUND_XHAT)

    if dw_partial_ptr is not None:
        for k in tl.static_range(TILES):
            tl.store(dw_partial_ptr + walk * N + tcolumns[k], tl.sum(tdw[k], axis=0), mask=tcolumn_masks[k])


@triton.jit
def mean_of_products_of_row(
    x_row_ptr, dy_row_ptr, weight_ptr, offset, rstd, N: tl.constexpr, tcolumns, tmasks
):
    """c of one row, which is read for this alone: nothing of it stays in registers."""
    tproducts = tl.zeros(tcolumns[0].shape, tl.float32)
    for k in tl.static_range(len(tcolumns)):
        txhat = load_columns(x_row_ptr, tcolumns[k], tmasks[k], "") * rstd
        tdy = load_columns(dy_row_ptr, tcolumns[k], tmasks[k], "")
        tproducts += txhat * (tdy * load_scale(weight_ptr, offset, tcolumns[k], tmasks[k], ""))
    return tl.sum(tproducts) / N


@triton.jit(do_not_specialize=["M", "x_row_stride", "dy_row_stride"])
def backward_dx_reread(
    x_ptr,
    dy_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_partial_ptr,
    M,
    x_row_stride,
    dy_row_stride,
    offset,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (P,). One row per step."""
    walk = tl.program_id(0).to(tl.int64)
    x_row_stride = aligned(x_row_stride, ALIGN)
    dy_row_stride = aligned(dy_row_stride, ALIGN)
    tcolumns, tmasks = column_tiles(0, N, WIDTH, TILES, STRIPS=1)
    tdw = (tl.zeros((WIDTH,), tl.float32),) * TILES

    for row in tl.range(walk, M, tl.num_programs(0), num_stages=STAGES):
        rstd = tl.load(rstd_ptr + row)
        x_row_ptr = x_ptr + row * x_row_stride
        dy_row_ptr = dy_ptr + row * dy_row_stride
        c = mean_of_products_of_row(x_row_ptr, dy_row_ptr, weight_ptr, offset, rstd, N, tcolumns, tmasks)

        tdw_before = tdw
        tdw = ()
        for k in tl.static_range(TILES):
            # With the eviction policy of the loads for c the compiler would merge the two, and hold the row after all.
            txhat = load_columns(x_row_ptr, tcolumns[k], tmasks[k], "evict_first") * rstd
            tdy = load_columns(dy_row_ptr, tcolumns[k], tmasks[k], "evict_first")
            tscale = load_scale(weight_ptr, offset, tcolumns[k], tmasks[k], "evict_last")
            tl.store(dx_ptr + row * N + tcolumns[k], (tdy * tscale - txhat * c) * rstd, mask=tmasks[k])
            tdw = tdw + (tdw_before[k] + tdy * as_multiplied(txhat, x_ptr, ROUND_XHAT),)

    if dw_partial_ptr is not None:
        for k in tl.static_range(TILES):
            tl.store(dw_partial_ptr + walk * N + tcolumns[k], tdw[k], mask=tmasks[k])


@triton.jit(do_not_specialize=["x_row_stride", "dy_row_stride"])
def backward_c(
    x_ptr,
    dy_ptr,
    weight_ptr,
    rstd_ptr,
    c_ptr,
    x_row_stride,
    dy_row_stride,
    offset,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid: (M,)."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    x_row_ptr = x_ptr + row * aligned(x_row_stride, ALIGN)
    dy_row_ptr = dy_ptr + row * aligned(dy_row_stride, ALIGN)

    tproducts = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tmask = column_mask(columns, CHUNKS * WIDTH, N)
        txhat = load_columns(x_row_ptr, columns, tmask, "") * rstd
        tdy = load_columns(dy_row_ptr, columns, tmask, "")
        tproducts += txhat * (tdy * load_scale(weight_ptr, offset, columns, tmask, ""))

    tl.store(c_ptr + row, tl.sum(tproducts) / N)


@triton.jit(do_not_specialize=["P"])
def backward_dw(dw_partial_ptr, dw_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Grid: (cdiv(N, WIDTH),). ROWS running sums, each over the rows in index order, are then added as a tree."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tdw = tl.zeros((ROWS, WIDTH), tl.float32)

    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        tmask = (rows < P)[:, None] & (columns < N)[None, :]
        tdw += tl.load(tile_pointers(dw_partial_ptr, rows, N, columns), mask=tmask, other=0.0)

    tl.store(dw_ptr + columns, tl.sum(tdw, axis=0), mask=columns < N)
