# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Rows that no registers hold: summed chunk by chunk, then read again, from L2 mostly. The mathematics is that of
forward.py and backward.py."""

import cuda.tile as ct

from .tiles import (
    ConstBool,
    ConstInt,
    factor_of_x,
    load_tile,
    with_divisor,
    xhat_as_multiplied,
)
from .weights import load_scale_tile


def forward_reread(
    y,  # (M, N), x's dtype: written
    rstd,  # (M,), float32: written
    x,  # (M, N), any row stride
    weight,  # (N,)
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
    """Grid: (M,). The squares are summed lane by lane over the chunks, and across lanes once."""
    y, x, weight = with_divisor((y, x, weight), DIVISOR)
    i = ct.bid(0)
    tsquares = ct.zeros((1, WIDTH), dtype=ct.float32)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    for j in range(ct.cdiv(x.shape[1], WIDTH)):
        tx = load_tile(x, (i, j), (1, WIDTH), LATENCY, TMA, DIVISOR)
        tsquares = tsquares + tx * tx

    trstd = ct.rsqrt(ct.sum(tsquares) * inv_n + eps)
    ct.scatter(rstd, i, trstd)

    for j in range(ct.cdiv(x.shape[1], WIDTH)):
        tx = load_tile(x, (i, j), (1, WIDTH), LATENCY, TMA, DIVISOR)
        ty = xhat_as_multiplied(tx * trstd, x.dtype, ROUND_XHAT)
        if HAS_WEIGHT:
            tscale = load_scale_tile(weight, j, WIDTH, offset, TMA, DIVISOR)
            ty = ty * tscale
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


def chunked_row_gradients(arrays, row, inv_n, offset, CHUNK, LATENCY, TMA, DIVISOR, HAS_WEIGHT):
    """Writes dx of a row that registers do not hold: chunk by chunk, first for c, then again, from L2."""
    dx, dy, x, weight, rstd = arrays
    tc, trstd = mean_by_chunks(
        x, dy, weight, rstd, row, inv_n, offset, CHUNK, LATENCY, TMA, DIVISOR, HAS_WEIGHT
    )

    tfactor = factor_of_x(tc, trstd)
    for j in range(ct.cdiv(x.shape[1], CHUNK)):
        tx = load_tile(x, (row, j), (1, CHUNK), LATENCY, TMA, DIVISOR)
        tg = load_tile(dy, (row, j), (1, CHUNK), LATENCY, TMA, DIVISOR) * trstd
        if HAS_WEIGHT:
            tg = tg * load_scale_tile(weight, j, CHUNK, offset, TMA, DIVISOR)
        tdx = tx * tfactor + tg
        ct.store(dx, (row, j), ct.astype(tdx, dx.dtype), allow_tma=TMA)


def backward_reread(
    dx,  # (M, N), x's dtype: written
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
    HAS_WEIGHT: ConstBool,
    DEPENDENT: ConstBool,
):
    """Grid: (M,). dx where dw is not needed."""
    dx, dy, x, weight = with_divisor((dx, dy, x, weight), DIVISOR)
    if DEPENDENT:
        ct.grid_dependency_control_wait()
    arrays = (dx, dy, x, weight, rstd)
    chunked_row_gradients(arrays, ct.bid(0), inv_n, offset, WIDTH, LATENCY, TMA, DIVISOR, HAS_WEIGHT)
