# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Makes a kernel, and every function it calls, see the interpreter where its source says cuda.tile.

A copy of a function shares the original's code object, so breakpoints, tracebacks and line numbers are those of
the source; only its globals differ. cuda.tile itself is never changed.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType

import cuda.tile as ct
import torch

from . import ops
from .blocks import Blocks
from .dtypes import promote
from .tile import Tile, as_index, as_tile


class Namespace:
    """Replacement of `ct`, the module cuda.tile, inside an interpreted kernel. operations: what takes no block."""

    def __init__(self, blocks: Blocks, operations: dict[str, object]):
        self._blocks = blocks
        vars(self).update(operations)

    def bid(self, axis: int) -> Tile:
        return as_tile(self._blocks.block[_axis(axis)])

    def num_blocks(self, axis: int) -> Tile:
        return as_tile(self._blocks.extents[_axis(axis)])

    def grid_dependency_control_wait(self) -> None:
        """Launches run one after the other here, so what is waited for has happened; that it is, is checked."""
        self._blocks.wait_for_launch_before()

    def grid_dependency_control_launch_dependents(self) -> None:
        """See grid_dependency_control_wait."""

    def __getattr__(self, attribute: str):
        getattr(ct, attribute)  # AttributeError for what cuda.tile does not have either
        raise NotImplementedError(f"ct.{attribute} is not supported by the interpreter")


class Range:
    """range() in a kernel: bounds may be run-time scalars, and the loop variable is one."""

    def __init__(self, *bounds: Tile | int):
        self.bounds = bounds
        self._range = builtins.range(*(as_index(b) for b in bounds))
        if self._range.step < 0:
            raise ValueError(f"range takes a positive step, got {self._range.step}")

    def __iter__(self) -> Iterator[Tile]:
        dtype = torch.int32
        for bound in self.bounds:
            dtype = promote(dtype, bound.value.dtype if isinstance(bound, Tile) else bound)
        for i in self._range:
            yield Tile(torch.tensor(i, dtype=dtype))

    @property
    def constants(self) -> range:
        """Plain integers for static_iter, which unrolls, from plain integers."""
        if any(isinstance(b, Tile) for b in self.bounds):
            raise TypeError("static_iter takes compile-time bounds, got a run-time scalar")
        return self._range


def rebind(
    value: object, namespace: Namespace, done: dict[FunctionType, FunctionType] | None = None
) -> object:
    """Return a copy of a function in which cuda.tile is `namespace`, also in the functions that its code names; the
    namespace for cuda.tile; any other value itself. done: copies made so far."""
    done = {} if done is None else done
    if value is ct:
        return namespace
    if not isinstance(value, FunctionType):
        return value
    if value not in done:
        scope = dict(value.__globals__, __builtins__=_BUILTINS)
        closure = tuple(CellType() for _ in value.__closure__ or ())
        copy = FunctionType(value.__code__, scope, value.__name__, value.__defaults__, closure)
        copy.__kwdefaults__ = value.__kwdefaults__
        done[value] = copy  # before its own names are looked at: a function may call itself
        for name in _names(value.__code__):
            if name in scope:
                scope[name] = rebind(scope[name], namespace, done)
        for cell, original in zip(closure, value.__closure__ or (), strict=True):
            cell.cell_contents = rebind(original.cell_contents, namespace, done)
    return done[value]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _min(*values):
    return ops.minimum(*values) if any(isinstance(v, Tile) for v in values) else builtins.min(*values)


def _max(*values):
    return ops.maximum(*values) if any(isinstance(v, Tile) for v in values) else builtins.max(*values)


def _axis(axis: int) -> int:
    if axis not in (0, 1, 2):
        raise TypeError(f"expected a grid axis of 0, 1 or 2, got {axis!r}")
    return axis


_BUILTINS = dict(vars(builtins), range=Range, min=_min, max=_max)
