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
    first = tl.program_id(0) % STRIPS * WIDTH
    x_row_stride = aligned(x_row_stride, ALIGN)
    dy_row_stride = aligned(dy_row_stride, ALIGN)
    tscale = ()
    tdw = ()
    for k in tl.static_range(TILES):
        columns = first + k * WIDTH + tl.arange(0, WIDTH)
        tcolumn_mask = column_mask(columns, (STRIPS + k) * WIDTH, N)
        tscale = tscale + (load_scale(weight_ptr, offset, columns, tcolumn_mask, ""),)
        tdw = tdw + (tl.zeros((ROWS, WIDTH), tl.float32),)

    for step in tl.range(
        walk, tl.cdiv(M.to(tl.int64), ROWS), tl.num_programs(0) // STRIPS, num_stages=STAGES
    ):
        rows = step * ROWS + tl.arange(0, ROWS)
        trstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        tx = ()
        tdy = ()
        for k in tl.static_range(TILES):
            columns = first + k * WIDTH + tl.arange(0, WIDTH)
            tmask = tile_mask(rows, columns, M, ROWS, (STRIPS + k) * WIDTH, N)
            tx = tx + (tl.load(tile_pointers(x_ptr, rows, x_row_stride, columns), mask=tmask, other=0.0),)
            tdy = tdy + (tl.load(tile_pointers(dy_ptr, rows, dy_row_stride, columns), mask=tmask, other=0.0),)

        if c_ptr is None:
            tproducts = tl.zeros((ROWS, WIDTH), tl.float32)
            for k in tl.static_range(TILES):
                tproducts += tx[k].to(tl.float32) * trstd * (tdy[k].to(tl.float32) * tscale[k][None, :])
            tc = tl.sum(tproducts, axis=1)[:, None] / N
        else:
            tc = tl.load(c_ptr + rows, mask=rows < M, other=0.0)[:, None]

        tdw_before = tdw
        tdw = ()
        for k in tl.static_range(TILES):
            columns = first + k * WIDTH + tl.arange(0, WIDTH)
            tmask = tile_mask(rows, columns, M, ROWS, (STRIPS + k) * WIDTH, N)
            tdy32 = tdy[k].to(tl.float32)
            txhat = tx[k].to(tl.float32) * trstd
            tdx = (tdy32 * tscale[k][None, :] - txhat * tc) * trstd
            tl.store(tile_pointers(dx_ptr, rows, N, columns), tdx, mask=tmask)
            tdw = tdw + (tdw_before[k] + tdy32 * as_multiplied(txhat, x_ptr, ROUND_XHAT),)

    if dw_partial_ptr is not None:
        for k in tl.static_range(TILES):
            columns = first + k * WIDTH + tl.arange(0, WIDTH)
            tmask = column_mask(columns, (STRIPS + k) * WIDTH, N)
            tl.store(dw_partial_ptr + walk * N + columns, tl.sum(tdw[k], axis=0), mask=tmask)


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
    tdw = ()
    for _ in tl.static_range(TILES):
        tdw = tdw + (tl.zeros((WIDTH,), tl.float32),)

    for row in tl.range(walk, M, tl.num_programs(0), num_stages=STAGES):
        rstd = tl.load(rstd_ptr + row)
        tproducts = tl.zeros((WIDTH,), tl.float32)
        for k in tl.static_range(TILES):
            columns = k * WIDTH + tl.arange(0, WIDTH)
            tmask = column_mask(columns, (k + 1) * WIDTH, N)
            txhat = load_columns(x_ptr + row * x_row_stride, columns, tmask, "") * rstd
            tdy = load_columns(dy_ptr + row * dy_row_stride, columns, tmask, "")
            tproducts += txhat * (tdy * load_scale(weight_ptr, offset, columns, tmask, ""))
        c = tl.sum(tproducts) / N

        tdw_before = tdw
        tdw = ()
        for k in tl.static_range(TILES):
            columns = k * WIDTH + tl.arange(0, WIDTH)
            tmask = column_mask(columns, (k + 1) * WIDTH, N)
            # With the policies of the loads above the compiler would merge the two, and hold the values after all.
            txhat = load_columns(x_ptr + row * x_row_stride, columns, tmask, "evict_first") * rstd
            tdy = load_columns(dy_ptr + row * dy_row_stride, columns, tmask, "evict_first")
            tscale = load_scale(weight_ptr, offset, columns, tmask, "evict_last")
            tl.store(dx_ptr + row * N + columns, (tdy * tscale - txhat * c) * rstd, mask=tmask)
            tdw = tdw + (tdw_before[k] + tdy * as_multiplied(txhat, x_ptr, ROUND_XHAT),)

    if dw_partial_ptr is not None:
        for k in tl.static_range(TILES):
            columns = k * WIDTH + tl.arange(0, WIDTH)
            tmask = column_mask(columns, (k + 1) * WIDTH, N)
            tl.store(dw_partial_ptr + walk * N + columns, tdw[k], mask=tmask)


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
