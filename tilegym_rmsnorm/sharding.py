# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""How the ops of torch_ops.py are sharded: the rules by which a DTensor's engine runs them on local tensors.

x, dy and residual may be sharded in any dimension but the normalized ones, evenly or not. Nothing is communicated then:
each process normalizes its rows. weight and bias are replicated, dw and db are partial sums. Weights of heads are
sharded as the heads are. What is placed otherwise the engine moves first, at the least cost: rows that are split are
gathered, which is said once.

The rules are registered when a DTensor is first seen, and never by an import: DTensor takes a second to import.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import Tensor

from tilegym_rmsnorm import placements
from tilegym_rmsnorm.spec import D_RESIDUAL, DB, DW, DX
from tilegym_rmsnorm.torch_ops import op

# What an op is given and gives on one dimension of a mesh: the placements of its results, and of its arguments, None
# for what is no tensor.
_Rule = tuple[list[Any], list[Any]]


def prepare(*tensors: Tensor | None) -> None:
    """Registers the rules if one of the tensors is a DTensor, and they are not registered yet."""
    if any(placements.is_dtensor(tensor) for tensor in tensors):
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op("rms_norm_forward"))(_forward)
    register_sharding(op("add_rms_norm_forward"))(_add_forward)
    register_sharding(op("rms_norm_backward"))(_backward)
    register_sharding(op("add_rms_norm_backward"))(_add_backward)


def _forward(x: Any, weight: Any, bias: Any, normalized_dims: int, *options: Any) -> list[_Rule]:
    _warn_of_split_rows(normalized_dims, x)
    rules = []
    for placement, of_vectors, _ in _choices(normalized_dims, (x,), weight, bias):
        vectors = [None if vector is None else of_vectors for vector in (weight, bias)]
        rules.append(([placement] * 2, [placement, *vectors, None, *(None for _ in options)]))
    return rules


def _add_forward(
    x: Any, residual: Any, weight: Any, bias: Any, normalized_dims: int, *options: Any
) -> list[_Rule]:
    _warn_of_split_rows(normalized_dims, x, residual)
    rules = []
    for placement, of_vectors, _ in _choices(normalized_dims, (x, residual), weight, bias):
        vectors = [None if vector is None else of_vectors for vector in (weight, bias)]
        rules.append(([placement] * 3, [placement, placement, *vectors, None, *(None for _ in options)]))
    return rules


def _backward(
    dy: Any, x: Any, weight: Any, rstd: Any, wanted: int, normalized_dims: int, *options: Any
) -> list[_Rule]:
    _warn_of_split_rows(normalized_dims, x)
    rules = []
    for placement, of_vector, of_sums in _choices(normalized_dims, (x, dy), weight):
        dx, dw, db = _placed(wanted, placement, of_sums, weight, (DX, DW, DB))
        given = [placement, placement, None if weight is None else of_vector, placement]
        rules.append(([dx, dw, db], given + [None] * (2 + len(options))))
    return rules


def _add_backward(
    dy: Any,
    d_residual_out: Any,
    residual_out: Any,
    weight: Any,
    rstd: Any,
    wanted: int,
    normalized_dims: int,
    *options: Any,
) -> list[_Rule]:
    _warn_of_split_rows(normalized_dims, residual_out)
    rules = []
    for placement, of_vector, of_sums in _choices(
        normalized_dims, (residual_out, dy, d_residual_out), weight
    ):
        results = _placed(wanted, placement, of_sums, weight, (DX, D_RESIDUAL, DW, DB))
        given = [placement, None if d_residual_out is None else placement, placement]
        given += [None if weight is None else of_vector, placement]
        rules.append((results, given + [None] * (2 + len(options))))
    return rules


def _placed(wanted: int, placement: Any, of_sums: Any, weight: Any, bits: tuple[int, ...]) -> list[Any]:
    """The placements of the gradients that are wanted."""
    of = {DX: placement, D_RESIDUAL: placement, DW: None if weight is None else of_sums, DB: of_sums}
    return [of[bit] if wanted & bit else None for bit in bits]


def _choices(dims: int, rows: tuple[Any, ...], *vectors: Any) -> list[tuple[Any, Any, Any]]:
    """How the tensors of rows can be placed on one dimension of a mesh, with the placements that weight and bias, and
    the sums over rows, have then.

    Of each tensor the placements that it has are among them: rows of a sequence that was sharded and then flattened
    are sharded with strides.
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
        elif shard == Shard(leading - 1):  # not with strides: the heads of a process follow each other
            choices.append((shard, Shard(0), Shard(0)))
    return choices


def _warn_of_split_rows(dims: int, *tensors: Any) -> None:
    if any(placements.splits_rows(tensor, dims) for tensor in tensors):
        _say_that_rows_are_gathered()


@functools.cache
def _say_that_rows_are_gathered() -> None:
    warnings.warn(
        "tilegym_rmsnorm: a DTensor is sharded in a normalized dimension. Its rows are gathered before they are "
        'normalized, which communicates all of them. To mend it: shard another dimension, or backend="torch", of which '
        "the mean alone communicates",
        stacklevel=2,
    )
