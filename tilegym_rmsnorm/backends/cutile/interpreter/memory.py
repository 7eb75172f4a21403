# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Record for each element of each array which block wrote it, which read it, and whether it was ever written.

Blocks of one launch run in no particular order on a GPU, so an element that one block writes may not be touched
by another in the same launch, unless both do it atomically. A `Memory` keeps, for one array argument in one launch,
which block accessed each element and how; memory from `empty` remembers besides, over all launches, which elements no
kernel has written.
"""

from __future__ import annotations

import itertools
import math
import weakref

import torch
from torch import Tensor

_unwritten: weakref.WeakKeyDictionary[torch.UntypedStorage, Tensor] = weakref.WeakKeyDictionary()

_NOBODY, _SEVERAL = 0, -1  # besides these, a map holds the number of the block, counted from 1

# An access that a block may not make to an element, and the accesses of another block that forbid it.
_RACES = {
    "read": ("written", "atomically written"),
    "written": ("written", "read", "atomically written", "atomically read"),
    "atomically read": ("written",),
    "atomically written": ("written", "read"),
}


def poison(dtype: torch.dtype) -> float | int | bool:
    """Return the value of memory without a defined one: NaN, or an integer that is hard to overlook."""
    if dtype == torch.bool:
        return True
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def empty(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor whose elements raise RuntimeError when a kernel reads them before a kernel wrote them."""
    tensor = torch.full(shape if isinstance(shape, tuple) else (shape,), poison(dtype), dtype=dtype)
    _unwritten[tensor.untyped_storage()] = torch.ones(tensor.numel(), dtype=torch.bool)
    return tensor


def unwritten(tensor: Tensor) -> int:
    """Count elements that no kernel has written, of a tensor from `empty` or a view of one."""
    unwritten_elements = _unwritten_elements(tensor)
    if unwritten_elements is None:
        raise ValueError("expected a tensor made by interpreter.empty, got another")
    return int(unwritten_elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).sum())


def _unwritten_elements(tensor: Tensor) -> Tensor | None:
    elements = _unwritten.get(tensor.untyped_storage())
    if elements is not None and elements.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
        raise NotImplementedError(
            "memory from interpreter.empty viewed in a dtype of another size is not supported"
        )
    return elements


class Box:
    """The elements of a rectangular part of an array. `base`: where the array starts in its storage."""

    def __init__(self, part: Tensor, base: int):
        self._sizes = [1 if s == 0 else n for n, s in zip(part.shape, part.stride(), strict=True)]
        self._strides = part.stride()
        self._start = part.storage_offset() - base

    def of(self, elements: Tensor) -> Tensor:
        """Their entries in a flat map; an axis of stride 0 (expanded) counts once."""
        return elements.as_strided(self._sizes, self._strides, elements.storage_offset() + self._start)

    def set(self, elements: Tensor, values: Tensor | int) -> None:
        self.of(elements)[...] = values

    def offset(self, position: list[int]) -> int:
        return self._start + sum(p * s for p, s in zip(position, self._strides, strict=True))


class Lanes:
    """The elements that a gather or scatter addresses. `offsets`: counted from the array's first element, flat."""

    def __init__(self, offsets: Tensor):
        self.offsets = offsets

    def of(self, elements: Tensor) -> Tensor:
        return elements[self.offsets]

    def set(self, elements: Tensor, values: Tensor | int) -> None:
        elements[self.offsets] = values

    def offset(self, position: list[int]) -> int:
        return int(self.offsets[position[0]])


class Memory:
    """The elements behind one array argument during one launch. Block numbers count from 0."""

    def __init__(self, name: str, tensor: Tensor):
        self.name = name
        self.tensor = tensor
        self.base = tensor.storage_offset()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.extent = 1 + reach if tensor.numel() else 0
        self.overlapping: list[Memory] = []
        self._blocks: dict[str, Tensor] = {}  # for each kind of access, which block did it to each element
        self._unwritten = _unwritten_elements(tensor)
        if self._unwritten is not None:
            self._unwritten = self._unwritten[self.base : self.base + self.extent]

    def flat(self) -> Tensor:
        return self.tensor.as_strided((self.extent,), (1,))

    def read(self, cells: Box | Lanes, number: int, is_atomic: bool = False) -> None:
        if self._unwritten is not None:
            self._refuse(cells, cells.of(self._unwritten), "is read, but no kernel has written it")
        self._access("atomically read" if is_atomic else "read", cells, number)

    def write(self, cells: Box | Lanes, number: int, is_atomic: bool = False) -> None:
        self._access("atomically written" if is_atomic else "written", cells, number)
        if self._unwritten is not None:
            cells.set(self._unwritten, False)

    def _access(self, how: str, cells: Box | Lanes, number: int) -> None:
        for earlier in _RACES[how]:
            if earlier in self._blocks:
                seen = cells.of(self._blocks[earlier])
                others = _is_other(seen, number)
                if others.any():
                    block = int(seen[others][0])
                    who = "several other blocks" if block == _SEVERAL else f"block number {block - 1}"
                    why = f"is {how} here and {earlier} by {who}, and blocks run in no order: a race"
                    self._refuse(cells, others, why)
        if how not in self._blocks:
            self._blocks[how] = torch.zeros(self.extent, dtype=torch.int32)
            self._check_overlap()
        who = torch.tensor(number + 1, dtype=torch.int32)
        if how != "written":  # by several is an error already
            who = torch.where(_is_other(cells.of(self._blocks[how]), number), _SEVERAL, who)
        cells.set(self._blocks[how], who)

    def _refuse(self, cells: Box | Lanes, at: Tensor, why: str) -> None:
        if at.any():
            offset = cells.offset(at.nonzero()[0].tolist())
            raise RuntimeError(f"{self.name}{self._index(offset)} {why}")

    def _index(self, offset: int) -> list[int]:
        """The array index of an element; 0 along expanded axes."""
        index = [0] * self.tensor.ndim
        for axis in sorted(range(self.tensor.ndim), key=self.tensor.stride, reverse=True):
            if self.tensor.stride(axis):
                index[axis], offset = divmod(offset, self.tensor.stride(axis))
        return index

    def _check_overlap(self) -> None:
        """Refuse overlapping arguments, once both are accessed, if either is written."""
        for other in self.overlapping:
            is_written = any(how.endswith("written") for how in (*self._blocks, *other._blocks))
            if other._blocks and is_written:
                raise RuntimeError(
                    f"{self.name} and {other.name} overlap in memory, and one of them is written"
                )


def _is_other(seen: Tensor, number: int) -> Tensor:
    return (seen != _NOBODY) & (seen != number + 1)


def find_overlaps(memories: list[Memory]) -> None:
    """Tells each memory which others share bytes with it."""
    for a, b in itertools.combinations(memories, 2):
        if _share_bytes(a, b):
            a.overlapping.append(b)
            b.overlapping.append(a)


def _share_bytes(a: Memory, b: Memory) -> bool:
    starts = [m.tensor.data_ptr() for m in (a, b)]
    ends = [start + m.extent * m.tensor.itemsize for start, m in zip(starts, (a, b), strict=True)]
    if not (a.extent and b.extent) or max(starts) >= min(ends):
        return False
    # The spans meet, but strided views (two halves of a matrix's columns) may interleave without a common byte.
    touched = torch.zeros(max(ends) - min(starts), dtype=torch.bool)
    views = []
    for m in (a, b):
        size = m.tensor.itemsize
        shape = [1 if s == 0 else n for n, s in zip(m.tensor.shape, m.tensor.stride(), strict=True)]
        strides = [s * size for s in m.tensor.stride()]
        views.append(touched.as_strided([*shape, size], [*strides, 1], m.tensor.data_ptr() - min(starts)))
    views[0].fill_(True)
    return bool(views[1].any())
