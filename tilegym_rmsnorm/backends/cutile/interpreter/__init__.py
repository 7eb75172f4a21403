# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Run a cuTile kernel's own Python over CPU tensors, block by block, as TRITON_INTERPRET=1 does for Triton.

    launch(sum_partials, (4096 // 16,), (dw, dw_partial, (), 128, 16, 16, True, 0))

pdb and pytest stop at the kernel's source lines. Faults that a GPU passes over raise here: access out of
bounds, reading memory that nobody wrote (allocate it with `empty`), two blocks meeting at one element. So do errors
that the compiler finds in kernels of this kind: extents that are no power of two, dtypes that do not mix or do not
fit the array, indices of another rank. Operations that are not covered raise NotImplementedError with their name.

Blocks may wait for each other by atomics and by loads and stores that are RELAXED: see blocks.py. A debugger that was
started outside stops at breakpoints in the caller's thread, where all blocks run until one waits.

Not modelled: the GPU's order of additions in a reduction, fused multiply-add, the compiler's rule that a variable
keeps its dtype and shape through a loop, atomic accesses that other blocks see out of program order.
"""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType

import cuda.tile as ct
import torch

from . import arrays, atomics, ops
from .arrays import Array
from .blocks import Blocks
from .dtypes import NUMBER, TILE_DTYPE, TORCH_DTYPE, Constant, fits
from .memory import Memory, empty, find_overlaps, unwritten
from .rebind import Namespace, rebind
from .tile import Tile, as_tile

Bound = Array | Tile | Constant | tuple["Bound", ...]  # an argument as a kernel sees it

LARGEST_GRID = (2**24 - 1, 2**16 - 1, 2**16 - 1)  # blocks in each dimension: cuda-tile's limit, then CUDA's

__all__ = ["empty", "launch", "unwritten"]

_PLAIN = ct.DType, enum.EnumMeta
OPERATIONS = {
    **{name: getattr(ct, name) for name in ct.__all__ if isinstance(getattr(ct, name), _PLAIN)},
    **{name: getattr(module, name) for module in (ops, arrays, atomics) for name in module.__all__},
}


def launch(
    function: FunctionType,
    grid: tuple[int, ...],
    args: tuple,
    *,
    order: Sequence[int] | None = None,
    resident: int | None = None,
    lockstep: bool = False,
    dependent: bool = False,
) -> None:
    """Runs `function`, a plain Python function, once per block of `grid` (1 to 3 extents).

    args: CPU tensors, numbers, and plain tuples of them. No result may depend on the next three, which choose among the
    ways in which a GPU may run blocks. order: the block numbers (x counts fastest) as they start, each once, ascending
    by default. resident: how many blocks at most have started and not ended, all by default. lockstep: a block lets
    another run after each atomic access; by default only when it has found there what it has found there before.

    dependent: the launch begins before the one before it has ended, so a block that accesses an array before
    ct.grid_dependency_control_wait raises RuntimeError.

    Raises IndexError for accesses out of bounds, RuntimeError for races, overlapping arguments, unwritten memory and
    blocks that wait for each other forever, TypeError and ValueError for what the compiler or ct.launch refuses,
    NotImplementedError for what is not covered. Errors from inside the kernel name the block.
    """
    blocks = Blocks(_checked_grid(grid), resident, lockstep, dependent)
    numbers = range(math.prod(grid))
    if order is not None and sorted(order) != list(numbers):
        raise ValueError(f"order: expected each of the {len(numbers)} block numbers once, got {order}")
    if resident is not None and resident < 1:
        raise ValueError(f"resident: expected at least 1, got {resident}")
    parameters = _bind(function, args, blocks)
    blocks.run(
        rebind(function, Namespace(blocks, OPERATIONS)), parameters, numbers if order is None else order
    )


def _checked_grid(grid: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(grid, tuple) or any(not isinstance(n, int) for n in grid):
        raise TypeError(f"grid: expected a tuple of integers, got {grid!r}")
    if not 1 <= len(grid) <= 3 or any(
        not 1 <= n <= limit for n, limit in zip(grid, LARGEST_GRID, strict=False)
    ):
        raise ValueError(f"grid: expected 1 to 3 extents from 1 to at most {LARGEST_GRID}, got {grid}")
    return grid


def _bind(function: FunctionType, args: tuple, blocks: Blocks) -> list[Bound]:
    """The arguments as the kernel sees them: arrays, scalars, numbers where it says ct.Constant, tuples of these."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"expected a plain Python function, got {type(function).__name__}")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(args) != len(names):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, got {len(args)}")
    hints = typing.get_type_hints(function, include_extras=True)
    bound = [
        _bind_one(name, value, getattr(hints.get(name), "__metadata__", ()), blocks)
        for name, value in zip(names, args, strict=True)
    ]
    find_overlaps([array.memory for array in _arrays(bound)])
    return bound


def _arrays(bound: Iterable[Bound]) -> Iterator[Array]:
    for each in bound:
        if isinstance(each, tuple):
            yield from _arrays(each)
        elif isinstance(each, Array):
            yield each


def _bind_one(name: str, value: object, metadata: tuple, blocks: Blocks) -> Bound:
    """metadata: of the parameter's annotation, which holds for each item of a tuple."""
    if type(value) is tuple:
        return tuple(_bind_one(f"{name}[{i}]", item, metadata, blocks) for i, item in enumerate(value))
    if isinstance(value, tuple):
        raise TypeError(
            f"{name}: {type(value).__name__!r} is a subclass of 'tuple'. Only plain tuples are accepted."
        )
    if isinstance(value, list):
        raise NotImplementedError(f"{name}: a list argument is not supported by the interpreter")
    if any(isinstance(m, ct.ConstantAnnotation) for m in metadata):
        if not isinstance(value, NUMBER):
            raise TypeError(
                f"{name}: expected a number for a ct.Constant parameter, got {type(value).__name__}"
            )
        return value
    if isinstance(value, torch.Tensor):
        return _bind_array(name, value, metadata, blocks)
    if isinstance(value, (bool, float)):
        return as_tile(value)
    if isinstance(value, int):
        dtype = torch.int64 if any(m in ct.ScalarInt64.__metadata__ for m in metadata) else torch.int32
        if not fits(value, dtype):
            raise OverflowError(
                f"{name}: {value} is out of range of {dtype}; ct.ScalarInt64 takes larger ones"
            )
        return Tile(torch.tensor(value, dtype=dtype))
    raise TypeError(f"{name}: expected a tensor or a number, got {type(value).__name__}")


def _bind_array(name: str, tensor: torch.Tensor, metadata: tuple, blocks: Blocks) -> Array:
    if tensor.device.type != "cpu" or tensor.dtype not in TILE_DTYPE:
        raise TypeError(f"{name}: cannot interpret a tensor of {tensor.dtype} on {tensor.device}")
    index_dtype = torch.int32
    for annotation in metadata:
        if isinstance(annotation, ct.ArrayAnnotation):
            if annotation.static_shape_dims or annotation.static_stride_dims:
                raise NotImplementedError(f"{name}: static dimensions are not supported by the interpreter")
            index_dtype = TORCH_DTYPE[annotation.index_dtype]
    tensor = tensor.detach()  # as ct.launch, which sees memory and not autograd
    return Array(tensor, Memory(name, tensor), blocks, index_dtype)
