# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Derive from M, the number of rows, the size class of a call, and how many blocks share its rows."""

from __future__ import annotations

SIZES = ("few", "small", "large")
FEW_ROWS = 1024
SMALL = 4 * 2**20  # elements of x: 8 MB in bfloat16
FEW_TILES = 8  # row tiles per SM
MOST_SLABS = 4  # per SM
LARGEST_GRID = 2**24 - 1  # blocks in one dimension of a launch, cuda-tile's limit
LARGEST_GRID_Y = 2**16 - 1  # in its second dimension, and its third: CUDA's
# A kernel sees shapes, strides and row numbers as int32; only the offsets of elements are computed in 64 bits.
MOST_ROWS = 2**30
# Where no GPU may decide P: the SMs of an H100 or H200, and what P is a multiple of
FIXED_SMS, DIVISOR_OF_P = 132, 16
NO_END = 2**62  # more rows than any memory holds


def size_class(m: int, n: int) -> str:
    """Return which of SIZES a call is. Each is bound by something else, so variants may differ. M chooses by this only.

    few: bound by launch latency; small: by occupancy; large: by bandwidth.
    """
    if m * n > SMALL:
        return "large"
    return "few" if m <= FEW_ROWS else "small"


def rows_of_class(size: str, n: int) -> range:
    """The numbers of rows M, from 1 on, of which size_class(M, n) is `size`; none if rows of n are too wide for it."""
    most = SMALL // n
    if size == "large":
        return range(most + 1, NO_END)
    return range(1, min(FEW_ROWS, most) + 1) if size == "few" else range(FEW_ROWS + 1, most + 1)


def shortest_walks(tiles: int, blocks: int) -> int:
    """Return as few of `blocks` as leave the longest walk no longer: 1024 tiles for 264 blocks are 4 each for 256."""
    return -(-tiles // -(-tiles // blocks))


def fixed_walks(tiles: int, most: int) -> int:
    """Return how many walks tiles have, such that tiles behind the others change the walk of none: each has one of its
    own until there are `most`. A multiple of what cuda-tile compiles the sum of P rows for."""
    whole = most // DIVISOR_OF_P * DIVISOR_OF_P
    return max(DIVISOR_OF_P, min(-(-tiles // DIVISOR_OF_P) * DIVISOR_OF_P, whole))
