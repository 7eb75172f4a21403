# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward of RMSNorm in Triton. Per row, in float32:

    x' = round(alpha * x + residual), residual_out, or x without a residual
    rstd = 1 / sqrt(mean(x'^2) + eps)      xhat = x' * rstd      y = xhat * (weight + offset) + bias

A weight that is None is a factor of 1. FORM.rounds_xhat (casting="llama") rounds xhat to the dtype of x' before it
meets the weight.

    forward_rows      whole rows, a tile of them per program, x read once
    forward_reread    a row per program, wider than registers hold: summed in strips, then read again, from L2 mostly
    forward_vllm      the bits of vLLM's rms_norm_batch_invariant, of x and a weight of all rows alone

x and residual are (M, N) or (B, T, H, N) of any strides but the last (rows.py), which ALIGN divides. weight and bias
(N,), or (H, N) with FORM.is_per_head, y and residual_out of x's shape and rstd (M,) float32 are contiguous. Each has
its own dtype. An absent array is None.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    column_tiles,
    kernel_name,
    load_columns,
    load_scale,
    places_of,
    rounded,
    row_pointers,
    rows_of_head,
    rstd_of,
    split_program,
    stride_names,
    tile_masks,
    vector_of_head,
)


@triton.jit
def load_normalized(source, rows, columns, tmask, N: tl.constexpr):
    """x' in float32. residual_out is stored on the way."""
    x_rows, residual_rows, residual_out_ptr, alpha = source
    tx = load_columns(x_rows, columns, tmask)
    if residual_rows is None:
        return tx
    else:
        tsum = tx * alpha + load_columns(residual_rows, columns, tmask)
        tresidual_out = tsum.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + rows * N + columns, tresidual_out, mask=tmask)
        return tresidual_out.to(tl.float32)


@triton.jit
def add_bias(ty, bias_ptr, columns, tmask):
    if bias_ptr is None:
        return ty
    else:
        return ty + load_columns(bias_ptr, columns, tmask)


@triton.jit
def forward_rows(
    source, scale, bias_ptr, y_ptr, rstd_ptr, rows, M, eps, FORM: tl.constexpr, TILE: tl.constexpr
):
    tcolumns, tcolumn_masks = column_tiles(0, FORM.N, TILE)
    tmasks = tile_masks(rows, tcolumn_masks, M, TILE)
    tx = ()
    tscale = ()
    for k in tl.static_range(len(tcolumns)):
        tx = tx + (load_normalized(source, rows[:, None], tcolumns[k][None, :], tmasks[k], FORM.N),)
        tscale = tscale + (load_scale(scale, tcolumns[k], tcolumn_masks[k]),)

    tsquares = tl.zeros(tx[0].shape, tl.float32)
    for k in tl.static_range(len(tx)):
        tsquares += tx[k] * tx[k]
    trstd = rstd_of(tl.sum(tsquares, axis=1) / FORM.N, eps)
    tl.store(rstd_ptr + rows, trstd, mask=rows < M)

    for k in tl.static_range(len(tx)):
        columns = tcolumns[k][None, :]
        txhat = rounded(tx[k] * trstd[:, None], source[2], FORM.rounds_xhat)
        ty = add_bias(txhat * tscale[k][None, :], bias_ptr, columns, tcolumn_masks[k][None, :])
        tl.store(y_ptr + rows[:, None] * FORM.N + columns, ty, mask=tmasks[k])


@triton.jit
def forward_reread(
    source, scale, bias_ptr, y_ptr, rstd_ptr, row, eps, FORM: tl.constexpr, TILE: tl.constexpr
):
    WIDTH: tl.constexpr = TILE.width
    tsquares = tl.zeros((WIDTH,), tl.float32)
    for strip in range(TILE.strips):
        tcolumns, tmasks = column_tiles(strip, FORM.N, TILE)
        tx = load_normalized(source, row, tcolumns[0], tmasks[0], FORM.N)
        tsquares += tx * tx

    rstd = rstd_of(tl.sum(tsquares) / FORM.N, eps)
    tl.store(rstd_ptr + row, rstd)
    x_row, residual_row, normalized_ptr, _ = source
    if residual_row is None:
        normalized_row = x_row
    else:
        normalized_row = normalized_ptr + row * FORM.N
        tl.debug_barrier()  # an element of residual_out may be stored by one thread and read by another

    for strip in range(TILE.strips):
        tcolumns, tmasks = column_tiles(strip, FORM.N, TILE)
        tx = load_columns(normalized_row, tcolumns[0], tmasks[0])
        txhat = rounded(tx * rstd, normalized_ptr, FORM.rounds_xhat)
        ty = txhat * load_scale(scale, tcolumns[0], tmasks[0])
        y_row = y_ptr + row * FORM.N + tcolumns[0]
        tl.store(y_row, add_bias(ty, bias_ptr, tcolumns[0], tmasks[0]), mask=tmasks[0])


@triton.jit
def forward_vllm(x_row, weight_ptr, y_ptr, rstd_ptr, row, n, eps, BLOCK: tl.constexpr):
    """As vLLM writes it, since the compiler goes by all of it. Masks decide which products and sums it contracts: hence
    n is no constant. Loads and stores decide which elements a thread adds."""
    tsquares = tl.zeros((1,), tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tx = load_columns(x_row, columns, columns < n)
        tsquares += tl.sum(tl.where(columns < n, tx * tx, 0.0))

    trstd = 1.0 / tl.sqrt(tsquares / n + eps)
    tl.store(rstd_ptr + row + tl.arange(0, 1), trstd)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tx = load_columns(x_row, columns, columns < n)
        ty = tx * trstd * load_columns(weight_ptr, columns, columns < n)
        tl.store(y_ptr + row * n + columns, ty, mask=columns < n)


@triton.jit(do_not_specialize=["M", "T", "H", *stride_names("x", "residual")], repr=kernel_name)
def forward(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    M,
    x_row_stride,
    eps,
    offset,
    bias_ptr,
    residual_ptr,
    residual_out_ptr,
    alpha,
    T,
    H,
    x_batch_stride,
    x_token_stride,
    residual_batch_stride,
    residual_token_stride,
    residual_row_stride,
    n,
    ALIGN: tl.constexpr,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Find the rows of this program, and run KERNEL on them. Grid: (cdiv(M, rows),); with FORM.is_per_head
    (cdiv(M / H, rows) * H,). n: N of `forward_vllm`, else None."""
    if KERNEL == "forward_rows":
        number, head = split_program(tl.program_id(0), H, FORM)
        rows = rows_of_head(number.to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows), head, H, FORM)
        places = places_of(rows[:, None], M, T, H)
    else:
        rows = tl.program_id(0).to(tl.int64)
        places = places_of(rows, tl.num_programs(0), T, H)
        head = places[2]
    x = x_ptr, aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    x_rows = row_pointers(x, places, H)
    residual = residual_ptr, aligned(residual_batch_stride, residual_token_stride, residual_row_stride, ALIGN)
    source = (
        x_rows,
        None if residual_ptr is None else row_pointers(residual, places, H),
        x_ptr if residual_ptr is None else residual_out_ptr,
        alpha,
    )
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, head, FORM)
    if bias_ptr is not None:
        bias_ptr = vector_of_head(bias_ptr, head, FORM)
    scale = weight_ptr, offset

    if KERNEL == "forward_rows":
        forward_rows(source, scale, bias_ptr, y_ptr, rstd_ptr, rows, M, eps, FORM, TILE)
    elif KERNEL == "forward_vllm":
        forward_vllm(x_rows, weight_ptr, y_ptr, rstd_ptr, rows, n, eps, TILE.width)
    else:
        tl.static_assert(KERNEL == "forward_reread")
        forward_reread(source, scale, bias_ptr, y_ptr, rstd_ptr, rows, eps, FORM, TILE)
