# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backward of RMSNorm in Triton. Per row, in float32, with o the offset (without a weight, weight + o is 1):

    xhat = x * rstd        g = dy * (weight + o)        c = mean(xhat * g)
    d = (g - xhat * c) * rstd + d_residual_out          dx = alpha * d         d_residual = d
    dw = sum over rows of dy * xhat                     db = sum over rows of dy

x is what was normalized: residual_out where there was a residual, whose gradient d_residual_out is then. P walks over
the rows each keep the float32 sums of their rows in registers and write them to their own row of dw_partial and
db_partial; a second kernel sums those rows. No atomics: dw and db have the same bits on every run.

    backward_dx           d and partial sums, x and dy held in registers: whole rows, or strips of columns, c given
    backward_dx_reread    the same for whole rows too wide for that: loaded again (from L2, mostly) once c is known
    backward_c            c alone, for rows of which not even the sums fit; strips of columns follow
    sum_partials          dw and db: the partial rows summed in a fixed order and rounded once

A row in registers is a tuple of TILES tiles: tx, tdy, tscale (weight + o), tdw and tdb, at tcolumns where tmasks are
true.

x, dy and d_residual_out are (M, N) or (B, T, H, N) of any strides but the last (rows.py), which ALIGN divides. weight,
dw and db (N,), or (H, N) with PER_HEAD, dx and d_residual of x's shape, the float32 rstd and c (M,) and dw_partial and
db_partial (P, N) or (P, H * N) are contiguous. Each has its own dtype. What a call has not, or nobody wants, is None;
so is an alpha of 1. ROUND_XHAT (casting="llama") rounds xhat to x's dtype in dw, not in dx.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    as_multiplied,
    column_mask,
    count_of_head,
    load_columns,
    load_scale,
    places_of,
    row_pointers,
    rows_of_head,
    split_program,
    tile_mask,
    vector_of_head,
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
def load_x_and_dy(x_rows, dy_rows, tcolumns, tmasks):
    """x and dy of these rows, as tiles of their own dtypes. What lies outside reads 0, and so adds 0 to every sum."""
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


STRIDES = [
    f"{rows}_{of}_stride" for rows in ("x", "dy", "d_residual_out") for of in ("batch", "token", "row")
]


@triton.jit(do_not_specialize=["M", "T", "H", *STRIDES])
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
    d_residual_out_strides = dy_strides
    if d_residual_out_ptr is not None:
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


@triton.jit(do_not_specialize=["M", "T", "H", *STRIDES])
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
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
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
    """Grid: (P,), or (P * H,) with PER_HEAD. One row per step."""
    program = tl.program_id(0).to(tl.int64)
    walk, head = split_program(program, H, PER_HEAD)
    x_strides = aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    dy_strides = aligned(dy_batch_stride, dy_token_stride, dy_row_stride, ALIGN)
    d_residual_out_strides = dy_strides
    if d_residual_out_ptr is not None:
        d_residual_out_strides = aligned(
            d_residual_out_batch_stride, d_residual_out_token_stride, d_residual_out_row_stride, ALIGN
        )
    tcolumns, tmasks = column_tiles(0, N, WIDTH, TILES, STRIPS=1)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, head, N, PER_HEAD)
    tdw = (tl.zeros((WIDTH,), tl.float32),) * TILES
    tdb = tdw

    steps, walks = count_of_head(M, H, PER_HEAD), count_of_head(tl.num_programs(0), H, PER_HEAD)
    for step in tl.range(walk, steps, walks, num_stages=STAGES):
        row = rows_of_head(step, head, H, PER_HEAD)
        rstd = tl.load(rstd_ptr + row)
        place = places_of(row, M, T, H)
        x_row = row_pointers(x_ptr, place, x_strides, H)
        dy_row = row_pointers(dy_ptr, place, dy_strides, H)
        d_residual_out_row = d_residual_out_ptr
        if d_residual_out_ptr is not None:
            d_residual_out_row = row_pointers(d_residual_out_ptr, place, d_residual_out_strides, H)
        c = mean_of_products_of_row(x_row, dy_row, weight_ptr, offset, rstd, N, tcolumns, tmasks)

        tdw_before, tdb_before, tdw = tdw, tdb, ()
        if db_partial_ptr is not None:
            tdb = ()
        for k in tl.static_range(TILES):
            # With the eviction policy of the loads for c the compiler would merge the two, and hold the row after all.
            tx = load_columns(x_row, tcolumns[k], tmasks[k], "evict_first")
            tdy = load_columns(dy_row, tcolumns[k], tmasks[k], "evict_first")
            tscale = load_scale(weight_ptr, offset, tcolumns[k], tmasks[k], "evict_last")
            td = gradient(tx, tdy, tscale, rstd, c)
            store_d(dx_ptr, d_residual_ptr, d_residual_out_row, alpha, td, row, N, tcolumns[k], tmasks[k])
            tdw = tdw + (tdw_before[k] + tdy * as_multiplied(tx * rstd, x_ptr, None, ROUND_XHAT),)
            if db_partial_ptr is not None:
                tdb = tdb + (tdb_before[k] + tdy,)

    for k in tl.static_range(TILES):
        if dw_partial_ptr is not None:
            tl.store(dw_partial_ptr + program * N + tcolumns[k], tdw[k], mask=tmasks[k])
        if db_partial_ptr is not None:
            tl.store(db_partial_ptr + program * N + tcolumns[k], tdb[k], mask=tmasks[k])


@triton.jit(do_not_specialize=["T", "H", *STRIDES])
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
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    T=None,
    H=None,
    x_batch_stride=None,
    x_token_stride=None,
    dy_batch_stride=None,
    dy_token_stride=None,
):
    """Grid: (M,)."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    x_strides = aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    dy_strides = aligned(dy_batch_stride, dy_token_stride, dy_row_stride, ALIGN)
    place = places_of(row, tl.num_programs(0), T, H)
    x_row = row_pointers(x_ptr, place, x_strides, H)
    dy_row = row_pointers(dy_ptr, place, dy_strides, H)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, place[2], N, PER_HEAD)

    tproducts = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tmask = column_mask(columns, CHUNKS * WIDTH, N)
        txhat = load_columns(x_row, columns, tmask, "") * rstd
        tdy = load_columns(dy_row, columns, tmask, "")
        tproducts += txhat * (tdy * load_scale(weight_ptr, offset, columns, tmask, ""))

    tl.store(c_ptr + row, tl.sum(tproducts) / N)


@triton.jit
def sum_columns(partial_ptr, sum_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS running sums, each over the rows of partial_ptr in index order, are then added as a tree."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tsum = tl.zeros((ROWS, WIDTH), tl.float32)

    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        tmask = (rows < P)[:, None] & (columns < N)[None, :]
        tsum += tl.load(partial_ptr + rows[:, None] * N + columns[None, :], mask=tmask, other=0.0)

    tl.store(sum_ptr + columns, tl.sum(tsum, axis=0), mask=columns < N)


@triton.jit(do_not_specialize=["P"])
def sum_partials(
    partial_ptr,
    sum_ptr,
    P,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    second_partial_ptr=None,
    second_sum_ptr=None,
):
    """Grid: (cdiv(N, WIDTH), 1), or 2 where there is a second sum. N: the columns of each, H * N with PER_HEAD."""
    if second_sum_ptr is None:
        sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH)
    else:
        if tl.program_id(1) == 0:
            sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH)
        else:
            sum_columns(second_partial_ptr, second_sum_ptr, P, N, ROWS, WIDTH)
