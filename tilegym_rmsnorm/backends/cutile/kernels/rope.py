# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""RMSNorm and rotary embedding of the heads of q and k (B, T, H, D) in cuTile, both in one launch.

For each head x with weight w, and c, s of its position, in float32; y = n behind the R rotated elements:

    rstd = 1 / sqrt(mean_j x_j^2 + eps)        n = x * rstd * (w + offset)
    y_i = n_i c_i - n_j s_i        y_j = n_j c_j + n_i s_j        for each pair (i, j)

The pairs are (i, i + R / 2), or INTERLEAVED (2i, 2i + 1). The backward reads x and dy, and computes rstd again:

    dn_i = dy_i c_i + dy_j s_j        dn_j = dy_j c_j - dy_i s_i

With dn in the place of dy the rest is the backward of RMSNorm, and its partial rows of dw are summed as there
(backward.py). ROUND_XHAT is casting="llama". ROUND_EACH is rounding="each": n, both products and their sum are rounded
to x's dtype.

`load_pairs` takes each array apart in the same way, and `store_pairs` joins it: a tile of WIDTH columns has the first
elements of HALF pairs, one the second ones, and some tiles of REST columns have what is not rotated. So the
mathematics does not know how pairs lie. All but the last tile of an array lie inside it, lanes past its end read 0.

    SHAPE = (ROWS, HEADS, WIDTH)        a tile has HEADS heads of ROWS steps along T (heads.py)
    PAIRS = (HALF, REST, RESTS, N, INTERLEAVED)        RESTS: tiles of what is not rotated; N: columns of the array
    HOW = (LATENCY, TMA, DIVISOR)        how tiles of x and dy are loaded
    TABLES = (cos, sin, positions, rows_of_batch)

Row t of cos and sin is that of step t, or with rows_of_batch = T row b * T + t, or the row that `positions` names. A
position outside of them reads nothing, and has rows of NaN.
"""

import cuda.tile as ct

from .backward import h_and_g
from .heads import (
    count_tiles,
    load_columns_at,
    load_tile_at,
    place_of_tile,
    row_numbers,
    rows_in,
    sum_of_indices,
    tiles_along_heads,
    zeros_of_tiles,
)
from .pdl import wait_for_launch_before
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    factor_of_x,
    gather_tile,
    load_tile,
    multiplied,
    products_lane_by_lane,
    rounded,
    row_of_terms_of_dw,
)


def load_pairs(load, array, place, SHAPE, PAIRS, HOW):
    """An array's tiles as pairs, float32: first elements, second elements, then those behind. Its columns are loaded by
    load(columns, place, k, SHAPE with the width, HOW), tile k of them."""
    HALF, REST, RESTS, N, INTERLEAVED = PAIRS
    ROWS, HEADS, WIDTH = SHAPE
    if INTERLEAVED:
        tpairs = load(array.slice(-1, 0, 2 * HALF), place, 0, (ROWS, HEADS, 2 * WIDTH), HOW)
        rows = tpairs.shape[0]
        tpairs = ct.reshape(tpairs, (rows, WIDTH, 2))
        tiles = tuple(
            ct.reshape(ct.extract(tpairs, (0, 0, k), (rows, WIDTH, 1)), (rows, WIDTH))
            for k in ct.static_iter(range(2))
        )
    else:
        tiles = (
            load(array.slice(-1, 0, HALF), place, 0, SHAPE, HOW),
            load(array.slice(-1, HALF, 2 * HALF), place, 0, SHAPE, HOW),
        )
    if RESTS > 0:
        behind = array.slice(-1, 2 * HALF, N)
        tiles = tiles + tuple(
            load(behind, place, k, (ROWS, HEADS, REST), HOW) for k in ct.static_iter(range(RESTS))
        )
    return tiles


def store_pairs(array, place, tiles, EXTENTS, PAIRS, TMA):
    """Writes such tiles, rounded to the array's dtype, at `place`. Without columns, a tile has EXTENTS there."""
    HALF, _, RESTS, N, INTERLEAVED = PAIRS
    if INTERLEAVED:
        tpairs = ct.cat((tiles[0][:, :, None], tiles[1][:, :, None]), 2)
        tpairs = ct.reshape(tpairs, (tpairs.shape[0], 2 * tpairs.shape[1]))
        store_columns(array.slice(-1, 0, 2 * HALF), place, 0, tpairs, EXTENTS, TMA)
    else:
        store_columns(array.slice(-1, 0, HALF), place, 0, tiles[0], EXTENTS, TMA)
        store_columns(array.slice(-1, HALF, 2 * HALF), place, 0, tiles[1], EXTENTS, TMA)
    if RESTS > 0:
        behind = array.slice(-1, 2 * HALF, N)
        for k in ct.static_iter(range(RESTS)):
            store_columns(behind, place, k, tiles[2 + k], EXTENTS, TMA)


def store_columns(array, place, k, tile, EXTENTS, TMA):
    """Tile k of columns of such tiles."""
    tile = ct.reshape(ct.astype(tile, array.dtype), EXTENTS + (tile.shape[-1],))
    ct.store(array, place + (k,), tile, allow_tma=TMA)


def load_heads(array, place, k, SHAPE, HOW):
    """Columns of x or dy, as (rows, WIDTH)."""
    LATENCY, TMA, DIVISOR = HOW
    return load_tile_at(array, place, k, SHAPE, LATENCY, TMA, DIVISOR)


def load_weight_of_heads(weight, place, k, SHAPE, HOW):
    """Columns of the weight, (D,) or per-head (H, D), as a tile that broadcasts to that."""
    _, _, DIVISOR = HOW
    return load_columns_at(weight, place, k, SHAPE, False, DIVISOR, weight.ndim == 2)


def load_scale_of_heads(weights, place, offset, SHAPE, PAIRS, HOW):
    """weight + offset as pairs; nothing without a weight."""
    tscale = ()
    if len(weights) > 0:
        tweight = load_pairs(load_weight_of_heads, weights[0], place, SHAPE, PAIRS, HOW)
        tscale = tuple(t + offset for t in ct.static_iter(tweight))
    return tscale


def load_table(table, rows, k, SHAPE, HOW):
    """Columns of cos or sin, once for each head, as (rows, WIDTH). rows: the tile of steps, or what `rows_at_positions`
    returned."""
    ROWS, HEADS, WIDTH = SHAPE
    LATENCY, TMA, DIVISOR = HOW
    if len(rows) == 1:
        tile = load_tile(table, rows + (k,), (ROWS, WIDTH), LATENCY, TMA, DIVISOR)
    else:
        trows, toutside = rows
        tile = gather_tile(table, trows, k * WIDTH + ct.arange(WIDTH, dtype=ct.int32), False, LATENCY)
        tile = ct.where(toutside[:, None], float("nan"), tile)
    tile = ct.broadcast_to(tile[:, None, :], (ROWS, HEADS, WIDTH))
    return ct.reshape(tile, (ROWS * HEADS, WIDTH))


def rows_at_positions(table, positions, place, ROWS):
    """The rows of a table for a tile's steps, -1 where there is none, and whether a step's position is outside. Of
    steps past T it is not, for they must read 0."""
    batch = ct.minimum(place[0], positions.shape[0] - 1)
    tsteps = place[1] * ROWS + ct.arange(ROWS, dtype=ct.int32)
    tpositions = ct.gather(positions, (batch, tsteps), padding_value=-1)
    tinside = (tpositions >= 0) & (tpositions < table.shape[0])
    trows = ct.astype(ct.where(tinside, tpositions, -1), ct.int32)
    return trows, (trows < 0) & (tsteps < positions.shape[1])


def load_rotation(TABLES, steps, place, SHAPE, PAIRS, HOW, FULL_TABLES):
    """cos of the first and of the second elements of pairs, then sin, of a tile of so many steps along T."""
    cos, sin, positions, rows_of_batch = TABLES
    if len(positions) > 0:
        rows = rows_at_positions(cos, positions[0], place, SHAPE[0])
    else:
        # cuda-tile multiplies it by a stride, which int32 would hold up to 2**31 elements alone
        first = ct.astype(place[0], ct.int64) * rows_of_batch
        cos, sin = cos.slice(0, first, first + steps), sin.slice(0, first, first + steps)
        rows = (place[1],)
    HALF, _, _, _, INTERLEAVED = PAIRS
    if FULL_TABLES:
        ALL_PAIRS = (HALF, 0, 0, 2 * HALF, INTERLEAVED)
        tcos = load_pairs(load_table, cos, rows, SHAPE, ALL_PAIRS, HOW)
        tsin = load_pairs(load_table, sin, rows, SHAPE, ALL_PAIRS, HOW)
        trotation = tcos + tsin
    else:
        tcos, tsin = load_table(cos, rows, 0, SHAPE, HOW), load_table(sin, rows, 0, SHAPE, HOW)
        trotation = (tcos, tcos, tsin, tsin)
    return trotation


def rotated(tn, trotation, dtype, ROUND_EACH):
    """y of normalized heads as pairs."""
    tfirst, tsecond = tn[0], tn[1]
    tfirst_cos, tsecond_cos, tfirst_sin, tsecond_sin = trotation
    tturned = (
        rounded(tfirst * tfirst_cos, dtype, ROUND_EACH) - rounded(tsecond * tfirst_sin, dtype, ROUND_EACH),
        rounded(tsecond * tsecond_cos, dtype, ROUND_EACH) + rounded(tfirst * tsecond_sin, dtype, ROUND_EACH),
    )
    return tturned + tn[2:]


def rotated_back(tdy, trotation):
    """dn of dy as pairs: the adjoint."""
    tfirst, tsecond = tdy[0], tdy[1]
    tfirst_cos, tsecond_cos, tfirst_sin, tsecond_sin = trotation
    tturned = (
        tfirst * tfirst_cos + tsecond * tsecond_sin,
        tsecond * tsecond_cos - tfirst * tfirst_sin,
    )
    return tturned + tdy[2:]


def sum_over_columns(a, b):
    """The sums over a row of a * b as pairs, (rows, 1)."""
    total = ct.sum(products_lane_by_lane(a, b, 2), axis=1, keepdims=True)
    if len(a) > 2:
        total = total + ct.sum(products_lane_by_lane(a[2:], b[2:], len(a) - 2), axis=1, keepdims=True)
    return total


def normalize_and_rotate(heads, place, TABLES, inv_n, eps, offset, SHAPE, PAIRS, HOW, SWITCHES):
    """Writes y of the tile of heads of q or k there."""
    y, x = heads[0], heads[1]
    FULL_TABLES, ROUND_XHAT, ROUND_EACH, EARLY_WEIGHT, DEPENDENT = SWITCHES
    tx = load_pairs(load_heads, x, place, SHAPE, PAIRS, HOW)
    if EARLY_WEIGHT:
        tscale = load_scale_of_heads(heads[2:], place, offset, SHAPE, PAIRS, HOW)
        trotation = load_rotation(TABLES, x.shape[1], place, SHAPE, PAIRS, HOW, FULL_TABLES)
    if DEPENDENT:
        ct.grid_dependency_control_launch_dependents()

    trstd = ct.rsqrt(sum_over_columns(tx, tx) * inv_n + eps)

    if not EARLY_WEIGHT:
        tscale = load_scale_of_heads(heads[2:], place, offset, SHAPE, PAIRS, HOW)
        trotation = load_rotation(TABLES, x.shape[1], place, SHAPE, PAIRS, HOW, FULL_TABLES)
    tn = tuple(rounded(t * trstd, x.dtype, ROUND_XHAT) for t in ct.static_iter(tx))
    if len(tscale) > 0:
        tn = multiplied(tn, tscale)
    tn = tuple(rounded(t, x.dtype, ROUND_EACH) for t in ct.static_iter(tn))
    ty = rotated(tn, trotation, x.dtype, ROUND_EACH)

    store_pairs(y, place, ty, (1,) + SHAPE[:2], PAIRS, False)


def forward_rope(
    q,  # (q_out, q) or (q_out, q, weight): (B, T, Hq, D), q_out written, q any strides but of columns; (D,) or (Hq, D)
    k,  # () or the same of (B, T, Hk, D)
    cos,  # (rows, R) if FULL_TABLES, else (rows, R / 2)
    sin,  # as cos
    positions,  # () or ((1 or B, T) int64,)
    rows_of_batch,
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    HEADS: ConstInt,
    K_ROWS: ConstInt,
    K_HEADS: ConstInt,
    WIDTH: ConstInt,
    HALF: ConstInt,
    REST: ConstInt,
    RESTS: ConstInt,
    N: ConstInt,
    INTERLEAVED: ConstBool,
    LATENCY: ConstInt,
    DIVISOR: ConstInt,
    FULL_TABLES: ConstBool,
    ROUND_XHAT: ConstBool,
    ROUND_EACH: ConstBool,
    EARLY_WEIGHT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: a block for each tile of q, then one for each of k. EARLY_WEIGHT: weight and tables are loaded beside x,
    not behind its sum (forward.py)."""
    PAIRS, HOW = (HALF, REST, RESTS, N, INTERLEAVED), (LATENCY, False, DIVISOR)
    SWITCHES = (FULL_TABLES, ROUND_XHAT, ROUND_EACH, EARLY_WEIGHT, DEPENDENT)
    TABLES, SHAPE = (cos, sin, positions, rows_of_batch), (ROWS, HEADS, WIDTH)
    K_SHAPE = (K_ROWS, K_HEADS, WIDTH)
    i, count = ct.bid(0), count_tiles(q[1], SHAPE)
    place = place_of_tile(q[1], i, SHAPE)
    if len(k) > 0 and i >= count:
        place = place_of_tile(k[1], i - count, K_SHAPE)
    if DEPENDENT:
        wait_for_launch_before(sum_of_indices(place))
    if len(k) > 0 and i >= count:
        normalize_and_rotate(k, place, TABLES, inv_n, eps, offset, K_SHAPE, PAIRS, HOW, SWITCHES)
    else:
        normalize_and_rotate(q, place, TABLES, inv_n, eps, offset, SHAPE, PAIRS, HOW, SWITCHES)


def store_partials_of_heads(partial, x, block, place, ttotals, SHAPE, PAIRS):
    """Writes the sums of a block's rows as its row of partial sums: row `block` of (P, D). Of weights of heads, of
    (P, H, D) the heads at its place, in row block // (tiles along H)."""
    ROWS, HEADS, _ = SHAPE
    if partial.ndim == 3:
        tsums = tuple(
            ct.sum(ct.reshape(t, (ROWS, HEADS, t.shape[1])), axis=0) for t in ct.static_iter(ttotals)
        )
        row = block // tiles_along_heads(x, SHAPE)
        store_pairs(partial, (row, place[2]), tsums, (1, HEADS), PAIRS, False)
    else:
        tsums = tuple(ct.sum(t, axis=0, keepdims=True) for t in ct.static_iter(ttotals))
        store_pairs(partial, (block,), tsums, (1,), PAIRS, False)


def gradients_of_heads(heads, block, blocks, TABLES, inv_n, eps, offset, SHAPE, PAIRS, HOW, SWITCHES):
    """Writes dx of tiles block, block + blocks, block + 2 blocks, ... of the heads of q or k, and the sum of their
    terms of dw."""
    dx, dy, x = heads[0], heads[1], heads[2]
    weights, partials = heads[3:4], heads[4:]
    FULL_TABLES, ROUND_XHAT = SWITCHES
    _, TMA, _ = HOW
    first = place_of_tile(x, block, SHAPE)
    tscale = load_scale_of_heads(weights, first, offset, SHAPE, PAIRS, HOW)

    tdw = ()
    if len(partials) > 0:
        _, REST, RESTS, _, _ = PAIRS
        tdw = zeros_of_tiles(SHAPE, 2) + zeros_of_tiles((SHAPE[0], SHAPE[1], REST), RESTS)
    for i in range(block, count_tiles(x, SHAPE), blocks):
        place = place_of_tile(x, i, SHAPE)
        tx = load_pairs(load_heads, x, place, SHAPE, PAIRS, HOW)
        tdy = load_pairs(load_heads, dy, place, SHAPE, PAIRS, HOW)
        trotation = load_rotation(TABLES, x.shape[1], place, SHAPE, PAIRS, HOW, FULL_TABLES)
        # 0 of rows past the last: with an eps of 0 it would be infinite, and their terms of dw NaN
        tinside = row_numbers(x, place, SHAPE)[1]
        tinside = ct.reshape(ct.broadcast_to(tinside, SHAPE[:2]), (rows_in(SHAPE), 1))
        trstd = ct.where(tinside, ct.rsqrt(sum_over_columns(tx, tx) * inv_n + eps), 0.0)

        tdn = rotated_back(tdy, trotation)
        th, tg = h_and_g(tdn, trstd, tscale)
        tfactor = factor_of_x(sum_over_columns(tx, tg) * inv_n, trstd)
        tdx = tuple(tx[k] * tfactor + tg[k] for k in ct.static_iter(range(len(tx))))

        store_pairs(dx, place, tdx, (1,) + SHAPE[:2], PAIRS, TMA)
        if len(partials) > 0:
            tterms = row_of_terms_of_dw(tx, tdn, th, trstd, x.dtype, ROUND_XHAT)
            tdw = added(tdw, tterms)

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
    HALF: ConstInt,
    REST: ConstInt,
    RESTS: ConstInt,
    N: ConstInt,
    INTERLEAVED: ConstBool,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    FULL_TABLES: ConstBool,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: q_blocks that walk the tiles of q, then those that walk the tiles of k. With weights of heads either number
    is a multiple of the tiles along H, so that a block stays at its heads. The next kernel is not let in early
    (backward.py)."""
    PAIRS, HOW = (HALF, REST, RESTS, N, INTERLEAVED), (LATENCY, TMA, DIVISOR)
    SWITCHES = (FULL_TABLES, ROUND_XHAT)
    TABLES, SHAPE = (cos, sin, positions, rows_of_batch), (ROWS, HEADS, WIDTH)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    block = ct.bid(0)
    if len(k) > 0 and block >= q_blocks:
        K_SHAPE, k_blocks = (K_ROWS, K_HEADS, WIDTH), ct.num_blocks(0) - q_blocks
        gradients_of_heads(
            k, block - q_blocks, k_blocks, TABLES, inv_n, eps, offset, K_SHAPE, PAIRS, HOW, SWITCHES
        )
    else:
        gradients_of_heads(q, block, q_blocks, TABLES, inv_n, eps, offset, SHAPE, PAIRS, HOW, SWITCHES)
