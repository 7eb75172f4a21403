# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Rows that no registers hold: summed chunk by chunk, then read again, from L2 mostly. The mathematics is that of
forward.py and backward.py."""

import cuda.tile as ct

from .residual import (
    NO_RESIDUAL_GRADIENTS,
    added_residual,
    load_d_residual_tile,
    residual_with_divisor,
    store_gradient_tile,
)
from .tiles import ConstBool, ConstInt, as_float32, factor_of_x, load_tile, rounded, with_divisor
from .weights import load_columns, load_scale_tile


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
    residual, bias = residual_with_divisor(residual, DIVISOR), with_divisor(bias, DIVISOR)
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

    trstd = ct.rsqrt(ct.sum(tsquares) * inv_n + eps)
    ct.scatter(rstd, i, trstd)

    for j in range(ct.cdiv(x.shape[1], WIDTH)):
        tx = as_float32(load_normalized(x, residual, (i, j), (1, WIDTH), LATENCY, TMA, DIVISOR))
        ty = rounded(tx * trstd, dtype, ROUND_XHAT)
        if HAS_WEIGHT:
            tscale = load_scale_tile(weight, j, WIDTH, offset, TMA, DIVISOR)
            ty = ty * tscale
        if len(bias) > 0:
            ty = ty + ct.reshape(load_columns(bias[0], j, WIDTH, TMA, DIVISOR), (1, WIDTH))
        ct.store(y, (i, j), ct.astype(ty, y.dtype), allow_tma=TMA)


def mean_by_chunks(x, dy, weight, rstd, i, inv_n, offset, CHUNK, LATENCY, TMA, DIVISOR, HAS_WEIGHT):
    """c and rstd of row i, whose products are summed lane by lane over the chunks, and across lanes once."""
    tproducts = ct.zeros((1, CHUNK), dtype=ct.float32)
    for j in range(ct.cdiv(x.shape[1], CHUNK)):
        tx = load_tile(x, (i, j), (1, CHUNK), LATENCY, TMA, DIVISOR)
        tscaled_dy = load_tile(dy, (i, j), (1, CHUNK), LATENCY, TMA, DIVISOR)
        if HAS_WEIGHT:
            tscaled_dy = tscaled_dy * load_scale_tile(weight, j, CHUNK, offset, TMA, DIVISOR)
        tproducts = tproducts + tx * tscaled_dy

    trstd = ct.load(rstd, i, shape=())
    return ct.sum(tproducts) * trstd * inv_n, trstd  # rstd is the same for all of the row: multiplied once


def chunked_row_gradients(
    arrays,
    row,
    inv_n,
    offset,
    CHUNK,
    LATENCY,
    TMA,
    DIVISOR,
    HAS_WEIGHT,
    residual_gradients=NO_RESIDUAL_GRADIENTS,
):
    """Writes dx of a row that registers do not hold: chunk by chunk, first for c, then again, from L2."""
    dx, dy, x, weight, rstd = arrays
    d_residual_out, d_residual = residual_gradients
    tc, trstd = mean_by_chunks(
        x, dy, weight, rstd, row, inv_n, offset, CHUNK, LATENCY, TMA, DIVISOR, HAS_WEIGHT
    )

    tfactor = factor_of_x(tc, trstd)
    for j in range(ct.cdiv(x.shape[1], CHUNK)):
        tx = load_tile(x, (row, j), (1, CHUNK), LATENCY, TMA, DIVISOR)
        tg = load_tile(dy, (row, j), (1, CHUNK), LATENCY, TMA, DIVISOR) * trstd
        td_residual_out = load_d_residual_tile(d_residual_out, (row, j), (1, CHUNK), LATENCY, TMA, DIVISOR)
        if HAS_WEIGHT:
            tg = tg * load_scale_tile(weight, j, CHUNK, offset, TMA, DIVISOR)
        store_gradient_tile(dx, d_residual, (row, j), tx * tfactor + tg, td_residual_out, TMA)


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
    d_residual_out = with_divisor(d_residual_out, DIVISOR)
    residual_gradients = (d_residual_out, residual_with_divisor(d_residual, DIVISOR))
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    arrays = (dx, dy, x, weight, rstd)
    chunked_row_gradients(
        arrays, ct.bid(0), inv_n, offset, WIDTH, LATENCY, TMA, DIVISOR, HAS_WEIGHT, residual_gradients
    )
