# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Recognize the rotary embedding of a model by what its function computes, with each rounding.

Known is one function of q and k, and of cos and sin, (B or 1, T, R):

    q * cos + rotate_half(q) * sin        rotate_half: [-x2, x1] for x = [x1, x2];     the same of k

cos and sin get a dimension for the heads: q and k are (B, H, T, D), or (B, T, H, D), or with tables (T, R) (T, H, D).

A second form takes the first R of D elements, and joins the others to the result. Either form may cast its result to
the dtype of q, and of k: where all are of one dtype, as calls require here, that changes nothing. Or it casts all four
to float32 first, and its results back.

Beside those of expressions.py, an expression may be:

    ("neg", e)  ("cat", a, b)  ("unsqueeze", e, dim)             cat: in the last dimension
    ("width", e)  ("half", n)  ("columns", e, first, end)        width: elements of the last dimension; half: n // 2
"""

from __future__ import annotations

import ast
import itertools
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_rmsnorm.integrations.huggingface.arithmetic import is_match
from tilegym_rmsnorm.integrations.huggingface.classes import has_hooks
from tilegym_rmsnorm.integrations.huggingface.expressions import Expression, Lookups, Reader, are_current
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

_Q, _K, _COS, _SIN = ("q",), ("k",), ("cos",), ("sin",)


class Rotary(NamedTuple):
    function: Any
    is_partial: bool  # whether it takes the first elements of a head alone
    heads: int  # the dimension of the heads: 1, 2 or -2
    is_wide: bool  # whether it computes in float32, and rounds its results
    lookups: Lookups  # the names outside of it on which this depends

    def is_current(self, function: Any) -> bool:
        """Return whether this is the function that a call would run, with the helpers that were read."""
        is_same = function is self.function and are_current(self.lookups)
        return is_same and not (isinstance(function, torch.nn.Module) and has_hooks(function))


def read_rotary(rotary: Any, given: list[Any], named: dict[str, Any]) -> Rotary:
    """Read a rotary embedding, or raise `Unclear`. given, named: its constant arguments besides q, k, cos and sin."""
    constants = [("const", value) for value in given]
    options = {name: ("const", value) for name, value in named.items()}
    lookups: Lookups = []
    reader = _Reader(type(None), lookups)
    reader.methods["unsqueeze"], reader.functions[torch.cat] = _unsqueeze, _cat
    found = reader.read(_function_of(rotary), [_Q, _K, _COS, _SIN, *constants], options)
    if found[:2] == ("if", ("is not None", _K)):
        found = found[2]
    # Keep each helper once: a call compares them all.
    helpers = list({each[1]: each for each in lookups if isinstance(each[2], FunctionType)}.values())
    for partial, heads, wide in itertools.product((False, True), (1, 2, -2), (False, True)):
        expected = ("tuple", *(_rotated(x, partial, heads, wide) for x in (_Q, _K)))
        if is_match(expected, found if wide else _without_casts(found)):
            return Rotary(rotary, partial, heads, wide, helpers)
    raise Unclear("computes no rotary embedding that is known")


def _function_of(rotary: Any) -> FunctionType:
    """Return the function of a rotary embedding. The library `kernels` makes a module of one that it may replace."""
    if isinstance(rotary, torch.nn.Module):
        forward: Any = type(rotary).forward
        code = getattr(forward, "__code__", None)
        if has_hooks(rotary) or code is None or code.co_code != _passing_on(None).__code__.co_code:
            raise Unclear("is a module that does more than to call a function")
        rotary = forward.__closure__[0].cell_contents
    if not isinstance(rotary, FunctionType):
        raise Unclear("is no plain function")
    return rotary


def _passing_on(function: Any) -> Any:
    """Make the forward of such a module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def _rotated(x: Expression, partial: bool, heads: int, wide: bool) -> Expression:
    cos: Expression = ("unsqueeze", _COS, heads)
    sin: Expression = ("unsqueeze", _SIN, heads)
    given = x
    if wide:
        x, cos, sin = (("to", each, torch.float32) for each in (x, cos, sin))
    width = ("width", cos)
    turned = ("columns", x, None, width) if partial else x
    middle = ("half", ("width", turned))
    half = ("cat", ("neg", ("columns", turned, middle, None)), ("columns", turned, None, middle))
    y: Expression = ("add", ("mul", turned, cos), ("mul", half, sin))
    y = ("cat", y, ("columns", x, width, None)) if partial else y
    return ("to", y, ("dtype", given)) if wide else y


def _without_casts(found: Any) -> Any:
    """Leave out the casts of both results to the dtypes of q and k."""
    if found[:1] != ("tuple",) or len(found) != 3:
        return found
    casts = [("dtype", _Q), ("dtype", _K)]
    results = [each[1] if each[:1] == ("to",) and each[2] in casts else each for each in found[1:]]
    return ("tuple", *results)


class _Reader(Reader):
    def value(self, node: ast.expr | None) -> Any:
        of = self.value
        if node is None:  # an end of a slice
            return None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = of(node.operand)
            if operand[0] != "const":
                return ("neg", operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            if of(node.right) == ("const", 2):
                return ("half", of(node.left))
        elif isinstance(node, ast.Subscript):
            base, index = of(node.value), node.slice
            if base[0] == "shape" and ast.unparse(index) == "-1":
                return ("width", base[1])
            if isinstance(index, ast.Tuple) and len(index.elts) == 2 and ast.unparse(index.elts[0]) == "...":
                part = index.elts[1]
                if isinstance(part, ast.Slice) and part.step is None:
                    return ("columns", base, of(part.lower), of(part.upper))
        return super().value(node)

    def bind(self, target: ast.expr, value: Any) -> bool:
        if isinstance(target, ast.Tuple) and value[0] == "tuple" and len(target.elts) == len(value) - 1:
            return all(map(self.bind, target.elts, value[1:]))
        return super().bind(target, value)


def _unsqueeze(e: Expression, dim: Expression) -> Expression:
    if dim[0] != "const":
        raise TypeError
    return ("unsqueeze", e, dim[1])


def _cat(tensors: Expression, dim: Expression) -> Expression:
    if tensors[0] != "tuple" or dim != ("const", -1):
        raise ValueError
    return ("cat", *tensors[1:])
