# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Atomics: they change the elements that a gather with the same indices would read, and return what was there.

Where several lanes meet at one element they follow each other in the tile's order; a GPU may take any. For a lane
out of bounds nothing happens, and the value returned, which cuda.tile leaves open, is poison.
"""

from __future__ import annotations

from collections.abc import Callable

import cuda.tile as ct
import torch
from torch import Tensor

from .arrays import as_stored, broadcast, check_call, find_lanes, of_active
from .dtypes import name
from .memory import poison
from .ordering import is_atomic
from .tile import as_tensor, as_tile

__all__ = ["atomic_add", "atomic_or", "atomic_xchg"]

_INTEGERS = (torch.int32, torch.int64)
_NUMBERS = (*_INTEGERS, torch.float32, torch.float64)
_NUMBERS_AND_HALVES = (*_NUMBERS, torch.float16, torch.bfloat16)


def _atomic(op: str, dtypes: tuple[torch.dtype, ...], combine: Callable, is_bitwise: bool = False):
    def operation(
        array,
        indices,
        update,
        /,
        *,
        check_bounds=True,
        memory_order=ct.MemoryOrder.ACQ_REL,
        memory_scope=ct.MemoryScope.DEVICE,
    ):
        check_call(op, array, check_bounds)
        is_atomic(op, memory_order, memory_scope)  # always, or it raises
        if array.tensor.dtype not in dtypes:
            raise TypeError(f"{op} takes an array of {', '.join(map(name, dtypes))}, got {array}")
        lanes, shape, active = find_lanes(op, array, indices, None, check_bounds)
        # A constant is loosely typed only beside scalar indices: the compiler broadcasts it before it casts it.
        if shape or is_bitwise:
            update = as_tile(update)
        if is_bitwise and update.dtype != array.dtype:
            raise TypeError(f"update for {array}: expected exactly its dtype, got {update.dtype.name}")
        operand = broadcast(as_stored(array, update), shape, "update").reshape(-1)

        array.read(lanes, is_atomic=True)
        array.write(lanes, is_atomic=True)

        elements = array.memory.flat()
        found = _change(combine, elements, lanes.offsets, operand if active is None else operand[active])
        array.blocks.saw((array.memory.name, *lanes.offsets.tolist()), found)
        return of_active(found, shape, active, as_tensor(poison(array.tensor.dtype), array.tensor.dtype))

    return operation


def _change(combine: Callable, elements: Tensor, offsets: Tensor, operand: Tensor) -> Tensor:
    """Combine each lane's operand with its element. Return the elements as each lane found them."""
    found = torch.empty(offsets.shape, dtype=operand.dtype)
    all_at_once = [slice(None)]
    one_by_one = range(offsets.numel())
    for lane in one_by_one if offsets.unique().numel() < offsets.numel() else all_at_once:
        found[lane] = elements[offsets[lane]]
        elements[offsets[lane]] = combine(found[lane], operand[lane])
    return found


atomic_add = _atomic("atomic_add", _NUMBERS_AND_HALVES, torch.add)
atomic_or = _atomic("atomic_or", _INTEGERS, torch.bitwise_or, is_bitwise=True)
atomic_xchg = _atomic("atomic_xchg", _NUMBERS, lambda found, operand: operand)
