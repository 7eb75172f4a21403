# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""RMSNorm and rotary embedding of the heads of q and k (B, T, H, D) in cuTile, both in one launch.

For each head x with weight w, and c, s of its position, in float32; y = n behind the R rotated elements:

    rstd = 1 / sqrt(mean_j x_j^2 + eps)        n = x * rstd * (w + offset)
    y_i = n_i c_i - n_j s_i        y_j = n_j c_j + n_i s_j        for each pair (i, j)

The pairs are (i, i + R / 2), or INTERLEAVED (2i, 2i + 1). The backward reads x and dy, and computes rstd again:

    dn_i = dy_i c_i + dy_j s_j        dn_j = dy_j c_j - dy_i s_i

With dn in the place of dy the rest is the backward of RMSNorm, and its partial rows of dw are summed as there
(backward.py). ROUND_XHAT is casting="llama". ROUND_N is rounding="norm" or "each": n is rounded to x's dtype.
ROUND_EACH is "each": so are both products and their sum.

The grid of either pass is q_blocks that walk the tiles of q, then those that walk the tiles of k. With weights of heads
either number is a multiple of the tiles along H, so that a block stays at its heads. A block loads the weight once. It
loads cos and sin once for all heads of a tile, and they stay (1, ROWS, 1, WIDTH) until they meet x: tiles made as large
as x's before that would go through shared memory.

`load_pairs` takes each array apart in the same way, and `store_pairs` joins it: PIECES tiles of WIDTH columns have the
first elements of HALF pairs, as many the second ones, and RESTS tiles of REST columns what is not rotated. So the
mathematics does not know how pairs lie. All but the last tile of each lie inside it, lanes past its end read 0.

    SHAPE = (ROWS, HEADS, WIDTH)        a tile is (1, ROWS, HEADS, WIDTH): HEADS heads of ROWS steps along T (heads.py)
    PAIRS = (HALF, PIECES, REST, RESTS, N, INTERLEAVED)        N: columns of the array
    HOW = (LATENCY, TMA, DIVISOR)        how tiles of x and dy are loaded
    TABLES = (cos, sin, positions, rows_of_batch)

Row t of cos and sin is that of step t, or with rows_of_batch = T row b * T + t, or the row that `positions` names. A
position outside of them reads row 0 instead, and has rows of NaN.
"""

import cuda.tile as ct

from .formula import factor_of_x, gradient, h_and_g, rstd_of, scaled, terms_of_dw, xhat_of
from .heads import count_tiles, indices, indices_of_heads, row_numbers, tiles_along_heads
from .pdl import wait_and_signal
from .rows import has_aligned_rows
from .tiles import AS_COMPILED, ZERO, ConstBool, ConstInt, added, as_float32, rounded, sum_of_products, zeros
from .weights import scale_of


def place_by_steps(array, i, SHAPE):
    """The place of tile i: along H first, then B, then T, so that sequences read the rows of cos and sin that they
    share at about the same time. (heads.py goes along T before B.)"""
    heads, batches = tiles_along_heads(array, SHAPE), array.shape[0]
    return (i // heads % batches, i // heads // batches, i % heads)


def load_pairs(load, array, place, SHAPE, PAIRS, HOW):
    """An array's tiles as pairs, float32: first elements, second elements, then those behind. Its columns are loaded by
    load(columns, place, k, SHAPE with the width, HOW), tile k of them."""
    HALF, PIECES, REST, RESTS, N, INTERLEAVED = PAIRS
    ROWS, HEADS, WIDTH = SHAPE
    if INTERLEAVED:
        of_pairs, tfirst, tsecond = array.slice(-1, 0, 2 * HALF), (), ()
        for k in ct.static_iter(range(PIECES)):
            tboth = split_pairs(load(of_pairs, place, k, (ROWS, HEADS, 2 * WIDTH), HOW))
            tfirst, tsecond = tfirst + tboth[:1], tsecond + tboth[1:]
        tiles = tfirst + tsecond
    else:
        tiles = load_float32(load, array.slice(-1, 0, HALF), place, PIECES, SHAPE, HOW)
        tiles = tiles + load_float32(load, array.slice(-1, HALF, 2 * HALF), place, PIECES, SHAPE, HOW)
    if RESTS > 0:
        behind = array.slice(-1, 2 * HALF, N)
        tiles = tiles + load_float32(load, behind, place, RESTS, (ROWS, HEADS, REST), HOW)
    return tiles


def load_float32(load, columns, place, COUNT, SHAPE, HOW):
    """The first COUNT tiles of some columns."""
    return tuple(as_float32(load(columns, place, k, SHAPE, HOW)) for k in ct.static_iter(range(COUNT)))


def split_pairs(tile):
    """The first and the second elements of pairs side by side along a tile's last dimension, as float32.

    Each pair is one integer. Where they are extracted from a tile of (..., WIDTH, 2), tileiras 13.4 loads the second
    elements of some narrow tiles two at a time, from addresses between those that the hardware takes.
    """
    shape = tile.shape[:-1] + (tile.shape[-1] // 2,)
    tbytes = ct.pack_to_bytes(tile)
    if tile.dtype == ct.float32:
        twords = ct.unpack_from_bytes(tbytes, ct.int64)
        tfirst = ct.bitcast(ct.astype(twords, ct.int32), ct.float32)
        tsecond = ct.bitcast(ct.astype(twords >> 32, ct.int32), ct.float32)
    elif tile.dtype == ct.bfloat16:
        twords = ct.unpack_from_bytes(tbytes, ct.int32)
        tfirst, tsecond = ct.bitcast(twords << 16, ct.float32), ct.bitcast(twords & -0x10000, ct.float32)
    else:
        twords = ct.unpack_from_bytes(tbytes, ct.int32)
        tfirst = as_float32(ct.bitcast(ct.astype(twords, ct.int16), tile.dtype))
        tsecond = as_float32(ct.bitcast(ct.astype(twords >> 16, ct.int16), tile.dtype))
    return ct.reshape(tfirst, shape), ct.reshape(tsecond, shape)


def store_pairs(array, place, tiles, EXTENTS, PAIRS, TMA):
    """Writes such tiles, rounded to the array's dtype, at `place`. Without columns, a tile has EXTENTS there."""
    HALF, PIECES, _, RESTS, N, INTERLEAVED = PAIRS
    for k in ct.static_iter(range(PIECES)):
        if INTERLEAVED:
            tpairs = joined_pairs(tiles[k], tiles[PIECES + k])
            store_columns(array.slice(-1, 0, 2 * HALF), place, k, tpairs, EXTENTS, TMA)
        else:
            store_columns(array.slice(-1, 0, HALF), place, k, tiles[k], EXTENTS, TMA)
            store_columns(array.slice(-1, HALF, 2 * HALF), place, k, tiles[PIECES + k], EXTENTS, TMA)
    for k in ct.static_iter(range(RESTS)):
        store_columns(array.slice(-1, 2 * HALF, N), place, k, tiles[2 * PIECES + k], EXTENTS, TMA)


def joined_pairs(tfirst, tsecond):
    """The inverse of `split_pairs`, in float32."""
    shape = tfirst.shape
    tpairs = ct.cat((ct.reshape(tfirst, shape + (1,)), ct.reshape(tsecond, shape + (1,))), -1)
    return ct.reshape(tpairs, shape[:-1] + (2 * shape[-1],))


def store_columns(array, place, k, tile, EXTENTS, TMA):
    """Tile k of columns of such tiles."""
    tile = ct.reshape(ct.astype(tile, array.dtype), EXTENTS + (tile.shape[-1],))
    ct.store(array, place + (k,), tile, allow_tma=TMA)


def load_heads(array, place, k, SHAPE, HOW):
    """Columns of x or dy, as (1, ROWS, HEADS, WIDTH)."""
    ROWS, HEADS, WIDTH = SHAPE
    LATENCY, TMA, DIVISOR = HOW
    if has_aligned_rows(array, DIVISOR):
        index, extents = place + (k,), (1, ROWS, HEADS, WIDTH)
        tile = ct.load(array, index, extents, padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)
    else:
        tsteps, theads = indices_of_heads(place, SHAPE)
        index = (place[0], tsteps[None, :, :, None], theads[None, :, :, None], indices(k, WIDTH))
        tile = ct.gather(array, index, padding_value=0, latency=LATENCY)
    return tile


def load_weight_of_heads(weight, place, k, SHAPE, HOW):
    """Columns of the weight: of (D,) as (1, 1, 1, WIDTH); of (H, D) those of the heads there, (1, 1, HEADS, WIDTH)."""
    _, HEADS, WIDTH = SHAPE
    _, _, DIVISOR = HOW
    if weight.ndim == 1:
        shape, first, extents = (1, 1, 1, WIDTH), (), (WIDTH,)
    else:
        shape, first, extents = (1, 1, HEADS, WIDTH), (place[2],), (HEADS, WIDTH)
    if has_aligned_rows(weight, DIVISOR):
        tile = ct.load(weight, first + (k,), extents, padding_mode=ZERO, allow_tma=False)
    elif weight.ndim == 1:
        tile = ct.gather(weight, indices(k, WIDTH), padding_value=0)
    else:
        tile = ct.gather(weight, (indices(place[2], HEADS)[:, None], indices(k, WIDTH)), padding_value=0)
    return ct.reshape(tile, shape)


def load_table(table, rows, k, SHAPE, HOW):
    """Columns of cos or sin, (1, ROWS, 1, WIDTH). rows: what `rows_of_steps` returned.

    Masked along columns alone, where some lanes have none: each mask along rows is a branch around a load, and around
    its conversion to float32 too, so that the loads would wait one for another. Not by TMA, for which a slice takes a
    new descriptor (bench/NOTES.md).
    """
    ROWS, _, WIDTH = SHAPE
    tcolumns = indices(k, WIDTH)
    index = (rows[0][:, None], tcolumns[None, :])
    if table.shape[1] % WIDTH == 0:
        tile = ct.gather(table, index, check_bounds=False)
    else:
        tinside = (tcolumns < table.shape[1])[None, :]
        tile = ct.gather(table, index, mask=tinside, padding_value=0, check_bounds=False)
    if len(rows) > 1:
        tile = ct.where(rows[1][:, None], ct.full((1, 1), float("nan"), table.dtype), tile)
    return ct.reshape(tile, (1, ROWS, 1, WIDTH))


def rows_of_steps(TABLES, steps, place, ROWS):
    """The rows of the tables for a tile of so many steps along T; with positions also which of them are outside of the
    tables, and stand as row 0. Steps past the last one have its row: their x and dy are 0, so no mask is needed."""
    cos, _, positions, rows_of_batch = TABLES
    tsteps = ct.minimum(indices(place[1], ROWS), steps - 1)
    if len(positions) > 0:
        batch = ct.minimum(place[0], positions[0].shape[0] - 1)
        tpositions = ct.gather(positions[0], (batch, tsteps), check_bounds=False)
        toutside = (tpositions < 0) | (tpositions >= cos.shape[0])
        rows = (ct.astype(ct.where(toutside, 0, tpositions), ct.int32), toutside)
    else:
        rows = (place[0] * rows_of_batch + tsteps,)
    return rows


def load_rotation(TABLES, steps, place, SHAPE, PAIRS, HOW, FULL_TABLES):
    """cos of the first and of the second elements of pairs, then sin, of a tile of so many steps along T."""
    cos, sin = TABLES[:2]
    rows = rows_of_steps(TABLES, steps, place, SHAPE[0])
    HALF, PIECES, _, _, _, INTERLEAVED = PAIRS
    if FULL_TABLES:
        ALL_PAIRS = (HALF, PIECES, 0, 0, 2 * HALF, INTERLEAVED)
        tcos = load_pairs(load_table, cos, rows, SHAPE, ALL_PAIRS, HOW)
        tsin = load_pairs(load_table, sin, rows, SHAPE, ALL_PAIRS, HOW)
        trotation = tcos + tsin
    else:
        # Slices, whose number of columns is known to the compiler.
        tcos = load_float32(load_table, cos.slice(-1, 0, HALF), rows, PIECES, SHAPE, HOW)
        tsin = load_float32(load_table, sin.slice(-1, 0, HALF), rows, PIECES, SHAPE, HOW)
        trotation = tcos + tcos + tsin + tsin
    return trotation


def rotated(tn, trotation, PIECES, dtype, ROUND_EACH):
    """y of normalized heads as pairs."""
    tfirst, tsecond = (), ()
    for k in ct.static_iter(range(PIECES)):
        ta, tb = tn[k], tn[PIECES + k]
        ta_cos, tb_cos, ta_sin, tb_sin = trotation[k::PIECES]
        tfirst = tfirst + (rounded(ta * ta_cos, dtype, ROUND_EACH) - rounded(tb * ta_sin, dtype, ROUND_EACH),)
        tsecond = tsecond + (
            rounded(tb * tb_cos, dtype, ROUND_EACH) + rounded(ta * tb_sin, dtype, ROUND_EACH),
        )
    return tfirst + tsecond + tn[2 * PIECES :]


def rotated_back(tdy, trotation, PIECES):
    """dn of dy as pairs: the adjoint."""
    tfirst, tsecond = (), ()
    for k in ct.static_iter(range(PIECES)):
        ta, tb = tdy[k], tdy[PIECES + k]
        ta_cos, tb_cos, ta_sin, tb_sin = trotation[k::PIECES]
        tfirst = tfirst + (ta * ta_cos + tb * tb_sin,)
        tsecond = tsecond + (tb * tb_cos - ta * ta_sin,)
    return tfirst + tsecond + tdy[2 * PIECES :]


def walk(of_heads, q, k, q_blocks, TABLES, NUMBERS, SHAPE, K_SHAPE, PAIRS, HOW, SWITCHES):
    """Calls `of_heads` for the tiles of q in the first q_blocks blocks, and for those of k in the others."""
    block = ct.bid(0)
    if len(k) > 0 and block >= q_blocks:
        k_blocks = ct.num_blocks(0) - q_blocks
        of_heads(k, block - q_blocks, k_blocks, TABLES, NUMBERS, K_SHAPE, PAIRS, HOW, SWITCHES)
    else:
        of_heads(q, block, q_blocks, TABLES, NUMBERS, SHAPE, PAIRS, HOW, SWITCHES)


def normalize_and_rotate(heads, block, blocks, TABLES, NUMBERS, SHAPE, PAIRS, HOW, SWITCHES):
    """Writes y of tiles block, block + blocks, block + 2 blocks, ... of the heads of q or k."""
    y, x = heads[0], heads[1]
    inv_n, eps, offset = NUMBERS
    FULL_TABLES, IN_ORDER, ROUND_XHAT, ROUND_N, ROUND_EACH = SWITCHES
    PIECES, (_, TMA, _) = PAIRS[1], HOW
    ORDER = () if IN_ORDER else AS_COMPILED
    first = place_by_steps(x, block, SHAPE)
    weights, tweight = heads[2:], ()
    if len(weights) > 0:
        tweight = load_pairs(load_weight_of_heads, weights[0], first, SHAPE, PAIRS, HOW)
    tscale = scale_of(tweight, offset)
    for i in range(block, count_tiles(x, SHAPE), blocks):
        place = place_by_steps(x, i, SHAPE)
        tx = load_pairs(load_heads, x, place, SHAPE, PAIRS, HOW)
        trotation = load_rotation(TABLES, x.shape[1], place, SHAPE, PAIRS, HOW, FULL_TABLES)
        trstd = rstd_of(sum_of_products(tx, tx, 2 * PIECES, ORDER, 3), inv_n, eps)

        tn = scaled(xhat_of(tx, trstd, x.dtype, ROUND_XHAT), tscale, ())
        tn = tuple(rounded(t, x.dtype, ROUND_N) for t in ct.static_iter(tn))
        ty = rotated(tn, trotation, PIECES, x.dtype, ROUND_EACH)
        store_pairs(y, place, ty, (1,) + SHAPE[:2], PAIRS, TMA)


def forward_rope(
    q,  # (q_out, q) or (q_out, q, weight): (B, T, Hq, D), q_out written, q any strides but of columns; (D,) or (Hq, D)
    k,  # () or the same of (B, T, Hk, D)
    q_blocks,
    cos,  # (rows, R) if FULL_TABLES, else (rows, R / 2)
    sin,  # as cos
    positions,  # () or ((1 or B, T) int64 or int32,)
    rows_of_batch,
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    HEADS: ConstInt,
    K_ROWS: ConstInt,
    K_HEADS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    HALF: ConstInt,
    REST: ConstInt,
    RESTS: ConstInt,
    N: ConstInt,
    INTERLEAVED: ConstBool,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    FULL_TABLES: ConstBool,
    IN_ORDER: ConstBool,
    ROUND_XHAT: ConstBool,
    ROUND_N: ConstBool,
    ROUND_EACH: ConstBool,
    DEPENDENT: ConstBool,
):
    PAIRS, HOW = (HALF, PIECES, REST, RESTS, N, INTERLEAVED), (LATENCY, TMA, DIVISOR)
    SWITCHES = (FULL_TABLES, IN_ORDER, ROUND_XHAT, ROUND_N, ROUND_EACH)
    TABLES, SHAPE = (cos, sin, positions, rows_of_batch), (ROWS, HEADS, WIDTH)
    wait_and_signal(DEPENDENT)
    K_SHAPE, NUMBERS = (K_ROWS, K_HEADS, WIDTH), (inv_n, eps, offset)
    walk(normalize_and_rotate, q, k, q_blocks, TABLES, NUMBERS, SHAPE, K_SHAPE, PAIRS, HOW, SWITCHES)


def store_partials_of_heads(partial, x, block, place, ttotals, SHAPE, PAIRS):
    """Writes the sums of a block's rows as its row of partial sums: row `block` of (P, D). With weights of heads, of
    (P, H, D) the heads at its place, in row block // (tiles along H)."""
    ROWS, HEADS, _ = SHAPE
    if partial.ndim == 3:
        tsums = tuple(ct.sum(ct.reshape(t, t.shape[1:]), axis=0) for t in ct.static_iter(ttotals))
        row = block // tiles_along_heads(x, SHAPE)
        store_pairs(partial, (row, place[2]), tsums, (1, HEADS), PAIRS, False)
    else:
        tsums = tuple(
            ct.sum(ct.reshape(t, (ROWS * HEADS, t.shape[3])), axis=0, keepdims=True)
            for t in ct.static_iter(ttotals)
        )
        store_pairs(partial, (block,), tsums, (1,), PAIRS, False)


def gradients_of_heads(heads, block, blocks, TABLES, NUMBERS, SHAPE, PAIRS, HOW, SWITCHES):
    """Writes dx of tiles block, block + blocks, block + 2 blocks, ... of the heads of q or k, and the sum of their
    terms of dw."""
    dx, dy, x = heads[0], heads[1], heads[2]
    weights, partials = heads[3:4], heads[4:]
    inv_n, eps, offset = NUMBERS
    FULL_TABLES, IN_ORDER, ROUND_XHAT = SWITCHES
    ROWS, HEADS, WIDTH = SHAPE
    PIECES, (_, TMA, _) = PAIRS[1], HOW
    ORDER = () if IN_ORDER else AS_COMPILED
    first = place_by_steps(x, block, SHAPE)
    tweight = ()
    if len(weights) > 0:
        tweight = load_pairs(load_weight_of_heads, weights[0], first, SHAPE, PAIRS, HOW)
    tscale = scale_of(tweight, offset)

    tdw = zeros((1, ROWS, HEADS, WIDTH), 2 * PIECES) + zeros((1, ROWS, HEADS, PAIRS[2]), PAIRS[3])
    for i in range(block, count_tiles(x, SHAPE), blocks):
        place = place_by_steps(x, i, SHAPE)
        tx = load_pairs(load_heads, x, place, SHAPE, PAIRS, HOW)
        tdy = load_pairs(load_heads, dy, place, SHAPE, PAIRS, HOW)
        trotation = load_rotation(TABLES, x.shape[1], place, SHAPE, PAIRS, HOW, FULL_TABLES)
        # 0 of rows past the last: with an eps of 0 it would be infinite, and their terms of dw NaN
        tinside = ct.reshape(row_numbers(x, place, SHAPE)[1], (1, ROWS, HEADS, 1))
        tsquares = sum_of_products(tx, tx, 2 * PIECES, ORDER, 3)
        trstd = ct.where(tinside, rstd_of(tsquares, inv_n, eps), 0.0)

        tdn = rotated_back(tdy, trotation, PIECES)
        th, tg = h_and_g(tdn, trstd, tscale)
        tfactor = factor_of_x(sum_of_products(tx, tg, 2 * PIECES, ORDER, 3) * inv_n, trstd)
        store_pairs(dx, place, gradient(tx, tfactor, tg), (1, ROWS, HEADS), PAIRS, TMA)
        tdw = added(tdw, terms_of_dw(tx, tdn, th, trstd, x.dtype, ROUND_XHAT))

    if len(partials) > 0:
        store_partials_of_heads(partials[0], x, block, first, tdw, SHAPE, PAIRS)


def backward_rope(
    q,  # (dq, dq_out, q), then weight, then partial: dq written, as in the forward; (P, D) or (P, Hq, D), written
    k,  # () or the same of k
    q_blocks,
    cos,  # as in the forward
    sin,
    positions,
    rows_of_batch,
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    HEADS: ConstInt,
    K_ROWS: ConstInt,
    K_HEADS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    HALF: ConstInt,
    REST: ConstInt,
    RESTS: ConstInt,
    N: ConstInt,
    INTERLEAVED: ConstBool,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    FULL_TABLES: ConstBool,
    IN_ORDER: ConstBool,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """The next kernel is not let in early (backward.py)."""
    PAIRS, HOW = (HALF, PIECES, REST, RESTS, N, INTERLEAVED), (LATENCY, TMA, DIVISOR)
    SWITCHES = (FULL_TABLES, IN_ORDER, ROUND_XHAT)
    TABLES, SHAPE = (cos, sin, positions, rows_of_batch), (ROWS, HEADS, WIDTH)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    K_SHAPE, NUMBERS = (K_ROWS, K_HEADS, WIDTH), (inv_n, eps, offset)
    walk(gradients_of_heads, q, k, q_blocks, TABLES, NUMBERS, SHAPE, K_SHAPE, PAIRS, HOW, SWITCHES)
