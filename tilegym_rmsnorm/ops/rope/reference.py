# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norm and rotary embedding of q and k in plain PyTorch: the specification that every backend is checked against.

For each head x of D elements of q or k, with weight w, offset o, R = rotary_dim, and c, s the rows of cos and sin for
its position (a table of R / 2 columns stands for one whose halves, or pairs, are equal):

    rstd = 1 / sqrt(mean_j x_j^2 + eps)        xhat = x * rstd             n = xhat * (w + o)

    y_i = n_i c_i - n_j s_i     y_j = n_j c_j + n_i s_j     for each pair (i, j);     y = n from element R on

The pairs are (i, i + R / 2), or with `interleaved` (2i, 2i + 1). The gradient of n is the adjoint, right whatever the
tables hold; behind it the gradients are those of RMSNorm (ops/norm/reference.py), with rstd computed again:

    dn_i = dy_i c_i + dy_j s_j     dn_j = dy_j c_j - dy_i s_i     g = dn * (w + o)
    dx = (g - xhat * mean_j(xhat * g)) * rstd                       dw = sum over heads and positions of dn * xhat

Computation is in float32, in float64 where any input is float64. Each result is rounded once. casting="llama" rounds
xhat too. rope_rounding="norm" rounds n, to x's dtype; "each" n, both products and their sum. Gradients ignore those
roundings, but dw has xhat as it was multiplied.

q and k have four dimensions. Every function takes any device, and is differentiable. The functions check no arguments:
ops/rope/checks.py does, before they are called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import joint_dtype, round_xhat, rounded_value, rstd_torch
from tilegym_rmsnorm.call.watched import outside_of_trace
from tilegym_rmsnorm.ops.rope.spec import (
    ROPE_OPS,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)
from tilegym_rmsnorm.reproducibility import tell_of_operations


class Tables(NamedTuple):
    """cos and sin of both elements of each pair, (B or 1, T, 1, R / 2), in the dtype of computation."""

    first_cos: Tensor
    second_cos: Tensor
    first_sin: Tensor
    second_sin: Tensor


def rope_forward_torch(tensors: RopeTensors, spec: RopeSpec) -> RopeOutputs:
    """Compute q_out and k_out, None without k."""
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    tell_of_operations(ROPE_OPS[0], spec, q)
    tables = tables_at(cos, sin, positions, spec, q.shape[:2])
    q_out = _normalized_and_rotated(q, q_weight, tables, spec)
    return q_out, None if k is None else _normalized_and_rotated(k, k_weight, tables, spec)


def rope_gradients_torch(tensors: RopeBackwardTensors, spec: RopeSpec, wanted: RopeWanted) -> RopeGradients:
    """Compute dq and dk, in the dtypes of q and k, and the wanted gradients of the weights; others are None."""
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions = tensors
    tell_of_operations(ROPE_OPS[1], spec, q)
    tables = tables_at(cos, sin, positions, spec, q.shape[:2])
    dq, dq_weight = _gradients(dq_out, q, q_weight, tables, spec, wanted.dq_weight)
    if k is None or dk_out is None:
        return dq, None, dq_weight, None
    dk, dk_weight = _gradients(dk_out, k, k_weight, tables, spec, wanted.dk_weight)
    return dq, dk, dq_weight, dk_weight


def tables_at(
    cos: Tensor, sin: Tensor, positions: Tensor | None, spec: RopeSpec, leading: torch.Size
) -> Tables:
    """Select the rows of cos and sin, of R or R / 2 columns, for B batches of T positions: `leading`. Without positions
    the rows are those of T, or of B and T; with them, (T,) or (B, T), those of a table. A position outside of the table
    has rows of NaN."""
    batch, length = leading
    if positions is not None:
        positions = positions[None] if positions.ndim == 1 else positions
        is_inside = (positions >= 0) & (positions < cos.shape[0])
        index, outside = torch.where(is_inside, positions, 0).long(), ~is_inside[:, :, None]
        cos, sin = (table[index].masked_fill(outside, float("nan")) for table in (cos, sin))
    dtype = joint_dtype(cos, sin)
    halves = [part for table in (cos, sin) for part in _halves(table.to(dtype), spec)]
    if cos.ndim == 3:
        return Tables(*(each[:, :, None] for each in halves))
    count = 1 if outside_of_trace(lambda: bool(cos.shape[0] == length)) else batch
    return Tables(*(each.reshape(count, length, 1, each.shape[-1]) for each in halves))


def _halves(table: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    """Return the columns of a table for the first and for the second element of each pair."""
    is_of_pairs = outside_of_trace(lambda: bool(table.shape[-1] * 2 == spec.rotary_dim))
    return (table, table) if is_of_pairs else split_pairs(table, spec.interleaved)


def split_pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Split the last dimension into the first and the second element of each pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def joined_pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """Join what `split_pairs` split. The result is no view: autograd forbids in-place operations on views that a custom
    Function returns."""
    if not interleaved:
        return torch.cat((first, second), -1)
    pairs = torch.stack((first, second), -1)
    return torch.ops.aten._unsafe_view(pairs, (*pairs.shape[:-2], 2 * pairs.shape[-2]))


def rotated(n: Tensor, tables: Tables, spec: RopeSpec, dtype: torch.dtype) -> Tensor:
    """Rotate normalized heads, (B, T, H, D). rope_rounding="norm" or "each" rounds to `dtype`, but keeps n's."""
    rounds_products = spec.rope_rounding == "each"

    def r(value: Tensor) -> Tensor:
        return rounded_value(value, dtype) if rounds_products else value

    n = n if spec.rope_rounding == "end" else rounded_value(n, dtype)
    first, second = split_pairs(_rotated_part(n, spec), spec.interleaved)
    first_cos, second_cos, first_sin, second_sin = tables
    turned = joined_pairs(
        r(first * first_cos) - r(second * first_sin),
        r(second * second_cos) + r(first * second_sin),
        spec.interleaved,
    )
    return turned if spec.rotary_dim == spec.n else torch.cat((turned, n[..., spec.rotary_dim :]), -1)


def rotated_back(dy: Tensor, tables: Tables, spec: RopeSpec) -> Tensor:
    """Compute the gradient of the normalized heads, (B, T, H, D), from that of the rotated ones: the adjoint."""
    first, second = split_pairs(_rotated_part(dy, spec), spec.interleaved)
    first_cos, second_cos, first_sin, second_sin = tables
    turned = joined_pairs(
        first * first_cos + second * second_sin, second * second_cos - first * first_sin, spec.interleaved
    )
    return turned if spec.rotary_dim == spec.n else torch.cat((turned, dy[..., spec.rotary_dim :]), -1)


def _rotated_part(x: Tensor, spec: RopeSpec) -> Tensor:
    """Return the first R elements of heads. A slice of all of them would be an alias, which the older vmap, for batches
    of gradients, does not know."""
    return x if spec.rotary_dim == spec.n else x[..., : spec.rotary_dim]


def _normalized_and_rotated(x: Tensor, weight: Tensor | None, tables: Tables, spec: RopeSpec) -> Tensor:
    dtype = joint_dtype(x, weight, tables.first_cos)
    wide = x.to(dtype)
    n = round_xhat(wide * rstd_torch(wide, spec.eps, 1), x.dtype, spec.casting)
    if weight is not None:
        n = n * (weight.to(dtype) + spec.offset)
    return rotated(n, tables, spec, x.dtype).to(x.dtype)


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, tables: Tables, spec: RopeSpec, dw_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    dtype = joint_dtype(x, weight, dy, tables.first_cos)
    wide = x.to(dtype)
    rstd = rstd_torch(wide, spec.eps, 1)
    xhat, dn = wide * rstd, rotated_back(dy.to(dtype), tables, spec)
    g = dn if weight is None else dn * (weight.to(dtype) + spec.offset)
    dx = (g - xhat * (xhat * g).mean(-1, keepdim=True)) * rstd
    dw = None
    if dw_dtype is not None and weight is not None:
        terms = dn * round_xhat(xhat, x.dtype, spec.casting)
        dw = terms.sum(tuple(range(4 - weight.ndim))).to(dw_dtype)
    return dx.to(x.dtype), dw
