# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Rows that no registers hold: summed chunk by chunk, then read again, from L2 mostly. The mathematics is that of
forward.py and backward.py."""

import cuda.tile as ct

from .formula import factor_of_x, gradient, rstd_of, scaled, xhat_of
from .residual import added_residual, store_gradients
from .rows import load_optional_tile, load_tile, store_tile, with_divisor
from .tiles import ConstBool, ConstInt, as_float32
from .weights import load_scale_tile, load_vector_tile


def load_normalized(x, residual, index, shape, LATENCY, TMA, DIVISOR):
    """A tile of what is normalized: of x, as float32, or of residual_out, in its dtype."""
    tx = load_tile(x, index, shape, LATENCY, TMA, DIVISOR)
    if len(residual) > 0:
        addend, residual_out, alpha = residual
        tresidual = load_tile(addend, index, shape, LATENCY, TMA, DIVISOR)
        tx = added_residual((tx,), (tresidual,), alpha, residual_out.dtype)[0]
    return tx


def forward_reread(
    y,  # (M, N): written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride
    weight,  # (N,)
    residual,  # () or (as x, (M, N) written, alpha)
    bias,  # () or ((N,),)
    inv_n,
    eps,
    offset,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    ROUND_XHAT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). The squares are summed lane by lane over the chunks, and across lanes once. The second time x and the
    residual are read again, not their sum, which this block has just written: nothing need wait for it."""
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    residual, bias = with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
    dtype = residual[1].dtype if len(residual) > 0 else x.dtype
    i = ct.bid(0)
    tsquares = ct.zeros((1, WIDTH), dtype=ct.float32)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    for j in range(ct.cdiv(x.shape[1], WIDTH)):
        tstored = load_normalized(x, residual, (i, j), (1, WIDTH), LATENCY, TMA, DIVISOR)
        if len(residual) > 0:
            ct.store(residual[1], (i, j), tstored, allow_tma=TMA)
        tx = as_float32(tstored)
        tsquares = tsquares + tx * tx

    trstd = rstd_of(ct.sum(tsquares), inv_n, eps)
    ct.scatter(rstd, i, trstd)

    for j in range(ct.cdiv(x.shape[1], WIDTH)):
        tx = as_float32(load_normalized(x, residual, (i, j), (1, WIDTH), LATENCY, TMA, DIVISOR))
        txhat = xhat_of((tx,), trstd, dtype, ROUND_XHAT)
        tscale = (load_scale_tile(weight, j, WIDTH, offset, TMA, DIVISOR),) if HAS_WEIGHT else ()
        tbias = (load_vector_tile(bias[0], j, WIDTH, TMA, DIVISOR),) if len(bias) > 0 else ()
        store_tile(y, ((i, j), TMA), scaled(txhat, tscale, tbias))


def mean_by_chunks(arrays, row, NUMBERS, CHUNK, HOW):
    """c and rstd of a row, whose products are summed lane by lane over the chunks, and across lanes once. HOW is
    (LATENCY, TMA, DIVISOR)."""
    dy, x, weights, rstd = arrays
    inv_n, offset = NUMBERS
    _, TMA, DIVISOR = HOW
    tproducts = ct.zeros((1, CHUNK), dtype=ct.float32)
    for j in range(ct.cdiv(x.shape[1], CHUNK)):
        tx = load_tile(x, (row, j), (1, CHUNK), *HOW)
        tscaled_dy = load_tile(dy, (row, j), (1, CHUNK), *HOW)
        if len(weights) > 0:
            tscaled_dy = tscaled_dy * load_scale_tile(weights[0], j, CHUNK, offset, TMA, DIVISOR)
        tproducts = tproducts + tx * tscaled_dy

    trstd = ct.load(rstd, row, shape=())
    return ct.sum(tproducts) * trstd * inv_n, trstd  # rstd is the same for all of the row: multiplied once


def chunked_row_gradients(arrays, row, NUMBERS, CHUNK, HOW):
    """Writes dx of a row that registers do not hold: chunk by chunk, first for c, then again, from L2."""
    dx, dy, x, weights, rstd, d_residual_out, d_residual = arrays
    _, TMA, DIVISOR = HOW
    tc, trstd = mean_by_chunks((dy, x, weights, rstd), row, NUMBERS, CHUNK, HOW)

    tfactor = factor_of_x(tc, trstd)
    for j in range(ct.cdiv(x.shape[1], CHUNK)):
        tx = load_tile(x, (row, j), (1, CHUNK), *HOW)
        tg = load_tile(dy, (row, j), (1, CHUNK), *HOW) * trstd
        td_residual_out = load_optional_tile(d_residual_out, (row, j), (1, CHUNK), *HOW)
        if len(weights) > 0:
            tg = tg * load_scale_tile(weights[0], j, CHUNK, NUMBERS[1], TMA, DIVISOR)
        td = gradient((tx,), tfactor, (tg,))
        store_gradients(store_tile, ((row, j), TMA), dx, d_residual, td, td_residual_out)


def backward_reread(
    dx,  # (M, N): written
    dy,  # (M, N), any row stride
    x,  # (M, N), any row stride
    weight,  # (N,)
    rstd,  # (M,), float32
    d_residual_out,  # () or (as dy,)
    d_residual,  # (), (alpha,) or ((M, N) written, alpha)
    inv_n,
    offset,
    WIDTH: ConstInt,
    LATENCY: ConstInt,
    TMA: ConstBool,
    DIVISOR: ConstInt,
    HAS_WEIGHT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). dx where dw is not needed."""
    dx, dy, x, weight = with_divisor((dx, dy, x, weight), DIVISOR)
    d_residual_out, d_residual = with_divisor(d_residual_out, DIVISOR), with_divisor(d_residual, DIVISOR)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    arrays = (dx, dy, x, (weight,) if HAS_WEIGHT else (), rstd, d_residual_out, d_residual)
    chunked_row_gradients(arrays, ct.bid(0), (inv_n, offset), WIDTH, (LATENCY, TMA, DIVISOR))
