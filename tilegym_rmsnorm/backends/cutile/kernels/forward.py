# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The forward of RMSNorm in cuTile. For row i of x (M x N), in float32:

    rstd = 1 / sqrt(mean_j x^2 + eps)        y = x * rstd * (weight + offset)

y is rounded once, on its way out; rstd (float32) is kept for the backward. With ROUND_XHAT (casting="llama") x * rstd
is rounded to x's dtype before it meets the weight, as Hugging Face's Llama code does.

    forward_rows      one row per block, gathered into register tiles
    forward_tiles     several narrow rows per block, as one 2-D tile
    forward_team     (forward_team.py) wide rows, each shared by several blocks
    forward_reread    wide rows that those do not serve: summed chunk by chunk, then read again (from L2, mostly)

All but the last read x from memory once. M, eps, offset and 1/N are run-time values; tile extents, dtypes and the
switches in capitals are compiled in. Without a weight (HAS_WEIGHT False) the argument is a placeholder that is never
read.
"""

import cuda.tile as ct

from .pdl import wait_for_launch_before
from .team import sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    column_tiles,
    gather_tile,
    has_aligned_rows,
    load_row,
    load_tile,
    packed_row_as_float32,
    products_lane_by_lane,
    row_as_float32,
    store_row,
    sum_of_products,
    with_divisor,
    xhat_as_multiplied,
)
from .weights import awaited_together, gather_scale_tile, load_scale, load_scale_tile, load_weight, scale_of


def normalize_row(arrays, row, tcolumns, inv_n, eps, offset, PIECES, LATENCY, SWITCHES, team=()):
    """Writes y and rstd of one row. team: what a block needs to know that holds a part of the row
    (forward_team.py)."""
    y, rstd, x, weight = arrays
    EVEN, ALIGNED, PACKED, HAS_WEIGHT, ROUND_XHAT, EARLY_WEIGHT, TOGETHER, SIGNALS = SWITCHES
    IS_AWAITED = HAS_WEIGHT and TOGETHER and weight.dtype == x.dtype
    IS_ASKED_FOR = HAS_WEIGHT and not IS_AWAITED and (EARLY_WEIGHT or TOGETHER)
    tstored = load_row(x, row, tcolumns, EVEN, LATENCY)
    if IS_AWAITED:
        tweight = load_weight(weight, tcolumns, EVEN)
        tstored = awaited_together(tstored, tweight, ALIGNED)
    if IS_ASKED_FOR:
        tscale = load_scale(weight, tcolumns, offset, EVEN)
    if SIGNALS:
        ct.grid_dependency_control_launch_dependents()

    tx = row_as_float32(tstored)
    total = sum_of_products(tx, tx, PIECES)
    is_first = True
    if len(team) > 0:
        board, member, MEMBERS, SLOTS = team
        total = sum_of_team(board, row, member, total, MEMBERS, SLOTS)
        is_first = member == 0
    trstd = ct.rsqrt(total * inv_n + eps)
    if is_first:
        ct.scatter(rstd, row, trstd)

    if PACKED:
        tx = packed_row_as_float32(tstored)
    ty = tuple(xhat_as_multiplied(t * trstd, x.dtype, ROUND_XHAT) for t in ct.static_iter(tx))
    if HAS_WEIGHT:
        if IS_AWAITED:
            tscale = scale_of(tweight, offset)
        elif not IS_ASKED_FOR:
            tscale = load_scale(weight, tcolumns, offset, EVEN)
        ty = tuple(ty[k] * tscale[k] for k in ct.static_iter(range(len(ty))))

    store_row(y, row, tcolumns, ty, EVEN)


def forward_rows(
    y,  # (M, N), x's dtype: written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride
    weight,  # (N,)
    inv_n,
    eps,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    REST: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    PACKED: ConstBool,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    EARLY_WEIGHT: ConstBool,
    TOGETHER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (M,).

    The compiler moves loads of the weight behind the reduction, between the stores of y, where they are waited for once
    more. It does not move them past the signal that lets the next kernel in, so EARLY_WEIGHT has them issued along with
    x: 1x4096 in 2.4 us instead of 2.6 on an H100, before launches became dependent. Rows that fill the registers have
    no room for that, and give the signal first: 16384x3072 float32 136.5 us with it, 137.1 without. PACKED makes room:
    it keeps x in its own 16 bits while the squares are summed.

    In some kernels (4096 columns of float16 and of float32) the compiler moves them behind the first sums all the
    same, and the signal too. TOGETHER leaves it no choice (`weights.awaited_together`), and gives the signal first. A
    weight of another dtype than x is written beside x, but not awaited: float32 beside x of 16 bits would take twice
    the registers, which rows of many blocks an SM do not have (14336 columns: 128 bytes a thread spilled). So it is
    mostly loaded behind the sum all the same; hopper.py has rules of its own for it, mostly with EARLY_WEIGHT.
    """
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    tcolumns = column_tiles(WIDTH, PIECES, REST)
    if DEPENDENT and TOGETHER:
        wait_for_launch_before(ct.bid(0))
    elif DEPENDENT:
        ct.grid_dependency_control_wait()
    if DEPENDENT and not EARLY_WEIGHT:
        ct.grid_dependency_control_launch_dependents()
    ALIGNED, SIGNALS = has_aligned_rows(x, DIVISOR), DEPENDENT and EARLY_WEIGHT
    SWITCHES = (EVEN, ALIGNED, PACKED, HAS_WEIGHT, ROUND_XHAT, EARLY_WEIGHT, TOGETHER, SIGNALS)
    normalize_row((y, rstd, x, weight), ct.bid(0), tcolumns, inv_n, eps, offset, PIECES, LATENCY, SWITCHES)


def rows_and_scale(x, weight, i, offset, shape, PIECES, LATENCY, HOW):
    """The rows of block i as tiles of x, float32, and of weight + offset, or nothing where there is no weight.

    By gathers rows past the last one are that one again; tiles have zeros there.
    """
    ROWS, WIDTH = shape
    EVEN, HAS_WEIGHT, GATHERS, TOGETHER, TMA, DIVISOR = HOW
    tscale = ()
    if GATHERS:
        trows = ct.minimum(i * ROWS + ct.arange(ROWS, dtype=ct.int32), x.shape[0] - 1)
        tcolumns = column_tiles(WIDTH, PIECES, 0)
        tx = tuple(
            gather_tile(x, trows, tcolumns[k], EVEN or k < PIECES - 1, LATENCY)
            for k in ct.static_iter(range(PIECES))
        )
        if HAS_WEIGHT and TOGETHER and weight.dtype == x.dtype:
            tscale = tuple(
                gather_scale_tile(weight, ROWS, tcolumns[k], offset, EVEN or k < PIECES - 1)
                for k in ct.static_iter(range(PIECES))
            )
        elif HAS_WEIGHT:
            tscale = load_scale(weight, tcolumns, offset, EVEN)
            tscale = tuple(ct.reshape(t, (1, WIDTH)) for t in ct.static_iter(tscale))
    else:
        tx = (load_tile(x, (i, 0), (ROWS, WIDTH), LATENCY, TMA, DIVISOR),)
        if HAS_WEIGHT:
            tscale = (load_scale_tile(weight, 0, WIDTH, offset, TMA, DIVISOR),)
    return tx, tscale


def forward_tiles(
    y,  # (M, N), x's dtype: written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride
    weight,  # (N,)
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    EVEN: ConstBool,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    EARLY_WEIGHT: ConstBool,
    TOGETHER: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (cdiv(M, ROWS),). Rows past M are not written. No config has TMA here: limits.py says why.

    EARLY_WEIGHT: x and the weight by gathers, which are awaited together; rows past M read the last one. Without, a
    branch leaves such rows of x out, and the weight waits behind it (bfloat16 1x256 1.41 us instead of 1.15, an H200).
    TOGETHER: the same, and each thread gathers the weight that it multiplies by (`weights.gather_scale_tile`); of
    another dtype than x, other threads load it. A row may then be PIECES tiles side by side. Of tiles of 512 bytes it
    lies in one warp, 16 bytes a thread, and its sum takes no barrier; a wider tile has a row in all warps, two rows
    at a time.
    """
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    i = ct.bid(0)
    if DEPENDENT:
        wait_for_launch_before(i)
    HOW = (EVEN, HAS_WEIGHT, EARLY_WEIGHT or TOGETHER, TOGETHER, TMA, DIVISOR)
    tx, tscale = rows_and_scale(x, weight, i, offset, (ROWS, WIDTH), PIECES, LATENCY, HOW)
    if DEPENDENT:
        ct.grid_dependency_control_launch_dependents()

    tsquares = products_lane_by_lane(tx, tx, PIECES)
    trstd = ct.rsqrt(ct.sum(tsquares, axis=1, keepdims=True) * inv_n + eps)
    ct.store(rstd, (i,), ct.reshape(trstd, (ROWS,)), allow_tma=False)

    ty = tuple(xhat_as_multiplied(t * trstd, x.dtype, ROUND_XHAT) for t in ct.static_iter(tx))
    if HAS_WEIGHT:
        ty = tuple(ty[k] * tscale[k] for k in ct.static_iter(range(PIECES)))

    for k in ct.static_iter(range(PIECES)):
        ct.store(y, (i, k), ct.astype(ty[k], y.dtype), allow_tma=TMA)
