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

from .tiles import added, as_float32, row_as_float32


def added_residual(tstored_x, tstored_residual, alpha, dtype):
    """alpha * x + residual of tiles, rounded to residual_out's dtype."""
    return tuple(
        ct.astype(as_float32(tstored_x[k]) * alpha + as_float32(tstored_residual[k]), dtype)
        for k in ct.static_iter(range(len(tstored_x)))
    )


def with_residual(tstored, tresidual, residual, store, where):
    """Return the tiles to normalize: those of x, or of residual_out, in its dtype, which this writes by
    store(array, where, tiles)."""
    if len(residual) > 0:
        _, residual_out, alpha = residual
        tstored = added_residual(tstored, tresidual, alpha, residual_out.dtype)
        store(residual_out, where, tstored)
    return tstored


def store_gradients(store, where, dx, d_residual, td, td_residual_out):
    """Write dx, and d_residual if that is a tensor of its own, by store(array, where, tiles).

    td: the gradient of what was normalized. td_residual_out: tiles of d_residual_out as they are stored, or ().
    """
    if len(td_residual_out) > 0:
        td = added(td, row_as_float32(td_residual_out))
    if len(d_residual) == 2:
        store(d_residual[0], where, td)
    if len(d_residual) > 0:
        td = tuple(t * d_residual[-1] for t in ct.static_iter(td))
    store(dx, where, td)
