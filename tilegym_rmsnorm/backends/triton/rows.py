# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the Triton kernels share: how rows become tiles and back.

Whole rows are held as TILES tiles of (ROWS, WIDTH) elements, masked only where they pass row M or column N. Row indices
are int64, since M * N may exceed 2^31; N is below 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def aligned(row_stride, ALIGN: tl.constexpr):
    # Changes no value. Strides are not specialised on, lest a batch size of other strides compile anew, and without
    # this the compiler would take a row to start anywhere and load its elements one by one.
    return row_stride // ALIGN * ALIGN


@triton.jit
def tile_pointers(ptr, rows, row_stride, columns):
    return ptr + (rows * row_stride)[:, None] + columns[None, :]


@triton.jit
def column_mask(columns, END: tl.constexpr, N: tl.constexpr):
    # END: no column of the tile reaches it. A constant mask folds away, a comparison with N need not.
    if END <= N:
        return tl.full(columns.shape, 1, tl.int1)
    else:
        return columns < N


@triton.jit
def tile_mask(rows, tcolumn_mask, M, ROWS: tl.constexpr):
    # A tile of one row is only visited if that row exists.
    if ROWS == 1:
        return tcolumn_mask[None, :]
    else:
        return (rows < M)[:, None] & tcolumn_mask[None, :]


@triton.jit
def load_columns(row_ptr, columns, tmask, EVICTION: tl.constexpr):
    return tl.load(row_ptr + columns, mask=tmask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def load_scale(weight_ptr, offset, columns, tmask, EVICTION: tl.constexpr):
    """weight + offset in float32, 1 without a weight."""
    if weight_ptr is None:
        return tl.full(columns.shape, 1.0, tl.float32)
    else:
        return load_columns(weight_ptr, columns, tmask, EVICTION) + offset


@triton.jit
def as_multiplied(txhat, x_ptr, ROUND_XHAT: tl.constexpr):
    """xhat as it meets the weight in y, and dy in dw."""
    if ROUND_XHAT:
        return txhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    else:
        return txhat
