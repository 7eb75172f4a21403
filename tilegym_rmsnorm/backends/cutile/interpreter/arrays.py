# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Arrays and four ways into them: load and store by tile index, gather and scatter by element index.

Accesses that cuda.tile documents as undefined raise IndexError here: past the end with check_bounds=False, and
a tile that lies wholly outside its array even without. Latency and TMA hints are checked, with no other effect.
"""

from __future__ import annotations

import math
from types import NoneType

import cuda.tile as ct
import torch
from torch import Tensor

from .blocks import Blocks
from .dtypes import TILE_DTYPE, check_implicit_cast, fits, is_integer, promote
from .memory import Box, Lanes, Memory, poison
from .ordering import is_atomic
from .tile import (
    Tile,
    as_index,
    as_tensor,
    as_tile,
    check_extents,
    loose_dtype,
    normalize_axis,
    tuple_of_indices,
    tuple_of_ints,
)

__all__ = ["gather", "load", "num_tiles", "scatter", "store"]

_PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}


class Array:
    """An array argument, or a slice of one. `blocks`: of the launch."""

    def __init__(self, tensor: Tensor, memory: Memory, blocks: Blocks, index_dtype: torch.dtype):
        self.tensor = tensor
        self.memory = memory
        self.blocks = blocks
        self.dtype = TILE_DTYPE[tensor.dtype]
        self.ndim = tensor.ndim
        self.shape = tuple(Tile(torch.tensor(n, dtype=index_dtype)) for n in tensor.shape)
        self.strides = tuple(Tile(torch.tensor(s, dtype=index_dtype)) for s in tensor.stride())
        self._index_dtype = index_dtype

    def slice(self, axis: int, start: Tile | int, stop: Tile | int) -> Array:
        axis = normalize_axis(axis, self.ndim)
        first, end = as_index(start), as_index(stop)
        if not (0 <= first < self.tensor.shape[axis] and first <= end <= self.tensor.shape[axis]):
            raise IndexError(f"slice {first}:{end} of axis {axis} is outside {self}")
        offset = first * self.tensor.stride(axis)
        dtype = promote(loose_dtype(start), self._index_dtype)  # cuda-tile multiplies in the wider one
        if not fits(offset, dtype):
            raise OverflowError(f"slice of {self} at {offset} elements is out of range of {dtype}")
        part = self.tensor.narrow(axis, first, end - first)
        return Array(part, self.memory, self.blocks, self._index_dtype)

    def get_raw_memory(self) -> RawMemory:
        return RawMemory(self)

    def read(self, cells: Box | Lanes, is_atomic: bool = False) -> None:
        self.blocks.check_access()
        self.memory.read(cells, self.blocks.number, is_atomic)

    def write(self, cells: Box | Lanes, is_atomic: bool = False) -> None:
        self.blocks.check_access()
        self.memory.write(cells, self.blocks.number, is_atomic)

    def __getattr__(self, attribute: str):
        if hasattr(ct.Array, attribute):
            raise NotImplementedError(f"Array.{attribute} is not supported by the interpreter")
        raise AttributeError(f"Array has no attribute {attribute!r}")

    def __repr__(self) -> str:
        return f"{self.memory.name} of shape {tuple(self.tensor.shape)} and dtype {self.dtype.name}"


class RawMemory:
    """An array's memory by offsets in elements from its first. Offsets outside of what the array spans raise IndexError
    here, as they are undefined."""

    def __init__(self, array: Array):
        if not array.tensor.is_contiguous():
            raise NotImplementedError(f"memory by offsets of {array}, which is not packed, is not supported")
        self.array = array

    def load_offset(self, offset, /, *, mask=None, padding_value=0, latency=None):
        check_call("load_offset", self.array, True, latency)
        return _gathered(self.array, *self._lanes("load_offset", offset, mask), padding_value)

    def store_offset(self, offset, value, /, *, mask=None, latency=None):
        check_call("store_offset", self.array, True, latency)
        _scatter("store_offset", self.array, *self._lanes("store_offset", offset, mask), value)

    def _lanes(self, op: str, offset: object, mask: object) -> tuple[Lanes, torch.Size, Tensor | None]:
        offsets = as_tile(offset).value
        if not is_integer(offsets.dtype):
            raise TypeError(f"{op} takes integer offsets, got {offsets.dtype}")
        active = None if mask is None else active_lanes(op, mask, offsets.shape).reshape(-1)
        found = offsets.reshape(-1).long() if active is None else offsets.reshape(-1)[active].long()
        begin = self.array.tensor.storage_offset() - self.array.memory.base
        if found.numel() and not (0 <= int(found.min()) and int(found.max()) < self.array.tensor.numel()):
            raise IndexError(
                f"{op} at offsets {int(found.min())} to {int(found.max())} is outside {self.array}"
            )
        return Lanes(found + begin), offsets.shape, active


def num_tiles(array, /, axis, shape, order="C"):
    check_call("num_tiles", array, True, order=order)
    axis, extents = normalize_axis(axis, array.ndim), _tile_extents(array, shape)
    return Tile(torch.tensor(-(-array.tensor.shape[axis] // extents[axis]), dtype=torch.int32))


def load(
    array,
    /,
    index,
    shape,
    *,
    order="C",
    padding_mode=ct.PaddingMode.UNDETERMINED,
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=ct.MemoryOrder.WEAK,
    memory_scope=ct.MemoryScope.NONE,
):
    check_call("load", array, check_bounds, latency, allow_tma, order)
    atomically = is_atomic("load", memory_order, memory_scope)
    extents = _tile_extents(array, shape)
    padding = _padding(array, padding_mode)

    part = _part("load", array, index, extents, check_bounds)
    array.read(Box(part, array.memory.base), atomically)

    if part.shape == extents:
        value = part.clone(memory_format=torch.contiguous_format)
    else:
        value = torch.full(extents, padding, dtype=part.dtype)
        _corner(value, part).copy_(part)
    if atomically:
        array.blocks.saw((part.data_ptr(), part.shape), value)
    return Tile(value.reshape(()) if shape == () else value)


def store(
    array,
    /,
    index,
    tile,
    *,
    order="C",
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=ct.MemoryOrder.WEAK,
    memory_scope=ct.MemoryScope.NONE,
):
    check_call("store", array, check_bounds, latency, allow_tma, order)
    atomically = is_atomic("store", memory_order, memory_scope)
    value = as_stored(array, tile)
    if value.ndim == 0:
        value = value.reshape((1,) * array.ndim)
    if value.ndim != array.ndim:
        raise TypeError(f"store of a tile of shape {tuple(value.shape)} into {array}: the ranks differ")

    part = _part("store", array, index, tuple(value.shape), check_bounds)
    array.write(Box(part, array.memory.base), atomically)

    part.copy_(_corner(value, part))
    if atomically:
        array.blocks.published()


def gather(array, indices, /, *, mask=None, padding_value=0, check_bounds=True, latency=None):
    check_call("gather", array, check_bounds, latency)
    return _gathered(array, *find_lanes("gather", array, indices, mask, check_bounds), padding_value)


def scatter(array, indices, value, /, *, mask=None, check_bounds=True, latency=None):
    check_call("scatter", array, check_bounds, latency)
    _scatter("scatter", array, *find_lanes("scatter", array, indices, mask, check_bounds), value)


def _gathered(array, lanes, shape, active, padding_value) -> Tile:
    padding = broadcast(as_stored(array, padding_value), shape, "padding_value")

    array.read(lanes)

    return of_active(lanes.of(array.memory.flat()), shape, active, padding)


def of_active(found: Tensor, shape: tuple[int, ...], active: Tensor | None, padding: Tensor) -> Tile:
    """A tile of what its active lanes found, and of padding in the others."""
    if active is None:
        return Tile(found.reshape(shape))
    value = padding.expand(shape).clone(memory_format=torch.contiguous_format)
    value.view(-1)[active] = found
    return Tile(value)


def _scatter(op, array, lanes, shape, active, value) -> None:
    stored = broadcast(as_stored(array, value), shape, "value").reshape(-1)
    ascending = bool((lanes.offsets[1:] > lanes.offsets[:-1]).all())
    if not ascending and lanes.offsets.unique().numel() != lanes.offsets.numel():
        raise RuntimeError(f"several lanes of one {op} write the same element of {array}")

    array.write(lanes)

    lanes.set(array.memory.flat(), stored if active is None else stored[active])


def _part(op: str, array: Array, index: object, extents: tuple[int, ...], check_bounds: bool) -> Tensor:
    """The part of a tile that lies inside the array, as a view of the array."""
    counts, inside = tuple_of_indices(index), tuple(array.tensor.shape)
    if len(counts) != array.ndim:
        raise TypeError(f"{op} at index {counts}: expected {array.ndim} indices for {array}")
    origin = tuple(i * n for i, n in zip(counts, extents, strict=True))
    ends = tuple(o + n for o, n in zip(origin, extents, strict=True))
    if any(o < 0 or o >= n for o, n in zip(origin, inside, strict=True)):
        raise IndexError(f"{op} at index {counts} of tiles {extents} is wholly outside {array}")
    if not check_bounds and any(e > n for e, n in zip(ends, inside, strict=True)):
        raise IndexError(
            f"{op} at index {counts} of tiles {extents}, check_bounds=False, reaches outside {array}"
        )
    return array.tensor[tuple(slice(o, e) for o, e in zip(origin, ends, strict=True))]


def _corner(value: Tensor, part: Tensor) -> Tensor:
    """The lanes of a tile that lie inside the array: slicing has already clipped `part` to it."""
    return value[tuple(slice(n) for n in part.shape)]


def find_lanes(
    op: str, array: Array, indices: object, mask: object, check_bounds: bool
) -> tuple[Lanes, tuple[int, ...], Tensor | None]:
    """The elements that are accessed, the tile's shape, and the lanes that access them (flat; None: all do)."""
    values = [as_tile(i).value for i in (indices if isinstance(indices, tuple) else (indices,))]
    if len(values) != array.ndim:
        raise TypeError(f"{op} with {len(values)} indices: expected {array.ndim} for {array}")
    for value in values:
        if not is_integer(value.dtype):
            raise TypeError(f"{op} takes integer indices, got {value.dtype}")
    shapes = {v.shape for v in values if v.ndim}
    shape = torch.broadcast_shapes(*shapes) if len(shapes) > 1 else next(iter(shapes), torch.Size())

    active = None if mask is None else active_lanes(op, mask, shape)
    offsets = torch.tensor(array.tensor.storage_offset() - array.memory.base)
    for axis, (value, extent, stride) in enumerate(
        zip(values, array.tensor.shape, array.tensor.stride(), strict=True)
    ):
        low, high = torch.aminmax(value)
        if low < 0 or high >= extent:
            inside = (value >= 0) & (value < extent)
            outside = ~inside if active is None else ~inside & active
            if not check_bounds and outside.any():
                found = value.expand(outside.shape)[outside][0]
                raise IndexError(
                    f"{op} at index {int(found)} of axis {axis}, check_bounds=False, is outside {array}"
                )
            active = inside if active is None else inside & active
        offsets = offsets + value.long() * stride

    if active is not None:
        active = active.expand(shape).reshape(-1)
    offsets = offsets.expand(shape).reshape(-1)
    return Lanes(offsets if active is None else offsets[active]), shape, active


def active_lanes(op: str, mask: object, shape: tuple[int, ...]) -> Tensor:
    value = as_tile(mask).value
    if value.dtype != torch.bool:
        raise TypeError(f"{op} takes a mask of bool_, got {mask!r}")
    return broadcast(value, shape, "mask")


def broadcast(value: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    try:
        return value.expand(shape)
    except RuntimeError as error:
        raise TypeError(
            f"{what} of shape {tuple(value.shape)} is not broadcastable to the indices' {tuple(shape)}"
        ) from error


def as_stored(array: Array, value: object) -> Tensor:
    source = loose_dtype(value)
    if source is not array.tensor.dtype:
        check_implicit_cast(source, array.tensor.dtype, f"value for {array}")
    return as_tensor(value, array.tensor.dtype)


def _tile_extents(array: Array, shape: object) -> tuple[int, ...]:
    extents = check_extents(tuple_of_ints(shape, "shape")) or (1,) * array.ndim
    if len(extents) != array.ndim:
        raise TypeError(f"tiles of shape {shape} in {array}: the ranks differ")
    return extents


def _padding(array: Array, mode: ct.PaddingMode) -> float | int | bool:
    dtype = array.tensor.dtype
    if mode == ct.PaddingMode.UNDETERMINED:
        return poison(dtype)
    if mode != ct.PaddingMode.ZERO and not dtype.is_floating_point:
        raise TypeError(f"{mode} takes a float dtype, got {array}")
    return _PADDING[mode]


def check_call(op, array, check_bounds, latency=None, allow_tma=None, order="C") -> None:
    """Refuse what is no array, an order other than C, and hints of other types than the compiler takes."""
    if not isinstance(array, Array):
        raise TypeError(f"{op} takes an array, got {type(array).__name__}")
    if order not in ("C", tuple(range(array.ndim))):
        raise NotImplementedError(f"{op}(order={order!r}) is not supported by the interpreter")
    if not isinstance(check_bounds, bool) or not isinstance(allow_tma, (bool, NoneType)):
        raise TypeError(f"{op}: expected constant bools, got {check_bounds=}, {allow_tma=}")
    if latency is not None and not (isinstance(latency, int) and 1 <= latency <= 10):
        raise ValueError(f"{op}: expected a latency from 1 to 10, got {latency}")
