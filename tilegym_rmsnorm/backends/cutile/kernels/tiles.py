# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Register tiles, one by one and in tuples: a row of x, or of several rows, is a tuple of tiles side by side.

Kernels hand on what goes together in tuples: `arrays`, NUMBERS, HOW, which are switches, and where the tiles lie. A
function unpacks them in its first lines; they are not the same for all functions.
"""

import cuda.tile as ct

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]
ZERO = ct.PaddingMode.ZERO
AS_COMPILED = (1, 2**16)  # the order of ct.sum: of `order_of` for more threads than a tile has lanes


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


def at_least_zero(index):
    """The index of a tile, which is never negative, in a form that tells the compiler so. Where it cannot tell, it puts
    a branch around every load of a tile, and the loads no longer overlap."""
    return ct.maximum(index, 0)


def opaque_zero():
    """An opaque zero that the compiler cannot fold: it does not know that grids of kernels on rows have one block along
    y."""
    return ct.num_blocks(1) - 1


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


def rounded(tile, dtype, ROUNDS):
    """A float32 tile, of values of `dtype` if ROUNDS."""
    if ROUNDS:
        tile = as_float32(ct.astype(tile, dtype))
    return tile


def zeros(shape, COUNT):
    return tuple(ct.zeros(shape, dtype=ct.float32) for _ in ct.static_iter(range(COUNT)))


def zeros_like(tiles):
    return tuple(ct.zeros(t.shape, dtype=ct.float32) for t in ct.static_iter(tiles))


def added(a, b):
    """a[k] + b[k], for two tuples of tiles."""
    return tuple(a[k] + b[k] for k in ct.static_iter(range(len(a))))


def multiplied(a, b):
    """a[k] * b[k], for two tuples of tiles."""
    return tuple(a[k] * b[k] for k in ct.static_iter(range(len(a))))


def order_of(arrays, DIVISOR, WARPS):
    """How `sum_of_lanes` adds a row that a block of so many warps loads from these arrays: (VECTOR, THREADS). VECTOR
    neighbours are 16 bytes of the widest array, which the compiler holds so or as 16 bytes of another one; and no more
    than DIVISOR."""
    VECTOR = DIVISOR
    for each in ct.static_iter(arrays):
        VECTOR = min(VECTOR, 4 if each.dtype == ct.float32 else 8)
    return VECTOR, 32 * WARPS


def order_of_tiles(arrays, WIDTH, DIVISOR, WARPS):
    """Return ORDER for tiles of several rows, of so many lanes each: (), pair by pair, where a thread holds no more of
    a row than it loads at a time from the first of these arrays."""
    VECTOR, THREADS = order_of(arrays[:1], DIVISOR, WARPS)
    return order_of(arrays, DIVISOR, WARPS) if WIDTH > VECTOR * THREADS else ()


def sum_of_products(a, b, PIECES, ORDER, AXIS=None):
    """Sum a * b over all lanes, or along AXIS, which is the last and stays, for two tuples of tiles: the first PIECES
    are equally wide, and so are the others. ORDER: of `order_of`; or (), pair by pair.

    Equal ones are added lane by lane first: the sum across lanes, which waits for all warps, comes once for them.
    """
    total = sum_of_lanes(products_lane_by_lane(a[:PIECES], b[:PIECES]), ORDER, AXIS)
    if len(a) > PIECES:
        total = total + sum_of_lanes(products_lane_by_lane(a[PIECES:], b[PIECES:]), ORDER, AXIS)
    return total


def sum_of_lanes(tile, ORDER, AXIS=None):
    """Add what a thread holds of a row in one order: neighbours that it loads together, then, two terms at a time, what
    lies half a row apart. ct.sum adds the rest, of which a thread holds one.

    By ct.sum alone the compiler chooses in which order a thread adds: copies of one loop differ in that, and so would a
    row's bits by its place among the others (tests/machine_code/orders.py). Tiles of several rows and backwards of
    teams do so under a level of reproducibility alone: it costs some backwards 3 to 9 % on an H200, and registers.
    `Variant.order` says which variants add alike.
    """
    if len(ORDER) == 0:
        total = sum_of_pairs(tile, AXIS)
    else:
        total = sum_of_neighbours(tile, ORDER, AXIS)
    return total


def sum_of_pairs(tile, AXIS):
    """Lanes 2i and 2i + 1 are added, then their sums so, until one is left."""
    LEAD, WIDTH = tile.shape[:-1], tile.shape[-1]
    if WIDTH > 1:
        total = sum_of_pairs(ct.sum(ct.reshape(tile, LEAD + (WIDTH // 2, 2)), axis=-1), AXIS)
    else:
        total = ct.sum(tile, axis=AXIS, keepdims=AXIS is not None)
    return total


def sum_of_neighbours(tile, ORDER, AXIS):
    VECTOR, THREADS = ORDER
    LEAD, WIDTH = tile.shape[:-1], tile.shape[-1]
    HELD = min(VECTOR, WIDTH // THREADS)
    if WIDTH <= THREADS:
        total = ct.sum(tile, axis=AXIS, keepdims=AXIS is not None)
    elif HELD > 1:
        tneighbours = ct.reshape(tile, LEAD + (WIDTH // HELD, HELD))
        total = sum_of_neighbours(ct.sum(tneighbours, axis=-1), (1, THREADS), AXIS)
    else:
        thalves = ct.reshape(tile, LEAD + (2, WIDTH // 2))
        total = sum_of_neighbours(ct.sum(thalves, axis=-2), (1, THREADS), AXIS)
    return total


def products_lane_by_lane(a, b):
    """The sum of a[k] * b[k], as one tile."""
    tproducts = a[0] * b[0]
    for k in ct.static_iter(range(1, len(a))):
        tproducts = tproducts + a[k] * b[k]
    return tproducts
