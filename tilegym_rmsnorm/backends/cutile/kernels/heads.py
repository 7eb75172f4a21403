# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Tiles of arrays of rows, (M, N) or heads (B, T, H, N), each array with its own strides and read where it lies.

SHAPE is (ROWS, HEADS, WIDTH). Of (M, N) a tile has ROWS rows, and HEADS is 0. Of (B, T, H, N) it has HEADS heads of
ROWS steps along T. Its `place` counts in tiles: (i,) or (b, t, h). Once loaded, a tile is (rows, WIDTH) whichever the
array is: the computation takes heads as rows. Elements past the array read 0, and are not written.

Tiles of heads are numbered along H first, then T, then B. So a block whose steps are multiples of the tiles along H
stays at its heads: that is how a backward with per-head weights sums dw.
"""

import cuda.tile as ct

from .rows import has_aligned_rows, load_rstd_tile, load_tile, load_vector, store_sum_of_rows
from .tiles import ZERO, as_float32


def rows_in(SHAPE):
    ROWS, HEADS, _ = SHAPE
    return ROWS if HEADS == 0 else ROWS * HEADS


def tiles_along_heads(array, SHAPE):
    return ct.cdiv(array.shape[2], SHAPE[1])


def count_tiles(array, SHAPE):
    ROWS, HEADS, _ = SHAPE
    if HEADS == 0:
        count = ct.cdiv(array.shape[0], ROWS)
    else:
        count = array.shape[0] * ct.cdiv(array.shape[1], ROWS) * tiles_along_heads(array, SHAPE)
    return count


def place_of_tile(array, i, SHAPE):
    """The place of tile i. (With an early return the compiler keeps fewer loads of a loop in flight.)"""
    ROWS, HEADS, _ = SHAPE
    place = (i,)
    if HEADS > 0:
        heads, steps = tiles_along_heads(array, SHAPE), ct.cdiv(array.shape[1], ROWS)
        place = (i // heads // steps, i // heads % steps, i % heads)
    return place


def sum_of_indices(place):
    """A number that a block has only once it has all indices of its place, and no more than there are tiles."""
    index = place[0]
    for k in ct.static_iter(range(1, len(place))):
        index = index + place[k]
    return index


def indices(k, EXTENT):
    """The indices of tile k along a dimension."""
    return k * EXTENT + ct.arange(EXTENT, dtype=ct.int32)


def indices_of_heads(place, SHAPE):
    """The indices along T and along H of a tile's rows, as (ROWS, 1) and (1, HEADS)."""
    ROWS, HEADS, _ = SHAPE
    tsteps, theads = indices(place[1], ROWS), indices(place[2], HEADS)
    return tsteps[:, None], theads[None, :]


def load_tile_at(array, place, k, SHAPE, HOW):
    """Tile k along the row of the tiles at `place`, as float32; how, `load_tile` says."""
    ROWS, HEADS, WIDTH = SHAPE
    LATENCY, TMA, DIVISOR = HOW
    if HEADS == 0:
        tile = load_tile(array, (place[0], k), (ROWS, WIDTH), LATENCY, TMA, DIVISOR)
    elif has_aligned_rows(array, DIVISOR):
        index, extents = place + (k,), (1, ROWS, HEADS, WIDTH)
        tile = ct.load(array, index, extents, padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)
        tile = as_float32(ct.reshape(tile, (ROWS * HEADS, WIDTH)))
    else:
        tsteps, theads = indices_of_heads(place, SHAPE)
        tcolumns = indices(k, WIDTH)
        index = (place[0], tsteps[:, :, None], theads[:, :, None], tcolumns[None, None, :])
        tile = ct.gather(array, index, padding_value=0, latency=LATENCY)
        tile = as_float32(ct.reshape(tile, (ROWS * HEADS, WIDTH)))
    return tile


def load_tiles_at(array, place, SHAPE, PIECES, HOW):
    """The first PIECES tiles along the row there."""
    return tuple(load_tile_at(array, place, k, SHAPE, HOW) for k in ct.static_iter(range(PIECES)))


def load_optional_at(arrays, place, SHAPE, PIECES, HOW):
    """Return `load_tiles_at` of the array in a tuple, () without one."""
    tiles = ()
    if len(arrays) > 0:
        tiles = load_tiles_at(arrays[0], place, SHAPE, PIECES, HOW)
    return tiles


def store_tiles_at(array, where, tiles):
    """Write float32 tiles along the row at a place, from tile FIRST on, rounded to the array's dtype. where: (place,
    FIRST, SHAPE, TMA)."""
    place, FIRST, (ROWS, HEADS, WIDTH), TMA = where
    for k in ct.static_iter(range(len(tiles))):
        tile = ct.astype(tiles[k], array.dtype)
        if HEADS > 0:
            tile = ct.reshape(tile, (1, ROWS, HEADS, WIDTH))
        ct.store(array, place + (FIRST + k,), tile, allow_tma=TMA)


def row_numbers(array, place, SHAPE):
    """Number the rows of a tile of heads over all of B, T and H, and tell which exist, both as (ROWS, HEADS)."""
    tsteps, theads = indices_of_heads(place, SHAPE)
    _, steps, heads, _ = array.shape
    return (place[0] * steps + tsteps) * heads + theads, (tsteps < steps) & (theads < heads)


def load_rstd_at(rstd, x, place, SHAPE, TMA):
    """rstd, (M,), of the rows of a tile of x, as (rows, 1)."""
    if SHAPE[1] == 0:
        trstd = load_rstd_tile(rstd, place[0], SHAPE[0], TMA)
    else:
        trows, tinside = row_numbers(x, place, SHAPE)
        trstd = ct.gather(rstd, trows, mask=tinside, padding_value=0, check_bounds=False)
        trstd = ct.reshape(trstd, (rows_in(SHAPE), 1))
    return trstd


def store_rstd_at(rstd, x, place, trstd, SHAPE):
    """Writes (rows, 1) as rstd of the rows of a tile of x."""
    if SHAPE[1] == 0:
        ct.store(rstd, place, ct.reshape(trstd, (SHAPE[0],)), allow_tma=False)
    else:
        trows, tinside = row_numbers(x, place, SHAPE)
        ct.scatter(rstd, trows, ct.reshape(trstd, trows.shape), mask=tinside, check_bounds=False)


def load_columns_at(arrays, place, SHAPE, PIECES, HOW, PER_HEAD):
    """The weight or bias in a tuple, as float32 tiles; () of (). Of (N,) a tile is (WIDTH,); of (H, N), PER_HEAD,
    that of the heads there, (HEADS, WIDTH)."""
    _, HEADS, WIDTH = SHAPE
    _, TMA, DIVISOR = HOW
    tiles = ()
    if len(arrays) > 0 and PER_HEAD:
        tiles = tuple(
            load_tile(arrays[0], (place[2], k), (HEADS, WIDTH), 1, TMA, DIVISOR)
            for k in ct.static_iter(range(PIECES))
        )
    elif len(arrays) > 0:
        tiles = tuple(load_vector(arrays[0], k, WIDTH, TMA, DIVISOR) for k in ct.static_iter(range(PIECES)))
    return tiles


def as_one_row(tile):
    """A tile (WIDTH,) as (1, WIDTH); others as they are."""
    if len(tile.shape) == 1:
        tile = ct.reshape(tile, (1, tile.shape[0]))
    return tile


def beside_rows(tiles, SHAPE, PER_HEAD):
    """Such tiles, so that they broadcast to tiles of rows: those of heads once a step along T."""
    ROWS, HEADS, WIDTH = SHAPE
    if PER_HEAD:
        tiles = tuple(
            ct.reshape(ct.broadcast_to(t[None, :, :], (ROWS, HEADS, WIDTH)), (ROWS * HEADS, WIDTH))
            for t in ct.static_iter(tiles)
        )
    else:  # not before: an offset is added to a tile as it is loaded, or the compiler makes other machine code
        tiles = tuple(as_one_row(t) for t in ct.static_iter(tiles))
    return tiles


def store_partials_at(partial, where, ttotals):
    """Writes the sum of a block's rows of dy * xhat, or of dy, as its row of partial sums: row b of (P, N) for block b.
    PER_HEAD: of (P, H * N) the heads at its place, in row b // (tiles along H). where: (x, place, SHAPE, PER_HEAD)."""
    x, place, SHAPE, PER_HEAD = where
    ROWS, HEADS, WIDTH = SHAPE
    for k in ct.static_iter(range(len(ttotals))):
        if PER_HEAD:
            tsum = ct.sum(ct.reshape(ttotals[k], (ROWS, HEADS, WIDTH)), axis=0)
            theads = (place[2] * HEADS + ct.arange(HEADS, dtype=ct.int32))[:, None]
            tcolumns = (k * WIDTH + ct.arange(WIDTH, dtype=ct.int32))[None, :]
            _, _, heads, n = x.shape
            tinside = (theads < heads) & (tcolumns < n)
            index = (ct.bid(0) // tiles_along_heads(x, SHAPE), theads * n + tcolumns)
            ct.scatter(partial, index, ct.astype(tsum, partial.dtype), mask=tinside, check_bounds=False)
        else:
            store_sum_of_rows(partial, (ct.bid(0), k), ttotals[k])
