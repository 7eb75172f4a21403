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

from .backward import h_and_g
from .residual import added_residual, times_alpha, with_d_residual_out
from .team import join_team, sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    as_float32,
    factor_of_x,
    multiplied,
    products_lane_by_lane,
    rounded,
    row_as_float32,
    row_of_terms_of_dw,
)


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


def shifts_of(VECTOR, ENDS):
    """Return the spacing, in rows, of one SHIFT."""
    return VECTOR if ENDS else 1


def rows_of_step(step, SHAPE, ENDS):
    """The rows of a step, counted from the block's first, as (ROWS, 1)."""
    ROWS, _, _, VECTOR = SHAPE
    return (step * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]) * shifts_of(VECTOR, ENDS)


def length_of_rows(array, VECTOR, ENDS):
    """N."""
    n = array.shape[1]
    return n if ENDS else ct.assume_divisible_by(n, VECTOR)


def offsets_of(trows, tlanes, n, start):
    """Offsets in elements, 64 bits wide."""
    return ct.astype(trows, ct.int64) * n + (tlanes + start)


def load_inner(array, trows, tis_row, n, lanes, LATENCY):
    """The inner lanes of rows, as tiles of the array's dtype; others hold 0."""
    _, start, end, tinner, _, _ = lanes
    memory = array.get_raw_memory()
    return tuple(
        memory.load_offset(offsets_of(trows, t, n, start), mask=tis_row & (t < end), latency=LATENCY)
        for t in ct.static_iter(tinner)
    )


def load_ends(arrays, trows, tis_row, n, lanes, ENDS):
    """The ends of rows of each array, if rows have any."""
    _, start, _, _, tends, tis_own = lanes
    tiles = ()
    if ENDS:
        toffsets = offsets_of(trows, tends, n, start)
        tiles = tuple(
            a.get_raw_memory().load_offset(toffsets, mask=tis_row & tis_own) for a in ct.static_iter(arrays)
        )
    return tiles


def store_rows(array, trows, tis_row, n, lanes, tiles):
    """Writes tiles of inner lanes, and of ends behind them, rounded to the array's dtype."""
    _, start, end, tinner, tends, tis_own = lanes
    memory = array.get_raw_memory()
    for k in ct.static_iter(range(len(tinner))):
        toffsets = offsets_of(trows, tinner[k], n, start)
        memory.store_offset(toffsets, ct.astype(tiles[k], array.dtype), mask=tis_row & (tinner[k] < end))
    if len(tiles) > len(tinner):
        toffsets = offsets_of(trows, tends, n, start)
        memory.store_offset(toffsets, ct.astype(tiles[-1], array.dtype), mask=tis_row & tis_own)


def load_columns(array, lanes, ENDS):
    """A weight or bias as float32 tiles like those of rows; lanes that are not the row's hold 0."""
    shift, _, end, tinner, tends, tis_own = lanes
    if ENDS:
        tiles = tuple(shifted_columns(array, t, shift, end) for t in ct.static_iter(tinner))
        tiles = tiles + (
            as_float32(ct.gather(array, tends - shift, mask=tis_own, check_bounds=False, padding_value=0)),
        )
    else:
        tiles = tuple(
            as_float32(ct.gather(array, t, mask=t < end, check_bounds=False, padding_value=0))
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


def load_scale(weight, lanes, offset, ENDS):
    """weight + offset, as float32 tiles."""
    tcolumns = load_columns(weight, lanes, ENDS)
    return tuple(t + offset for t in ct.static_iter(tcolumns))


def sum_over_rows(a, b, PIECES):
    """The sums of a * b over each row, as (ROWS, 1)."""
    ttotal = ct.sum(products_lane_by_lane(a, b, PIECES), axis=1, keepdims=True)
    if len(a) > PIECES:
        ttotal = ttotal + ct.sum(a[-1] * b[-1], axis=1, keepdims=True)
    return ttotal


def sum_with_team(ttotal, row, team):
    """The sum over all parts of the one row of a step, which a team of blocks shares (team.py)."""
    if len(team) > 0:
        board, member, MEMBERS, SLOTS = team
        total = sum_of_team(board, row, member, ct.sum(ttotal), MEMBERS, SLOTS)
        ttotal = ct.full((1, 1), total, dtype=ct.float32)
    return ttotal


def normalize_rows(arrays, block, blocks, inv_n, eps, offset, SHAPE, HOW, residual, bias, team):
    """The forward of a block, one of so many. HOW is (ENDS, LATENCY, HAS_WEIGHT, ROUND_XHAT)."""
    y, rstd, x, weight = arrays
    ENDS, LATENCY, HAS_WEIGHT, ROUND_XHAT = HOW
    ROWS, _, PIECES, VECTOR = SHAPE
    SHIFTS = shifts_of(VECTOR, ENDS)
    first, part = block % SHIFTS, 0
    if len(team) > 0:
        part = team[1]
    n, m = length_of_rows(x, VECTOR, ENDS), x.shape[0]
    lanes = lanes_of_block(first, n, part, SHAPE, ENDS)
    tscale, tbias = (), ()
    if HAS_WEIGHT:
        tscale = load_scale(weight, lanes, offset, ENDS)
    if len(bias) > 0:
        tbias = load_columns(bias[0], lanes, ENDS)
    rows = (x,) + residual[:1]
    dtype = residual[1].dtype if len(residual) > 0 else x.dtype
    stride = blocks // SHIFTS
    trows = rows_of_step(block // SHIFTS, SHAPE, ENDS)
    tahead = load_ends(rows, trows, trows + first < m, n, lanes, ENDS)
    for step in range(block // SHIFTS, ct.cdiv(ct.cdiv(m - first, SHIFTS), ROWS), stride):
        trows = rows_of_step(step, SHAPE, ENDS)
        tis_row = trows + first < m
        tnext_rows = rows_of_step(step + stride, SHAPE, ENDS)
        tnext = load_ends(rows, tnext_rows, tnext_rows + first < m, n, lanes, ENDS)
        tstored = load_inner(x, trows, tis_row, n, lanes, LATENCY) + tahead[:1]
        if len(residual) > 0:
            tresidual = load_inner(residual[0], trows, tis_row, n, lanes, LATENCY) + tahead[1:]
            tstored = added_residual(tstored, tresidual, residual[2], dtype)
            store_rows(residual[1], trows, tis_row, n, lanes, tstored)
        tx = row_as_float32(tstored)
        ttotal = sum_with_team(sum_over_rows(tx, tx, PIECES), step * SHIFTS + first, team)
        trstd = ct.rsqrt(ttotal * inv_n + eps)
        ct.scatter(rstd, trows + first, trstd, mask=tis_row & (part == 0), check_bounds=False)
        ty = tuple(rounded(t * trstd, dtype, ROUND_XHAT) for t in ct.static_iter(tx))
        if HAS_WEIGHT:
            ty = multiplied(ty, tscale)
        if len(bias) > 0:
            ty = added(ty, tbias)
        store_rows(y, trows, tis_row, n, lanes, ty)
        tahead = tnext


def gradients_of_rows(
    arrays, dw_partial, db_partial, block, blocks, inv_n, offset, SHAPE, HOW, residual_gradients, team
):
    """The backward of a block, one of so many; it writes row `block` of dw_partial, and of db_partial if there is one.
    HOW is (ENDS, LATENCY, HAS_WEIGHT, HAS_DW, ROUND_XHAT)."""
    dx, dy, x, weight, rstd = arrays
    ENDS, LATENCY, HAS_WEIGHT, HAS_DW, ROUND_XHAT = HOW
    ROWS, _, PIECES, VECTOR = SHAPE
    d_residual_out, d_residual = residual_gradients
    SHIFTS = shifts_of(VECTOR, ENDS)
    first, part = block % SHIFTS, 0
    if len(team) > 0:
        part = team[1]
    n, m = length_of_rows(x, VECTOR, ENDS), x.shape[0]
    lanes = lanes_of_block(first, n, part, SHAPE, ENDS)
    tscale = ()
    if HAS_WEIGHT:
        tscale = load_scale(weight, lanes, offset, ENDS)
    tdw = zeros_of_lanes(lanes, ROWS, ENDS)
    tdb = tdw if len(db_partial) > 0 else ()
    rows = (x, dy) + d_residual_out
    stride = blocks // SHIFTS
    trows = rows_of_step(block // SHIFTS, SHAPE, ENDS)
    tahead = load_ends(rows, trows, trows + first < m, n, lanes, ENDS)
    trstd = ct.gather(rstd, trows + first, padding_value=0)
    for step in range(block // SHIFTS, ct.cdiv(ct.cdiv(m - first, SHIFTS), ROWS), stride):
        trows = rows_of_step(step, SHAPE, ENDS)
        tis_row = trows + first < m
        tnext_rows = rows_of_step(step + stride, SHAPE, ENDS)
        tnext = load_ends(rows, tnext_rows, tnext_rows + first < m, n, lanes, ENDS)
        tnext_rstd = ct.gather(rstd, tnext_rows + first, padding_value=0)
        tx = row_as_float32(load_inner(x, trows, tis_row, n, lanes, LATENCY) + tahead[:1])
        tdy = row_as_float32(load_inner(dy, trows, tis_row, n, lanes, LATENCY) + tahead[1:2])
        td_residual_out = ()
        if len(d_residual_out) > 0:
            td_residual_out = load_inner(d_residual_out[0], trows, tis_row, n, lanes, LATENCY) + tahead[2:]
        th, tg = h_and_g(tdy, trstd, tscale)
        ttotal = sum_with_team(sum_over_rows(tx, tg, PIECES), step * SHIFTS + first, team)
        tfactor = factor_of_x(ttotal * inv_n, trstd)
        td = tuple(tx[k] * tfactor + tg[k] for k in ct.static_iter(range(len(tx))))
        td = with_d_residual_out(td, td_residual_out)
        if len(d_residual) == 2:
            store_rows(d_residual[0], trows, tis_row, n, lanes, td)
        store_rows(dx, trows, tis_row, n, lanes, times_alpha(td, d_residual))
        if HAS_DW:
            tdw = added(tdw, row_of_terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT))
        if len(db_partial) > 0:
            tdb = added(tdb, tdy)
        tahead, trstd = tnext, tnext_rstd
    if HAS_DW:
        store_partial_row(dw_partial, block, lanes, tdw)
    if len(db_partial) > 0:
        store_partial_row(db_partial[0], block, lanes, tdb)


def zeros_of_lanes(lanes, ROWS, ENDS):
    """Sums of dw before the first row."""
    _, _, _, tinner, tends, _ = lanes
    tlanes = tinner + (tends,) if ENDS else tinner
    return tuple(ct.zeros((ROWS, t.shape[1]), dtype=ct.float32) for t in ct.static_iter(tlanes))


def store_partial_row(partials, p, lanes, tsums):
    """Writes the sums over the rows of tiles as row p of dw_partial or of db_partial."""
    shift, _, end, tinner, tends, tis_own = lanes
    for k in ct.static_iter(range(len(tinner))):
        tsum = ct.astype(ct.sum(tsums[k], axis=0, keepdims=True), partials.dtype)
        ct.scatter(partials, (p, tinner[k] - shift), tsum, mask=tinner[k] < end, check_bounds=False)
    if len(tsums) > len(tinner):
        tsum = ct.astype(ct.sum(tsums[-1], axis=0, keepdims=True), partials.dtype)
        ct.scatter(partials, (p, tends - shift), tsum, mask=tis_own, check_bounds=False)


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
    DEPENDENT: ConstBool,
):
    """Grid: a multiple of VECTOR where there are ENDS."""
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    SHAPE, HOW = (ROWS, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_WEIGHT, ROUND_XHAT)
    arrays = (y, rstd, x, weight)
    normalize_rows(
        arrays, ct.bid(0), ct.num_blocks(0), inv_n, eps, offset, SHAPE, HOW, residual, bias, team=()
    )


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
    DEPENDENT: ConstBool,
):
    """Grid: MEMBERS times what forward_unaligned has. The first member of a team has a row's ends."""
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    block, team = join_team(board, MEMBERS, SLOTS)
    SHAPE, HOW = (1, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_WEIGHT, ROUND_XHAT)
    arrays, blocks = (y, rstd, x, weight), ct.num_blocks(0) // MEMBERS
    normalize_rows(arrays, block, blocks, inv_n, eps, offset, SHAPE, HOW, residual, bias, team)


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
    DEPENDENT: ConstBool,
):
    """Grid: (P,), a multiple of VECTOR where there are ENDS."""
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    SHAPE, HOW = (ROWS, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_WEIGHT, HAS_DW, ROUND_XHAT)
    arrays, blocks = (dx, dy, x, weight, rstd), ct.num_blocks(0)
    gradients_of_rows(
        arrays,
        dw_partial,
        db_partial,
        ct.bid(0),
        blocks,
        inv_n,
        offset,
        SHAPE,
        HOW,
        (d_residual_out, d_residual),
        team=(),
    )


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
    DEPENDENT: ConstBool,
):
    """Grid: (P * MEMBERS,). The first member of a team has a row's ends."""
    if DEPENDENT:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    block, team = join_team(board, MEMBERS, SLOTS)
    SHAPE, HOW = (1, WIDTH, PIECES, VECTOR), (ENDS, LATENCY, HAS_WEIGHT, HAS_DW, ROUND_XHAT)
    arrays, blocks = (dx, dy, x, weight, rstd), ct.num_blocks(0) // MEMBERS
    gradients_of_rows(
        arrays, dw_partial, (), block, blocks, inv_n, offset, SHAPE, HOW, (d_residual_out, d_residual), team
    )
