# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The forward of RMSNorm in cuTile. For row i of x (M x N), in float32:

    rstd = 1 / sqrt(mean_j x^2 + eps)        y = x * rstd * (weight + offset) + bias

With a residual x stands here for the sum that is normalized (residual.py). y is rounded once, on its way out; rstd
(float32) is kept for the backward. With ROUND_XHAT (casting="llama") x * rstd is rounded to x's dtype before it meets
the weight, as Hugging Face's Llama code does.

    forward_rows      one row per block, gathered into register tiles
    forward_tiles     several narrow rows per block, as one 2-D tile
    forward_team      (forward_team.py) wide rows, each shared by several blocks
    forward_reread    (reread.py) wide rows that those do not serve: read twice, the second time from L2, mostly

All but the last read x from memory once. M, eps, offset and 1/N are run-time values; tile extents, dtypes and the
switches in capitals are compiled in. Without a weight (HAS_WEIGHT False) the argument is a placeholder that is never
read.

When the weight is loaded (plans/variants.py: LoadsWeight). The compiler sinks the load of the weight below the
reduction, where its latency shows once more.

    late            as the compiler has it
    EARLY_WEIGHT    beside x, above the signal that lets the next kernel in: the compiler moves no load across that
    JOINT_WEIGHT    beside x, by a fake dependency (`weights.joint_load`), for kernels in which the compiler moves the
                    signal too. A weight of another dtype than x is only written beside x: float32 beside x of 16 bits
                    would take twice the registers. It mostly sinks, and has records of its own, mostly EARLY_WEIGHT.
"""

import cuda.tile as ct

from .heads import (
    load_columns_at,
    load_optional_at,
    place_of_tile,
    store_rstd_at,
    store_tile_at,
    sum_of_indices,
)
from .pdl import wait_for_launch_before
from .residual import added_residual, residual_with_divisor, row_with_residual
from .team import sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    as_float32,
    column_tiles,
    gather_tile,
    has_aligned_rows,
    load_row,
    multiplied,
    packed_row_as_float32,
    products_lane_by_lane,
    rounded,
    row_as_float32,
    store_row,
    sum_of_products,
    with_divisor,
)
from .weights import gather_columns, joint_load, load_scale, load_weight, scale_of, shifted, weight_tile


def normalize_row(
    arrays, row, tcolumns, inv_n, eps, offset, PIECES, LATENCY, HOW, residual=(), bias=(), team=()
):
    """Writes y and rstd of one row.

    HOW is (EVEN, ALIGNED, PACKED, HAS_WEIGHT, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS), the switches of
    `forward_rows` and two more: ALIGNED, whether rows begin at multiples of 16 bytes; SIGNALS, whether the next kernel
    is let in here. team, of a block that holds a part of the row (forward_team.py): the board, which part, MEMBERS and
    SLOTS."""
    y, rstd, x, weight = arrays
    EVEN, ALIGNED, PACKED, HAS_WEIGHT, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS = HOW
    IS_JOINT = HAS_WEIGHT and JOINT_WEIGHT and weight.dtype == x.dtype
    IS_EARLY = HAS_WEIGHT and not IS_JOINT and (EARLY_WEIGHT or JOINT_WEIGHT)
    tstored = load_row(x, row, tcolumns, EVEN, LATENCY)
    if IS_JOINT:
        tweight = load_weight(weight, tcolumns, EVEN)
        tstored = joint_load(tstored, tweight, ALIGNED)
    if IS_EARLY:
        tscale = load_scale(weight, tcolumns, offset, EVEN)
    if SIGNALS:
        ct.grid_dependency_control_launch_dependents()

    tstored = row_with_residual(tstored, residual, row, tcolumns, EVEN, LATENCY)
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
    ty = tuple(rounded(t * trstd, tstored[0].dtype, ROUND_XHAT) for t in ct.static_iter(tx))
    if HAS_WEIGHT:
        if IS_JOINT:
            tscale = scale_of(tweight, offset)
        elif not IS_EARLY:
            tscale = load_scale(weight, tcolumns, offset, EVEN)
        ty = multiplied(ty, tscale)
    if len(bias) > 0:
        tbias = row_as_float32(load_weight(bias[0], tcolumns, EVEN))
        ty = added(ty, tbias)

    store_row(y, row, tcolumns, ty, EVEN)


def forward_rows(
    y,  # (M, N): written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride, or (B, T, H, N), any strides
    weight,  # (N,)
    residual,  # () or (as x, (M, N) written, alpha)
    bias,  # () or ((N,),)
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
    JOINT_WEIGHT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). The signal to the next kernel comes first, unless EARLY_WEIGHT needs it behind the loads. PACKED
    keeps x in its own 16 bits while the squares are summed, which makes room for an early weight."""
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    residual, bias = residual_with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    tcolumns = column_tiles(WIDTH, PIECES, REST)
    if DEPENDENT and JOINT_WEIGHT:
        wait_for_launch_before(ct.bid(0))
    elif DEPENDENT:
        ct.grid_dependency_control_wait()
    if DEPENDENT and not EARLY_WEIGHT:
        ct.grid_dependency_control_launch_dependents()
    ALIGNED, SIGNALS = has_aligned_rows(x, DIVISOR), DEPENDENT and EARLY_WEIGHT
    HOW = (EVEN, ALIGNED, PACKED, HAS_WEIGHT, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS)
    arrays = (y, rstd, x, weight)
    normalize_row(arrays, ct.bid(0), tcolumns, inv_n, eps, offset, PIECES, LATENCY, HOW, residual, bias)


def load_block(arrays, place, SHAPE, PIECES, LATENCY, EVEN, GATHERS, DIVISOR):
    """A block's tiles of the one array of rows in a tuple, as float32; nothing of an empty tuple. By gathers rows past
    the last one are that one again; tiles have zeros there."""
    ROWS, _, WIDTH = SHAPE
    if GATHERS and len(arrays) > 0:
        trows = ct.minimum(place[0] * ROWS + ct.arange(ROWS, dtype=ct.int32), arrays[0].shape[0] - 1)
        tcolumns = column_tiles(WIDTH, PIECES, 0)
        tiles = tuple(
            gather_tile(arrays[0], trows, tcolumns[k], EVEN or k < PIECES - 1, LATENCY)
            for k in ct.static_iter(range(PIECES))
        )
    else:
        tiles = load_optional_at(arrays, place, SHAPE, PIECES, LATENCY, False, DIVISOR)
    return tiles


def load_columns_of_block(
    array, dtype, place, SHAPE, PIECES, EVEN, GATHERS, JOINT, DIVISOR, PER_HEAD, shift=()
):
    """A row of a weight or bias beside rows of `dtype`, as float32 that broadcasts to a block's tiles. shift: () or
    (what is added,)."""
    ROWS, _, WIDTH = SHAPE
    if GATHERS:
        tcolumns = column_tiles(WIDTH, PIECES, 0)
        if JOINT and array.dtype == dtype:
            tiles = tuple(
                shifted(gather_columns(array, ROWS, tcolumns[k], EVEN or k < PIECES - 1), shift)
                for k in ct.static_iter(range(PIECES))
            )
        else:
            tiles = tuple(
                ct.reshape(shifted(as_float32(weight_tile(array, tcolumns, k, EVEN)), shift), (1, WIDTH))
                for k in ct.static_iter(range(PIECES))
            )
    else:
        tiles = tuple(
            load_columns_at(array, place, k, SHAPE, False, DIVISOR, PER_HEAD, shift)
            for k in ct.static_iter(range(PIECES))
        )
    return tiles


def tiles_with_residual(tx, tresidual, residual, place, SHAPE):
    """Return the tiles to normalize, float32: those of x, or of residual_out, which this writes."""
    if len(residual) > 0:
        _, residual_out, alpha = residual
        tresidual_out = added_residual(tx, tresidual, alpha, residual_out.dtype)
        for k in ct.static_iter(range(len(tresidual_out))):
            store_tile_at(residual_out, place, k, tresidual_out[k], SHAPE, False)
        tx = row_as_float32(tresidual_out)
    return tx


def forward_tiles(
    y,  # (M, N), or heads (B, T, H, N): written
    rstd,  # (M,), or (B * T * H,), float32: written
    x,  # as y, any strides but of columns
    weight,  # (N,), or PER_HEAD (H, N)
    residual,  # () or (as x, as y and written, alpha)
    bias,  # () or (as weight,)
    inv_n,
    eps,
    offset,
    ROWS: ConstInt,
    HEADS: ConstInt,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    LATENCY: ConstInt,
    DIVISOR: ConstInt,
    EVEN: ConstBool,
    HAS_WEIGHT: ConstBool,
    PER_HEAD: ConstBool,
    ROUND_XHAT: ConstBool,
    EARLY_WEIGHT: ConstBool,
    JOINT_WEIGHT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: a block for each tile (heads.py). Rows past the last are not written.

    With a late weight a branch leaves rows past M out, and the weight waits behind it. An early or joint one comes with
    x, by gathers, which read the last row again in place of rows past M. Joint, each thread gathers the weight that it
    multiplies by (`weights.gather_columns`), and a row may be PIECES tiles side by side. In tiles of 512 bytes a row
    lies in one warp, 16 bytes a thread, and its sum takes no barrier. Weights of heads are late.

    No TMA: tileiras 13.4 makes some such kernels of warps that together ask for more registers than a block has, and
    wait forever: of rows, and on sm_100 of heads 256 float32 wide.
    """
    ct.static_assert(
        HEADS == 0 or not (EARLY_WEIGHT or JOINT_WEIGHT), "heads are not read by gathers of rows"
    )
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    residual, bias = residual_with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    SHAPE = (ROWS, HEADS, WIDTH)
    GATHERS = EARLY_WEIGHT or JOINT_WEIGHT
    place = place_of_tile(x, ct.bid(0), SHAPE)
    if DEPENDENT:
        wait_for_launch_before(sum_of_indices(place))
    tx = load_block((x,), place, SHAPE, PIECES, LATENCY, EVEN, GATHERS, DIVISOR)
    tresidual = load_block(residual[:1], place, SHAPE, PIECES, LATENCY, EVEN, GATHERS, DIVISOR)
    if HAS_WEIGHT:
        tscale = load_columns_of_block(
            weight, x.dtype, place, SHAPE, PIECES, EVEN, GATHERS, JOINT_WEIGHT, DIVISOR, PER_HEAD, (offset,)
        )
    if len(bias) > 0:
        tbias = load_columns_of_block(
            bias[0], x.dtype, place, SHAPE, PIECES, EVEN, GATHERS, JOINT_WEIGHT, DIVISOR, PER_HEAD
        )
    if DEPENDENT:
        ct.grid_dependency_control_launch_dependents()

    tx = tiles_with_residual(tx, tresidual, residual, place, SHAPE)
    tsquares = products_lane_by_lane(tx, tx, PIECES)
    trstd = ct.rsqrt(ct.sum(tsquares, axis=1, keepdims=True) * inv_n + eps)
    store_rstd_at(rstd, x, place, trstd, SHAPE)

    dtype = residual[1].dtype if len(residual) > 0 else x.dtype
    ty = tuple(rounded(t * trstd, dtype, ROUND_XHAT) for t in ct.static_iter(tx))
    if HAS_WEIGHT:
        ty = multiplied(ty, tscale)
    if len(bias) > 0:
        ty = added(ty, tbias)

    for k in ct.static_iter(range(PIECES)):
        store_tile_at(y, place, k, ty[k], SHAPE, False)
