# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backward of RMSNorm in Triton. Per row, in float32, with o the offset (without a weight, weight + o is 1):

    xhat = x * rstd        g = dy * (weight + o)        c = mean(xhat * g)
    d = (g - xhat * c) * rstd + d_residual_out          dx = alpha * d         d_residual = d
    dw = sum over rows of dy * xhat                     db = sum over rows of dy

x is residual_out where there was a residual, and d_residual_out the gradient of residual_out. P walks over
the rows each keep the float32 sums of their rows in registers and write them to their own row of dw_partial and
db_partial; a second kernel sums those rows. No atomics: dw and db have the same bits on every run.

    backward_dx           d and partial sums, x and dy held in registers: whole rows, or strips of columns, c given
    backward_dx_reread    (reread.py) the same for whole rows too wide for that
    backward_c            (reread.py) c alone, for rows of which not even the sums fit; strips of columns follow
    sum_partials          (reduce.py) dw and db: the partial rows summed in a fixed order and rounded once

A row in registers is a tuple of TILES tiles: tx, tdy, tscale (weight + o), tdw and tdb, at tcolumns where tmasks are
true.

x, dy and d_residual_out are (M, N) or (B, T, H, N) of any strides but the last (rows.py), which ALIGN divides. weight,
dw and db (N,), or (H, N) with PER_HEAD, dx and d_residual of x's shape, the float32 rstd and c (M,) and dw_partial and
db_partial (P, N) or (P, H * N) are contiguous. Each has its own dtype. An array that is absent or not wanted is None;
so is an alpha of 1. ROUND_XHAT (casting="llama") rounds xhat to x's dtype in dw, not in dx.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    as_multiplied,
    column_tiles,
    count_of_head,
    load_columns,
    load_scale,
    places_of,
    row_pointers,
    rows_of_head,
    split_program,
    stride_names,
    tile_masks,
    vector_of_head,
)


@triton.jit
def load_scales(weight_ptr, offset, tcolumns, tmasks):
    tscale = ()
    for k in tl.static_range(len(tcolumns)):
        tscale = tscale + (load_scale(weight_ptr, offset, tcolumns[k], tmasks[k], ""),)
    return tscale


@triton.jit
def load_x_and_dy(x_rows, dy_rows, tcolumns, tmasks):
    """Load x and dy of these rows, as tiles of their own dtypes. Elements outside read 0, and add 0 to every sum."""
    tx = ()
    tdy = ()
    for k in tl.static_range(len(tcolumns)):
        tx = tx + (tl.load(x_rows + tcolumns[k][None, :], mask=tmasks[k], other=0.0),)
        tdy = tdy + (tl.load(dy_rows + tcolumns[k][None, :], mask=tmasks[k], other=0.0),)
    return tx, tdy


@triton.jit
def mean_of_products(tx, tdy, tscale, trstd, N: tl.constexpr):
    """c of each row, as (ROWS, 1). The products of all tiles are added first: then one reduction does for the row."""
    tproducts = tl.zeros(tx[0].shape, tl.float32)
    for k in tl.static_range(len(tx)):
        tproducts += tx[k].to(tl.float32) * trstd * (tdy[k].to(tl.float32) * tscale[k][None, :])
    return tl.sum(tproducts, axis=1)[:, None] / N


@triton.jit
def gradient(tx, tdy, tscale, trstd, tc):
    """d without d_residual_out."""
    return (tdy * tscale - tx * trstd * tc) * trstd


@triton.jit
def store_d(dx_ptr, d_residual_ptr, d_residual_out_rows, alpha, td, rows, N: tl.constexpr, columns, tmask):
    """dx and d_residual, from td, which is d without d_residual_out, and from pointers to rows of that."""
    if d_residual_out_rows is not None:
        td += load_columns(d_residual_out_rows, columns, tmask, "")
    if d_residual_ptr is not None:
        tl.store(d_residual_ptr + rows * N + columns, td, mask=tmask)
    if alpha is not None:
        td *= alpha
    if dx_ptr is not None:
        tl.store(dx_ptr + rows * N + columns, td, mask=tmask)


@triton.jit
def accumulate_dw(tdw, tx, tdy, trstd, x_ptr, ROUND_XHAT: tl.constexpr):
    """tdw with dy * xhat added element by element. The rows of a tile are added to each other after the last step."""
    tsums = ()
    for k in tl.static_range(len(tx)):
        txhat = as_multiplied(tx[k].to(tl.float32) * trstd, x_ptr, None, ROUND_XHAT)
        tsums = tsums + (tdw[k] + tdy[k].to(tl.float32) * txhat,)
    return tsums


@triton.jit
def accumulate_db(tdb, tdy):
    """tdb with dy added element by element, as in `accumulate_dw`."""
    tsums = ()
    for k in tl.static_range(len(tdy)):
        tsums = tsums + (tdb[k] + tdy[k].to(tl.float32),)
    return tsums


@triton.jit
def store_sums(partial_row_ptr, tsums, tcolumns, tmasks):
    """A walk's sums over its steps, (ROWS, WIDTH) each, summed over the rows of a tile as well."""
    for k in tl.static_range(len(tsums)):
        tl.store(partial_row_ptr + tcolumns[k], tl.sum(tsums[k], axis=0), mask=tmasks[k])


@triton.jit(do_not_specialize=["M", "T", "H", *stride_names("x", "dy", "d_residual_out")])
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
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    STRIPS: tl.constexpr,
    STAGES: tl.constexpr,
    db_partial_ptr=None,
    d_residual_out_ptr=None,
    d_residual_ptr=None,
    alpha=None,
    T=None,
    H=None,
    x_batch_stride=None,
    x_token_stride=None,
    dy_batch_stride=None,
    dy_token_stride=None,
    d_residual_out_batch_stride=None,
    d_residual_out_token_stride=None,
    d_residual_out_row_stride=None,
):
    """Grid: (P * STRIPS,). c_ptr None: whole rows, STRIPS is 1. Otherwise strips of one tile, TILES is 1. With PER_HEAD
    (P * H * STRIPS,), of walks over the rows of one head."""
    program = tl.program_id(0).to(tl.int64) // STRIPS
    walk, head = split_program(program, H, PER_HEAD)
    strip = tl.program_id(0) % STRIPS
    x_strides = aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    dy_strides = aligned(dy_batch_stride, dy_token_stride, dy_row_stride, ALIGN)
    d_residual_out_strides = aligned(
        d_residual_out_batch_stride, d_residual_out_token_stride, d_residual_out_row_stride, ALIGN
    )
    tcolumns, tcolumn_masks = column_tiles(strip, N, WIDTH, TILES, STRIPS)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, head, N, PER_HEAD)
    tscale = load_scales(weight_ptr, offset, tcolumns, tcolumn_masks)
    tdw = (tl.zeros((ROWS, WIDTH), tl.float32),) * TILES
    tdb = tdw

    steps = tl.cdiv(count_of_head(M.to(tl.int64), H, PER_HEAD), ROWS)
    walks = count_of_head(tl.num_programs(0) // STRIPS, H, PER_HEAD)
    for step in tl.range(walk, steps, walks, num_stages=STAGES):
        rows = rows_of_head(step * ROWS + tl.arange(0, ROWS), head, H, PER_HEAD)
        trstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        tmasks = tile_masks(rows, tcolumn_masks, M, ROWS)
        places = places_of(rows[:, None], M, T, H)
        x_rows = row_pointers(x_ptr, places, x_strides, H)
        dy_rows = row_pointers(dy_ptr, places, dy_strides, H)
        tx, tdy = load_x_and_dy(x_rows, dy_rows, tcolumns, tmasks)
        if c_ptr is None:
            tc = mean_of_products(tx, tdy, tscale, trstd, N)
        else:
            tc = tl.load(c_ptr + rows, mask=rows < M, other=0.0)[:, None]
        d_residual_out_rows = d_residual_out_ptr
        if d_residual_out_ptr is not None:
            d_residual_out_rows = row_pointers(d_residual_out_ptr, places, d_residual_out_strides, H)
        for k in tl.static_range(TILES):
            td = gradient(tx[k].to(tl.float32), tdy[k].to(tl.float32), tscale[k][None, :], trstd, tc)
            columns = tcolumns[k][None, :]
            store_d(
                dx_ptr, d_residual_ptr, d_residual_out_rows, alpha, td, rows[:, None], N, columns, tmasks[k]
            )
        tdw = accumulate_dw(tdw, tx, tdy, trstd, x_ptr, ROUND_XHAT)
        if db_partial_ptr is not None:
            tdb = accumulate_db(tdb, tdy)

    if dw_partial_ptr is not None:
        store_sums(dw_partial_ptr + program * N, tdw, tcolumns, tcolumn_masks)
    if db_partial_ptr is not None:
        store_sums(db_partial_ptr + program * N, tdb, tcolumns, tcolumn_masks)
