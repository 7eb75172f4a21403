# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The formulas of a norm, forward and backward, of tuples of float32 tiles: the same however rows are held. All ops
that normalize take them from here."""

import cuda.tile as ct

from .tiles import added, multiplied, rounded


def rstd_of(total, inv_n, eps):
    """Return 1 / sqrt(mean of squares + eps), of the sum of a row's squares."""
    return ct.rsqrt(total * inv_n + eps)


def xhat_of(tx, trstd, dtype, ROUND_XHAT):
    """Return x * rstd; under casting="llama" rounded to the dtype of what is normalized."""
    return tuple(rounded(t * trstd, dtype, ROUND_XHAT) for t in ct.static_iter(tx))


def scaled(txhat, tscale, tbias):
    """Return y = xhat * scale + bias, of which either may be ()."""
    ty = txhat
    if len(tscale) > 0:
        ty = multiplied(ty, tscale)
    if len(tbias) > 0:
        ty = added(ty, tbias)
    return ty


def h_and_g(tdy, trstd, tscale):
    """Return h = dy * rstd and g = h * scale; without a weight tscale is ()."""
    th = tuple(t * trstd for t in ct.static_iter(tdy))
    tg = th
    if len(tscale) > 0:
        tg = multiplied(th, tscale)
    return th, tg


def factor_of_x(tc, trstd):
    """Return the factor of x in dx = x * factor + g: -c * rstd^2. The compiler fuses this, but not `g - x * c`."""
    return -(tc * trstd) * trstd


def gradient(tx, tfactor, tg):
    """Return dx = x * factor + g."""
    return tuple(tx[k] * tfactor + tg[k] for k in ct.static_iter(range(len(tx))))


def terms_of_dw(tx, tdy, th, trstd, dtype, ROUND_XHAT):
    """Return dy * xhat, as h * x: added to a sum it is one instruction an element. Under casting="llama" xhat is
    rounded to x's dtype, as the forward did."""
    tterms = multiplied(th, tx)  # an early return would keep the compiler from fusing it
    if ROUND_XHAT:
        tterms = multiplied(tdy, xhat_of(tx, trstd, dtype, True))
    return tterms
