# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The residual of a pre-norm block, added inside the kernels. For row i, in float32:

    residual_out = alpha * x + residual, rounded to its dtype; that value is normalized
    d = the gradient of what was normalized (backward.py) + d_residual_out
    dx = alpha * d      d_residual = d, a tensor of its own only where alpha is not 1 or the dtypes differ

In the gradient the rounding of residual_out counts as the identity. d stays float32: dx and d_residual are each rounded
once, from it, and dx is not alpha times the rounded d_residual.

Kernels take these arrays in tuples: `residual` is (residual, residual_out, alpha), `d_residual_out` (array,),
`d_residual` (array, alpha), or (alpha,) where only dx is wanted and alpha is not 1, each of them () where it is absent.
A tuple's length is known to the compiler, so that a call without a residual compiles to what it was.
"""

import cuda.tile as ct

from .tiles import added, as_float32, load_row, load_tile, row_as_float32, store_row, with_divisor

NO_RESIDUAL_GRADIENTS = ((), ())  # of a backward's `residual_gradients`: d_residual_out, d_residual


def residual_with_divisor(residual, DIVISOR):
    """`residual` or `d_residual`, whose last element is alpha; `with_divisor` says why."""
    if len(residual) > 1:
        residual = with_divisor(residual[:-1], DIVISOR) + residual[-1:]
    return residual


def added_residual(tstored_x, tstored_residual, alpha, dtype):
    """alpha * x + residual of tiles, rounded to residual_out's dtype."""
    return tuple(
        ct.astype(as_float32(tstored_x[k]) * alpha + as_float32(tstored_residual[k]), dtype)
        for k in ct.static_iter(range(len(tstored_x)))
    )


def row_with_residual(tstored, residual, row, tcolumns, EVEN, LATENCY):
    """Return the row to normalize, as tiles of its dtype: tstored, a row of x, or residual_out, which this writes."""
    if len(residual) > 0:
        addend, residual_out, alpha = residual
        tresidual = load_row(addend, row, tcolumns, EVEN, LATENCY)
        tstored = added_residual(tstored, tresidual, alpha, residual_out.dtype)
        store_row(residual_out, row, tcolumns, tstored, EVEN)
    return tstored


def load_d_residual_out(d_residual_out, row, tcolumns, EVEN, LATENCY):
    """A row of d_residual_out, as tiles of its dtype, or nothing."""
    tiles = ()
    if len(d_residual_out) > 0:
        tiles = load_row(d_residual_out[0], row, tcolumns, EVEN, LATENCY)
    return tiles


def with_d_residual_out(td, td_residual_out):
    """Gradient tiles, with those of d_residual_out, as they are stored, added if there are any."""
    if len(td_residual_out) > 0:
        td = added(td, row_as_float32(td_residual_out))
    return td


def store_d_residual(d_residual, row, tcolumns, td, EVEN):
    """Writes d as d_residual if that is a tensor of its own, and returns dx."""
    if len(d_residual) == 2:
        store_row(d_residual[0], row, tcolumns, td, EVEN)
    return times_alpha(td, d_residual)


def times_alpha(td, d_residual):
    """dx, given d, as tiles."""
    if len(d_residual) > 0:
        td = tuple(t * d_residual[-1] for t in ct.static_iter(td))
    return td


def load_d_residual_tile(d_residual_out, index, shape, LATENCY, TMA, DIVISOR):
    """A tile of d_residual_out, a 2-D array, as float32, or nothing."""
    tiles = ()
    if len(d_residual_out) > 0:
        tiles = (load_tile(d_residual_out[0], index, shape, LATENCY, TMA, DIVISOR),)
    return tiles


def store_gradient_tile(dx, d_residual, index, td, td_residual_out, TMA):
    """Writes dx of a tile of 2-D arrays, given td, the gradient without d_residual_out; and d_residual where that is an
    array of its own."""
    if len(td_residual_out) > 0:
        td = td + td_residual_out[0]
    if len(d_residual) == 2:
        ct.store(d_residual[0], index, ct.astype(td, d_residual[0].dtype), allow_tma=TMA)
    if len(d_residual) > 0:
        td = td * d_residual[-1]
    ct.store(dx, index, ct.astype(td, dx.dtype), allow_tma=TMA)
