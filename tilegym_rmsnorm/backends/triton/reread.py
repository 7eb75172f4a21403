# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows that no registers hold, in Triton: summed chunk by chunk, then read again, from L2 mostly. The mathematics and
the arrays are those of forward.py and backward.py.

    forward_reread        a row per program
    backward_dx_reread    d, and the partial sums, which registers do hold
    backward_c            c alone, for rows of which not even the sums fit: backward_dx follows, by strips of columns
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.backward import gradient, store_d
from tilegym_rmsnorm.backends.triton.forward import add_bias, load_normalized
from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    as_multiplied,
    column_mask,
    column_tiles,
    count_of_head,
    load_columns,
    load_scale,
    places_of,
    row_pointers,
    rows_of_head,
    split_program,
    stride_names,
    vector_of_head,
)


@triton.jit(do_not_specialize=["T", "H", *stride_names("x", "residual")])
def forward_reread(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_row_stride,
    eps,
    offset,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    bias_ptr=None,
    residual_ptr=None,
    residual_out_ptr=None,
    alpha=None,
    T=None,
    H=None,
    x_batch_stride=None,
    x_token_stride=None,
    residual_batch_stride=None,
    residual_token_stride=None,
    residual_row_stride=None,
):
    """Grid: (M,)."""
    row = tl.program_id(0).to(tl.int64)
    place = places_of(row, tl.num_programs(0), T, H)
    x_strides = aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    x_row = row_pointers(x_ptr, place, x_strides, H)
    residual_strides = aligned(residual_batch_stride, residual_token_stride, residual_row_stride, ALIGN)
    residual_row = residual_ptr
    if residual_ptr is not None:
        residual_row = row_pointers(residual_ptr, place, residual_strides, H)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, place[2], N, PER_HEAD)
    if bias_ptr is not None:
        bias_ptr = vector_of_head(bias_ptr, place[2], N, PER_HEAD)

    tsquares = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tmask = column_mask(columns, CHUNKS * WIDTH, N)
        tx = load_normalized(x_row, residual_row, residual_out_ptr, alpha, row, N, columns, tmask)
        tsquares += tx * tx

    rstd = 1 / tl.sqrt_rn(tl.sum(tsquares) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    if residual_out_ptr is None:
        normalized_row = x_row
    else:
        normalized_row = residual_out_ptr + row * N
        tl.debug_barrier()  # an element of residual_out may be stored by one thread and read by another

    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tmask = column_mask(columns, CHUNKS * WIDTH, N)
        tx = load_columns(normalized_row, columns, tmask, "")
        txhat = as_multiplied(tx * rstd, x_ptr, residual_out_ptr, ROUND_XHAT)
        ty = txhat * load_scale(weight_ptr, offset, columns, tmask, "")
        tl.store(y_ptr + row * N + columns, add_bias(ty, bias_ptr, columns, tmask), mask=tmask)


@triton.jit
def products(x_row_ptr, dy_row_ptr, weight_ptr, offset, rstd, columns, tmask):
    """xhat * g of some columns of a row, which is read for c alone: nothing of it stays in registers."""
    txhat = load_columns(x_row_ptr, columns, tmask, "") * rstd
    tdy = load_columns(dy_row_ptr, columns, tmask, "")
    return txhat * (tdy * load_scale(weight_ptr, offset, columns, tmask, ""))


@triton.jit(do_not_specialize=["M", "T", "H", *stride_names("x", "dy", "d_residual_out")])
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
        tproducts = tl.zeros((WIDTH,), tl.float32)
        for k in tl.static_range(TILES):
            tproducts += products(x_row, dy_row, weight_ptr, offset, rstd, tcolumns[k], tmasks[k])
        c = tl.sum(tproducts) / N

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


@triton.jit(do_not_specialize=["T", "H", *stride_names("x", "dy")])
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
        tproducts += products(x_row, dy_row, weight_ptr, offset, rstd, columns, tmask)

    tl.store(c_ptr + row, tl.sum(tproducts) / N)
