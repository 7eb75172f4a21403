# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward of RMSNorm in Triton. Per row of x, in float32:

    rstd = 1 / sqrt(mean(x^2) + eps)      xhat = x * rstd      y = xhat * (weight + offset), or xhat without a weight

x (M, N) has any row stride; weight (N,), y (M, N) and rstd (M,) float32 are contiguous; weight_ptr may be None.
ROUND_XHAT (casting="llama") rounds xhat to x's dtype before it meets the weight. ALIGN divides the row stride of x.
rstd by sqrt_rn: `tl.rsqrt` takes a subnormal mean + eps (below 1.2e-38) for 0.

    forward_rows      ROWS whole rows per program, x read once
    forward_reread    one row, wider than registers hold: summed chunk by chunk, then read again (from L2, mostly)
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


@triton.jit(do_not_specialize=["M", "x_row_stride"])
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid: (cdiv(M, ROWS),)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_row_stride = aligned(x_row_stride, ALIGN)

    tx = ()
    tscale = ()
    for k in tl.static_range(TILES):
        columns = k * WIDTH + tl.arange(0, WIDTH)
        tcolumn_mask = column_mask(columns, (k + 1) * WIDTH, N)
        tmask = tile_mask(rows, tcolumn_mask, M, ROWS)
        tx = tx + (
            tl.load(tile_pointers(x_ptr, rows, x_row_stride, columns), mask=tmask, other=0.0).to(tl.float32),
        )
        tscale = tscale + (load_scale(weight_ptr, offset, columns, tcolumn_mask, ""),)

    tsquares = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in tl.static_range(TILES):
        tsquares += tx[k] * tx[k]
    trstd = 1 / tl.sqrt_rn(tl.sum(tsquares, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, trstd, mask=rows < M)

    for k in tl.static_range(TILES):
        columns = k * WIDTH + tl.arange(0, WIDTH)
        tmask = tile_mask(rows, column_mask(columns, (k + 1) * WIDTH, N), M, ROWS)
        ty = as_multiplied(tx[k] * trstd[:, None], x_ptr, ROUND_XHAT) * tscale[k][None, :]
        tl.store(tile_pointers(y_ptr, rows, N, columns), ty, mask=tmask)


@triton.jit(do_not_specialize=["x_row_stride"])
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
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid: (M,)."""
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * aligned(x_row_stride, ALIGN)

    tsquares = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tx = load_columns(x_row_ptr, columns, column_mask(columns, CHUNKS * WIDTH, N), "")
        tsquares += tx * tx

    rstd = 1 / tl.sqrt_rn(tl.sum(tsquares) / N + eps)
    tl.store(rstd_ptr + row, rstd)

    for chunk in range(CHUNKS):
        columns = chunk * WIDTH + tl.arange(0, WIDTH)
        tmask = column_mask(columns, CHUNKS * WIDTH, N)
        tx = load_columns(x_row_ptr, columns, tmask, "")
        tscale = load_scale(weight_ptr, offset, columns, tmask, "")
        tl.store(y_ptr + row * N + columns, as_multiplied(tx * rstd, x_ptr, ROUND_XHAT) * tscale, mask=tmask)
