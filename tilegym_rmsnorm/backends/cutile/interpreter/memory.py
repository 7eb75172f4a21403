# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What happened to each element of each array: who wrote it, who read it, and whether anybody ever wrote it.

Blocks of one launch run in no particular order on a GPU, so an element that one block writes may not be touched
by another in the same launch. A `Memory` keeps, for one array argument in one launch, which block wrote and which
read each element; memory from `empty` remembers besides, over all launches, which elements no kernel has written.
"""

from __future__ import annotations

import itertools
import math
import weakref

import torch
from torch import Tensor

_unwritten: weakref.WeakKeyDictionary[torch.UntypedStorage, Tensor] = weakref.WeakKeyDictionary()

_NOBODY, _SEVERAL = 0, -1  # besides these, a map holds the number of the block, counted from 1


def poison(dtype: torch.dtype) -> float | int | bool:
    """What memory without a defined value holds: NaN, or an integer that is hard to overlook."""
    if dtype == torch.bool:
        return True
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def empty(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor whose elements raise RuntimeError when a kernel reads them before a kernel wrote them."""
    tensor = torch.full(shape if isinstance(shape, tuple) else (shape,), poison(dtype), dtype=dtype)
    _unwritten[tensor.untyped_storage()] = torch.ones(tensor.numel(), dtype=torch.bool)
    return tensor


def unwritten(tensor: Tensor) -> int:
    """How many elements of a tensor from `empty`, or of a view of one, no kernel has written."""
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
        self._readers: Tensor | None = None
        self._writers: Tensor | None = None
        self._unwritten = _unwritten_elements(tensor)
        if self._unwritten is not None:
            self._unwritten = self._unwritten[self.base : self.base + self.extent]

    def flat(self) -> Tensor:
        return self.tensor.as_strided((self.extent,), (1,))

    def read(self, cells: Box | Lanes, number: int) -> None:
        if self._unwritten is not None:
            self._refuse(cells, cells.of(self._unwritten), "is read, but no kernel has written it")
        if self._writers is not None:
            self._check_race(cells, self._writers, number, "is read here and written by")
        if self._readers is None:
            self._readers = self._map()
            self._check_overlap()
        seen = cells.of(self._readers)
        others = (seen != _NOBODY) & (seen != number + 1)
        cells.set(self._readers, others.int() * (_SEVERAL - number - 1) + (number + 1))

    def write(self, cells: Box | Lanes, number: int) -> None:
        if self._writers is not None:
            self._check_race(cells, self._writers, number, "is written here and by")
        if self._readers is not None:
            self._check_race(cells, self._readers, number, "is written here and read by")
        if self._writers is None:
            self._writers = self._map()
            self._check_overlap()
        cells.set(self._writers, number + 1)
        if self._unwritten is not None:
            cells.set(self._unwritten, False)

    def _map(self) -> Tensor:
        return torch.zeros(self.extent, dtype=torch.int32)

    def _check_race(self, cells: Box | Lanes, blocks: Tensor, number: int, what: str) -> None:
        seen = cells.of(blocks)
        others = (seen != _NOBODY) & (seen != number + 1)
        if others.any():
            block = int(seen[others][0])
            who = "several other blocks" if block == _SEVERAL else f"block number {block - 1}"
            self._refuse(cells, others, f"{what} {who}, and blocks run in no order: a race")

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
        """At the first read and the first write: of two overlapping arguments none may be written."""
        for other in self.overlapping:
            touched = other._readers is not None or other._writers is not None
            if touched and (self._writers is not None or other._writers is not None):
                raise RuntimeError(
                    f"{self.name} and {other.name} overlap in memory, and one of them is written"
                )


def find_overlaps(memories: list[Memory]) -> None:
    """Tells each memory which others share bytes with it."""
    for a, b in itertools.combinations(memories, 2):
        if _share_bytes(a, b):
            a.overlapping.append(b)
            b.overlapping.append(a)


def _share_bytes(a: Memory, b: Memory) -> bool:
    start = min(a.tensor.data_ptr(), b.tensor.data_ptr())
    ends = [m.tensor.data_ptr() + m.extent * m.tensor.itemsize for m in (a, b)]
    starts = [m.tensor.data_ptr() for m in (a, b)]
    if not (a.extent and b.extent) or max(starts) >= min(ends):
        return False
    # The spans meet, but strided views (two halves of a matrix's columns) may interleave without a common byte.
    touched = torch.zeros(max(ends) - start, dtype=torch.bool)
    views = []
    for m in (a, b):
        size = m.tensor.itemsize
        shape = [1 if s == 0 else n for n, s in zip(m.tensor.shape, m.tensor.stride(), strict=True)]
        strides = [s * size for s in m.tensor.stride()]
        views.append(touched.as_strided([*shape, size], [*strides, 1], m.tensor.data_ptr() - start))
    views[0].fill_(True)
    return bool(views[1].any())
