# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Two kernels for the backward of rows too wide for registers, where neither backward_split nor a team of blocks
serves: each reads x and dy once. The mathematics is that of backward.py.

    backward_means    dx and dw by two passes over x and dy, 10 bytes an element in bfloat16 instead of 6: c of every
    backward_strips   row, then strips of columns

The passes serve where an entry says so, beyond 131072 columns, in rows that are not aligned (plans/rules.py), and on
other architectures than sm_90, for which nobody has timed teams or backward_split on wide rows.
"""

import cuda.tile as ct

from .formula import factor_of_x, gradient, terms_of_dw
from .reread import mean_by_chunks
from .residual import store_gradients
from .rows import load_gradient_tiles, load_optional_tile, store_sum_of_rows, store_tile, with_divisor
from .tiles import ZERO, ConstBool, ConstInt, added, multiplied, zeros
from .weights import load_scale_tile


def backward_means(
    c,  # (M,), float32: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    inv_n,
    offset,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). c = mean_j(x * g), the one number per row that dx needs from the whole row."""
    dy, x, weight = with_divisor((dy, x, weight), DIVISOR)
    i = ct.bid(0)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    tc, _ = mean_by_chunks((dy, x, (weight,), rstd), i, (inv_n, offset), WIDTH, (LATENCY, TMA, DIVISOR))
    ct.scatter(c, i, tc)


def backward_strips(
    dx,  # (M, N): written
    dw_partial,  # (P, N), float32, or dw of weight's dtype where P is 1: written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    c,  # (M,), float32, from backward_means
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    offset,
    ROWS: ConstInt,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (P, cdiv(N, WIDTH)). Block (b, j) walks row tiles b, b + P, ... of column strip j."""
    dx, dw_partial, dy, x, weight = with_divisor((dx, dw_partial, dy, x, weight), DIVISOR)
    d_residual_out, d_residual = with_divisor(d_residual_out, DIVISOR), with_divisor(d_residual, DIVISOR)
    j = ct.bid(1)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    tscale, SHAPE = (load_scale_tile(weight, j, WIDTH, offset, TMA, DIVISOR),), (ROWS, WIDTH)

    tdw = zeros(SHAPE, 1)
    for i in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        tx, tdy, trstd = load_gradient_tiles(x, dy, rstd, (i, j), SHAPE, LATENCY, TMA, DIVISOR)
        tc = ct.reshape(ct.load(c, (i,), (ROWS,), padding_mode=ZERO, allow_tma=TMA), (ROWS, 1))
        th = (tdy * trstd,)
        td_residual_out = load_optional_tile(d_residual_out, (i, j), SHAPE, LATENCY, TMA, DIVISOR)
        td = gradient((tx,), factor_of_x(tc, trstd), multiplied(th, tscale))
        store_gradients(store_tile, ((i, j), TMA), dx, d_residual, td, td_residual_out)
        tdw = added(tdw, terms_of_dw((tx,), (tdy,), th, trstd, x.dtype, ROUND_XHAT))

    store_sum_of_rows(dw_partial, (ct.bid(0), j), tdw[0])
