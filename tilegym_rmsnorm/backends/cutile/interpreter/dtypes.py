# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""cuda.tile's dtypes in terms of torch's, and its rules for mixing them.

A Python number inside a kernel is a loosely typed constant: beside a tile it takes the tile's dtype, unless its kind
(bool < int < float) is the higher one. Two tiles promote only where cuda.tile has a common dtype for them: float16 with
bfloat16 and unsigned with signed integers have none.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

Constant = bool | int | float
NUMBER = (int, float)  # what isinstance asks for; bool is an int

_NAMES = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
TORCH_DTYPE = {ct.bool_: torch.bool, **{getattr(ct, each): getattr(torch, each) for each in _NAMES}}
TILE_DTYPE = {theirs: ours for ours, theirs in TORCH_DTYPE.items()}

_BOOL, _INT, _FLOAT = range(3)


def torch_dtype(dtype: object) -> torch.dtype:
    """The torch dtype of a dtype written in a kernel (ct.float32, x.dtype; cuda.tile takes torch's own too)."""
    if not isinstance(dtype, (ct.DType, torch.dtype)):
        raise TypeError(f"expected a dtype, got {dtype!r}")
    found = TORCH_DTYPE.get(dtype, dtype)
    if found not in TILE_DTYPE:
        written = f"ct.{dtype.name}" if isinstance(dtype, ct.DType) else dtype
        raise NotImplementedError(f"{written} is not supported by the interpreter")
    return found


def name(dtype: torch.dtype) -> str:
    return TILE_DTYPE[dtype].name


def is_integer(dtype: torch.dtype) -> bool:
    return _kind(dtype) == _INT


def constant_dtype(value: Constant) -> torch.dtype:
    """The dtype of a constant with nothing beside it."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, float):
        return torch.float32
    for dtype in (torch.int32, torch.int64):
        if fits(value, dtype):
            return dtype
    raise ValueError(f"constant {value} is out of range of int64")


def promote(a: torch.dtype | Constant, b: torch.dtype | Constant, *, to_float: bool = False) -> torch.dtype:
    """The dtype in which a binary operation is done. `to_float`: integers divide as float32."""
    if not isinstance(a, torch.dtype):
        a, b = b, a
    if not isinstance(a, torch.dtype):
        a, b = constant_dtype(a), constant_dtype(b)
    both = isinstance(b, torch.dtype)
    common = _promote_dtypes(a, b) if both else _promote_with_constant(a, b, to_float)
    return torch.float32 if to_float and not common.is_floating_point else common


def check_implicit_cast(source: torch.dtype | Constant, target: torch.dtype, what: str) -> None:
    """Raises unless a value may be stored as `target` without an explicit cast."""
    if isinstance(source, torch.dtype):
        if target not in (source, _promote_dtypes(source, target)):
            raise TypeError(f"{what}: cannot implicitly cast {name(source)} to {name(target)}")
    elif _kind(target) == _BOOL:
        if isinstance(source, float) or source not in (0, 1):
            raise TypeError(f"{what}: cannot implicitly cast {source} to bool_")
    elif _kind(constant_dtype(source)) > _kind(target):
        raise TypeError(f"{what}: cannot implicitly cast {source} to {name(target)}")
    elif is_integer(target) and not fits(source, target):
        raise ValueError(f"{what}: {source} is out of range of {name(target)}")


def _kind(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return _BOOL
    return _FLOAT if dtype.is_floating_point else _INT


def fits(value: int, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def _promote_dtypes(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if a == b:
        return a
    if _kind(a) != _kind(b):
        return a if _kind(a) > _kind(b) else b
    if a.itemsize == b.itemsize or torch.uint8 in (a, b):
        raise TypeError(
            f"implicit promotion of {name(a)} and {name(b)} is not supported; cast one of them explicitly"
        )
    return a if a.itemsize > b.itemsize else b


def _promote_with_constant(dtype: torch.dtype, value: Constant, to_float: bool) -> torch.dtype:
    loose = constant_dtype(value)
    if _kind(loose) > _kind(dtype):
        return loose
    if is_integer(loose) and is_integer(dtype) and not to_float and not fits(value, dtype):
        raise ValueError(f"integer constant {value} is out of range of {name(dtype)}")
    return dtype
