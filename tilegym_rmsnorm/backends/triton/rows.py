# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Helpers of all Triton kernels: where rows lie, and how they become tiles and back.

Whole rows are held as tiles of (rows, width) elements, masked only where they pass row M or column N. Row indices are
int64, since M * N may exceed 2^31; N is below 2^31. FORM and TILE are Form and Tile (config.py).

Rows are numbered in the order of a contiguous array. Those of an array (M, N) are evenly spaced, a row stride apart.
Those of (B, T, H, N), where H is not None, have a stride for each dimension, of which the row stride is the last: row
(b * T + t) * H + h lies at (b, t, h). A place is this triple, or three times the row's number where H is None.

An absent array is None, and kernels ask for it themselves: Triton 3.6 compiles no function that returns None.

FORM.is_per_head: weight and bias are (H, N). Then a program keeps to the rows of one head, and its weight is a vector
again.
"""

import triton
import triton.language as tl

DIMENSIONS = ("batch", "token", "row")  # of (B, T, H, N), which a row counts through; (M, N) has the last


def stride_names(*arrays: str) -> list[str]:
    """The arguments of a kernel that say where the rows of these arrays lie."""
    return [f"{array}_{dimension}_stride" for array in arrays for dimension in DIMENSIONS]


def kernel_name(specialization) -> str:
    """Return KERNEL, so that profilers show the function that runs."""
    return specialization.constants["KERNEL"]


@triton.jit
def aligned(batch_stride, token_stride, row_stride, ALIGN: tl.constexpr):
    """The strides of an array, of which only the last counts where the others are None. Of no array they are 0."""
    # Changes no value. Strides are not specialised on, lest a batch size of other strides compile anew, and without
    # this the compiler would take a row to start anywhere and load its elements one by one.
    if row_stride is None:
        return 0, 0, 0
    elif batch_stride is None:
        return 0, 0, row_stride // ALIGN * ALIGN
    else:
        return batch_stride // ALIGN * ALIGN, token_stride // ALIGN * ALIGN, row_stride // ALIGN * ALIGN


@triton.jit
def split_program(program, H, FORM: tl.constexpr):
    """The program's number among those of its head, and its head. Neighbours take the heads of the same tokens."""
    if FORM.is_per_head:
        return program // H, program % H
    else:
        return program, 0


@triton.jit
def count_of_head(count, H, FORM: tl.constexpr):
    """Count the rows or programs of one head."""
    if FORM.is_per_head:
        return count // H
    else:
        return count


@triton.jit
def rows_of_head(numbers, head, H, FORM: tl.constexpr):
    """The rows that have these numbers among those of a head."""
    if FORM.is_per_head:
        return numbers * H + head
    else:
        return numbers


@triton.jit
def vector_of_head(ptr, head, FORM: tl.constexpr):
    """Point to the head's weight or bias."""
    if FORM.is_per_head:
        return ptr + head * FORM.N
    else:
        return ptr


@triton.jit
def places_of(rows, M, T, H):
    if H is None:
        return rows, rows, rows
    elif M.dtype == tl.int32:  # a division of 64 bits takes several times the instructions
        numbers = rows.to(tl.uint32)
        tokens = numbers // H.to(tl.uint32)
        return tokens // T.to(tl.uint32), tokens % T.to(tl.uint32), numbers % H.to(tl.uint32)
    else:
        tokens = rows // H
        return tokens // T, tokens % T, rows % H


@triton.jit
def row_pointers(array, places, H):
    """Point to the rows of an array, its pointer and strides, at these places."""
    ptr, strides = array
    if H is None:
        return ptr + places[2] * strides[2]
    else:
        offsets = places[0].to(tl.int64) * strides[0] + places[1].to(tl.int64) * strides[1]
        return ptr + (offsets + places[2].to(tl.int64) * strides[2])


@triton.jit
def column_mask(columns, END: tl.constexpr, N: tl.constexpr):
    # END: no column of the tile reaches it. A constant mask folds away, a comparison with N need not.
    if END <= N:
        return tl.full(columns.shape, 1, tl.int1)
    else:
        return columns < N


@triton.jit
def column_tiles(strip, N: tl.constexpr, TILE: tl.constexpr):
    """The columns of tiles side by side, from column strip * width on, and which of these columns exist."""
    TILES: tl.constexpr = TILE.tiles
    tcolumns = ()
    tmasks = ()
    for k in tl.static_range(TILES):
        tcolumns = tcolumns + (strip * TILE.width + k * TILE.width + tl.arange(0, TILE.width),)
        # As if this were the last strip: which one it is, the compiler does not know.
        tmasks = tmasks + (column_mask(tcolumns[k], (TILE.strips + k) * TILE.width, N),)
    return tcolumns, tmasks


@triton.jit
def tile_masks(rows, tcolumn_masks, M, TILE: tl.constexpr):
    tmasks = ()
    for k in tl.static_range(len(tcolumn_masks)):
        # A tile of one row is only visited if that row exists.
        if TILE.rows == 1:
            tmasks = tmasks + (tcolumn_masks[k][None, :],)
        else:
            tmasks = tmasks + ((rows < M)[:, None] & tcolumn_masks[k][None, :],)
    return tmasks


@triton.jit
def load_columns(row_ptr, columns, tmask, EVICTION: tl.constexpr = None):
    return tl.load(row_ptr + columns, mask=tmask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def load_scale(scale, columns, tmask, EVICTION: tl.constexpr = None):
    """weight + offset in float32, 1 without a weight."""
    weight_ptr, offset = scale
    if weight_ptr is None:
        return tl.full(columns.shape, 1.0, tl.float32)
    else:
        return load_columns(weight_ptr, columns, tmask, EVICTION) + offset


@triton.jit
def rstd_of(tmean, eps):
    """1 / sqrt(mean + eps). sqrt_rn takes up to eight registers a thread more than rsqrt, and so a program of an SM."""
    tsum = tmean + eps
    # rsqrt takes a subnormal number for 0: below 1.2e-38
    tis_tiny = tsum < 1e-30
    trstd = tl.rsqrt(tl.where(tis_tiny, tsum * 2.0**80, tsum))
    return tl.where(tis_tiny, trstd * 2.0**40, trstd)


@triton.jit
def rounded(tile, ptr, ROUNDS: tl.constexpr):
    """Round to the dtype of an array, where ROUNDS says so."""
    if ROUNDS:
        return tile.to(ptr.dtype.element_ty).to(tl.float32)
    else:
        return tile
