# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward of RMSNorm in Triton. Per row, in float32:

    x' = round(alpha * x + residual), residual_out, or x without a residual
    rstd = 1 / sqrt(mean(x'^2) + eps)      xhat = x' * rstd      y = xhat * (weight + offset) + bias

A weight that is None is a factor of 1. ROUND_XHAT (casting="llama") rounds xhat to the dtype of x' before it meets the
weight. rstd by sqrt_rn: `tl.rsqrt` takes a subnormal mean + eps (below 1.2e-38) for 0.

    forward_rows      ROWS whole rows per program, x read once
    forward_reread    (reread.py) one row, wider than registers hold

x and residual are (M, N) or (B, T, H, N) of any strides but the last (rows.py), which ALIGN divides. weight and bias
(N,), or (H, N) with PER_HEAD, y and residual_out of x's shape and rstd (M,) float32 are contiguous. Each has its own
dtype. An absent array is None.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    as_multiplied,
    column_tiles,
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
def load_normalized(x_rows, residual_rows, residual_out_ptr, alpha, rows, N: tl.constexpr, columns, tmask):
    """x' in float32, from pointers to rows of x and residual. residual_out is stored on the way."""
    tx = load_columns(x_rows, columns, tmask, "")
    if residual_rows is None:
        return tx
    else:
        tsum = tx * alpha + load_columns(residual_rows, columns, tmask, "")
        tresidual_out = tsum.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + rows * N + columns, tresidual_out, mask=tmask)
        return tresidual_out.to(tl.float32)


@triton.jit
def add_bias(ty, bias_ptr, columns, tmask):
    if bias_ptr is None:
        return ty
    else:
        return ty + load_columns(bias_ptr, columns, tmask, "")


@triton.jit(do_not_specialize=["M", "T", "H", *stride_names("x", "residual")])
def forward_rows(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    M,
    x_row_stride,
    eps,
    offset,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
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
    """Grid: (cdiv(M, ROWS),); with PER_HEAD (cdiv(M / H, ROWS) * H,)."""
    number, head = split_program(tl.program_id(0), H, PER_HEAD)
    rows = rows_of_head(number.to(tl.int64) * ROWS + tl.arange(0, ROWS), head, H, PER_HEAD)
    places = places_of(rows[:, None], M, T, H)
    x_strides = aligned(x_batch_stride, x_token_stride, x_row_stride, ALIGN)
    x_rows = row_pointers(x_ptr, places, x_strides, H)
    residual_strides = aligned(residual_batch_stride, residual_token_stride, residual_row_stride, ALIGN)
    residual_rows = residual_ptr
    if residual_ptr is not None:
        residual_rows = row_pointers(residual_ptr, places, residual_strides, H)
    if weight_ptr is not None:
        weight_ptr = vector_of_head(weight_ptr, head, N, PER_HEAD)
    if bias_ptr is not None:
        bias_ptr = vector_of_head(bias_ptr, head, N, PER_HEAD)

    tcolumns, tcolumn_masks = column_tiles(0, N, WIDTH, TILES, STRIPS=1)
    tmasks = tile_masks(rows, tcolumn_masks, M, ROWS)
    tx = ()
    tscale = ()
    for k in tl.static_range(TILES):
        columns = tcolumns[k][None, :]
        tx = tx + (
            load_normalized(
                x_rows, residual_rows, residual_out_ptr, alpha, rows[:, None], N, columns, tmasks[k]
            ),
        )
        tscale = tscale + (load_scale(weight_ptr, offset, tcolumns[k], tcolumn_masks[k], ""),)

    tsquares = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in tl.static_range(TILES):
        tsquares += tx[k] * tx[k]
    trstd = 1 / tl.sqrt_rn(tl.sum(tsquares, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, trstd, mask=rows < M)

    for k in tl.static_range(TILES):
        columns = tcolumns[k][None, :]
        txhat = as_multiplied(tx[k] * trstd[:, None], x_ptr, residual_out_ptr, ROUND_XHAT)
        ty = add_bias(txhat * tscale[k][None, :], bias_ptr, columns, tcolumn_masks[k][None, :])
        tl.store(y_ptr + rows[:, None] * N + columns, ty, mask=tmasks[k])
