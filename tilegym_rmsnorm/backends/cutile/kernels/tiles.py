# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Tile functions shared by the forward and backward kernels: how a row of N elements becomes register tiles and back.

A tile's extent is a power of two, a row's length is not. A row is therefore held in one tile, in several equal ones
(7168 = 7 * 1024), or in one and a smaller one (5120 = 4096 + 1024), which wastes fewer lanes. All tiles but the last
lie inside the row; where the last one reaches past column N (EVEN is False) its accesses are bounds-checked and the
lanes past the end read 0, so that sums over the tiles are sums over the row.

Kernels hand on what goes together in tuples: `arrays`, and HOW, which are switches. A function unpacks them in its
first lines; they are not the same for all functions.
"""

import cuda.tile as ct

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO


def as_float32(tile):
    return ct.astype(tile, ct.float32)


def paired_as_float32(tile):
    """Widen a 1-D tile to float32, bfloat16 two at a time: a shift and a mask make two of 32 bits.

    By astype the second of two takes two instructions, and is kept in 32 bits rather than made again.
    """
    if tile.dtype != ct.bfloat16:
        return as_float32(tile)
    tpairs = words_of(tile)
    tfirst = ct.bitcast(tpairs << 16, ct.float32)
    tsecond = ct.bitcast(tpairs & -0x10000, ct.float32)
    return ct.reshape(ct.cat((tfirst[:, None], tsecond[:, None]), 1), tile.shape)


def words_of(tile):
    """The bits of a 1-D tile as int32, of two elements of 16 bits together: one at a time takes more instructions."""
    return ct.unpack_from_bytes(ct.pack_to_bytes(tile), ct.int32)


def has_aligned_rows(array, DIVISOR):
    """Whether rows whose length is a multiple of DIVISOR elements begin and end at multiples of 16 bytes, if nothing
    lies between them."""
    return DIVISOR >= 8 or DIVISOR == 4 and array.dtype == ct.float32


def with_divisor(arrays, DIVISOR):
    """Return the arrays, and tell the compiler that N, their last extent, is a multiple of DIVISOR.

    cuda-tile asks of an extent only whether it is a multiple of 16. Of another one it must assume that a row may end
    between any two elements, and loads and stores each alone, although 72 bfloat16 end where 16 bytes end. Arrays whose
    rows do not end there stay as they are. Where rows begin, cuda-tile sees for itself, at strides and base: of a view
    whose rows begin elsewhere it loads each element alone, whatever is declared. Every kernel declares all arrays that
    have N columns.
    """
    return tuple(
        a.slice(-1, 0, ct.assume_divisible_by(a.shape[-1], DIVISOR))
        if DIVISOR < 16 and has_aligned_rows(a, DIVISOR)
        else a
        for a in ct.static_iter(arrays)
    )


def at_least_zero(index):
    """The index of a tile, which is never negative, in a form that tells the compiler so. Where it cannot tell, it puts
    a branch around every load of a tile, and the loads no longer overlap."""
    return ct.maximum(index, 0)


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


def opaque_zero():
    """An opaque zero that the compiler cannot fold: it does not know that grids of kernels on rows have one block along
    y."""
    return ct.num_blocks(1) - 1


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


def load_row(array, row, tcolumns, EVEN, LATENCY):
    """Row `row` of an array, as tiles of its dtype."""
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


def load_part_of_row(array, row, part, tcolumns, LATENCY):
    """Load part `part` of a row by TMA, as equal tiles of its dtype; any lanes past the end read 0."""
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


def row_as_float32(tiles):
    return tuple(as_float32(t) for t in ct.static_iter(tiles))


def paired_row_as_float32(tiles):
    return tuple(paired_as_float32(t) for t in ct.static_iter(tiles))


def packed_row_as_float32(tiles):
    """16-bit tiles as float32 once more, after a reduction that needed them as float32 already.

    An opaque zero keeps the compiler from reusing the first conversion, whose float32 would take twice the registers
    all through the reduction.
    """
    zero = ct.astype(opaque_zero(), ct.int16)
    return tuple(
        as_float32(ct.bitcast(ct.bitcast(t, ct.int16) ^ zero, t.dtype)) for t in ct.static_iter(tiles)
    )


def zero_row(tcolumns):
    return tuple(ct.zeros(t.shape, dtype=ct.float32) for t in ct.static_iter(tcolumns))


def added(a, b):
    """a[k] + b[k], for two tuples of tiles."""
    return tuple(a[k] + b[k] for k in ct.static_iter(range(len(a))))


def multiplied(a, b):
    """a[k] * b[k], for two tuples of tiles."""
    return tuple(a[k] * b[k] for k in ct.static_iter(range(len(a))))


def store_row(array, row, tcolumns, tiles, EVEN):
    """Writes float32 tiles as row `row` of an array, rounded to its dtype."""
    place = place_of(array, row)
    for k in ct.static_iter(range(len(tcolumns))):
        ct.scatter(
            array,
            place + (tcolumns[k],),
            ct.astype(tiles[k], array.dtype),
            check_bounds=not EVEN and k == len(tcolumns) - 1,
        )


def store_part_of_row(array, row, part, tiles):
    """Write equal tiles, rounded, as part `part` of a row, by TMA."""
    pieces = len(tiles)
    for k in ct.static_iter(range(pieces)):
        tile = ct.reshape(ct.astype(tiles[k], array.dtype), (1, tiles[k].shape[0]))
        ct.store(array, (row, part * pieces + k), tile, allow_tma=True)


def load_tile(array, index, shape, LATENCY, TMA, DIVISOR):
    """A tile of a 2-D array by its index in tiles, as float32; lanes outside the array read 0.

    Where rows do not begin at multiples of 16 bytes, `ct.load` puts a branch around every one or two elements, and
    waits at each; a gather does not. That is decided by N alone. Views whose rows begin elsewhere have the branches
    (1160 bfloat16, 1161 apart, 67 loads and 45 branches in place of 6 and 7 on sm_90), unless launcher.py copies them.
    """
    if has_aligned_rows(array, DIVISOR):
        tile = as_float32(ct.load(array, index, shape, padding_mode=ZERO, latency=LATENCY, allow_tma=TMA))
    else:
        trows = index[0] * shape[0] + ct.arange(shape[0], dtype=ct.int32)
        tcolumns = index[1] * shape[1] + ct.arange(shape[1], dtype=ct.int32)
        tile = gather_tile(array, trows, tcolumns, False, LATENCY)
    return tile


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


def products_lane_by_lane(a, b, PIECES):
    """The sum of a[k] * b[k] over the first PIECES tiles, as one tile."""
    tproducts = a[0] * b[0]
    for k in ct.static_iter(range(1, PIECES)):
        tproducts = tproducts + a[k] * b[k]
    return tproducts


def sum_of_products(a, b, PIECES):
    """Sum over all lanes of a * b, for two tuples of tiles of which the first PIECES are equally wide.

    Those are added lane by lane first: the sum across lanes, which waits for all warps, comes once for them.
    """
    total = ct.sum(products_lane_by_lane(a, b, PIECES))
    for k in ct.static_iter(range(PIECES, len(a))):
        total = total + ct.sum(a[k] * b[k])
    return total


def factor_of_x(tc, trstd):
    """Return the factor of x in dx = x * factor + g: -c * rstd^2. The compiler fuses this, but not `g - x * c`."""
    return -(tc * trstd) * trstd


def terms_of_dw(tx, tdy, th, trstd, dtype, ROUND_XHAT):
    """dy * xhat, as h * x (backward.py): added to a sum it is one instruction an element. Under casting="llama" xhat
    is rounded to x's dtype, as the forward did."""
    tterms = th * tx  # an early return would keep the compiler from fusing it
    if ROUND_XHAT:
        tterms = tdy * rounded(tx * trstd, dtype, True)
    return tterms


def row_of_terms_of_dw(tx, tdy, th, trstd, dtype, ROUND_XHAT):
    return tuple(
        terms_of_dw(tx[k], tdy[k], th[k], trstd, dtype, ROUND_XHAT) for k in ct.static_iter(range(len(tx)))
    )


def rounded(tile, dtype, ROUNDS):
    """A float32 tile, of values of `dtype` if ROUNDS: xhat as it meets the weight under casting="llama"."""
    if ROUNDS:
        tile = as_float32(ct.astype(tile, dtype))
    return tile
