# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The backward of rows that TMA brings into shared memory while the row before is summed. The mathematics is that of
backward.py.

Gathers of more than 12288 columns wait for memory at each row: tileiras 13.4 asks for a row only when the one before is
stored. Here a warp of its own asks for it as soon as this one is in registers. Then nothing may wait for rstd either:
each row's comes with the row before.

4096x16384 in bfloat16 (cuda-tile 1.7.0, tileiras 13.4.92) takes 102.3 us on an H200 instead of 115.8, and 116.5 where
rstd comes with its own row; 4096x18432 119.0, by teams of three blocks (backward_team.py) 132.2. On an H100 4096x16384
takes 155.6 by 128 blocks, 141.3 by 94 of them (by gathers 144.3, where fewer blocks are slower), and 18432 columns
with dw are faster by teams. So which kernel serves a width is for the rules and the tables to say, and how many blocks
walk the rows (`grid_percent`) for the tables. A float32 weight takes 136 to 160 bytes of stack at 16384 columns, none
if PACKED.
"""

import cuda.tile as ct

from .formula import factor_of_x, gradient, h_and_g, terms_of_dw
from .pdl import wait_and_signal
from .residual import store_gradients
from .rows import (
    column_tiles,
    load_part_of_row,
    not_hoisted,
    rstd_ahead,
    store_part_of_row,
    store_row,
    store_sums,
    with_divisor,
)
from .team import sum_of_team
from .tiles import (
    ConstBool,
    ConstInt,
    added,
    order_of,
    packed_row_as_float32,
    paired_row_as_float32,
    row_as_float32,
    sum_of_products,
    zeros_like,
)
from .weights import load_scale


def add_row_by_tma(arrays, where, tsums, trstd, NUMBERS, HOW, team=()):
    """Writes dx of one row and returns tsums with the row's share added: sums of dw, and behind them those of db, if
    there is db. rstd of the row is here already.

    It is added before the products are summed: after that h would take registers that 16384 columns do not leave, 256
    bytes of stack by 8 * 2048.

    PACKED, for rows that fill the registers even so: the weight is read again at each row, and the compiler makes x
    again from its 16 bits. bfloat16's x is widened one at a time beside a 16-bit weight: in pairs 9 * 2048 columns take
    104 bytes of stack (so they do under casting="llama" as it is). Else they take none in pairs, 16 under
    casting="llama", and one at a time beside a float32 weight the compiler loads over x that is still read
    (tests/machine_code/test_pipelines.py).

    team: of a block that holds a part of the row, PACKED (backward_team.py). x is made again from its 16 bits once the
    team's sum is there where it would take stack as float32: by 2 * 8192 columns 120 bytes in float16, 88 in bfloat16
    beside a float32 weight (made again 0; 16 in float16 beside a float32 weight, 24 and 40 in bfloat16 under
    casting="llama"). bfloat16 takes none beside a 16-bit weight, where 4096x32768 is 1 % slower with x made again.
    """
    dx, dy, x, weights, _, d_residual_out, d_residual = arrays
    inv_n, offset = NUMBERS
    LATENCY, PACKED, ROUND_XHAT, ORDER = HOW
    row, part, tcolumns, EVEN = where
    tstored_x, tstored_dy = load_part_of_row(x, where, LATENCY), load_part_of_row(dy, where, LATENCY)
    td_residual_out = ()
    if len(d_residual_out) > 0:
        td_residual_out = load_part_of_row(d_residual_out[0], where, LATENCY)
    tweight_columns = not_hoisted(tcolumns, row) if PACKED else tcolumns
    tscale = load_scale(weights, (row, part, tweight_columns, EVEN), offset)
    HAS_WIDE_WEIGHT = len(weights) > 0 and weights[0].dtype == ct.float32

    tx, tdy = paired_row_as_float32(tstored_x), paired_row_as_float32(tstored_dy)
    if PACKED and len(team) == 0 and len(weights) > 0 and not HAS_WIDE_WEIGHT:
        tx = row_as_float32(tstored_x)
    th, tg = h_and_g(tdy, trstd, tscale)
    tterms = terms_of_dw(tx, tdy, th, trstd, x.dtype, ROUND_XHAT)
    tsums = added(tsums, tterms + tdy if len(tsums) > len(tterms) else tterms)

    total = sum_of_team(sum_of_products(tx, tg, len(tcolumns), ORDER), row, team)
    if len(team) > 0 and (x.dtype == ct.float16 or HAS_WIDE_WEIGHT):
        tx = packed_row_as_float32(tstored_x)
    td = gradient(tx, factor_of_x(total * inv_n, trstd), tg)
    store_gradients(store_part_of_row, where, dx, d_residual, td, td_residual_out)
    return tsums


def backward_pipelined(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    db_partial,  # () or (as dw_partial,)
    inv_n,
    offset,
    WIDTH: ConstInt,
    PIECES: ConstInt,
    EVEN: ConstBool,
    LATENCY: ConstInt,
    PACKED: ConstBool,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    HAS_DW: ConstBool,
    ROUND_XHAT: ConstBool,
    WARPS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (P,). The next kernel is let in early, as backward_rows does."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    wait_and_signal(DEPENDENT)
    d_residual_out, db_partial = with_divisor(d_residual_out, DIVISOR), with_divisor(db_partial, DIVISOR)
    d_residual = with_divisor(d_residual, DIVISOR)
    weights = (weight,) if HAS_WEIGHT else ()
    arrays = (dx, dy, x, weights, rstd, d_residual_out, d_residual)
    ORDER = order_of((x, dy) + weights + d_residual_out, DIVISOR, WARPS)
    NUMBERS, HOW = (inv_n, offset), (LATENCY, PACKED, ROUND_XHAT, ORDER)
    tcolumns = column_tiles(WIDTH, PIECES, 0)
    tsums = zeros_like(tcolumns + tcolumns if len(db_partial) > 0 else tcolumns)
    trstd = rstd_ahead(rstd, ct.bid(0))
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        tnext = rstd_ahead(rstd, row + ct.num_blocks(0))
        tsums = add_row_by_tma(arrays, (row, 0, tcolumns, EVEN), tsums, trstd, NUMBERS, HOW)
        trstd = tnext
    store_sums(store_row, (ct.bid(0), 0, tcolumns, EVEN), (dw_partial, db_partial), tsums, HAS_DW)
