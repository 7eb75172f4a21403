# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find the calls of submodules whose input is changed in place afterwards, as far as the source of a module shows it.

The backward of a kernel reads what it normalized. A norm that is written out casts x to float32 first, and its
backward reads that copy: where x is half, such a model trains although x is changed. With a kernel PyTorch would raise,
or, where x is changed through `.data`, give another gradient in silence.

A function is run on names: each local may hold some values. A value is the expression that made it, a path of
attributes from the module, or a function defined inside. A possible view holds the value that it is of. Functions of
the same class or file are run where they are called; what a submodule returns is new, and what it does to its input is
not seen.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

Path = tuple[
    str, ...
]  # names of attributes from the module on; _ANY stands for an index that is not a number


class Change(NamedTuple):
    """The input of a submodule is changed after its call."""

    child: Path
    text: str  # the code that changes it
    by: Path | None  # the submodule that is called there, and changes the input if it works in place


class _Of(NamedTuple):
    """A value: what this path leads to, a submodule or a tensor."""

    path: Path


class _Function(NamedTuple):
    """A value: a function that is defined inside."""

    arguments: ast.arguments
    body: tuple[ast.stmt, ...]


_Values = frozenset[Any]
_NONE: _Values = frozenset()
_ANY = "*"
_MAX_CALLS = 40  # of functions that are run in place of their calls
_MAX_DEPTH = 4
_NOT_CHANGES = ("requires_grad_", "detach_", "retain_grad")
# Of the module operator, and as methods with underscores around them.
_OPERATORS = {name for name in dir(operator) if f"__{name}__" in dir(operator) and name.startswith("i")}
_CHANGES = _OPERATORS - {"index", "inv", "invert"} | {"setitem", "setattr"}
_ITEMS = ("values", "items", "children", "named_children")  # methods of containers of modules


def changed_inputs(cls: type, child: str) -> Iterator[Change]:
    """The changes that `forward`, or another method that names this child, makes to the inputs of submodules."""
    methods = _methods(cls)
    for name, function in methods:
        if isinstance(function, FunctionType) and (name == "forward" or child in function.__code__.co_names):
            yield from _changed_inputs(function, methods)


_Methods = tuple[tuple[str, FunctionType | staticmethod], ...]


def _methods(cls: type) -> _Methods:
    """The methods of a class and of its bases up to nn.Module, in the order of lookup, without decorators."""
    found = []
    for base in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]:
        for name, each in vars(base).items():
            if isinstance(each, FunctionType):
                with contextlib.suppress(ValueError):  # wrapped by itself
                    each = inspect.unwrap(each)
            if isinstance(each, (FunctionType, staticmethod)):
                found.append((name, each))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _changed_inputs(function: FunctionType, methods: _Methods) -> tuple[Change, ...]:
    run = _Run(methods)
    run.function(function, [], {}, _NONE, is_entry=True)
    return tuple(run.changed)


class _Run(ast.NodeVisitor):
    def __init__(self, methods: _Methods) -> None:
        self.methods = methods
        self.current: FunctionType | None = None  # the one that is run
        self.locals: dict[str | Path, _Values] = {}  # by path: what was assigned to an attribute
        self.read_by: dict[Any, dict[Path, None]] = {}  # value: the submodules that were called with it
        self.changed: dict[Change, None] = {}
        self.returned = _NONE
        self.results: dict[int, _Values] = {}  # by id of a call whose function was run
        self.depth = self.calls = 0

    def block(self, statements: Any) -> None:
        for statement in statements:
            self.visit(statement)

    def either(self, *blocks: list[ast.stmt]) -> None:
        """One of these is run: afterwards a name holds what it holds after any."""
        before, after = self.locals, []
        for each in blocks:
            self.locals = dict(before)
            self.block(each)
            after.append(self.locals)
        names = dict.fromkeys(name for each in after for name in each)
        self.locals = {name: _NONE.union(*(each.get(name, _NONE) for each in after)) for name in names}

    # Functions

    def function(
        self,
        function: FunctionType,
        given: list[_Values],
        named: dict[str, _Values],
        others: _Values,
        is_entry: bool = False,
    ) -> _Values:
        """What a function returns that is no part of this one: it sees none of its locals."""
        try:
            tree = tree_of(function)
        except Unclear:
            return _NONE
        around, current, self.current = self.locals, self.current, function
        self.locals = _attributes(around)
        if is_entry:  # each argument is a value of its own
            names = _parameters(tree.args)
            given = [frozenset({_Of(())}), *(frozenset({name}) for name in names[1:])]
        result = self.body(tree.args, tree.body, given, named, others)
        self.locals, self.current = around | _attributes(self.locals), current
        return result

    def body(
        self,
        arguments: ast.arguments,
        body: Any,
        given: list[_Values],
        named: dict[str, _Values],
        others: _Values,
    ) -> _Values:
        """What a function returns that is given these. others: what any of its parameters may be besides."""
        if self.depth >= _MAX_DEPTH or self.calls >= _MAX_CALLS:
            return _NONE
        self.depth, self.calls = self.depth + 1, self.calls + 1
        around, returned, self.returned = self.locals, self.returned, _NONE
        self.locals = dict(around)
        for index, name in enumerate(_parameters(arguments)):
            values = given[index] if index < len(given) else named.get(name, _NONE)
            self.locals[name] = values | others
        for more in (arguments.vararg, arguments.kwarg):
            if more is not None:
                self.locals[more.arg] = others.union(*given, *named.values())
        self.block(body)
        result, self.returned = self.returned, returned
        self.locals = around | _attributes(self.locals)
        self.depth -= 1
        return result

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.locals[node.name] = frozenset({_Function(node.args, tuple(node.body))})

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass  # run where it is called

    def visit_Return(self, node: ast.Return | ast.Yield) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.returned |= self.held(node.value)

    visit_Yield = visit_Return

    # Statements

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.either(node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        held = _items(self.held(node.iter), _ANY)
        for _ in range(2):  # the second time sees what the first one left
            self.bind(node.target, held, node)
            self.either(node.body, [])
        self.block(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        for _ in range(2):
            self.visit(node.test)
            self.either(node.body, [])
        self.block(node.orelse)

    def visit_Try(self, node: Any) -> None:
        self.either([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, item.context_expr, node)
        self.block(node.body)

    visit_AsyncWith = visit_With

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        held = self.held(node.subject)
        held |= _items(held, _ANY)
        for case in node.cases:
            for pattern in ast.walk(case.pattern):
                name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
                if name is not None:
                    self.locals[name] = held
            if case.guard is not None:
                self.visit(case.guard)
        self.either(*(case.body for case in node.cases), [])

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.assign(node.target, node.value, node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.assign(node.target, node.value, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.change(node.target, node)

    # Expressions

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        self.visit(function.value if isinstance(function, ast.Attribute) else function)
        for each in (*node.args, *node.keywords):
            self.visit(each)
        given = [self.held(each) for each in node.args]
        named = {word.arg: self.held(word.value) for word in node.keywords if word.arg is not None}
        every = _NONE.union(*given, *(self.held(word.value) for word in node.keywords))
        self.run(node, given, named, every)

        # Submodules that are called, or given to what calls them, as checkpoint is.
        for called in self.held(function):
            if isinstance(called, _Of) and called.path:
                self.read(called.path, every, node)
        for child in every:
            if isinstance(child, _Of) and child.path:
                self.read(child.path, every - {child}, node)

        names = _names(function)
        if self.is_global(function) and any(map(_is_change, names)):
            for each in (
                *node.args[:1],
                *(word.value for word in node.keywords if word.arg in ("input", "self")),
            ):
                self.change(each, node)
        if isinstance(function, ast.Attribute) and _is_change(function.attr):
            self.change(function.value, node)
        if _is_true(_option(node, "inplace", names)) or (
            isinstance(function, ast.Call) and _is_true(_option(function, "inplace", _names(function.func)))
        ):
            for each in (*node.args, *(word.value for word in node.keywords)):
                self.change(each, node)
        for word in node.keywords:
            if word.arg == "out":
                self.change(word.value, node)

    def run(self, node: ast.Call, given: list[_Values], named: dict[str, _Values], every: _Values) -> None:
        """Runs what is called here, if it is a function whose source is in reach."""
        function = node.func
        # Of arguments with stars nobody knows which is which.
        has_stars = any(isinstance(each, ast.Starred) for each in node.args) or len(named) < len(
            node.keywords
        )
        others = every if has_stars else _NONE
        result = None
        called = self.held(function)
        for each in called:
            if isinstance(each, _Function):
                result = (result or _NONE) | self.body(each.arguments, each.body, given, named, others)
        for each in every:
            if isinstance(each, _Function):  # given to what calls it
                result = (result or _NONE) | self.body(each.arguments, each.body, [], {}, every - {each})
        found = self.named(function, called)
        if isinstance(found, staticmethod):
            found = found.__func__
        elif isinstance(function, ast.Attribute):
            given = [frozenset({_Of(())}), *given]
        if isinstance(found, FunctionType) and not str(found.__module__).startswith("torch."):
            result = (result or _NONE) | self.function(found, given, named, others)
        if result is not None:
            self.results[id(node)] = self.results.get(id(node), _NONE) | result

    def named(self, node: ast.expr, held: _Values) -> Any:
        """The method or the global that is called by this."""
        if isinstance(node, ast.Name):
            is_global = self.current is not None and node.id not in self.locals
            return self.current.__globals__.get(node.id) if is_global else None  # type: ignore[union-attr]
        if not isinstance(node, ast.Attribute):
            return None
        methods = [each for name, each in self.methods if name == node.attr]
        if _Of((node.attr,)) in held:
            return methods[0] if methods else None
        if isinstance(node.value, ast.Call) and _names(node.value.func) == ["super"]:
            return dict(zip(methods, methods[1:], strict=False)).get(self.current)  # type: ignore[arg-type]
        return None

    def visit_ListComp(self, node: Any) -> None:
        self.comprehension(node, visit=True)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def comprehension(self, node: Any, visit: bool) -> _Values:
        """The values that are in it."""
        around = self.locals
        self.locals = dict(around)
        for each in node.generators:
            if visit:
                self.visit(each.iter)
            self.bind(each.target, _items(self.held(each.iter), _ANY), node)
            if visit:
                self.block(each.ifs)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        if visit:
            self.block(parts)
        held = _NONE.union(*map(self.held, parts))
        self.locals = around
        return held

    def held(self, node: ast.expr) -> _Values:
        """The values that an expression may be, or be a view of."""
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, _NONE)
        if isinstance(node, ast.Attribute):
            held = _items(self.held(node.value), node.attr, whole=False)
            return held.union(*(self.locals.get(each.path, _NONE) for each in held if isinstance(each, _Of)))
        if isinstance(node, ast.Subscript):
            index = node.slice
            is_number = isinstance(index, ast.Constant) and isinstance(index.value, (int, str))
            return _items(self.held(node.value), str(index.value) if is_number else _ANY)  # type: ignore[attr-defined]
        if isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            return self.held(node.value)
        if isinstance(node, ast.Lambda):
            return frozenset({_Function(node.args, (ast.Return(node.body),))})
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            return self.comprehension(node, visit=False)
        parts: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = node.values
        elif isinstance(node, ast.Call):
            return self.result(node)
        return frozenset({id(node)}).union(*map(self.held, parts))

    def result(self, node: ast.Call) -> _Values:
        function = node.func
        values = frozenset({id(node)}) | self.results.get(id(node), _NONE)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "getattr" and len(node.args) > 1:
            attribute = node.args[1]
            text = str(attribute.value) if isinstance(attribute, ast.Constant) else _ANY
            return values | _items(self.held(node.args[0]), text, whole=False)
        if name == "clone":
            return values
        if self.is_global(function):
            parts = [*node.args, *(word.value for word in node.keywords)]
        elif isinstance(function, ast.Attribute):
            # A method of a tensor may give a view. What a submodule of the same name gives is new.
            is_method = hasattr(torch.Tensor, name) or name in _ITEMS
            held = self.held(function.value)
            return values | {each for each in held if not isinstance(each, _Of) or (is_method and each.path)}
        else:
            return values
        return values | _NONE.union(*map(self.held, parts)) - {_Of(())}

    def is_global(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.locals

    def assign(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        if (
            isinstance(target, (ast.Tuple, ast.List))
            and isinstance(value, (ast.Tuple, ast.List))
            and len(target.elts) == len(value.elts)
        ):
            held = [self.held(each) for each in value.elts]  # before any is bound
            for one, values in zip(target.elts, held, strict=True):
                self.bind(one, values, node)
        else:
            self.bind(target, self.held(value), node)

    def bind(self, target: ast.expr, values: _Values, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.locals[target.id] = values
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.bind(each, _items(values, _ANY), node)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, values, node)
        elif isinstance(target, ast.Attribute):
            for each in self.held(target.value):
                if isinstance(each, _Of):
                    self.locals[(*each.path, target.attr)] = values
            if target.attr in ("data", "real", "imag"):
                self.change(target.value, node)
        elif isinstance(target, ast.Subscript):
            self.change(target.value, node)
            if isinstance(target.value, ast.Name) and _is_key(target.slice):  # a dict holds them from now on
                self.locals[target.value.id] = self.held(target.value) | values

    def read(self, path: Path, values: _Values, node: ast.Call) -> None:
        """A submodule is called with these."""
        if path[-1] in ("forward", "__call__"):
            path = path[:-1]
        self.changes(values, Change((), text_of_node(node), path))
        for value in values:
            self.read_by.setdefault(value, {})[path] = None

    def change(self, node: ast.expr, where: ast.AST) -> None:
        self.changes(self.held(node), Change((), text_of_node(where), None))

    def changes(self, values: _Values, change: Change) -> None:
        for value in values:
            for read, children in self.read_by.items():
                if read == value or _is_part(read, value):
                    self.changed.update(dict.fromkeys(change._replace(child=child) for child in children))


def fits(one: Path, other: Path) -> bool:
    """Whether two paths may be the same."""
    return len(one) == len(other) and all(a == b or _ANY in (a, b) for a, b in zip(one, other, strict=True))


def _parameters(arguments: ast.arguments) -> list[str]:
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _items(values: _Values, key: str, whole: bool = True) -> _Values:
    """What lies under a key of these. whole: a path may lead to a slice, or be that of a module in a list, too."""
    found = {_Of((*each.path, key)) if isinstance(each, _Of) else each for each in values}
    return frozenset(found) | (values - {_Of(())} if whole else _NONE)


def _is_part(one: Any, other: Any) -> bool:
    """Whether one of two paths leads to a part of what the other leads to."""
    if not isinstance(one, _Of) or not isinstance(other, _Of):
        return False
    length = min(len(one.path), len(other.path))
    return fits(one.path[:length], other.path[:length])


def _is_key(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _attributes(names: dict[str | Path, _Values]) -> dict[str | Path, _Values]:
    return {name: values for name, values in names.items() if isinstance(name, tuple)}


def _names(node: ast.expr) -> list[str]:
    """Of `a.b.c` c and b, as an overload of an op stands behind the op's name; of a name that name."""
    if isinstance(node, ast.Name):
        return [node.id]
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return names


def _is_change(name: str) -> bool:
    if name.endswith("__"):
        return name.strip("_") in _CHANGES
    return name in _CHANGES or (len(name) > 1 and name.endswith("_") and name not in _NOT_CHANGES)


def _option(node: ast.Call, name: str, names: list[str]) -> ast.expr | None:
    """What is given for a parameter of a function or a module of torch.nn."""
    for word in node.keywords:
        if word.arg == name:
            return word.value
    for scope in (torch.nn.functional, torch.nn):
        parameters = _parameters_in(scope, names[0]) if names else ()
        if name in parameters and parameters.index(name) < len(node.args):
            return node.args[parameters.index(name)]
    return None


@functools.lru_cache(maxsize=256)
def _parameters_in(scope: Any, name: str) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(getattr(scope, name)).parameters)
    except (AttributeError, TypeError, ValueError):
        return ()


def _is_true(node: ast.expr | None) -> bool:
    """Whether it may be."""
    return node is not None and not (isinstance(node, ast.Constant) and not node.value)
