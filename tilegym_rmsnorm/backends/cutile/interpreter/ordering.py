# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""memory_order and memory_scope: which of them the compiler takes, and which of those are covered.

Every atomic access is performed in program order and seen by all blocks at once, whatever its order. Acquire and
release also order the plain accesses around them. That is not modelled: plain accesses that rely on it are a race here.
Loads and stores that ask for nothing else are refused.
"""

from __future__ import annotations

import enum

from cuda.tile import MemoryOrder, MemoryScope

_OF_LOADS_AND_STORES = {
    "load": (MemoryOrder.WEAK, MemoryOrder.RELAXED, MemoryOrder.ACQUIRE),
    "store": (MemoryOrder.WEAK, MemoryOrder.RELAXED, MemoryOrder.RELEASE),
}
_OF_ATOMICS = (MemoryOrder.RELAXED, MemoryOrder.ACQUIRE, MemoryOrder.RELEASE, MemoryOrder.ACQ_REL)
_COVERED = {op: (MemoryOrder.WEAK, MemoryOrder.RELAXED) for op in _OF_LOADS_AND_STORES}
_SCOPES = (MemoryScope.NONE, MemoryScope.BLOCK, MemoryScope.DEVICE, MemoryScope.SYS)


def is_atomic(op: str, memory_order: object, memory_scope: object) -> bool:
    """Whether blocks may meet where `op` accesses memory, as they may unless it is WEAK."""
    order, scope = _member(op, MemoryOrder, memory_order), _member(op, MemoryScope, memory_scope)
    taken = _OF_LOADS_AND_STORES.get(op, _OF_ATOMICS)
    what = f"{op}(memory_order={order}, memory_scope={scope})"
    if order not in taken or scope not in _SCOPES:
        raise TypeError(f"{what}: expected one of {[*map(str, taken)]} and of {[*map(str, _SCOPES)]}")
    if (order == MemoryOrder.WEAK) != (scope == MemoryScope.NONE):
        raise TypeError(f"{what}: WEAK takes the scope NONE, and every other order another scope")
    if order not in _COVERED.get(op, taken) or scope == MemoryScope.BLOCK:
        raise NotImplementedError(f"{what} is not supported by the interpreter")
    return order != MemoryOrder.WEAK


def _member(op: str, kind: type[enum.Enum], value: object) -> enum.Enum:
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if not isinstance(value, kind):
        raise TypeError(f"{op}: expected a ct.{kind.__name__}, got {value!r}")
    return value
