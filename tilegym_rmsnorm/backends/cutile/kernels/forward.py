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

from .formula import rstd_of, scaled, xhat_of
from .heads import (
    beside_rows,
    load_columns_at,
    load_optional_at,
    place_of_tile,
    store_rstd_at,
    store_tiles_at,
    sum_of_indices,
)
from .pdl import wait_for_launch_before
from .residual import with_residual
from .rows import column_tiles, gather_tile, has_aligned_rows, load_row, store_row, with_divisor
from .team import member_of, sum_of_team
from .tiles import (
    AS_COMPILED,
    ConstBool,
    ConstInt,
    as_float32,
    order_of,
    order_of_tiles,
    packed_row_as_float32,
    row_as_float32,
    sum_of_products,
)
from .weights import gather_columns, joint_load, load_scale, load_weight, scale_of, shifted, weight_tile


def normalize_row(arrays, where, NUMBERS, PIECES, HOW, team=()):
    """Writes y and rstd of one row.

    HOW is (LATENCY, ALIGNED, PACKED, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS, ORDER), the switches of
    `forward_rows` and three more: ALIGNED, whether rows begin at multiples of 16 bytes; SIGNALS, whether the next
    kernel is let in here; ORDER, that of `sum_of_lanes`.
    team: of a block that holds a part of the row (team.py)."""
    y, rstd, x, weights, residual, bias = arrays
    inv_n, eps, offset = NUMBERS
    LATENCY, ALIGNED, PACKED, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS, ORDER = HOW
    IS_JOINT = JOINT_WEIGHT and len(weights) > 0 and weights[0].dtype == x.dtype
    IS_EARLY = not IS_JOINT and (EARLY_WEIGHT or JOINT_WEIGHT)
    tstored = load_row(x, where, LATENCY)
    if IS_JOINT:
        tweight = load_weight(weights[0], where)
        tstored = joint_load(tstored, tweight, ALIGNED)
    if IS_EARLY:
        tscale = load_scale(weights, where, offset)
    if SIGNALS:
        ct.grid_dependency_control_launch_dependents()

    tresidual = load_row(residual[0], where, LATENCY) if len(residual) > 0 else ()
    tstored = with_residual(tstored, tresidual, residual, store_row, where)
    tx = row_as_float32(tstored)
    total = sum_of_team(sum_of_products(tx, tx, PIECES, ORDER), where[0], team)
    is_first = member_of(team) == 0
    trstd = rstd_of(total, inv_n, eps)
    if is_first:
        ct.scatter(rstd, where[0], trstd)

    if PACKED:
        tx = packed_row_as_float32(tstored)
    txhat = xhat_of(tx, trstd, tstored[0].dtype, ROUND_XHAT)
    if IS_JOINT:
        tscale = scale_of(tweight, offset)
    elif not IS_EARLY:
        tscale = load_scale(weights, where, offset)
    tbias = row_as_float32(load_weight(bias[0], where)) if len(bias) > 0 else ()
    store_row(y, where, scaled(txhat, tscale, tbias))


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
    WARPS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). The signal to the next kernel comes first, unless EARLY_WEIGHT needs it behind the loads. PACKED
    keeps x in its own 16 bits while the squares are summed, which makes room for an early weight."""
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    residual, bias = with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    tcolumns = column_tiles(WIDTH, PIECES, REST)
    if DEPENDENT and JOINT_WEIGHT:
        wait_for_launch_before(ct.bid(0))
    elif DEPENDENT:
        ct.grid_dependency_control_wait()
    if DEPENDENT and not EARLY_WEIGHT:
        ct.grid_dependency_control_launch_dependents()
    weights = (weight,) if HAS_WEIGHT else ()
    arrays = (y, rstd, x, weights, residual, bias)
    where, NUMBERS = (ct.bid(0), 0, tcolumns, EVEN), (inv_n, eps, offset)
    ALIGNED, SIGNALS = has_aligned_rows(x, DIVISOR), DEPENDENT and EARLY_WEIGHT
    ORDER = order_of((x,) + weights + residual[:1], DIVISOR, WARPS)
    HOW = (LATENCY, ALIGNED, PACKED, ROUND_XHAT, EARLY_WEIGHT, JOINT_WEIGHT, SIGNALS, ORDER)
    normalize_row(arrays, where, NUMBERS, PIECES, HOW)


def load_block(arrays, BLOCK):
    """A block's tiles of the one array of rows in a tuple, as float32; nothing of an empty tuple. By gathers rows past
    the last one are that one again; tiles have zeros there. BLOCK is (place, SHAPE, PIECES, HOW, EVEN, GATHERS)."""
    place, SHAPE, PIECES, HOW, EVEN, GATHERS = BLOCK
    ROWS, _, WIDTH = SHAPE
    if GATHERS and len(arrays) > 0:
        trows = ct.minimum(place[0] * ROWS + ct.arange(ROWS, dtype=ct.int32), arrays[0].shape[0] - 1)
        tcolumns = column_tiles(WIDTH, PIECES, 0)
        tiles = tuple(
            gather_tile(arrays[0], trows, tcolumns[k], EVEN or k < PIECES - 1, HOW[0])
            for k in ct.static_iter(range(PIECES))
        )
    else:
        tiles = load_optional_at(arrays, place, SHAPE, PIECES, HOW)
    return tiles


def load_columns_of_block(arrays, dtype, BLOCK, JOINT, PER_HEAD, offset=()):
    """The weight or bias in a tuple beside rows of `dtype`, as float32 tiles; () of (). `beside_rows` is next.

    offset: () or (offset,), which is added to each tile before the next one is loaded: added to all of them later, it
    makes joint weights of 1024 columns spill."""
    place, SHAPE, PIECES, HOW, EVEN, GATHERS = BLOCK
    ROWS, _, WIDTH = SHAPE
    if GATHERS and len(arrays) > 0:
        tcolumns = column_tiles(WIDTH, PIECES, 0)
        if JOINT and arrays[0].dtype == dtype:
            tiles = tuple(
                shifted(gather_columns(arrays[0], ROWS, tcolumns[k], EVEN or k < PIECES - 1), offset)
                for k in ct.static_iter(range(PIECES))
            )
        else:
            tiles = tuple(
                shifted(as_float32(weight_tile(arrays[0], tcolumns, k, EVEN)), offset)
                for k in ct.static_iter(range(PIECES))
            )
    else:
        tiles = load_columns_at(arrays, place, SHAPE, PIECES, HOW, PER_HEAD)
        tiles = tuple(shifted(t, offset) for t in ct.static_iter(tiles))
    return tiles


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
    WARPS: ConstInt,
    IN_ORDER: ConstBool,
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
    residual, bias = with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    SHAPE, weights = (ROWS, HEADS, WIDTH), (weight,) if HAS_WEIGHT else ()
    ORDER = order_of_tiles((x,) + weights + residual[:1], WIDTH, DIVISOR, WARPS) if IN_ORDER else AS_COMPILED
    place = place_of_tile(x, ct.bid(0), SHAPE)
    if DEPENDENT:
        wait_for_launch_before(sum_of_indices(place))
    BLOCK = (place, SHAPE, PIECES, (LATENCY, False, DIVISOR), EVEN, EARLY_WEIGHT or JOINT_WEIGHT)
    tx, tresidual = load_block((x,), BLOCK), load_block(residual[:1], BLOCK)
    tscale = load_columns_of_block(weights, x.dtype, BLOCK, JOINT_WEIGHT, PER_HEAD, (offset,))
    tbias = load_columns_of_block(bias, x.dtype, BLOCK, JOINT_WEIGHT, PER_HEAD)
    tscale, tbias = beside_rows(tscale, SHAPE, PER_HEAD), beside_rows(tbias, SHAPE, PER_HEAD)
    if DEPENDENT:
        ct.grid_dependency_control_launch_dependents()

    where, dtype = (place, 0, SHAPE, False), residual[1].dtype if len(residual) > 0 else x.dtype
    tx = row_as_float32(with_residual(tx, tresidual, residual, store_tiles_at, where))
    trstd = rstd_of(sum_of_products(tx, tx, PIECES, ORDER, AXIS=1), inv_n, eps)
    store_rstd_at(rstd, x, place, trstd, SHAPE)

    txhat = xhat_of(tx, trstd, dtype, ROUND_XHAT)
    store_tiles_at(y, where, scaled(txhat, tscale, tbias))
