# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The tile: an immutable block of numbers in a CPU tensor, with cuda.tile's operators and methods.

Every operation is done in the promoted dtype of its operands and rounded there, so a chain of float16 operations
rounds after each, as documented. Zero-dimensional tiles are the scalars: ct.bid, loop variables, shapes, run-time
arguments.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable

import cuda.tile as ct
import torch

from .dtypes import NUMBER, TILE_DTYPE, Constant, constant_dtype, is_integer, name, promote, torch_dtype


def as_tensor(x: Tile | Constant, dtype: torch.dtype) -> torch.Tensor:
    """A constant is rounded to `dtype` before anything is done with it."""
    if isinstance(x, Tile):
        return x.value if x.value.dtype == dtype else x.value.to(dtype)
    return torch.tensor(x, dtype=dtype)


def as_tile(x: object) -> Tile:
    if isinstance(x, Tile):
        return x
    if isinstance(x, NUMBER):
        return Tile(torch.tensor(x, dtype=constant_dtype(x)))
    raise TypeError(f"expected a tile or a number, got {type(x).__name__}")


def loose_dtype(x: object) -> torch.dtype | Constant:
    """Return what promotion goes by: a tile's dtype, a constant's value."""
    return x if isinstance(x, NUMBER) else as_tile(x).value.dtype


def operands(x: object, y: object, *, to_float: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = promote(loose_dtype(x), loose_dtype(y), to_float=to_float)
    a, b = as_tensor(x, dtype), as_tensor(y, dtype)
    check_broadcast(a, b)
    return a, b


def check_broadcast(a: torch.Tensor, b: torch.Tensor) -> None:
    for n, m in zip(reversed(a.shape), reversed(b.shape), strict=False):
        if n != m and n != 1 and m != 1:
            raise TypeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not broadcast")


def check_extents(extents: tuple[int, ...]) -> tuple[int, ...]:
    for n in extents:
        if n < 1 or n & (n - 1):
            raise TypeError(f"tile extents are powers of two, got {extents}")
    return extents


def tuple_of_ints(shape: object, what: str) -> tuple[int, ...]:
    """Compile-time integers: run-time scalars are refused, as the compiler does."""
    items = shape if isinstance(shape, tuple) else (shape,)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in items):
        raise TypeError(f"{what} takes constant integers, got {shape!r}")
    return items


def tuple_of_indices(index: object) -> tuple[int, ...]:
    """Tile-space indices: integers or zero-dimensional tiles of a signed integer dtype."""
    return tuple(as_index(i) for i in (index if isinstance(index, tuple) else (index,)))


def as_index(i: object) -> int:
    if isinstance(i, int) and not isinstance(i, bool):
        return i
    if isinstance(i, Tile) and i.ndim == 0 and is_integer(i.value.dtype) and i.value.dtype != torch.uint8:
        return int(i.value)
    raise TypeError(f"expected a signed integer scalar, got {i!r}")


def normalize_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise TypeError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def arithmetic(op: str, x: object, y: object) -> Tile | Constant:
    on_constants, on_tensors = _ARITHMETIC[op]
    if isinstance(x, NUMBER) and isinstance(y, NUMBER):
        return on_constants(x, y)
    a, b = operands(x, y, to_float=op == "truediv")
    if a.dtype == torch.bool:
        raise TypeError(f"{op} does not support bool_; cast to an integer first")
    return Tile(on_tensors(a, b))


def compare(op: str, x: object, y: object) -> Tile | bool:
    if isinstance(x, NUMBER) and isinstance(y, NUMBER):
        return getattr(operator, op)(x, y)
    return Tile(getattr(torch, op)(*operands(x, y)))


def bitwise(op: str, x: object, y: object) -> Tile | Constant:
    on_constants, on_tensors = _BITWISE[op]
    if isinstance(x, NUMBER) and isinstance(y, NUMBER):
        return on_constants(x, y)
    if isinstance(x, Tile) and isinstance(y, Tile) and x.dtype != y.dtype and "shift" not in op:
        raise TypeError(f"{op} takes operands of one dtype, got {x.dtype.name} and {y.dtype.name}")
    a, b = operands(x, y)
    if a.dtype.is_floating_point or ("shift" in op and a.dtype == torch.bool):
        raise TypeError(f"{op} takes integers, got {name(a.dtype)}")
    return Tile(on_tensors(a, b))


def _floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.floor(a / b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="floor")


def _cdiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.is_floating_point:
        raise TypeError(f"cdiv takes integers, got {name(a.dtype)}")
    return _floordiv(a, b) + (torch.remainder(a, b) != 0)


def _format(values: object, spec: str) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_format(v, spec) for v in values) + "]"
    return format(values, spec)


_ARITHMETIC: dict[str, tuple[Callable, Callable]] = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub),
    "mul": (operator.mul, torch.mul),
    "truediv": (operator.truediv, torch.div),
    "floordiv": (operator.floordiv, _floordiv),
    "cdiv": (lambda x, y: -(-x // y), _cdiv),
    "mod": (operator.mod, torch.remainder),
    "minimum": (min, torch.fmin),
    "maximum": (max, torch.fmax),
    "minimum_or_nan": (min, torch.minimum),
    "maximum_or_nan": (max, torch.maximum),
}
_BITWISE: dict[str, tuple[Callable, Callable]] = {
    "and": (operator.and_, torch.bitwise_and),
    "or": (operator.or_, torch.bitwise_or),
    "xor": (operator.xor, torch.bitwise_xor),
    "lshift": (operator.lshift, torch.bitwise_left_shift),
    "rshift": (operator.rshift, torch.bitwise_right_shift),
}


def _operators(function: Callable, op: str) -> tuple[Callable, Callable]:
    """A binary operator's method and its reflection."""
    return lambda self, other: function(op, self, other), lambda self, other: function(op, other, self)


def _unsupported(op: str) -> Callable:
    def method(self, *_):
        raise NotImplementedError(f"{op} on tiles is not supported by the interpreter")

    return method


class Tile:
    """value: the elements. Nothing may write into it, as tiles share it with the tiles they were reshaped from."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor):
        self.value = value

    @property
    def dtype(self) -> ct.DType:
        return TILE_DTYPE[self.value.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return self.value.ndim

    def item(self) -> Tile:
        return self.reshape(())

    def reshape(self, shape: tuple[int, ...]) -> Tile:
        extents = tuple_of_ints(shape, "shape")
        known = math.prod(n for n in extents if n != -1)
        if extents.count(-1) == 1 and known > 0:
            extents = tuple(self.value.numel() // known if n == -1 else n for n in extents)
        if math.prod(check_extents(extents)) != self.value.numel():
            raise TypeError(f"cannot reshape {self.shape} to {shape}")
        return Tile(self.value.reshape(extents))

    def permute(self, axes: tuple[int, ...]) -> Tile:
        if sorted(normalize_axis(a, self.ndim) for a in axes) != list(range(self.ndim)):
            raise TypeError(f"expected a permutation of {self.ndim} axes, got {axes}")
        return Tile(self.value.permute(axes))

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        if axis0 is None and axis1 is None and self.ndim == 2:
            axis0, axis1 = 0, 1
        if self.ndim < 2 or axis0 is None or axis1 is None:
            raise TypeError(
                f"transpose takes two axes of a tile with at least 2, got {axis0}, {axis1} of {self.shape}"
            )
        axes = (normalize_axis(axis0, self.ndim), normalize_axis(axis1, self.ndim))
        return Tile(self.value.transpose(*axes))

    def astype(self, dtype: object, *, rounding_mode: ct.RoundingMode | None = None) -> Tile:
        target = torch_dtype(dtype)
        if rounding_mode not in (None, ct.RoundingMode.RN):
            raise NotImplementedError(
                f"astype(rounding_mode={rounding_mode}) is not supported by the interpreter"
            )
        return Tile(self.value.to(target))

    def extract(self, index: object, shape: int | tuple[int, ...]) -> Tile:
        """`index` counts subtiles of `shape`, not elements."""
        extents = check_extents(tuple_of_ints(shape, "shape"))
        counts = tuple_of_indices(index)
        parts = extents or (1,) * self.ndim
        if not len(parts) == len(counts) == self.ndim or any(
            n % p for n, p in zip(self.shape, parts, strict=True)
        ):
            raise TypeError(f"cannot extract a subtile {shape} at {counts} from a tile {self.shape}")
        value = self.value
        for axis, (count, part) in enumerate(zip(counts, parts, strict=True)):
            if not 0 <= count < value.shape[axis] // part:
                raise IndexError(f"subtile {counts} of shape {parts} is outside a tile of shape {self.shape}")
            value = value.narrow(axis, count * part, part)
        return Tile(value.reshape(extents))

    def __getitem__(self, index: object) -> Tile:
        """Only new axes: t[:, None]."""
        items = index if isinstance(index, tuple) else (index,)
        if any(not (i is None or i is Ellipsis or i == slice(None)) for i in items):
            raise TypeError(f"a tile is indexed with None, ':' and '...' alone, got {index!r}; use extract()")
        return Tile(self.value[index])

    def __bool__(self) -> bool:
        if self.ndim:
            raise TypeError(f"expected a scalar as condition, got a tile of shape {self.shape}")
        return bool(self.value)

    def __iter__(self):
        raise TypeError("a tile cannot be iterated over")

    def __getattr__(self, attribute: str):
        if hasattr(ct.Tile, attribute):
            raise NotImplementedError(f"Tile.{attribute} is not supported by the interpreter")
        raise AttributeError(f"Tile has no attribute {attribute!r}")

    def __repr__(self) -> str:
        return f"Tile[{name(self.value.dtype)},{self.shape}] {_abridged(self.value.tolist())}"

    def __str__(self) -> str:
        return str(self.value.tolist())

    def __format__(self, spec: str) -> str:
        return _format(self.value.tolist(), spec)

    __add__, __radd__ = _operators(arithmetic, "add")
    __sub__, __rsub__ = _operators(arithmetic, "sub")
    __mul__, __rmul__ = _operators(arithmetic, "mul")
    __truediv__, __rtruediv__ = _operators(arithmetic, "truediv")
    __floordiv__, __rfloordiv__ = _operators(arithmetic, "floordiv")
    __mod__, __rmod__ = _operators(arithmetic, "mod")
    __and__, __rand__ = _operators(bitwise, "and")
    __or__, __ror__ = _operators(bitwise, "or")
    __xor__, __rxor__ = _operators(bitwise, "xor")
    __lshift__, __rlshift__ = _operators(bitwise, "lshift")
    __rshift__, __rrshift__ = _operators(bitwise, "rshift")
    __lt__, __gt__ = _operators(compare, "lt")[0], _operators(compare, "gt")[0]
    __le__, __ge__ = _operators(compare, "le")[0], _operators(compare, "ge")[0]
    __eq__, __ne__ = _operators(compare, "eq")[0], _operators(compare, "ne")[0]
    __hash__ = None
    __pow__ = __rpow__ = _unsupported("**")
    __matmul__ = __rmatmul__ = _unsupported("@")
    __divmod__ = __rdivmod__ = _unsupported("divmod")

    def __neg__(self) -> Tile:
        return Tile(-(self.value.int() if self.value.dtype == torch.bool else self.value))

    def __abs__(self) -> Tile:
        return self if self.value.dtype == torch.bool else Tile(self.value.abs())

    def __invert__(self) -> Tile:
        if self.value.dtype.is_floating_point:
            raise TypeError(f"~ takes integers, got {name(self.value.dtype)}")
        return Tile(~self.value)


def _abridged(values: object) -> str:
    """The first 8 of each dimension: what pdb prints of a tile is to be read."""
    shortener = reprlib.Repr()
    shortener.maxlist, shortener.maxlevel, shortener.maxother = 8, 4, 40
    return shortener.repr(values)
