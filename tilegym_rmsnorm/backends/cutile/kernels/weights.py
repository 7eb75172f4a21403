# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Load weight and bias, with x or only once x is reduced (forward.py), and add the offset to the weight."""

import cuda.tile as ct

from .rows import load_vector
from .tiles import as_float32, opaque_zero, words_of


def weight_tile(weight, tcolumns, k, EVEN):
    """Tile k of the weight of a row, in its dtype; lanes past N hold 0."""
    is_bounded = not EVEN and k == len(tcolumns) - 1
    return ct.gather(weight, tcolumns[k], check_bounds=is_bounded, padding_value=0)


def load_weight(weight, where):
    """The weight or bias of a row's columns, as tiles of its dtype."""
    _, _, tcolumns, EVEN = where
    return tuple(weight_tile(weight, tcolumns, k, EVEN) for k in ct.static_iter(range(len(tcolumns))))


def scale_of(tweight, offset):
    """weight + offset, as float32 tiles; lanes past N hold `offset`, and meet only zeros."""
    return tuple(as_float32(t) + offset for t in ct.static_iter(tweight))


def shifted(tile, offset):
    """A tile plus the number in a tuple; of () the tile as it is."""
    return tile + offset[0] if len(offset) > 0 else tile


def load_scale(weights, where, offset):
    """weight + offset of a row, as float32 tiles, or () of no weight. Each is loaded, then widened: the compiler keeps
    to that order, and another gives other machine code."""
    _, _, tcolumns, EVEN = where
    tscale = ()
    if len(weights) > 0:
        tscale = tuple(
            as_float32(weight_tile(weights[0], tcolumns, k, EVEN)) + offset
            for k in ct.static_iter(range(len(tcolumns)))
        )
    return tscale


def joint_load(tiles, others, ALIGNED):
    """Give tiles a fake dependency on the others: the compiler cannot sink the loads of the others below a reduction of
    the tiles.

    tiles, others: 1-D, of one dtype. ALIGNED: 16 bytes are loaded at once, so two elements of 16 bits lie in one
    register and are combined as one word; else that would take more instructions than one at a time.
    """
    zero = opaque_zero()
    return tuple(joint_tile(tiles[k], others[k], zero, ALIGNED) for k in ct.static_iter(range(len(tiles))))


def joint_tile(tile, other, zero, ALIGNED):
    """One tile of `joint_load`: its bits, XOR the other's bits AND an opaque zero."""
    if ALIGNED:
        tbits = words_of(tile) ^ (words_of(other) & zero)
        return ct.unpack_from_bytes(ct.pack_to_bytes(tbits), tile.dtype)
    tbits = bits_of(tile)
    return ct.bitcast(tbits ^ (bits_of(other) & ct.astype(zero, tbits.dtype)), tile.dtype)


def bits_of(tile):
    """The bits of each element of a tile as an integer."""
    return ct.bitcast(tile, ct.int32 if tile.dtype == ct.float32 else ct.int16)


def load_vector_tile(array, j, WIDTH, TMA, DIVISOR):
    """Tile j of a weight or bias, shape (1, WIDTH), as float32."""
    return ct.reshape(load_vector(array, j, WIDTH, TMA, DIVISOR), (1, WIDTH))


def load_scale_tile(weight, j, WIDTH, offset, TMA, DIVISOR):
    """Tile j of weight + offset, shape (1, WIDTH), as float32."""
    return load_vector_tile(weight, j, WIDTH, TMA, DIVISOR) + offset


def gather_columns(array, ROWS, tcolumns, EVEN):
    """Gather columns of a weight or bias, as float32 (ROWS, columns), once a row: each thread loads what it multiplies.

    Loaded once, as (1, columns), the tile goes through shared memory to where it is needed, behind a barrier. A weight
    of another dtype than x does so anyhow, and its loads would sink below the sum.
    """
    index = ct.broadcast_to(tcolumns[None, :], (ROWS, tcolumns.shape[0]))
    return as_float32(ct.gather(array, index, check_bounds=not EVEN, padding_value=0))
