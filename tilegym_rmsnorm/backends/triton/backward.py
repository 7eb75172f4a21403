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
    backward_dx_reread    the same for whole rows too wide for that, read again once c is known, from L2 mostly
    backward_c            c alone, for rows of which not even the sums fit: backward_dx follows, by strips of columns
    sum_partials          (reduce.py) dw and db: the partial rows summed in a fixed order and rounded once

A row in registers is a tuple of tiles: tx, tdy, tscale (weight + o), tdw and tdb, at tcolumns where tmasks are true.

x, dy and d_residual_out are (M, N) or (B, T, H, N) of any strides but the last (rows.py), which ALIGN divides. weight,
dw and db (N,), or (H, N) with FORM.is_per_head, dx and d_residual of x's shape, the float32 rstd and c (M,) and
dw_partial and db_partial (P, N) or (P, H * N) are contiguous. Each has its own dtype. An array that is absent or not
wanted is None; so is an alpha of 1. FORM.rounds_xhat (casting="llama") rounds xhat to x's dtype in dw, not in dx.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    column_tiles,
    count_of_head,
    kernel_name,
    load_columns,
    load_scale,
    places_of,
    rounded,
    row_pointers,
    rows_of_head,
    split_program,
    stride_names,
    tile_masks,
    vector_of_head,
)


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
def store_d(outputs, d_residual_out_rows, td, rows, columns, tmask, N: tl.constexpr):
    """dx and d_residual, from td, which is d without d_residual_out, and from pointers to rows of that."""
    dx_ptr, d_residual_ptr, alpha = outputs
    if d_residual_out_rows is not None:
        td += load_columns(d_residual_out_rows, columns, tmask)
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
        txhat = rounded(tx[k].to(tl.float32) * trstd, x_ptr, ROUND_XHAT)
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


@triton.jit
def backward_dx(
    arrays, scale, rstd_ptr, c_ptr, outputs, partials, walker, lead, FORM: tl.constexpr, TILE: tl.constexpr
):
    """c_ptr None: whole rows, of one strip."""
    x, dy, d_residual_out = arrays
    dw_partial_ptr, db_partial_ptr = partials
    program, walk, head, tcolumns, tcolumn_masks = walker
    M, T, H = lead
    tscale = ()
    for k in tl.static_range(len(tcolumns)):
        tscale = tscale + (load_scale(scale, tcolumns[k], tcolumn_masks[k]),)
    ROWS: tl.constexpr = TILE.rows
    WIDTH: tl.constexpr = TILE.width
    tdw = (tl.zeros((ROWS, WIDTH), tl.float32),) * len(tcolumns)
    tdb = tdw

    steps = tl.cdiv(count_of_head(M.to(tl.int64), H, FORM), TILE.rows)
    walks = count_of_head(tl.num_programs(0) // TILE.strips, H, FORM)
    for step in tl.range(walk, steps, walks, num_stages=TILE.stages):
        rows = rows_of_head(step * TILE.rows + tl.arange(0, TILE.rows), head, H, FORM)
        trstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        tmasks = tile_masks(rows, tcolumn_masks, M, TILE)
        places = places_of(rows[:, None], M, T, H)
        tx, tdy = load_x_and_dy(row_pointers(x, places, H), row_pointers(dy, places, H), tcolumns, tmasks)
        if c_ptr is None:
            tc = mean_of_products(tx, tdy, tscale, trstd, FORM.N)
        else:
            tc = tl.load(c_ptr + rows, mask=rows < M, other=0.0)[:, None]
        d_residual_out_rows = None if d_residual_out[0] is None else row_pointers(d_residual_out, places, H)
        for k in tl.static_range(len(tx)):
            td = gradient(tx[k].to(tl.float32), tdy[k].to(tl.float32), tscale[k][None, :], trstd, tc)
            store_d(outputs, d_residual_out_rows, td, rows[:, None], tcolumns[k][None, :], tmasks[k], FORM.N)
        tdw = accumulate_dw(tdw, tx, tdy, trstd, x[0], FORM.rounds_xhat)
        if db_partial_ptr is not None:
            tdb = accumulate_db(tdb, tdy)

    if dw_partial_ptr is not None:
        store_sums(dw_partial_ptr + program * FORM.N, tdw, tcolumns, tcolumn_masks)
    if db_partial_ptr is not None:
        store_sums(db_partial_ptr + program * FORM.N, tdb, tcolumns, tcolumn_masks)


@triton.jit
def products(x_row, dy_row, scale, rstd, columns, tmask):
    """xhat * g of some columns of a row, which is read for c alone: nothing of it stays in registers."""
    txhat = load_columns(x_row, columns, tmask) * rstd
    tdy = load_columns(dy_row, columns, tmask)
    return txhat * (tdy * load_scale(scale, columns, tmask))


@triton.jit
def backward_dx_reread(
    arrays, scale, rstd_ptr, outputs, partials, walker, lead, FORM: tl.constexpr, TILE: tl.constexpr
):
    """One row per step."""
    x, dy, d_residual_out = arrays
    dw_partial_ptr, db_partial_ptr = partials
    program, walk, head, tcolumns, tmasks = walker
    M, T, H = lead
    WIDTH: tl.constexpr = TILE.width
    tdw = (tl.zeros((WIDTH,), tl.float32),) * len(tcolumns)
    tdb = tdw

    steps = count_of_head(M, H, FORM)
    walks = count_of_head(tl.num_programs(0), H, FORM)
    for step in tl.range(walk, steps, walks, num_stages=TILE.stages):
        row = rows_of_head(step, head, H, FORM)
        rstd = tl.load(rstd_ptr + row)
        place = places_of(row, M, T, H)
        x_row, dy_row = row_pointers(x, place, H), row_pointers(dy, place, H)
        d_residual_out_row = None if d_residual_out[0] is None else row_pointers(d_residual_out, place, H)
        tproducts = tl.zeros((WIDTH,), tl.float32)
        for k in tl.static_range(len(tcolumns)):
            tproducts += products(x_row, dy_row, scale, rstd, tcolumns[k], tmasks[k])
        c = tl.sum(tproducts) / FORM.N

        tdw_before, tdb_before, tdw = tdw, tdb, ()
        if db_partial_ptr is not None:
            tdb = ()
        for k in tl.static_range(len(tcolumns)):
            # With the eviction policy of the loads for c the compiler would merge the two, and hold the row after all.
            tx = load_columns(x_row, tcolumns[k], tmasks[k], "evict_first")
            tdy = load_columns(dy_row, tcolumns[k], tmasks[k], "evict_first")
            td = gradient(tx, tdy, load_scale(scale, tcolumns[k], tmasks[k], "evict_last"), rstd, c)
            store_d(outputs, d_residual_out_row, td, row, tcolumns[k], tmasks[k], FORM.N)
            tdw = tdw + (tdw_before[k] + tdy * rounded(tx * rstd, x[0], FORM.rounds_xhat),)
            if db_partial_ptr is not None:
                tdb = tdb + (tdb_before[k] + tdy,)

    for k in tl.static_range(len(tcolumns)):
        if dw_partial_ptr is not None:
            tl.store(dw_partial_ptr + program * FORM.N + tcolumns[k], tdw[k], mask=tmasks[k])
        if db_partial_ptr is not None:
            tl.store(db_partial_ptr + program * FORM.N + tcolumns[k], tdb[k], mask=tmasks[k])


@triton.jit
def backward_c(x_row, dy_row, scale, rstd, c_row, FORM: tl.constexpr, TILE: tl.constexpr):
    WIDTH: tl.constexpr = TILE.width
    tproducts = tl.zeros((WIDTH,), tl.float32)
    for strip in range(TILE.strips):
        tcolumns, tmasks = column_tiles(strip, FORM.N, TILE)
        tproducts += products(x_row, dy_row, scale, rstd, tcolumns[0], tmasks[0])

    tl.store(c_row, tl.sum(tproducts) / FORM.N)


@triton.jit(do_not_specialize=["M", "T", "H", *stride_names("x", "dy", "d_residual_out")], repr=kernel_name)
def backward(
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
    db_partial_ptr,
    d_residual_out_ptr,
    d_residual_ptr,
    alpha,
    T,
    H,
    x_batch_stride,
    x_token_stride,
    dy_batch_stride,
    dy_token_stride,
    d_residual_out_batch_stride,
    d_residual_out_token_stride,
    d_residual_out_row_stride,
    ALIGN: tl.constexpr,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Find the strides of arrays and the walk of this program, and run KERNEL. Grid: (P * strips,), or
    (P * H * strips,) of walks over the rows of one head; (M,) of backward_c."""
    if KERNEL == "backward_c":
        row = tl.program_id(0).to(tl.int64)
        rstd = tl.load(rstd_ptr + row)
    else:
        program = tl.program_id(0).to(tl.int64) // TILE.strips
        walk, head = split_program(program, H, FORM)
        strip = tl.program_id(0) % TILE.strips
    x = x_ptr, aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    dy = dy_ptr, aligned(dy_batch_stride, dy_token_stride, dy_row_stride, ALIGN)
    d_residual_out_strides = aligned(
        d_residual_out_batch_stride, d_residual_out_token_stride, d_residual_out_row_stride, ALIGN
    )
    if KERNEL == "backward_c":
        place = places_of(row, tl.num_programs(0), T, H)
        x_row, dy_row = row_pointers(x, place, H), row_pointers(dy, place, H)
        head = place[2]
    else:
        tcolumns, tcolumn_masks = column_tiles(strip, FORM.N, TILE)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, head, FORM)
    scale = weight_ptr, offset

    if KERNEL == "backward_c":
        backward_c(x_row, dy_row, scale, rstd, c_ptr + row, FORM, TILE)
    else:
        arrays = x, dy, (d_residual_out_ptr, d_residual_out_strides)
        outputs = dx_ptr, d_residual_ptr, alpha
        partials = dw_partial_ptr, db_partial_ptr
        walker = program, walk, head, tcolumns, tcolumn_masks
        if KERNEL == "backward_dx":
            backward_dx(arrays, scale, rstd_ptr, c_ptr, outputs, partials, walker, (M, T, H), FORM, TILE)
        else:
            tl.static_assert(KERNEL == "backward_dx_reread")
            backward_dx_reread(arrays, scale, rstd_ptr, outputs, partials, walker, (M, T, H), FORM, TILE)
