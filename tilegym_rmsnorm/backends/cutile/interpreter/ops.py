# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""cuda.tile's functions on tiles: its names (some hide a builtin), signatures and promotion rules.

Three read a tile's bits as other numbers: bitcast of the same width, the others by way of bytes, lowest byte first.
Reductions stay in the tile's dtype: half types are added half by half, with a rounding after each step. (The GPU's
order of additions is not specified.) Rounding modes but nearest-even and flushing to zero are not covered.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable

import cuda.tile as ct
import torch

from .dtypes import NUMBER, name, torch_dtype
from .tile import (
    Tile,
    arithmetic,
    as_tensor,
    as_tile,
    bitwise,
    check_broadcast,
    check_extents,
    compare,
    normalize_axis,
    operands,
    tuple_of_ints,
)

__all__ = """
    abs add arange assert_ assume_divisible_by astype bitcast bitwise_and bitwise_lshift bitwise_not
    bitwise_or bitwise_rshift bitwise_xor broadcast_to cat cdiv equal exp expand_dims extract floordiv full
    greater greater_equal less less_equal max maximum min minimum mod mul negative not_equal ones
    pack_to_bytes permute print printf reshape rsqrt sqrt static_assert static_eval static_iter sub sum
    transpose truediv unpack_from_bytes where zeros
""".split()

_STATIC_ITERATIONS = 1000  # cuda.tile's limit


def arange(size, /, *, dtype, start=0, step=1):
    (extent,) = check_extents(tuple_of_ints(size, "arange"))
    tile = Tile(torch.arange(extent, dtype=torch.int32)).astype(dtype)
    return tile * astype(step, dtype) + astype(start, dtype)


def full(shape, fill_value, dtype):
    extents = check_extents(tuple_of_ints(shape, "shape"))
    if as_tile(fill_value).ndim:
        raise TypeError(f"full takes a scalar to fill with, got a tile of shape {fill_value.shape}")
    return Tile(as_tensor(fill_value, torch_dtype(dtype)).expand(extents))


def zeros(shape, dtype):
    return full(shape, 0, dtype)


def ones(shape, dtype):
    return full(shape, 1, dtype)


def astype(x, dtype, /, *, rounding_mode=None):
    if isinstance(x, NUMBER):
        return Tile(as_tensor(x, torch_dtype(dtype)))
    return as_tile(x).astype(dtype, rounding_mode=rounding_mode)


def reshape(x, /, shape):
    if not isinstance(shape, tuple):
        raise TypeError(f"reshape takes a tuple, got {shape!r}")
    return as_tile(x).reshape(shape)


def expand_dims(x, /, axis):
    tile = as_tile(x)
    return Tile(tile.value.unsqueeze(normalize_axis(axis, tile.ndim + 1)))


def broadcast_to(x, /, shape):
    tile, extents = as_tile(x), check_extents(tuple_of_ints(shape, "shape"))
    lined_up = (1,) * (len(extents) - tile.ndim) + tile.shape
    if len(lined_up) != len(extents) or any(n not in (1, m) for n, m in zip(lined_up, extents, strict=True)):
        raise TypeError(f"shape {tile.shape} is not broadcastable to {extents}")
    return Tile(tile.value.expand(extents))


def permute(x, /, axes):
    return as_tile(x).permute(axes)


def transpose(x, /, axis0=None, axis1=None):
    return as_tile(x).transpose(axis0, axis1)


def cat(tiles, /, axis):
    if not isinstance(tiles, tuple) or not 1 <= len(tiles) <= 2:
        raise TypeError(f"cat takes a tuple of one or two tiles, got {tiles!r}")
    if len({t.dtype for t in tiles}) > 1:
        raise TypeError(f"cat takes tiles of one dtype, got {[t.dtype.name for t in tiles]}")
    joined = torch.cat([t.value for t in tiles], normalize_axis(axis, tiles[0].ndim))
    check_extents(tuple(joined.shape))
    return Tile(joined)


def extract(x, /, index, shape):
    return as_tile(x).extract(index, shape)


def bitcast(x, /, dtype):
    value = as_tile(x).value
    target = torch_dtype(dtype)
    if torch.bool in (value.dtype, target) or value.dtype.itemsize != target.itemsize:
        raise TypeError(f"bitcast takes dtypes of the same width, got {name(value.dtype)} and {name(target)}")
    return Tile(value.view(target))


def pack_to_bytes(x, /):
    value = as_tile(x).value
    if value.dtype == torch.bool:
        raise TypeError("pack_to_bytes takes numbers, got bool_")
    return Tile(value.reshape(-1).contiguous().view(torch.uint8))


def unpack_from_bytes(x, /, dtype):
    value = as_tile(x).value
    target = torch_dtype(dtype)
    if target == torch.bool:
        raise TypeError("unpack_from_bytes makes numbers, got bool_")
    if value.dtype != torch.uint8 or value.ndim != 1:
        raise TypeError(
            f"unpack_from_bytes takes a 1-D tile of uint8, got {value.ndim}-D of {name(value.dtype)}"
        )
    if value.numel() % target.itemsize:
        raise TypeError(f"{value.numel()} bytes are no whole number of {name(target)}")
    return Tile(value.contiguous().view(target))


def sum(x, /, axis=None, *, keepdims=False, rounding_mode=None, flush_to_zero=False):
    _check_rounding("sum", rounding_mode, flush_to_zero)
    value, axes = _reduction(x, axis)
    if value.dtype in (torch.float16, torch.bfloat16):
        for a in axes:
            while value.shape[a] > 1:
                low, high = value.chunk(2, a)
                value = low + high
    elif axes:
        value = value.sum(axes, keepdim=True, dtype=value.dtype)
    return _drop_axes(value, axes, keepdims)


def max(x, /, axis=None, *, keepdims=False, flush_to_zero=False, propagate_nan=False):
    _check_rounding("max", None, flush_to_zero)
    return _extremum(torch.amax, -math.inf, x, axis, keepdims, propagate_nan)


def min(x, /, axis=None, *, keepdims=False, flush_to_zero=False, propagate_nan=False):
    _check_rounding("min", None, flush_to_zero)
    return _extremum(torch.amin, math.inf, x, axis, keepdims, propagate_nan)


def _binary(function: Callable, op: str) -> Callable:
    return lambda x, y, /: function(op, x, y)


def _rounded(op: str) -> Callable:
    def operation(x, y, /, *, rounding_mode=None, flush_to_zero=False):
        _check_rounding(op, rounding_mode, flush_to_zero)
        return arithmetic(op, x, y)

    return operation


def _nan_aware(op: str) -> Callable:
    def operation(x, y, /, *, flush_to_zero=False, propagate_nan=False):
        _check_rounding(op, None, flush_to_zero)
        return arithmetic(op + "_or_nan" if propagate_nan else op, x, y)

    return operation


abs = builtins.abs
add, sub, mul, truediv = _rounded("add"), _rounded("sub"), _rounded("mul"), _rounded("truediv")
minimum, maximum = _nan_aware("minimum"), _nan_aware("maximum")
floordiv, cdiv, mod = _binary(arithmetic, "floordiv"), _binary(arithmetic, "cdiv"), _binary(arithmetic, "mod")
equal, not_equal = _binary(compare, "eq"), _binary(compare, "ne")
less, less_equal = _binary(compare, "lt"), _binary(compare, "le")
greater, greater_equal = _binary(compare, "gt"), _binary(compare, "ge")
bitwise_and, bitwise_or, bitwise_xor, bitwise_lshift, bitwise_rshift = (
    _binary(bitwise, op) for op in ("and", "or", "xor", "lshift", "rshift")
)


def bitwise_not(x, /):
    return (not x) if isinstance(x, bool) else ~x


def where(cond, x, y, /):
    condition = as_tensor(cond, torch.bool)
    a, b = operands(x, y)
    for branch in (a, b):
        check_broadcast(condition, branch)
    return Tile(torch.where(condition, a, b))


def negative(x, /):
    return operator.neg(x)


def sqrt(x, /, *, rounding_mode=None, flush_to_zero=False):
    _check_rounding("sqrt", rounding_mode, flush_to_zero)
    return _float_function(x, math.sqrt, torch.sqrt)


def rsqrt(x, /, *, flush_to_zero=False):
    _check_rounding("rsqrt", None, flush_to_zero)
    return _float_function(x, lambda v: v**-0.5, torch.rsqrt)


def exp(x, /, *, rounding_mode=None):
    _check_rounding("exp", rounding_mode, False)
    return _float_function(x, math.exp, torch.exp)


def static_eval(expr, /):
    return expr


def static_assert(condition, message=None, /):
    if not isinstance(condition, bool):
        raise TypeError(f"static_assert takes a compile-time bool, got {condition!r}")
    if not condition:
        raise AssertionError("" if message is None else str(message))


def static_iter(iterable):
    items = tuple(getattr(iterable, "constants", iterable))
    if len(items) > _STATIC_ITERATIONS:
        raise ValueError(f"static_iter is limited to {_STATIC_ITERATIONS} iterations, got {len(items)}")
    return items


def assert_(cond, /, message=None):
    if not isinstance(cond, Tile) or cond.value.dtype != torch.bool:
        raise TypeError(f"assert_ takes a tile of bool_, got {cond!r}")
    if not cond.value.all():
        raise AssertionError(message or "ct.assert_ failed")


def assume_divisible_by(x, divisor):
    if x % divisor != 0:
        raise ValueError(f"{x} was declared divisible by {divisor}")
    return x


def print(*args, sep=" ", end="\n"):
    builtins.print(*args, sep=sep, end=end)


def printf(format, *args):
    if any(isinstance(a, Tile) and a.ndim for a in args):
        raise NotImplementedError("printf of a tile that is no scalar is not supported by the interpreter")
    builtins.print(format % tuple(a.value.item() if isinstance(a, Tile) else a for a in args), end="")


def _check_rounding(op: str, rounding_mode: ct.RoundingMode | None, flush_to_zero: bool) -> None:
    if rounding_mode not in (None, ct.RoundingMode.RN) or flush_to_zero:
        raise NotImplementedError(
            f"{op}(rounding_mode={rounding_mode}, flush_to_zero={flush_to_zero}) is not supported by the interpreter"
        )


def _float_function(x: object, on_constant, on_tensor) -> Tile | float:
    if isinstance(x, NUMBER):
        return on_constant(x)
    value = as_tile(x).value
    return Tile(on_tensor(value if value.dtype.is_floating_point else value.float()))


def _reduction(x: object, axis: object) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The elements to reduce (bool counts as int32) and the axes, ascending and without repetition."""
    value = as_tile(x).value
    listed = range(value.ndim) if axis is None else tuple_of_ints(axis, "axis")
    axes = tuple(sorted(normalize_axis(a, value.ndim) for a in listed))
    if len(set(axes)) != len(axes):
        raise TypeError(f"repeated reduction axis in {axis}")
    return (value.int() if value.dtype == torch.bool else value), axes


def _drop_axes(value: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> Tile:
    return Tile(value if keepdims or not axes else value.squeeze(axes))


def _extremum(reduce, neutral: float, x: object, axis: object, keepdims: bool, propagate_nan: bool) -> Tile:
    """NaN lanes are passed over unless propagate_nan; where all lanes are NaN, so is the result."""
    value, axes = _reduction(x, axis)
    if axes:
        kept = value
        if value.dtype.is_floating_point and not propagate_nan:
            nan = value.isnan()
            kept = value.masked_fill(nan & ~nan.all(axes, keepdim=True), neutral)
        value = reduce(kept, axes, keepdim=True)
    return _drop_axes(value, axes, keepdims)
