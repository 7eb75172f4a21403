# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Shard the library ops of op.py: define the rules by which DTensor's engine runs them on local tensors.

x, dy and residual may be sharded in any dimension but the normalized ones, evenly or not. Then nothing is communicated:
each process normalizes its rows. weight and bias are replicated, dw and db are partial sums. Per-head weights are
sharded as the heads are. The engine redistributes tensors with other placements first, at the least cost. It gathers
rows that are split, with a warning once.

routes/sharding_rules.py registers the rules.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from tilegym_rmsnorm.call.tensors import splits_rows
from tilegym_rmsnorm.ops.norm.spec import D_RESIDUAL, DB, DW, DX

# Placements of an op's results, and of its arguments, on one dimension of a mesh; None for an argument that is no
# tensor.
_Rule = tuple[list[Any], list[Any]]


def rules_of_forward(
    x: Any, residual: Any, weight: Any, bias: Any, normalized_dims: int, *options: Any
) -> list[_Rule]:
    _warn_of_split_rows(normalized_dims, x, residual)
    rules = []
    for placement, of_vectors, _ in _choices(normalized_dims, (x, residual), weight, bias):
        of_residual = None if residual is None else placement
        vectors = [None if vector is None else of_vectors for vector in (weight, bias)]
        given = [placement, of_residual, *vectors, None, *(None for _ in options)]
        rules.append(([placement, placement, of_residual], given))
    return rules


def rules_of_backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    d_residual_out: Any,
    wanted: int,
    normalized_dims: int,
    *options: Any,
) -> list[_Rule]:
    from torch.distributed.tensor import Replicate

    _warn_of_split_rows(normalized_dims, x)
    rules = []
    for placement, of_vector, of_sums in _choices(normalized_dims, (x, dy, d_residual_out), weight):
        of_dw = None if weight is None else of_sums
        results = (DW, of_dw), (DB, of_sums), (D_RESIDUAL, placement)
        given = [placement, placement, None if weight is None else of_vector, placement]
        given += [None if d_residual_out is None else placement, *[None] * (2 + len(options))]
        dx = placement if wanted & DX else Replicate()  # without elements where not wanted
        rules.append(([dx, *(of if wanted & bit else None for bit, of in results)], given))
    return rules


def _choices(dims: int, rows: tuple[Any, ...], *vectors: Any) -> list[tuple[Any, Any, Any]]:
    """List the placements of rows on one dimension of a mesh, each with the placements of weight and bias, and of sums
    over rows.

    They include the current placements of each tensor: a sequence that was sharded and then flattened to rows has
    shards with strides (_StridedShard).
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x = rows[0]
    leading = x.ndim - dims
    of_heads = any(vector is not None and vector.ndim > dims for vector in vectors)
    shards: list[Any] = [Shard(dim) for dim in range(leading)]
    for tensor in rows:
        for placement in () if tensor is None else tensor.placements:
            dim = getattr(placement, "dim", None)
            if dim is not None and 0 <= dim < leading and placement not in shards:
                shards.append(placement)
    choices: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), Replicate())]
    for shard in shards:
        if not (of_heads and shard.dim == leading - 1):
            choices.append((shard, Replicate(), Partial()))
        elif shard == Shard(leading - 1):  # not _StridedShard: the heads of a process must be consecutive
            choices.append((shard, Shard(0), Shard(0)))
    return choices


def _warn_of_split_rows(dims: int, *tensors: Any) -> None:
    if any(splits_rows(tensor, dims) for tensor in tensors):
        _say_that_rows_are_gathered()


@functools.cache
def _say_that_rows_are_gathered() -> None:
    warnings.warn(
        "tilegym_rmsnorm: a DTensor is sharded in a normalized dimension. Its rows are gathered before they are "
        'normalized, which communicates all of them. To mend it: shard another dimension, or backend="torch", of which '
        "the mean alone communicates",
        stacklevel=2,
    )
