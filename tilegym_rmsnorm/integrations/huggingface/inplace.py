# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which calls of a forward have their input changed in place afterwards, as far as its source shows it.

The backward of a kernel reads what it normalized. A norm that is written out casts x to float32 first, and its backward
reads that copy: where x is half, such a model trains although x is changed. With a kernel PyTorch would raise.

The forward is run on names: each local may hold some values, known by where they were made. What may be a view holds
the value it is of; what the module and its children return is new. What they do to their inputs is not seen.
"""

from __future__ import annotations

import ast
import functools
from types import FunctionType
from typing import Any

from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.layers import forward_of
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

_Values = frozenset[Any]
_NOT_CHANGES = ("requires_grad_", "detach_")


def changed_inputs(cls: type) -> dict[str, str]:
    """By name of a child that the forward of a class calls: the text of what changes the child's input afterwards."""
    try:
        return _changed_inputs(forward_of(cls))
    except Unclear:
        return {}


@functools.lru_cache(maxsize=256)
def _changed_inputs(function: FunctionType) -> dict[str, str]:
    run = _Run()
    tree = tree_of(function)
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        run.locals[argument.arg] = frozenset({argument.arg})
    run.block(tree.body)
    return run.changed


class _Run(ast.NodeVisitor):
    def __init__(self) -> None:
        self.locals: dict[str, _Values] = {}
        self.read_by: dict[Any, set[str]] = {}  # value: the children that were called with it
        self.changed: dict[str, str] = {}

    def block(self, statements: list[ast.stmt]) -> None:
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
        self.locals = {
            name: frozenset().union(*(each.get(name, frozenset()) for each in after)) for name in names
        }

    # Statements

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.either(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        held = self.held(node.iter)
        for _ in range(2):  # the second time sees what the first one left
            self.bind(node.target, held)
            self.either(node.body, [])
        self.block(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        for _ in range(2):
            self.visit(node.test)
            self.either(node.body, [])
        self.block(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self.either([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        self.block(node.finalbody)

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

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        pass  # functions inside are not read

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    # Expressions

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        given = [*node.args, *(word.value for word in node.keywords)]
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if _is_of_self(function):
            if ast.unparse(function) == f"self.{name}":
                for value in frozenset().union(*map(self.held, given)):
                    self.read_by.setdefault(value, set()).add(name)
        elif name.endswith("_") and not name.endswith("__") and name not in _NOT_CHANGES:
            for each in (function, *node.args[: self.is_global(function)]):
                self.change(each, node)
        for word in node.keywords:
            if word.arg == "out":
                self.change(word.value, node)
            elif word.arg == "inplace" and not (
                isinstance(word.value, ast.Constant) and not word.value.value
            ):
                for each in node.args:
                    self.change(each, node)

    def held(self, node: ast.expr) -> _Values:
        """The values that an expression may be, or be a view of."""
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, frozenset())
        if _is_of_self(node):
            return frozenset({ast.unparse(node)})
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self.held(node.value)
        parts: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, (ast.Tuple, ast.List)):
            parts = node.elts
        elif isinstance(node, ast.Call) and not _is_of_self(node.func):
            # A method of a tensor or a function: both may give a view.
            if not (isinstance(node.func, ast.Attribute) and node.func.attr == "clone"):
                parts = node.args if self.is_global(node.func) else [node.func]
        return frozenset({id(node)}).union(*map(self.held, parts))

    def is_global(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.locals

    def assign(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        if isinstance(target, ast.Subscript):
            self.change(target, node)
        elif (
            isinstance(target, (ast.Tuple, ast.List))
            and isinstance(value, (ast.Tuple, ast.List))
            and len(target.elts) == len(value.elts)
        ):
            held = [self.held(each) for each in value.elts]  # before any is bound
            for one, values in zip(target.elts, held, strict=True):
                self.bind(one, values)
        else:
            self.bind(target, self.held(value))

    def bind(self, target: ast.expr, values: _Values) -> None:
        if isinstance(target, ast.Name):
            self.locals[target.id] = values
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.bind(each, values)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, values)

    def change(self, node: ast.expr, where: ast.AST) -> None:
        for value in self.held(node):
            for child in self.read_by.get(value, ()):
                self.changed.setdefault(child, text_of_node(where))


def _is_of_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"
