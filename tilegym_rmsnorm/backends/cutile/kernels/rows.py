# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Rows of N elements in memory, and how they become register tiles and back.

A tile's extent is a power of two, a row's length is not. A row is therefore held in one tile, in several equal ones
(7168 = 7 * 1024), or in one and a smaller one (5120 = 4096 + 1024), which wastes fewer lanes. All tiles but the last
lie inside the row; where the last one reaches past column N (EVEN is False) its accesses are bounds-checked and the
lanes past the end read 0, so that sums over the tiles are sums over the row.

A block's `where` is (row, part, tcolumns, EVEN): it holds these columns of the row, part `part` of equal parts.
"""

import cuda.tile as ct

from .tiles import ZERO, as_float32, opaque_zero


def has_aligned_rows(array, DIVISOR):
    """Whether rows whose length is a multiple of DIVISOR elements begin and end at multiples of 16 bytes, if nothing
    lies between them."""
    return DIVISOR >= 8 or DIVISOR == 4 and array.dtype == ct.float32


def with_divisor(arrays, DIVISOR):
    """Return the arrays, or numbers among them, and tell the compiler that the last extent, N, is one of DIVISOR.

    cuda-tile asks of an extent only whether it is a multiple of 16. Of another one it must assume that a row may end
    between any two elements, and loads and stores each alone, although 72 bfloat16 end where 16 bytes end. Arrays whose
    rows do not end there stay as they are. Where rows begin, cuda-tile sees for itself, at strides and base: of a view
    whose rows begin elsewhere it loads each element alone, whatever is declared. Every kernel declares all arrays that
    have N columns.
    """
    return tuple(
        a.slice(-1, 0, ct.assume_divisible_by(a.shape[-1], DIVISOR))
        if DIVISOR < 16 and len(a.shape) > 0 and has_aligned_rows(a, DIVISOR)
        else a
        for a in ct.static_iter(arrays)
    )


def column_tiles(WIDTH, PIECES, REST):
    """Column indices of a row's tiles: PIECES tiles of WIDTH, then one of REST more unless REST is 0."""
    tcolumns = tuple(ct.arange(WIDTH, dtype=ct.int32) + k * WIDTH for k in ct.static_iter(range(PIECES)))
    if REST > 0:
        tcolumns = tcolumns + (ct.arange(REST, dtype=ct.int32) + PIECES * WIDTH,)
    return tcolumns


def column_tiles_of(member, WIDTH, PIECES):
    """Column indices of what a member of a team holds: PIECES tiles of WIDTH, behind those of the members before."""
    first = member * (WIDTH * PIECES)
    tcolumns = column_tiles(WIDTH, PIECES, 0)
    return tuple(t + first for t in ct.static_iter(tcolumns))


def not_hoisted(tcolumns, row):
    """Prevent hoisting, by equal indices: what a loop loads there is loaded again from L1 for each row, to save
    registers.

    The opaque zero is a multiple of the tile's width, so that the compiler still sees 16 bytes that lie together.
    """
    zero = opaque_zero() * row * tcolumns[0].shape[0]
    return tuple(t + zero for t in ct.static_iter(tcolumns))


def rows_of(array):
    """Count the rows of an array: (M, N), or (B, T, H, N)."""
    if array.ndim == 2:
        return array.shape[0]
    return array.shape[0] * array.shape[1] * array.shape[2]


def place_of(array, row):
    """Return the index of row `row`, without its column. Rows of (B, T, H, N) are counted over all of B, T and H."""
    if array.ndim == 2:
        return (row,)
    return (
        row // array.shape[2] // array.shape[1],
        row // array.shape[2] % array.shape[1],
        row % array.shape[2],
    )


def load_row(array, where, LATENCY):
    """The columns of a row, as tiles of the array's dtype."""
    row, _, tcolumns, EVEN = where
    place = place_of(array, row)
    return tuple(
        ct.gather(
            array,
            place + (tcolumns[k],),
            check_bounds=not EVEN and k == len(tcolumns) - 1,
            padding_value=0,
            latency=LATENCY,
        )
        for k in ct.static_iter(range(len(tcolumns)))
    )


def load_part_of_row(array, where, LATENCY):
    """The part of a row by TMA, as equal tiles of the array's dtype; any lanes past the end read 0."""
    row, part, tcolumns, _ = where
    width, pieces = tcolumns[0].shape[0], len(tcolumns)
    return tuple(
        ct.reshape(
            ct.load(
                array,
                (row, part * pieces + k),
                (1, width),
                padding_mode=ZERO,
                latency=LATENCY,
                allow_tma=True,
            ),
            (width,),
        )
        for k in ct.static_iter(range(pieces))
    )


def store_row(array, where, tiles):
    """Writes float32 tiles as these columns of a row, rounded to the array's dtype."""
    row, _, tcolumns, EVEN = where
    place = place_of(array, row)
    for k in ct.static_iter(range(len(tcolumns))):
        ct.scatter(
            array,
            place + (tcolumns[k],),
            ct.astype(tiles[k], array.dtype),
            check_bounds=not EVEN and k == len(tcolumns) - 1,
        )


def store_part_of_row(array, where, tiles):
    """Write equal tiles, rounded, as the part of a row, by TMA."""
    row, part, _, _ = where
    pieces = len(tiles)
    for k in ct.static_iter(range(pieces)):
        tile = ct.reshape(ct.astype(tiles[k], array.dtype), (1, tiles[k].shape[0]))
        ct.store(array, (row, part * pieces + k), tile, allow_tma=True)


def store_sums(store, where, partials, tsums, HAS_DW):
    """Write sums of dw as a partial row, and those of db, which lie behind them, if there is db.

    partials: dw_partial, and () or (db_partial,). store(array, where, tiles) writes such a row.
    """
    dw_partial, db_partial = partials
    COUNT = len(tsums) // (1 + len(db_partial))
    if HAS_DW:
        store(dw_partial, where, tsums[:COUNT])
    if len(db_partial) > 0:
        store(db_partial[0], where, tsums[COUNT:])


def load_tile(array, index, shape, LATENCY, TMA, DIVISOR):
    """A tile of a 2-D array by its index in tiles, as float32; lanes outside the array read 0.

    Where rows do not begin at multiples of 16 bytes, `ct.load` puts a branch around every one or two elements, and
    waits at each; a gather does not. That is decided by N alone. Views whose rows begin elsewhere have the branches
    (1160 bfloat16, 1161 apart, 67 loads and 45 branches in place of 6 and 7 on sm_90), unless host/norm.py copies them.
    """
    if has_aligned_rows(array, DIVISOR):
        tile = as_float32(ct.load(array, index, shape, padding_mode=ZERO, latency=LATENCY, allow_tma=TMA))
    else:
        trows = index[0] * shape[0] + ct.arange(shape[0], dtype=ct.int32)
        tcolumns = index[1] * shape[1] + ct.arange(shape[1], dtype=ct.int32)
        tile = gather_tile(array, trows, tcolumns, False, LATENCY)
    return tile


def load_vector(array, j, WIDTH, TMA, DIVISOR):
    """Tile j of a weight or bias, shape (WIDTH,), as float32; how, `load_tile` says."""
    if has_aligned_rows(array, DIVISOR):
        tile = ct.load(array, (j,), (WIDTH,), padding_mode=ZERO, allow_tma=TMA)
    else:
        tcolumns = j * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        tile = ct.gather(array, tcolumns, check_bounds=True, padding_value=0)
    return as_float32(tile)


def load_optional_tile(arrays, *how):
    """Return (`load_tile` of the array in a tuple,), () without one."""
    return (load_tile(arrays[0], *how),) if len(arrays) > 0 else ()


def store_tile(array, where, tiles):
    """Write the one tile, rounded, as that of a 2-D array. where: its index in tiles, and TMA."""
    index, TMA = where
    ct.store(array, index, ct.astype(tiles[0], array.dtype), allow_tma=TMA)


def gather_tile(array, trows, tcolumns, EVEN, LATENCY):
    """Gather these rows and columns of a 2-D array, as float32. Elements past its end read 0; EVEN: there are none.

    Where EVEN, all rows must be the array's: nothing checks that, and a condition on them would be one on every load. A
    tile that `ct.load` cuts off at the last row has a branch around it, and what is loaded next waits.
    """
    index = (trows[:, None], tcolumns[None, :])
    return as_float32(ct.gather(array, index, check_bounds=not EVEN, padding_value=0, latency=LATENCY))


def load_gradient_tiles(x, dy, rstd, index, shape, LATENCY, TMA, DIVISOR):
    """x and dy at `index`, and rstd as (rows, 1): what the backward needs of a 2-D tile, float32."""
    tx = load_tile(x, index, shape, LATENCY, TMA, DIVISOR)
    tdy = load_tile(dy, index, shape, LATENCY, TMA, DIVISOR)
    return tx, tdy, load_rstd_tile(rstd, index[0], shape[0], TMA)


def gather_gradient_tiles(x, dy, rstd, trows, tcolumns, EVEN, LATENCY):
    """Gather x and dy by `gather_tile`, and rstd as (rows, 1)."""
    tx = gather_tile(x, trows, tcolumns, EVEN, LATENCY)
    tdy = gather_tile(dy, trows, tcolumns, EVEN, LATENCY)
    return tx, tdy, ct.gather(rstd, trows, check_bounds=False, latency=LATENCY)[:, None]


def rstd_ahead(rstd, row):
    """rstd of a row to come, or of the last one if there is none."""
    return ct.load(rstd, ct.minimum(row, rstd.shape[0] - 1), shape=())


def load_rstd_tile(rstd, i, ROWS, TMA):
    """Tile i of rstd, as (ROWS, 1)."""
    return ct.reshape(ct.load(rstd, (i,), (ROWS,), padding_mode=ZERO, allow_tma=TMA), (ROWS, 1))


def store_sum_of_rows(array, index, tile):
    """Adds the rows of a float32 tile, and writes that one row, rounded, as tile `index` of a 2-D array."""
    ct.store(array, index, ct.astype(ct.sum(tile, axis=0, keepdims=True), array.dtype), allow_tma=False)
