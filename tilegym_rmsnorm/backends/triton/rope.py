# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm of each head of q and k and the rotary embedding behind it, in Triton. Per head x, in float32, with o the
offset (without a weight, weight + o is 1) and (i, j) a pair of the first R of D elements:

    rstd = 1 / sqrt(mean(x^2) + eps)    xhat = x * rstd           n = xhat * (weight + o)
    y_i = n_i * cos_i - n_j * sin_i     y_j = n_j * cos_j + n_i * sin_j

    dn_i = dy_i * cos_i + dy_j * sin_j  dn_j = dy_j * cos_j - dy_i * sin_i
    g = dn * (weight + o)               c = mean(xhat * g)        dx = (g - xhat * c) * rstd
    dw = sum over tokens and heads of dn * xhat

From element R on y is n, and dn is dy. casting="llama" rounds xhat to x's dtype in n and in dw, rounding="norm" n,
rounding="each" n and the products of y. The backward computes rstd again.

    rope_forward     `forward_tile`, y: a tile per program, those of q first
    rope_backward    `backward_walk`, dx and partial sums of dw: each program walks over tiles of q, or of k
    sum_partials     (reduce.py) both dw: the partial rows summed in a fixed order and rounded once

A program holds a tile of (TOKENS, HEADS) heads of q or k (x), of M = B * T tokens, as a tuple of tiles
(TOKENS, HEADS, columns): the first elements of all pairs, the second ones, then the rest. In memory the elements of a
pair are half of R apart, or neighbours: `split_pairs` and `join_pairs` convert. FORM and TILE are RopeForm and RopeTile
(config_rope.py).

x and dy (dq_out, dk_out) are (B, T, H, D) of any strides but the last (rows.py), which ALIGN divides. cos and sin are
(table_rows, R) or (table_rows, R / 2), of row strides that TABLE_ALIGN divides. positions, weight and dw, (D,) or
(H, D), results (y or dx) of x's shape and dw_partial (walks, D) or (walks, H * D) are contiguous. Each has its own
dtype. An array that is absent or not wanted is None.
"""

import triton
import triton.language as tl

from tilegym_rmsnorm.backends.triton.rows import (
    aligned,
    column_mask,
    kernel_name,
    load_columns,
    load_scale,
    rounded,
    row_pointers,
    stride_names,
)


@triton.jit
def memory_tiles(FORM: tl.constexpr):
    """The columns of a head in tiles (1, 1, columns) as they lie in memory, and which of these columns exist."""
    RESTS: tl.constexpr = FORM.rests
    if FORM.is_interleaved:
        columns = tl.arange(0, 2 * FORM.half)
        tcolumns = (columns[None, None, :],)
        tmasks = (column_mask(columns, 2 * FORM.half, FORM.R)[None, None, :],)
    else:
        columns = tl.arange(0, FORM.half)
        tmask = column_mask(columns, FORM.half, FORM.R // 2)[None, None, :]
        tcolumns = (columns[None, None, :], (FORM.R // 2 + columns)[None, None, :])
        tmasks = (tmask, tmask)
    for k in tl.static_range(RESTS):
        columns = FORM.R + k * FORM.rest + tl.arange(0, FORM.rest)
        tcolumns = tcolumns + (columns[None, None, :],)
        tmasks = tmasks + (column_mask(columns, FORM.R + (k + 1) * FORM.rest, FORM.D)[None, None, :],)
    return tcolumns, tmasks


@triton.jit
def split_pairs(tiles, FORM: tl.constexpr):
    """Tiles as kernels compute with them, from those in memory."""
    if FORM.is_interleaved:
        tfirst, tsecond = tl.split(tiles[0].reshape(tiles[0].shape[0], tiles[0].shape[1], FORM.half, 2))
        split = (tfirst, tsecond)
        for k in tl.static_range(1, len(tiles)):
            split = split + (tiles[k],)
        return split
    else:
        return tiles


@triton.jit
def join_pairs(tiles, FORM: tl.constexpr):
    """Tiles as they lie in memory: the inverse of `split_pairs`."""
    if FORM.is_interleaved:
        joined = (tl.interleave(tiles[0], tiles[1]),)
        for k in tl.static_range(2, len(tiles)):
            joined = joined + (tiles[k],)
        return joined
    else:
        return tiles


@triton.jit
def load_heads(head_ptrs, thead_mask, tcolumns, tmasks, FORM: tl.constexpr):
    """Load as float32. Elements outside read 0, and add 0 to sums."""
    tiles = ()
    for k in tl.static_range(len(tcolumns)):
        tiles = tiles + (load_columns(head_ptrs, tcolumns[k], thead_mask & tmasks[k]),)
    return split_pairs(tiles, FORM)


@triton.jit
def store_heads(head_ptrs, tiles, thead_mask, tcolumns, tmasks, FORM: tl.constexpr):
    joined = join_pairs(tiles, FORM)
    for k in tl.static_range(len(tcolumns)):
        tl.store(head_ptrs + tcolumns[k], joined[k], mask=thead_mask & tmasks[k])


@triton.jit
def head_columns(heads, H, columns, tmask, FORM: tl.constexpr):
    """Columns of (H, D) at heads (1, HEADS), and which exist."""
    return heads[:, :, None].to(tl.int64) * FORM.D + columns, (heads < H)[:, :, None] & tmask


@triton.jit
def load_scales(weight_ptr, offset, heads, H, tcolumns, tmasks, FORM: tl.constexpr, TILE: tl.constexpr):
    """weight + offset of these heads, or 1: (1, HEADS, columns) if the weight is per-head, else (1, 1, columns)."""
    tscale = ()
    for k in tl.static_range(len(tcolumns)):
        columns, tmask = tcolumns[k], tmasks[k]
        if TILE.is_per_head:
            columns, tmask = head_columns(heads, H, columns, tmask, FORM)
        tscale = tscale + (load_scale((weight_ptr, offset), columns, tmask),)
    return split_pairs(tscale, FORM)


@triton.jit
def count_tiles(M, H, TILE: tl.constexpr):
    return (tl.cdiv(M, TILE.tokens) * tl.cdiv(H, TILE.heads)).to(tl.int32)


@triton.jit
def heads_of_tile(tile, H, TILE: tl.constexpr):
    """Return heads, (1, HEADS). Neighbours have the same tokens."""
    return (tile % tl.cdiv(H, TILE.heads) * TILE.heads + tl.arange(0, TILE.heads))[None, :]


@triton.jit
def tokens_of_tile(tile, M, T, H, TILE: tl.constexpr):
    """Return tokens (TOKENS, 1), their places in B and T."""
    first = (tile // tl.cdiv(H, TILE.heads)).to(tl.int64) * TILE.tokens
    tokens = (first + tl.arange(0, TILE.tokens))[:, None]
    if M.dtype == tl.int32:  # a division of 64 bits takes several times the instructions
        numbers = tokens.to(tl.uint32)
        return tokens, numbers // T.to(tl.uint32), numbers % T.to(tl.uint32)
    else:
        return tokens, tokens // T, tokens % T


@triton.jit
def load_tables(tables, positions_ptr, batches, steps, tmask, tcolumns, tmasks, FORM: tl.constexpr):
    """cos and sin of these tokens, each for both elements of the pairs: (TOKENS, 1, half). Outside they are NaN."""
    cos_ptr, sin_ptr, cos_stride, sin_stride, batch_stride, count = tables
    rows = batches.to(tl.int64) * batch_stride + steps.to(tl.int64)
    tis_inside = tl.full(rows.shape, 1, tl.int1)
    if positions_ptr is not None:
        rows = tl.load(positions_ptr + rows, mask=tmask, other=0).to(tl.int64)
        tis_inside = (rows >= 0) & (rows < count)
    tcos = load_table(cos_ptr + rows * cos_stride, tis_inside, tmask, tcolumns, tmasks, FORM)
    tsin = load_table(sin_ptr + rows * sin_stride, tis_inside, tmask, tcolumns, tmasks, FORM)
    return tcos, tsin


@triton.jit
def load_table(row_ptrs, tis_inside, tmask, tcolumns, tmasks, FORM: tl.constexpr):
    row_ptrs, tinside = row_ptrs[:, :, None], tis_inside[:, :, None]
    trow_mask = (tmask & tis_inside)[:, :, None]
    if FORM.has_half_tables:
        columns = tl.arange(0, FORM.half)
        tcolumn_mask = column_mask(columns, FORM.half, FORM.R // 2)[None, None, :]
        tfirst = load_columns(row_ptrs, columns[None, None, :], trow_mask & tcolumn_mask)
        tsecond = tfirst
    elif FORM.is_interleaved:
        tpairs = load_columns(row_ptrs, tcolumns[0], trow_mask & tmasks[0])
        tfirst, tsecond = split_pairs((tpairs,), FORM)
    else:
        tfirst = load_columns(row_ptrs, tcolumns[0], trow_mask & tmasks[0])
        tsecond = load_columns(row_ptrs, tcolumns[1], trow_mask & tmasks[1])
    return tl.where(tinside, tfirst, float("nan")), tl.where(tinside, tsecond, float("nan"))


@triton.jit
def mean_of_products(ta, tb, FORM: tl.constexpr):
    """Average each head, as (TOKENS, HEADS, 1). Products of tiles of one width are added before reduction."""
    tsum = tl.sum(ta[0] * tb[0] + ta[1] * tb[1], axis=2)
    if len(ta) > 2:
        trest = ta[2] * tb[2]
        for k in tl.static_range(3, len(ta)):
            trest += ta[k] * tb[k]
        tsum += tl.sum(trest, axis=2)
    return tsum[:, :, None] / FORM.D


@triton.jit
def normalized(tx, eps, thead_mask, FORM: tl.constexpr):
    """xhat and rstd."""
    tmean = mean_of_products(tx, tx, FORM) + eps
    # Outside x is 0: without eps xhat would be 0 * inf, and reach the sums.
    trstd = 1 / tl.sqrt_rn(tl.where(thead_mask, tmean, 1.0))
    txhat = ()
    for k in tl.static_range(len(tx)):
        txhat = txhat + (tx[k] * trstd,)
    return txhat, trstd


@triton.jit
def rotated(tn, tcos, tsin, x_ptr, FORM: tl.constexpr):
    tfirst = rounded(tn[0] * tcos[0], x_ptr, FORM.rounds_each)
    tfirst -= rounded(tn[1] * tsin[0], x_ptr, FORM.rounds_each)
    tsecond = rounded(tn[1] * tcos[1], x_ptr, FORM.rounds_each)
    tsecond += rounded(tn[0] * tsin[1], x_ptr, FORM.rounds_each)
    ty = (tfirst, tsecond)
    for k in tl.static_range(2, len(tn)):
        ty = ty + (tn[k],)
    return ty


@triton.jit
def rotated_back(tdy, tcos, tsin):
    """dn: the adjoint of `rotated`."""
    tdn = (tdy[0] * tcos[0] + tdy[1] * tsin[1], tdy[1] * tcos[1] - tdy[0] * tsin[0])
    for k in tl.static_range(2, len(tdy)):
        tdn = tdn + (tdy[k],)
    return tdn


@triton.jit
def forward_tile(tile, arrays, H, call, FORM: tl.constexpr, TILE: tl.constexpr):
    """y of a tile of q or k."""
    x, _, weight_ptr, y_ptr, _ = arrays
    tables, positions_ptr, M, T, eps, offset = call
    heads = heads_of_tile(tile, H, TILE)
    tokens, batches, steps = tokens_of_tile(tile, M, T, H, TILE)
    thead_mask = ((tokens < M) & (heads < H))[:, :, None]
    tcolumns, tmasks = memory_tiles(FORM)
    x_heads = row_pointers(x, (batches, steps, heads), H)[:, :, None]
    tx = load_heads(x_heads, thead_mask, tcolumns, tmasks, FORM)
    tcos, tsin = load_tables(tables, positions_ptr, batches, steps, tokens < M, tcolumns, tmasks, FORM)
    tscale = load_scales(weight_ptr, offset, heads, H, tcolumns, tmasks, FORM, TILE)

    txhat, _ = normalized(tx, eps, thead_mask, FORM)

    tn = ()
    for k in tl.static_range(len(txhat)):
        tproduct = rounded(txhat[k], x[0], FORM.rounds_xhat) * tscale[k]
        tn = tn + (rounded(tproduct, x[0], FORM.rounds_n),)
    ty = rotated(tn, tcos, tsin, x[0], FORM)

    y_heads = (y_ptr + (tokens * H + heads) * FORM.D)[:, :, None]
    store_heads(y_heads, ty, thead_mask, tcolumns, tmasks, FORM)


@triton.jit
def gradients_of_heads(tx, tdy, tcos, tsin, tscale, eps, thead_mask, x_ptr, FORM: tl.constexpr):
    """dx, and dn * xhat, which dw sums."""
    txhat, trstd = normalized(tx, eps, thead_mask, FORM)
    tdn = rotated_back(tdy, tcos, tsin)
    tg = ()
    tproducts = ()
    for k in tl.static_range(len(tx)):
        tg = tg + (tdn[k] * tscale[k],)
        tproducts = tproducts + (tdn[k] * rounded(txhat[k], x_ptr, FORM.rounds_xhat),)
    tc = mean_of_products(txhat, tg, FORM)
    tdx = ()
    for k in tl.static_range(len(tx)):
        tdx = tdx + ((tg[k] - txhat[k] * tc) * trstd,)
    return tdx, tproducts


@triton.jit
def zeros(FORM: tl.constexpr, TILE: tl.constexpr):
    TOKENS: tl.constexpr = TILE.tokens
    HEADS: tl.constexpr = TILE.heads
    HALF: tl.constexpr = FORM.half
    REST: tl.constexpr = FORM.rest
    RESTS: tl.constexpr = FORM.rests
    tiles = (tl.zeros((TOKENS, HEADS, HALF), tl.float32),) * 2
    for _ in tl.static_range(RESTS):
        tiles = tiles + (tl.zeros((TOKENS, HEADS, REST), tl.float32),)
    return tiles


@triton.jit
def store_sums(partial_row_ptr, tsums, heads, H, tcolumns, tmasks, FORM: tl.constexpr, TILE: tl.constexpr):
    """A walk's sums over its tiles, summed over the tokens of a tile as well, and over its heads unless each has a sum
    of its own."""
    tsums_of_tile = ()
    for k in tl.static_range(len(tsums)):
        tsum = tl.sum(tsums[k], axis=0, keep_dims=True)
        if not TILE.is_per_head:
            tsum = tl.sum(tsum, axis=1, keep_dims=True)
        tsums_of_tile = tsums_of_tile + (tsum,)
    joined = join_pairs(tsums_of_tile, FORM)
    for k in tl.static_range(len(tcolumns)):
        columns, tmask = tcolumns[k], tmasks[k]
        if TILE.is_per_head:
            columns, tmask = head_columns(heads, H, columns, tmask, FORM)
        tl.store(partial_row_ptr + columns, joined[k], mask=tmask)


@triton.jit
def backward_walk(
    program, programs, arrays, H, call, FORM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """dx of a program's tiles of q or k, and its partial sums. With a per-head weight they all have the same heads."""
    x, dy, weight_ptr, dx_ptr, dw_partial_ptr = arrays
    tables, positions_ptr, M, T, eps, offset = call
    tcolumns, tmasks = memory_tiles(FORM)
    scaled_heads = heads_of_tile(program, H, TILE)
    tscale = load_scales(weight_ptr, offset, scaled_heads, H, tcolumns, tmasks, FORM, TILE)
    tdw = zeros(FORM, TILE)

    for tile in tl.range(program, count_tiles(M, H, TILE), programs, num_stages=STAGES):
        heads = heads_of_tile(tile, H, TILE)
        tokens, batches, steps = tokens_of_tile(tile, M, T, H, TILE)
        thead_mask = ((tokens < M) & (heads < H))[:, :, None]
        x_heads = row_pointers(x, (batches, steps, heads), H)[:, :, None]
        dy_heads = row_pointers(dy, (batches, steps, heads), H)[:, :, None]
        tx = load_heads(x_heads, thead_mask, tcolumns, tmasks, FORM)
        tdy = load_heads(dy_heads, thead_mask, tcolumns, tmasks, FORM)
        tcos, tsin = load_tables(tables, positions_ptr, batches, steps, tokens < M, tcolumns, tmasks, FORM)
        tdx, tproducts = gradients_of_heads(tx, tdy, tcos, tsin, tscale, eps, thead_mask, x[0], FORM)
        dx_heads = (dx_ptr + (tokens * H + heads) * FORM.D)[:, :, None]
        store_heads(dx_heads, tdx, thead_mask, tcolumns, tmasks, FORM)
        tdw_before, tdw = tdw, ()
        for k in tl.static_range(len(tproducts)):
            tdw = tdw + (tdw_before[k] + tproducts[k],)

    if dw_partial_ptr is not None:
        if TILE.is_per_head:
            walk = (program // tl.cdiv(H, TILE.heads)).to(tl.int64) * H
        else:
            walk = program.to(tl.int64)
        store_sums(dw_partial_ptr + walk * FORM.D, tdw, scaled_heads, H, tcolumns, tmasks, FORM, TILE)


COUNTS = ["M", "T", "q_H", "k_H", "q_programs", "table_batch_stride", "table_rows"]


@triton.jit(
    do_not_specialize=[*COUNTS, *stride_names("q", "dq_out", "k", "dk_out", "cos", "sin")], repr=kernel_name
)
def rope(
    q_ptr,
    dq_out_ptr,
    q_weight_ptr,
    q_result_ptr,
    dq_weight_partial_ptr,
    k_ptr,
    dk_out_ptr,
    k_weight_ptr,
    k_result_ptr,
    dk_weight_partial_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_programs,
    M,
    T,
    q_H,
    k_H,
    cos_row_stride,
    sin_row_stride,
    table_batch_stride,
    table_rows,
    eps,
    offset,
    q_batch_stride,
    q_token_stride,
    q_row_stride,
    dq_out_batch_stride,
    dq_out_token_stride,
    dq_out_row_stride,
    k_batch_stride,
    k_token_stride,
    k_row_stride,
    dk_out_batch_stride,
    dk_out_token_stride,
    dk_out_row_stride,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    FORM: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Grid of a forward: the tiles of q and k, each cdiv(M, TOKENS) * cdiv(H, HEADS). Grid of a backward: the programs
    of q and those of k. Where a weight is per-head, its walks by cdiv(H, HEADS)."""
    program = tl.program_id(0)
    if KERNEL == "rope_forward":
        q_programs = count_tiles(M, q_H, Q)
    else:
        tl.static_assert(KERNEL == "rope_backward")
    _, cos_stride, sin_stride = aligned(0, cos_row_stride, sin_row_stride, TABLE_ALIGN)
    tables = cos_ptr, sin_ptr, cos_stride, sin_stride, table_batch_stride, table_rows
    call = tables, positions_ptr, M, T, eps, offset
    # No name is bound in both branches: Triton would want one type, and weights and strides may have two.
    if program < q_programs:
        q = q_ptr, aligned(q_batch_stride, q_token_stride, q_row_stride, ALIGN)
        dq_out = dq_out_ptr, aligned(dq_out_batch_stride, dq_out_token_stride, dq_out_row_stride, ALIGN)
        q_arrays = q, dq_out, q_weight_ptr, q_result_ptr, dq_weight_partial_ptr
        if KERNEL == "rope_forward":
            forward_tile(program, q_arrays, q_H, call, FORM, Q)
        else:
            backward_walk(program, q_programs, q_arrays, q_H, call, FORM, Q, STAGES)
    elif k_ptr is not None:
        k = k_ptr, aligned(k_batch_stride, k_token_stride, k_row_stride, ALIGN)
        dk_out = dk_out_ptr, aligned(dk_out_batch_stride, dk_out_token_stride, dk_out_row_stride, ALIGN)
        k_arrays = k, dk_out, k_weight_ptr, k_result_ptr, dk_weight_partial_ptr
        if KERNEL == "rope_forward":
            forward_tile(program - q_programs, k_arrays, k_H, call, FORM, K)
        else:
            k_programs = tl.num_programs(0) - q_programs
            backward_walk(program - q_programs, k_programs, k_arrays, k_H, call, FORM, K, STAGES)
