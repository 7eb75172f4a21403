# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Recognize the arithmetic of a model's RMSNorm by its expression, and choose the kernel call that computes it.

An arithmetic is a norm with all its roundings: the dtype that it computes in, and where it rounds to which dtype. The
kernels know two castings, and write y in any dtype; `Match.plan` says which of these an arithmetic needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.call.arithmetic import promoted
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.watched import get_trace, outside_of_trace
from tilegym_rmsnorm.integrations.huggingface.expressions import (
    Expression,
    Lookups,
    Unclear,
    X,
    are_current,
    expression_of,
    text_of,
)

_HALF = (torch.float16, torch.bfloat16)


class Plan(NamedTuple):
    """Casting and dtype of y of a kernel call, for one pair of dtypes."""

    casting: Casting
    out_dtype: torch.dtype


class Call(NamedTuple):
    weight: Tensor | None
    eps: float | None
    plan: Plan


@dataclass(frozen=True)
class Match:
    """Known norm: its arithmetic, and the attributes of its module that hold weight, eps and a switch.

    Args:
        arithmetic: A name in `ARITHMETICS`.
        weight: Attribute; "" without a weight.
        eps: Attribute; "" where the code has a number in its place.
        fixed_eps: The number in the place of eps.
        offset: Added to weight.
        switch: Attribute that is false where the weight is left out; "" where none is read.
        rstd_first: Whether the code says `rstd * x`, not `x * rstd`: the first factor decides the strides of y.
        own_casting: That of an `RMSNorm` of this package: y has x's dtype, whatever weight's is. None: another norm.
    """

    arithmetic: str
    weight: str = ""
    eps: str = ""
    fixed_eps: float | None = None
    offset: float = 0.0
    switch: str = ""
    rstd_first: bool = False
    own_casting: Casting | None = None

    def plan(self, x: torch.dtype, weight: torch.dtype | None) -> Plan | None:
        """Choose how a kernel computes this arithmetic. None: no kernel does, and the original forward runs."""
        if x not in KERNEL_DTYPES or not (weight is None or weight in KERNEL_DTYPES):
            return None
        if self.own_casting is not None:
            return Plan(self.own_casting, x)
        if self.arithmetic == "llama":
            return Plan("llama", x if weight is None else promoted(weight, x))
        if self.arithmetic == "t5" and weight is not None:
            if weight is torch.float32:
                return Plan("once", torch.float32)
            return Plan("llama", x) if weight is x else None
        if self.arithmetic == "torch" and not (weight is None or weight is x):
            return None
        return Plan("once", x)

    def call(self, module: torch.nn.Module, shape: torch.Size, dtype: torch.dtype) -> Call | None:
        """Return the kernel's arguments for x of this shape and dtype. None: as for `plan`, or the original forward has
        to say what happens, because weight would be broadcast or is gone, or eps is not a number."""
        if get_trace() is not None:
            return outside_of_trace(self.call, module, shape, dtype)
        weight = self.weight_of(module)
        eps = getattr(module, self.eps) if self.eps else self.fixed_eps
        if not shape or not (is_eps(eps) or (eps is None and self.arithmetic == "torch")):
            return None
        if weight is not None:
            if weight.shape != shape[-1:]:
                return None
        elif self.arithmetic == "torch":
            if tuple(getattr(module, "normalized_shape", shape[-1:])) != tuple(shape[-1:]):
                return None
        elif self.weight and not (self.switch and not getattr(module, self.switch)):
            return None
        plan = self.plan(dtype, None if weight is None else weight.dtype)
        return None if plan is None else Call(weight, eps, plan)

    def weight_of(self, module: torch.nn.Module) -> Tensor | None:
        if not self.weight or (self.switch and not getattr(module, self.switch)):
            return None
        return getattr(module, self.weight)


def is_eps(value: Any) -> bool:
    """Return whether kernels take this value as eps."""
    return type(value) in (int, float) and 0 <= value < math.inf


class _Any(NamedTuple):
    """Placeholder in a pattern: matches an attribute, or a number where `may_be_number` or `is_number` says so."""

    field: str
    may_be_number: bool = False
    is_number: bool = False


class _Either(NamedTuple):
    """Placeholder in a pattern: matches any of these options."""

    options: tuple[Any, ...]


_W, _EPS, _SWITCH = _Any("weight"), _Any("eps", may_be_number=True), _Any("switch")
_OFFSET = _Any("offset", is_number=True)


def _wide(e: Any) -> Expression:
    return ("to", e, torch.float32)


def _like(e: Any, other: Any) -> Expression:
    return ("to", e, ("dtype", other))


_RSTD = ("rsqrt", ("add", ("mean", ("square", _wide(X))), _EPS))
# x and weight may lack the cast: beside a float32 factor the product is float32 anyway.
_XHAT = ("mul", _Either((_wide(X), X)), _RSTD)
_ONCE = _like(("mul", _XHAT, _Either((_wide(_W), _W))), X)
_WEIGHTLESS = _like(_XHAT, X)
_T5 = ("if", ("in", ("dtype", _W), frozenset(_HALF)), ("mul", _W, _like(_XHAT, _W)), ("mul", _W, _XHAT))
_TORCH_SHAPES = ("self", "normalized_shape"), ("last shape", X), ("shape", _W)

# Name: meaning, and the expressions in which models write it. docs/huggingface.md shows this table.
ARITHMETICS: dict[str, tuple[str, tuple[Expression, ...]]] = {
    "llama": (
        "x * rstd is rounded to x's dtype, then multiplied by weight; y has the wider dtype of both",
        (("mul", _W, _like(_XHAT, X)),),
    ),
    "once": ("x * rstd * weight in float32, then rounded to x's dtype", (_ONCE,)),
    "offset": (
        "x * rstd * (1 + weight) in float32, then rounded to x's dtype",
        (_like(("mul", _XHAT, ("add", _OFFSET, _wide(_W))), X),),
    ),
    "optional weight": (
        "as once, without a weight where a switch of the module is off",
        (("if", _SWITCH, _ONCE, _WEIGHTLESS),),
    ),
    "no weight": ("x * rstd in float32, then rounded to x's dtype", (_WEIGHTLESS,)),
    "t5": ("as llama where weight is half, else x * rstd * weight in float32, which is y's dtype", (_T5,)),
    "torch": (
        "torch.nn.functional.rms_norm over the last dimension",
        tuple(("rms_norm", X, shape, _W, _EPS) for shape in _TORCH_SHAPES),
    ),
}

# Known norms that have no kernel, each with the reason.
_DECLINED: tuple[tuple[Expression, str], ...] = (
    (("mul", X, _like(_RSTD, X)), "rounds rstd to x's dtype before it multiplies x"),
    (_like(_RSTD, X), "returns rstd alone"),
    (
        _like(("mul", _XHAT, _wide(("add", _OFFSET, _W))), X),
        "rounds 1 + weight to weight's dtype before it multiplies",
    ),
)

_matches: dict[tuple[type, tuple[Any, ...]], tuple[Match | Unclear, Lookups]] = {}


def match_of(cls: type) -> Match:
    """Return the arithmetic of the `forward` of a class. Raise `Unclear` where it is none of `ARITHMETICS`."""
    # The key has the methods: a class may be given others, which a cached match would miss.
    parts = (part for each in cls.__mro__ if each is not torch.nn.Module for part in vars(each).values())
    key = cls, tuple(part for part in parts if isinstance(part, (FunctionType, staticmethod)))
    found, lookups = _matches.get(key, (None, []))
    if found is None or not are_current(lookups):
        lookups = []
        try:
            found = _match(expression_of(cls, lookups))
        except Unclear as error:
            found = Unclear(str(error))  # a new one, without frames: the cache would keep them
        _matches[key] = found, lookups
    if isinstance(found, Unclear):
        raise Unclear(str(found))
    return found


def _match(expression: Expression) -> Match:
    for name, (_, patterns) in ARITHMETICS.items():
        for pattern in patterns:
            for fields in _unified(pattern, expression, {}):
                return Match(name, **fields, rstd_first=_is_rstd_first(expression))
    for pattern, reason in _DECLINED:
        if is_match(pattern, expression):
            raise Unclear(reason)
    raise Unclear(f"computes no arithmetic that is known: {text_of(expression)}")


def is_match(pattern: Expression, found: Any) -> bool:
    """Return whether a pattern is an expression, whatever the order of factors and of terms."""
    return next(_unified(pattern, found, {}), None) is not None


def _is_rstd_first(expression: Any) -> bool:
    if not isinstance(expression, tuple):
        return False
    is_it = expression[:1] == ("mul",) and expression[1][:1] == ("rsqrt",)
    return is_it or any(map(_is_rstd_first, expression))


def _unified(pattern: Any, found: Any, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each way to match a pattern with an expression, as the values of its placeholders."""
    if isinstance(pattern, _Any):
        bound = _bound(pattern, found)
        if bound is not None and all(fields.get(name, value) == value for name, value in bound.items()):
            yield {**fields, **bound}
    elif isinstance(pattern, _Either):
        for each in pattern.options:
            yield from _unified(each, found, fields)
    elif not isinstance(pattern, tuple) or not isinstance(found, tuple) or len(pattern) != len(found):
        if pattern == found:
            yield fields
    elif pattern and pattern[0] in ("mul", "add") and pattern[0] == found[0]:
        for operands in (found[1:], found[:0:-1]):
            yield from _unified_all(pattern[1:], operands, fields)
    else:
        yield from _unified_all(pattern, found, fields)


def _unified_all(patterns: Expression, found: Expression, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not patterns:
        yield fields
        return
    for first in _unified(patterns[0], found[0], fields):
        yield from _unified_all(patterns[1:], found[1:], first)


def _bound(placeholder: _Any, found: Any) -> dict[str, Any] | None:
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    kind, value = found
    if kind == "self" and not placeholder.is_number:
        return {placeholder.field: value}
    if kind == "const" and type(value) in (int, float) and math.isfinite(value):
        if placeholder.is_number:
            return {placeholder.field: float(value)}
        if placeholder.may_be_number:
            return {f"fixed_{placeholder.field}": float(value)}
    return None
