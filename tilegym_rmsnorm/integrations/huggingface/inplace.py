# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find calls of submodules whose input is changed in place afterwards, as far as a method's own source shows it.

The backward of a kernel reads x. A norm written in PyTorch casts x to float32 first, and its backward reads that copy:
where x is half, such a model trains although x is changed. With a kernel PyTorch would raise, or give a wrong gradient
in silence where x is changed through `.data`.

A method is run on names: each local may hold some values. A value is the expression that made it, or the path of
attributes that leads to it from the module. A view holds the value of its base. Results of all other calls are new.
Functions that the method calls are not read. Submodules count as changing their input only where `inplace` is set.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

# Names of attributes, from the module on; _ANY stands for an index that is not a number.
Path = tuple[str, ...]
_ANY = "*"


class Change(NamedTuple):
    """Change of a submodule's input after its call."""

    child: Path
    by: Path | None  # a submodule called there, which changes the input if it works in place
    text: str  # the code that changes the input


class _Of(NamedTuple):
    """Value: the submodule or tensor to which this path leads."""

    path: Path


_Values = frozenset[Any]
_NONE: _Values = frozenset()
_INITIALIZING = ("__init__", "_init_weights")  # no forward runs in them
_NOT_CHANGES = ("requires_grad_", "detach_")
_ATTRIBUTES = ("data", "T", "mT", "H", "mH", "real", "imag")  # views of their tensor
# Methods of tensors and functions of torch that may return the tensor that they are given, or a view of that tensor.
_VIEWS = set(
    "adjoint alias as_strided as_subclass bfloat16 broadcast_to chunk conj contiguous cpu cuda data detach "
    "diagonal double dsplit expand expand_as flatten float half hsplit imag moveaxis movedim narrow numpy "
    "permute ravel real rearrange reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims t "
    "tensor_split to transpose type type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze "
    "untyped_storage view view_as view_as_complex view_as_real vsplit".split()
)
# Functions that pass on their arguments.
_CONTAINERS = ("enumerate", "filter", "iter", "list", "map", "reversed", "sorted", "tuple", "zip")
_ITEMS = ("children", "items", "named_children", "values")  # methods of containers of modules


def changed_inputs(cls: type, child: str) -> Iterator[Change]:
    """Yield the changes that a class makes to inputs of submodules, in forward and the methods that name this child."""
    for base in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]:
        for name, each in vars(base).items():
            try:
                function = inspect.unwrap(each) if isinstance(each, FunctionType) else None
            except ValueError:  # wrapped by itself
                continue
            if isinstance(function, FunctionType) and name not in _INITIALIZING:
                if name == "forward" or child in function.__code__.co_names:
                    yield from _changed_inputs(function)


def fits(one: Path, other: Path) -> bool:
    """Return whether two paths may be the same."""
    return len(one) == len(other) and all(a == b or _ANY in (a, b) for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=256)
def _changed_inputs(function: FunctionType) -> tuple[Change, ...]:
    try:
        tree = tree_of(function)
    except Unclear:
        return ()
    run, arguments = _Run(), tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        run.locals[argument.arg] = frozenset({argument.arg})
    if first := (*arguments.posonlyargs, *arguments.args)[:1]:
        run.locals[first[0].arg] = frozenset({_Of(())})
    run.block(tree.body)
    return tuple(Change(child, by, text) for (child, by), text in run.changed.items())


class _Run(ast.NodeVisitor):
    def __init__(self) -> None:
        self.locals: dict[str, _Values] = {}
        self.read_by: dict[Any, set[Path]] = {}  # value: the submodules that were called with it
        self.changed: dict[tuple[Path, Path | None], str] = {}
        self.passes = 0  # of loops: each makes other values

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def either(self, *blocks: list[ast.stmt]) -> None:
        """Run each of these from the same locals. Afterwards a name holds all that it holds after any of them."""
        before, after = self.locals, []
        for each in blocks:
            self.locals = dict(before)
            self.block(each)
            after.append(self.locals)
        names = dict.fromkeys(name for each in after for name in each)
        self.locals = {name: _NONE.union(*(each.get(name, _NONE) for each in after)) for name in names}

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.either(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        held = _items(self.held(node.iter), _ANY)
        for _ in range(2):  # the second pass sees the values that the first one left
            self.passes += 1
            self.bind(node.target, held, node)
            self.block(node.body)
        self.block(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        for _ in range(2):
            self.passes += 1
            self.visit(node.test)
            self.block(node.body)
        self.block(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self.either([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.either(*(case.body for case in node.cases), [])

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        if node.value is not None:
            self.visit(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.assign(target, node.value, node)

    visit_AnnAssign = visit_NamedExpr = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if not isinstance(node.op, ast.Add) or not isinstance(node.value, (ast.Tuple, ast.List)):
            self.change(self.held(node.target), node)
        elif isinstance(node.target, ast.Name):  # a tuple or a list: to a tensor none can be added
            self.locals[node.target.id] = self.held(node.target) | self.held(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        pass  # functions inside are not read

    visit_Lambda = visit_FunctionDef

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for each in node.generators:
            self.visit(each.iter)
            self.bind(each.target, _items(self.held(each.iter), _ANY), node)
        self.visit(node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        values = [self.held(each) for each in (*node.args, *(word.value for word in node.keywords))]
        every = _NONE.union(*values)
        # Submodules that are called, or passed to a function that calls them, as to checkpoint: in any order.
        paths = sorted(
            each.path for each in self.held(function) | every if isinstance(each, _Of) and each.path
        )
        for path in (*paths, *paths[-2::-1]):
            self.read(path, every - {_Of(path)}, node)
        name = _name(function)
        is_change = name.endswith("_") and not name.endswith("__") and name not in _NOT_CHANGES
        if is_change or (name == "fill" and isinstance(function, ast.Attribute)):  # of an array of NumPy
            if isinstance(function, ast.Attribute):
                self.change(self.held(function.value), node)
            self.change(_NONE.union(*values[:1]) if self.is_global(function) else _NONE, node)
        made = function.keywords if isinstance(function, ast.Call) else []  # of nn.ReLU(inplace=True)(x)
        for word in (*node.keywords, *made):
            if word.arg == "out":
                self.change(self.held(word.value), node)
            elif word.arg == "inplace":
                is_off = isinstance(word.value, ast.Constant) and not word.value.value
                self.change(_NONE if is_off else every, node)

    def held(self, node: ast.expr) -> _Values:
        """Return the values that an expression may be, or be a view of."""
        parts: list[ast.expr] = []
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, _NONE)
        if isinstance(node, ast.Attribute):
            held = self.held(node.value)
            paths = {_Of((*each.path, node.attr)) for each in held if isinstance(each, _Of)}
            return held | paths if node.attr in _ATTRIBUTES else frozenset(paths)
        if isinstance(node, ast.Subscript):
            index = node.slice
            is_known = isinstance(index, ast.Constant) and isinstance(index.value, (int, str))
            return _items(self.held(node.value), str(index.value) if is_known else _ANY)  # type: ignore[attr-defined]
        if isinstance(node, (ast.Starred, ast.NamedExpr)):
            return self.held(node.value)
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, (ast.BoolOp, ast.Dict)):
            parts = node.values
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = node.elts
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            parts = [node.elt]
        elif isinstance(node, ast.Call):
            parts = self.handed_on(node)
        return frozenset({(id(node), self.passes)}).union(*map(self.held, parts))

    def handed_on(self, node: ast.Call) -> list[ast.expr]:
        """Return the expressions of which the result of a call may be a view."""
        function, name = node.func, _name(node.func)
        if name in _CONTAINERS and isinstance(function, ast.Name):
            return node.args
        if self.is_global(function):
            return node.args[:1] if name in _VIEWS or name.endswith("_") else []
        if isinstance(function, ast.Attribute) and (name in _VIEWS or name in _ITEMS or name.endswith("_")):
            return [function.value]
        return []

    def is_global(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.locals

    def assign(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        several = ast.Tuple, ast.List
        if isinstance(target, several) and isinstance(value, several) and len(target.elts) == len(value.elts):
            held = list(map(self.held, value.elts))  # all before the first is bound: a, b = b, a
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
        elif isinstance(target, ast.Subscript):
            index = target.slice
            is_text = isinstance(index, ast.Constant) and isinstance(index.value, str)  # no tensor takes one
            self.change(_NONE if is_text else self.held(target.value), node)
        elif isinstance(target, ast.Attribute) and target.attr in _ATTRIBUTES:
            self.change(self.held(target.value), node)

    def read(self, path: Path, values: _Values, node: ast.Call) -> None:
        """Record that the submodule at this path is called with these values."""
        if path[-1] in ("forward", "__call__"):
            path = path[:-1]
        self.change(values, node, path)
        for value in values:
            self.read_by.setdefault(value, set()).add(path)

    def change(self, values: _Values, node: ast.AST, by: Path | None = None) -> None:
        for value in values:
            for child in self.read_by.get(value, ()):
                self.changed.setdefault((child, by), text_of_node(node))


def _name(function: ast.expr) -> str:
    """Return the name of a called function or method; "" without one."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _items(values: _Values, key: str) -> _Values:
    """Return the values under a key of these: submodules by their path, and the values themselves, as slices."""
    return values | {_Of((*each.path, key)) for each in values if isinstance(each, _Of)}
