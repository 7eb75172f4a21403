# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Turn the forward of a module into one expression: the fingerprint by which a norm is known.

The source of `forward` is read statement by statement. Names of locals are replaced by their values, and Python methods
and functions are read where they are called. So docstrings, annotations, names, helpers and the order of statements
leave no trace, while each operation and each rounding does. Code that is not understood raises `Unclear`: a forward is
never guessed.

An expression is nested tuples, an operation and its operands:

    ("x",)  ("self", name)  ("const", number)       the argument of forward, an attribute, a literal
    ("to", e, dtype)  ("dtype", e)                  dtype: a torch.dtype, or that of another expression
    ("mul", a, b)  ("add", a, b)  ("square", e)  ("rsqrt", e)  ("mean", e)       mean: of the last dimension, kept
    ("if", test, a, b)  ("in", e, values)  ("is not None", e)
    ("rms_norm", x, shape, weight, eps)             PyTorch's own

A `Reader` that knows more operations reads other functions than norms, as in rotary.py.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tilegym_rmsnorm.integrations.huggingface.source import Unclear, assignment, tree_of

Expression = tuple[Any, ...]
Lookups = list[tuple[Any, str, Any]]  # a module or the globals of one, a name, and the value that it had

X: Expression = ("x",)
_SELF: Expression = ("the module",)
_NONE: Expression = ("const", None)
_MAX_DEPTH = 4  # of nested calls that are read
_MAX_STATEMENTS = 40  # in all functions that are read; a norm has ten
_MISSING = object()


def are_current(lookups: Lookups) -> bool:
    """Return whether these names still have their values: a helper, or a function of torch, may have been replaced."""
    return all(_looked_up(scope, name) is value for scope, name, value in lookups)


def _looked_up(scope: Any, name: str) -> Any:
    if isinstance(scope, ModuleType):
        return getattr(scope, name, _MISSING)
    return scope[name] if name in scope else vars(builtins).get(name, _MISSING)


def expression_of(cls: type, lookups: Lookups | None = None) -> Expression:
    """Return the expression of the `forward` of a class. Add to `lookups` each name outside of forward on which the
    expression depends, also where `Unclear` is raised."""
    function = inspect.getattr_static(cls, "forward", None)
    if not isinstance(function, FunctionType):
        raise Unclear("is no plain function")
    return Reader(cls, [] if lookups is None else lookups).read(function, [_SELF, X], {}, is_forward=True)


def text_of(expression: Any) -> str:
    """Write an expression for people."""
    if not isinstance(expression, tuple) or not expression:
        return str(expression).removeprefix("torch.")
    operation, *operands = expression
    if operation == "x":
        return "x"
    if operation == "self":
        return operands[0]
    if operation == "const":
        return repr(operands[0])
    if operation in ("mul", "add"):
        sign = " * " if operation == "mul" else " + "
        return f"({sign.join(map(text_of, operands))})"
    return f"{operation}({', '.join(map(text_of, operands))})"


class _Object(NamedTuple):
    """Python value that does not come from a tensor: a module, a function, a dtype."""

    value: Any


class Reader:
    def __init__(self, cls: type, lookups: Lookups) -> None:
        self.cls, self.lookups = cls, lookups
        # These make the expression of a call of a tensor's method of that name, and of a function.
        self.methods, self.functions = dict(_METHODS), dict(_FUNCTIONS)
        self.depth = self.statements = 0
        # Locals of the call that is read, and globals of its function.
        self.values, self.globals = dict[str, Any](), dict[str, Any]()

    def read(
        self, function: FunctionType, given: list[Any], named: dict[str, Any], is_forward: bool = False
    ) -> Any:
        """Evaluate a call of `function`: an `Expression` or an `_Object`."""
        tree = tree_of(function)
        if function.__code__.co_freevars:
            names = ", ".join(function.__code__.co_freevars).replace("__class__", "super()")
            raise Unclear(f"uses {names}, which is not read")
        if self.depth == _MAX_DEPTH:
            raise Unclear("calls functions too deeply")
        parameters = _parameters(tree, is_forward)
        values = _defaults(function, parameters) | dict(zip(parameters, given, strict=False)) | named
        if len(given) > len(parameters) or set(values) != set(parameters):
            raise Unclear("calls a function with other arguments than it takes")
        outer = self.depth, self.values, self.globals
        self.depth, self.values, self.globals = self.depth + 1, values, function.__globals__
        result = self.block(tree.body)
        self.depth, self.values, self.globals = outer
        if result is None:
            raise Unclear("does not return on every path")
        return result

    def block(self, statements: list[ast.stmt]) -> Any:
        """Evaluate statements up to their `return`; None without one."""
        for index, statement in enumerate(statements):
            self.statements += 1
            if self.statements > _MAX_STATEMENTS:
                raise Unclear("has too many statements for a norm")
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.value(statement.value)
            if isinstance(statement, ast.If):
                test, values, branches = self.value(statement.test), self.values, []
                for branch in (statement.body, statement.orelse):
                    self.values = dict(values)
                    branches.append(self.block([*branch, *statements[index + 1 :]]))
                if None in branches:
                    return None
                return branches[0] if branches[0] == branches[1] else ("if", test, *branches)
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text or isinstance(statement, ast.Pass):
                continue
            target, assigned = assignment(statement)
            if assigned is None or not self.bind(target, self.value(assigned)):
                raise Unclear(f"has a statement that is not read: {text_of_node(statement)}")
        return None

    def bind(self, target: ast.expr, value: Any) -> bool:
        """Assign a value. Return whether such a target is read."""
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        return isinstance(target, ast.Name)

    def value(self, node: ast.expr) -> Any:
        """Evaluate a node: an `Expression` or an `_Object`."""
        of = self.value
        if isinstance(node, ast.Name):
            if node.id in self.values:
                return self.values[node.id]
            found = self.looked_up(self.globals, node.id)
            if found is not _MISSING:
                return _Object(found)
        elif isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, (bool, int, float)):
                return ("const", node.value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = of(node.operand)
            if operand[0] == "const":
                return ("const", -operand[1])
        elif isinstance(node, (ast.Tuple, ast.List)):
            return ("tuple", *map(of, node.elts))
        elif isinstance(node, ast.Attribute):
            return self.attribute(of(node.value), node.attr)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _applied(_OPERATORS[type(node.op)], [of(node.left), of(node.right)], {})
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = of(node.left), of(node.comparators[0])
            if isinstance(node.ops[0], ast.In) and right[0] == "tuple":
                return ("in", left, frozenset(_plain(item) for item in right[1:]))
            if isinstance(node.ops[0], ast.IsNot) and right == _NONE:
                return ("is not None", left)
        elif isinstance(node, ast.Subscript) and text_of_node(node.slice) == "-1:":
            base = of(node.value)
            if base[0] == "shape":
                return ("last shape", base[1])
        elif isinstance(node, ast.Call):
            named = {word.arg: of(word.value) for word in node.keywords if word.arg is not None}
            if len(named) == len(node.keywords) and not any(isinstance(a, ast.Starred) for a in node.args):
                return self.call(node.func, [of(argument) for argument in node.args], named)
        raise Unclear(f"computes something that is not read: {text_of_node(node)}")

    def looked_up(self, scope: Any, name: str) -> Any:
        found = _looked_up(scope, name)
        self.lookups.append((scope, name, found))
        return found

    def attribute(self, base: Any, name: str) -> Any:
        if base == _SELF:
            return ("self", name)
        if isinstance(base, _Object):
            found = self.looked_up(base.value, name) if isinstance(base.value, ModuleType) else _MISSING
            if found is not _MISSING:
                return _Object(found)
        elif name in ("dtype", "shape"):
            return (name, base)
        raise Unclear(f"reads .{name} of something that is not read")

    def call(self, node: ast.expr, given: list[Any], named: dict[str, Any]) -> Any:
        if isinstance(node, ast.Attribute):
            base = self.value(node.value)
            if base == _SELF:
                method = inspect.getattr_static(self.cls, node.attr, None)
                if isinstance(method, staticmethod) and isinstance(method.__func__, FunctionType):
                    return self.read(method.__func__, given, named)
                if isinstance(method, FunctionType):
                    return self.read(method, [_SELF, *given], named)
                raise Unclear(f"calls self.{node.attr}, which is no method of its class")
            if not isinstance(base, _Object):
                operation = self.methods.get(node.attr)
                if operation is None:
                    raise Unclear(f"calls .{node.attr}() of a tensor")
                return _applied(operation, [base, *given], named)
        called = self.value(node)
        if isinstance(called, _Object):
            try:
                operation = self.functions.get(called.value)
            except TypeError:  # not hashable
                operation = None
            if operation is not None:
                return _applied(operation, given, named)
            if isinstance(called.value, FunctionType) and not called.value.__module__.startswith("torch."):
                return self.read(called.value, given, named)
        raise Unclear(f"calls {text_of_node(node)}")


def _parameters(tree: ast.FunctionDef, is_forward: bool) -> list[str]:
    arguments = tree.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    more = [each.arg for each in (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs) if each]
    if is_forward and (more or len(names) != 2):
        others = ", ".join([*names[2:], *more])
        raise Unclear(f"takes more than one tensor: {others}" if others else "takes no tensor")
    if more or (is_forward and arguments.defaults):
        raise Unclear("calls a function with arguments that are not read")
    return names


def _defaults(function: FunctionType, parameters: list[str]) -> dict[str, Any]:
    values = function.__defaults__ or ()
    if not all(value is None or isinstance(value, (bool, int, float)) for value in values):
        raise Unclear("calls a function with arguments that are not read")
    return {name: ("const", value) for name, value in zip(parameters[::-1], values[::-1], strict=False)}


def text_of_node(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Object) else value


def _applied(operation: Any, given: list[Any], named: dict[str, Any]) -> Any:
    try:
        return operation(*map(_plain, given), **{name: _plain(value) for name, value in named.items()})
    except (TypeError, ValueError):  # the operation does not take these arguments
        raise Unclear(f"calls {operation.__name__.strip('_')} in a way that is not read") from None


# An operation takes expressions, and values of Python where it needs one.


def _to(e: Expression, dtype: Any) -> Expression:
    is_dtype = isinstance(dtype, torch.dtype) or (isinstance(dtype, tuple) and dtype[0] == "dtype")
    if not is_dtype:
        raise TypeError
    return e if e[0] == "to" and e[2] == dtype else ("to", e, dtype)


def _float(e: Expression) -> Expression:
    return _to(e, torch.float32)


def _type_as(e: Expression, other: Expression) -> Expression:
    return _to(e, ("dtype", other))


def _mul(a: Expression, b: Expression) -> Expression:
    return ("square", a) if a == b else ("mul", a, b)


def _add(a: Expression, b: Expression) -> Expression:
    return ("add", a, b)


def _square(e: Expression) -> Expression:
    return ("square", e)


def _rsqrt(e: Expression) -> Expression:
    return ("rsqrt", e)


def _pow(e: Expression, exponent: Expression) -> Expression:
    if exponent == ("const", 2):
        return ("square", e)
    if exponent == ("const", -0.5):  # PyTorch computes it by rsqrt
        return ("rsqrt", e)
    raise ValueError


def _mean(e: Expression, dim: Expression, keepdim: Expression) -> Expression:
    if dim not in (("const", -1), ("tuple", ("const", -1))) or keepdim != ("const", True):
        raise ValueError
    return ("mean", e)


def _rms_norm(
    input: Expression, normalized_shape: Expression, weight: Expression = _NONE, eps: Expression = _NONE
) -> Expression:
    return ("rms_norm", input, normalized_shape, weight, eps)


_OPERATORS = {ast.Mult: _mul, ast.Add: _add, ast.Pow: _pow}
# Operations that are functions of torch, too.
_OF_BOTH: dict[str, Callable[..., Any]] = {"mul": _mul, "add": _add, "square": _square, "rsqrt": _rsqrt}
_OF_BOTH |= {"pow": _pow, "mean": _mean}
_METHODS = {"to": _to, "type": _to, "float": _float, "type_as": _type_as, **_OF_BOTH}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): operation for name, operation in _OF_BOTH.items()},
    **dict.fromkeys((torch.rms_norm, functional.rms_norm), _rms_norm),
    **{operator.mul: _mul, operator.add: _add},
}
