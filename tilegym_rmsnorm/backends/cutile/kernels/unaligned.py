# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Packed rows that begin between multiples of 16 bytes, read and written in vectors. The mathematics is that of
forward.py and backward.py.

An access of 16 bytes must begin at a multiple of 16. Of rows of 3001 bfloat16 only every eighth begins so, and gathers
of rows take each element alone. Here memory is cut into vectors of VECTOR elements from the array's first on, wherever
rows begin, and lane 0 of a row is the first element of the vector in which it begins: column 0 is at lane SHIFT, the
row's number times N, modulo VECTOR. A row is

    inner lanes     the vectors behind its first that are all its own: tiles of (ROWS, WIDTH), of vectors
    ends            what it has of its first and of its last vector, shared with the rows before and behind: one tile of
                    (ROWS, 2 * VECTOR), element by element

so a sum over a row is a sum over both, and no lane is read or written that is another row's. Rows of one SHIFT are
VECTOR rows apart: a block takes rows of one SHIFT alone, so its weight and its sum of dw stay in the same lanes. Where
VECTOR divides N, SHIFT is 0, there are no ends (ENDS is False), and a block takes rows that lie together.

Blocks walk the rows. The inner lanes of the next come by asynchronous copies (LATENCY). Those have no elements of 16
bits, so the ends of the next row are asked for a step ahead, and its rstd.

On an H200 a backward of 33322x3001 in bfloat16 beside a residual takes 219 us, by gathers of rows 479 (cuda-tile 1.7.0,
tileiras 13.4.92).
"""

import cuda.tile as ct

from .formula import factor_of_x, gradient, h_and_g, rstd_of, scaled, terms_of_dw, xhat_of
from .pdl import wait_and_signal
from .residual import store_gradients, with_residual
from .rows import store_sums
from .team import join_team, member_of, sum_of_team
from .tiles import AS_COMPILED, ConstBool, ConstInt, added, as_float32, row_as_float32, sum_of_products, zeros
from .weights import scale_of


def lanes_of_block(first, n, part, SHAPE, ENDS):
    """Return the lane layout of a block that begins with row `first`: (SHIFT, the offset of lane 0 of row `first`, the
    lane behind the last inner one, the inner lanes, the lanes of the ends, and which of those are the row's).

    part: which part of the inner lanes it has. SHAPE is (ROWS, WIDTH, PIECES, VECTOR), here and below.
    """
    _, WIDTH, PIECES, VECTOR = SHAPE
    shift, begin = 0, 0
    if ENDS:
        shift, begin = first * n % VECTOR, VECTOR
    end = ct.assume_divisible_by((shift + n) // VECTOR * VECTOR, VECTOR)
    start = ct.assume_divisible_by(first * n - shift, VECTOR)
    begin = begin + part * (WIDTH * PIECES)
    tlanes = ct.arange(WIDTH, dtype=ct.int32)[None, :] + begin
    tinner = tuple(tlanes + k * WIDTH for k in ct.static_iter(range(PIECES)))
    tboth = ct.arange(2 * VECTOR, dtype=ct.int32)[None, :]
    tends = ct.where(tboth < VECTOR, tboth, tboth + (end - VECTOR))
    tis_own = ct.where(tboth < VECTOR, tends >= shift, tends < shift + n) & (part == 0)
    return shift, start, end, tinner, tends, tis_own


def rows_of_step(step, LAYOUT):
    """Return where the rows of a step of a block lie: their numbers counted from the block's first, as (ROWS, 1), which
    of them there are, N, and the block's lanes. LAYOUT is (first, M, N, lanes, SHAPE, ENDS)."""
    first, m, n, lanes, (ROWS, _, _, VECTOR), ENDS = LAYOUT
    trows = (step * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]) * shifts_of(VECTOR, ENDS)
    return trows, trows + first < m, n, lanes


def shifts_of(VECTOR, ENDS):
    """Return the spacing, in rows, of one SHIFT."""
    return VECTOR if ENDS else 1


def length_of_rows(array, VECTOR, ENDS):
    """N."""
    n = array.shape[1]
    return n if ENDS else ct.assume_divisible_by(n, VECTOR)


def offsets_of(trows, tlanes, n, start):
    """Offsets in elements, 64 bits wide."""
    return ct.astype(trows, ct.int64) * n + (tlanes + start)


def load_inner(array, where, LATENCY):
    """The inner lanes of rows, as tiles of the array's dtype; others hold 0."""
    trows, tis_row, n, (_, start, end, tinner, _, _) = where
    memory = array.get_raw_memory()
    return tuple(
        memory.load_offset(offsets_of(trows, t, n, start), mask=tis_row & (t < end), latency=LATENCY)
        for t in ct.static_iter(tinner)
    )


def load_ends(arrays, where, ENDS):
    """The ends of rows of each array, if rows have any."""
    trows, tis_row, n, (_, start, _, _, tends, tis_own) = where
    tiles = ()
    if ENDS:
        toffsets = offsets_of(trows, tends, n, start)
        tiles = tuple(
            a.get_raw_memory().load_offset(toffsets, mask=tis_row & tis_own) for a in ct.static_iter(arrays)
        )
    return tiles


def store_rows(array, where, tiles):
    """Writes tiles of inner lanes, and of ends behind them, rounded to the array's dtype."""
    trows, tis_row, n, (_, start, end, tinner, tends, tis_own) = where
    memory = array.get_raw_memory()
    for k in ct.static_iter(range(len(tinner))):
        toffsets = offsets_of(trows, tinner[k], n, start)
        memory.store_offset(toffsets, ct.astype(tiles[k], array.dtype), mask=tis_row & (tinner[k] < end))
    if len(tiles) > len(tinner):
        toffsets = offsets_of(trows, tends, n, start)
        memory.store_offset(toffsets, ct.astype(tiles[-1], array.dtype), mask=tis_row & tis_own)


def store_partial_row(partial, where, tsums):
    """Writes the sums over the rows of tiles as row p of dw_partial or of db_partial. where: (p, lanes)."""
    p, (shift, _, end, tinner, tends, tis_own) = where
    for k in ct.static_iter(range(len(tsums))):
        tsum = ct.astype(ct.sum(tsums[k], axis=0, keepdims=True), partial.dtype)
        if k < len(tinner):
            ct.scatter(partial, (p, tinner[k] - shift), tsum, mask=tinner[k] < end, check_bounds=False)
        else:
            ct.scatter(partial, (p, tends - shift), tsum, mask=tis_own, check_bounds=False)


def load_lanes(arrays, lanes, ENDS):
    """The weight or bias in a tuple, as float32 tiles like those of rows; () of (). Lanes that are not the row's hold
    0."""
    shift, _, end, tinner, tends, tis_own = lanes
    tiles = ()
    if len(arrays) > 0 and ENDS:
        tiles = tuple(shifted_columns(arrays[0], t, shift, end) for t in ct.static_iter(tinner))
        tends = ct.gather(arrays[0], tends - shift, mask=tis_own, check_bounds=False, padding_value=0)
        tiles = tiles + (as_float32(tends),)
    elif len(arrays) > 0:
        tiles = tuple(
            as_float32(ct.gather(arrays[0], t, mask=t < end, check_bounds=False, padding_value=0))
            for t in ct.static_iter(tinner)
        )
    return tiles


def shifted_columns(array, tlanes, shift, end):
    """Columns that lie between vectors, element by element, as the sum of them and of a second row of nothing.

    A reduction has the compiler choose anew how threads hold a tile. Without it all tiles that meet this one are held
    as it is loaded, element by element, and rows go through shared memory in 16 bits at a time.
    """
    tcopies = ct.arange(2, dtype=ct.int32)[:, None]
    tloaded = ct.gather(
        array,
        tlanes - shift + 0 * tcopies,
        mask=(tcopies == 0) & (tlanes < end),
        check_bounds=False,
        padding_value=0,
    )
    return ct.sum(as_float32(tloaded), axis=0, keepdims=True)


def sum_with_team(ttotal, row, team):
    """The sum over all parts of the one row of a step, which a team of blocks shares (team.py)."""
    if len(team) > 0:
        ttotal = ct.full((1, 1), sum_of_team(ct.sum(ttotal), row, team), dtype=ct.float32)
    return ttotal


def normalize_rows(arrays, block, blocks, NUMBERS, SHAPE, HOW, team=()):
    """The forward of a block, one of so many. HOW is (ENDS, LATENCY, ROUND_XHAT, ORDER)."""
    y, rstd, x, weights, residual, bias = arrays
    inv_n, eps, offset = NUMBERS
    ENDS, LATENCY, ROUND_XHAT, ORDER = HOW
    ROWS, _, PIECES, VECTOR = SHAPE
    SHIFTS, part = shifts_of(VECTOR, ENDS), member_of(team)
    first, n, m = block % SHIFTS, length_of_rows(x, VECTOR, ENDS), x.shape[0]
    lanes = lanes_of_block(first, n, part, SHAPE, ENDS)
    LAYOUT = (first, m, n, lanes, SHAPE, ENDS)
    tscale = scale_of(load_lanes(weights, lanes, ENDS), offset)
    tbias = load_lanes(bias, lanes, ENDS)
    rows, dtype = (x,) + residual[:1], residual[1].dtype if len(residual) > 0 else x.dtype
    stride = blocks // SHIFTS
    tahead = load_ends(rows, rows_of_step(block // SHIFTS, LAYOUT), ENDS)
    for step in range(block // SHIFTS, ct.cdiv(ct.cdiv(m - first, SHIFTS), ROWS), stride):
        where = rows_of_step(step, LAYOUT)
        tnext = load_ends(rows, rows_of_step(step + stride, LAYOUT), ENDS)
        tstored, tresidual = load_inner(x, where, LATENCY) + tahead[:1], ()
        if len(residual) > 0:
            tresidual = load_inner(residual[0], where, LATENCY) + tahead[1:]
        tx = row_as_float32(with_residual(tstored, tresidual, residual, store_rows, where))
        total = sum_with_team(sum_of_products(tx, tx, PIECES, ORDER, 1), step * SHIFTS + first, team)
        trstd = rstd_of(total, inv_n, eps)
        ct.scatter(rstd, where[0] + first, trstd, mask=where[1] & (part == 0), check_bounds=False)
        store_rows(y, where, scaled(xhat_of(tx, trstd, dtype, ROUND_XHAT), tscale, tbias))
        tahead = tnext


def gradients_of_rows(arrays, partials, block, blocks, NUMBERS, SHAPE, HOW, team=()):
    """The backward of a block, one of so many; it writes row `block` of `partials`, dw_partial and () or (db_partial,).
    HOW is (ENDS, LATENCY, HAS_DW, ROUND_XHAT, ORDER)."""
    dx, dy, x, weights, rstd, d_residual_out, d_residual = arrays
    inv_n, offset = NUMBERS
    ENDS, LATENCY, HAS_DW, ROUND_XHAT, ORDER = HOW
    ROWS, WIDTH, PIECES, VECTOR = SHAPE
    SHIFTS = shifts_of(VECTOR, ENDS)
    first, n, m = block % SHIFTS, length_of_rows(x, VECTOR, ENDS), x.shape[0]
    lanes = lanes_of_block(first, n, member_of(team), SHAPE, ENDS)
    LAYOUT = (first, m, n, lanes, SHAPE, ENDS)
    tscale = scale_of(load_lanes(weights, lanes, ENDS), offset)
    tdw = zeros((ROWS, WIDTH), PIECES) + zeros((ROWS, 2 * VECTOR), 1 if ENDS else 0)
    tdb = tdw if len(partials[1]) > 0 else ()
    rows = (x, dy) + d_residual_out
    stride = blocks // SHIFTS
    where = rows_of_step(block // SHIFTS, LAYOUT)
    tahead, trstd = load_ends(rows, where, ENDS), ct.gather(rstd, where[0] + first, padding_value=0)
    for step in range(block // SHIFTS, ct.cdiv(ct.cdiv(m - first, SHIFTS), ROWS), stride):
        where, of_next = rows_of_step(step, LAYOUT), rows_of_step(step + stride, LAYOUT)
        tnext = load_ends(rows, of_next, ENDS)
        tnext_rstd = ct.gather(rstd, of_next[0] + first, padding_value=0)
        tx = row_as_float32(load_inner(x, where, LATENCY) + tahead[:1])
        tdy = row_as_float32(load_inner(dy, where, LATENCY) + tahead[1:2])
        td_residual_out = ()
        if len(d_residual_out) > 0:
            td_residual_out = load_inner(d_residual_out[0], where, LATENCY) + tahead[2:]

        th, tg = h_and_g(tdy, trstd, tscale)
        total = sum_with_team(sum_of_products(tx, tg, PIECES, ORDER, 1), step * SHIFTS + first, team)
        td = gradient(tx, factor_of_x(total * inv_n, trstd), tg)
        store_gradients(store_rows, where, dx, d_residual, td, td_residual_out)
        tdw = added(tdw, terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT))
        tdb = added(tdb, tdy)
        tahead, trstd = tnext, tnext_rstd
    store_sums(store_partial_row, (block, lanes), partials, tdw + tdb, HAS_DW)


def forward_unaligned(
    y,  # (M, N), packed: written
    rstd,  # (M,), float32: written
    x,  # (M, N), packed
    weight,  # (N,)
    residual,  # () or (as x, (M, N) written, alpha)
    bias,  # () or ((N,),)
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    VECTOR: ConstInt,
    ENDS: ConstBool,
    LATENCY: ConstInt,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: a multiple of VECTOR where there are ENDS."""
    wait_and_signal(DEPENDENT)
    ORDER = () if IN_ORDER else AS_COMPILED
    SHAPE, HOW = (ROWS, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, ROUND_XHAT, ORDER)
    arrays = (y, rstd, x, (weight,) if HAS_WEIGHT else (), residual, bias)
    normalize_rows(arrays, ct.bid(0), ct.num_blocks(0), (inv_n, eps, offset), SHAPE, HOW)


def forward_unaligned_team(
    y,  # (M, N), packed: written
    rstd,  # (M,), float32: written
    x,  # (M, N), packed
    weight,  # (N,)
    residual,  # () or (as x, (M, N) written, alpha)
    bias,  # () or ((N,),)
    board,  # (more than M, SLOTS), int32: EMPTY, written
    inv_n,
    eps,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    VECTOR: ConstInt,
    ENDS: ConstBool,
    LATENCY: ConstInt,
    MEMBERS: ConstInt,
    SLOTS: ConstInt,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: MEMBERS times what forward_unaligned has. The first member of a team has a row's ends."""
    wait_and_signal(DEPENDENT)
    ORDER = () if IN_ORDER else AS_COMPILED
    block, team = join_team(board, MEMBERS, SLOTS)
    SHAPE, HOW = (1, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, ROUND_XHAT, ORDER)
    arrays = (y, rstd, x, (weight,) if HAS_WEIGHT else (), residual, bias)
    normalize_rows(arrays, block, ct.num_blocks(0) // MEMBERS, (inv_n, eps, offset), SHAPE, HOW, team)


def backward_unaligned(
    dx,  # (M, N), packed: written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), packed
    x,  # (M, N), packed
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    db_partial,  # () or (as dw_partial,)
    inv_n,
    offset,
    ROWS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    VECTOR: ConstInt,
    ENDS: ConstBool,
    LATENCY: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P,), a multiple of VECTOR where there are ENDS."""
    wait_and_signal(DEPENDENT)
    ORDER = () if IN_ORDER else AS_COMPILED
    SHAPE, HOW = ((ROWS, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_DW, ROUND_XHAT, ORDER))
    arrays = (dx, dy, x, (weight,) if HAS_WEIGHT else (), rstd, d_residual_out, d_residual)
    partials, blocks, NUMBERS = (dw_partial, db_partial), ct.num_blocks(0), (inv_n, offset)
    gradients_of_rows(arrays, partials, ct.bid(0), blocks, NUMBERS, SHAPE, HOW)


def backward_unaligned_team(
    dx,  # (M, N), packed: written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), packed
    x,  # (M, N), packed
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    board,  # (more than M, SLOTS), int32: EMPTY, written
    inv_n,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    VECTOR: ConstInt,
    ENDS: ConstBool,
    LATENCY: ConstInt,
    MEMBERS: ConstInt,
    SLOTS: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    IN_ORDER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P * MEMBERS,). The first member of a team has a row's ends."""
    wait_and_signal(DEPENDENT)
    ORDER = () if IN_ORDER else AS_COMPILED
    block, team = join_team(board, MEMBERS, SLOTS)
    SHAPE, HOW = (1, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_DW, ROUND_XHAT, ORDER)
    arrays = (dx, dy, x, (weight,) if HAS_WEIGHT else (), rstd, d_residual_out, d_residual)
    blocks, NUMBERS = ct.num_blocks(0) // MEMBERS, (inv_n, offset)
    gradients_of_rows(arrays, (dw_partial, ()), block, blocks, NUMBERS, SHAPE, HOW, team)
