# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find the order in which PyTorch lays out the dimensions of what it computes from a tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling


def order_in_memory(x: Tensor, rstd_first: bool = False) -> tuple[int, ...] | None:
    """Sort the dimensions of the product of x and rstd by their strides, the slowest first. None: already in order.

    TensorIterator compares dimensions by the strides of its first operand, and by those of the next where one of the
    two is 0. rstd is contiguous, and its last stride is 0. Half x is cast to float32, whose strides are dense.
    """
    if x.is_contiguous() or x.is_nested:
        return None
    shape, strides = tuple(x.shape), x.stride()
    given = shape, strides, x.dtype is torch.float32, rstd_first
    if is_dynamo_compiling() or not all(type(number) is int for number in shape + strides):
        return _order(*given)  # symbols are not hashable, which the cache needs
    return _cached_order(*given)


def in_order(y: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Lay the dimensions of y out in this order, if they are not."""
    if order is None:
        return y.contiguous()
    return y.permute(order).contiguous().permute([order.index(dim) for dim in range(y.dim())])


def _order(
    shape: Sequence[int], strides: Sequence[int], is_float32: bool, rstd_first: bool
) -> tuple[int, ...] | None:
    dims = range(len(shape))
    if not is_float32:
        strides = _dense(_sorted_dims(shape, [strides]), shape)
    of_rstd = [*_dense(dims[:-1], shape), 0]
    found = _sorted_dims(shape, [of_rstd, strides] if rstd_first else [strides, of_rstd])
    moved = [dim for dim in dims if shape[dim] != 1]
    by_stride = [dim for dim in found if shape[dim] != 1]
    if by_stride == moved:
        return None
    order = list(dims)
    for dim, other in zip(moved, by_stride, strict=True):
        order[dim] = other
    return tuple(order)


_cached_order = functools.lru_cache(maxsize=1024)(_order)


def _sorted_dims(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """Sort dimensions exactly as TensorIterator::reorder_dimensions does. `sorted` would not do: Dynamo cannot sort by
    symbolic numbers, and of two dimensions neither may come first, so that the algorithm decides."""
    order = list(range(len(shape)))[::-1]
    for place in range(1, len(order)):
        for before in range(place - 1, -1, -1):
            swap = _is_slower(order[before], order[place], shape, operands)
            if swap is False:
                break
            if swap:
                order[before], order[place] = order[place], order[before]
                place = before
    return order[::-1]


def _is_slower(one: int, other: int, shape: Sequence[int], operands: Sequence[Sequence[int]]) -> bool | None:
    """Return whether dimension `one` has larger strides than `other`. None: neither comes first."""
    for strides in operands:
        if strides[one] == 0 or strides[other] == 0:
            continue
        if strides[one] < strides[other]:
            return False
        if strides[one] > strides[other]:
            return True
        if shape[one] > shape[other]:
            return True
    return None


def _dense(order: Iterable[int], shape: Sequence[int]) -> list[int]:
    """Return the strides of a tensor without gaps in memory, whose dimensions have this order, the slowest first."""
    strides, count = [0] * len(shape), 1
    for dim in [*order][::-1]:
        strides[dim] = count
        count *= shape[dim]
    return strides
