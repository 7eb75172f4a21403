# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rewrite decoder layers, so that a residual add runs in the norm that follows it.

A layer is rewritten where its forward has these statements in a row, under whatever names, and NORM is a patched norm
of the layer:

    hidden = residual + hidden             a sum of two values
    residual = hidden                      may be missing
    hidden = self.NORM(hidden)

One call that returns both the norm and the sum takes their place. All other statements are compiled again as they are.
The sum that ends a layer stays: the norm that follows it is the next layer's.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tilegym_rmsnorm.integrations.huggingface.norms import PatchedType, add_norm, subclass
from tilegym_rmsnorm.integrations.huggingface.rewriting import (
    assigned,
    called_child,
    compiled_again,
    forward_and_tree,
    forward_of,
    replacing,
)
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

_ADD_NORM, _SUM = "tilegym_add_norm", "tilegym_sum"  # names that no layer has


@dataclass(frozen=True)
class LayerPatch:
    """Description from which a patched class is made, beside its base class: the names of the norms that add."""

    norms: tuple[str, ...]

    def fits(self, base: type) -> bool:
        return rewritten(base, self.norms)[1] == self.norms

    def made(self, base: type) -> PatchedType:
        function, _ = rewritten(base, self.norms)
        return subclass(base, self, {"forward": function})


def rewritten(cls: type, norms: Collection[str]) -> tuple[FunctionType, tuple[str, ...]]:
    """Move the adds of a forward into the norms of these names. Return the new forward, and the names of the norms that
    add. Raise `Unclear` where no norm adds."""
    _, tree = forward_and_tree(cls)
    tree = copy.deepcopy(tree)  # others read it
    rewriter = _Rewriter(norms)
    rewriter.generic_visit(tree)
    if not rewriter.found:
        raise Unclear("has no sum that one of its norms follows at once")
    return compiled_again(cls, tree, {_ADD_NORM: add_norm}), tuple(rewriter.found)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, norms: Collection[str]) -> None:
        self.norms = norms
        self.found: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, self._rewritten(statements))
        return super().generic_visit(node)

    def left(self, node: ast.AST) -> ast.AST:
        return node

    # Functions and classes inside are left as they are. So is `try`: a handler sees the sum when the norm raises.
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Try = visit_TryStar = left

    def _rewritten(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        while statements:
            replaced = self._replaced(statements)
            if replaced is None:
                result.append(statements[0])
                statements = statements[1:]
            else:
                new, count = replaced
                result += new
                statements = statements[count:]
        return result

    def _replaced(self, statements: list[ast.stmt]) -> tuple[list[ast.stmt], int] | None:
        """Return the statements that replace the first ones of these, and how many they replace; None: none."""
        total, value = assigned(statements[0])
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return None
        copy, count = "", 1
        if len(statements) > 1:
            name, copied = assigned(statements[1])
            if isinstance(copied, ast.Name) and copied.id == total:
                copy, count = name, 2
        if len(statements) <= count:
            return None
        y, call = assigned(statements[count])
        norm = self._norm_called(call, {total, copy} - {""})
        if not norm or not y:
            return None
        self.found.append(norm)
        # Bind the sum to each name that the old statements leave bound to it: later statements may read it.
        held = [name for name in dict.fromkeys((total, copy)) if name and name != y]
        first, *others = held or [_SUM]
        lines = [f"{y}, {first} = {_ADD_NORM}(self.{norm})", *(f"{name} = {first}" for name in others)]
        if not held:
            lines.append(f"del {_SUM}")
        new = ast.parse("\n".join(lines)).body
        for statement in new:
            replacing(statements[count], statement)
        assignment: Any = new[0]
        assignment.value.args += [value.left, value.right]  # evaluated in the old order
        return new, count + 1

    def _norm_called(self, call: ast.expr | None, names: set[str]) -> str:
        """Return NORM if the call is `self.NORM(name)`, else ""."""
        if (
            isinstance(call, ast.Call)
            and not call.keywords
            and len(call.args) == 1
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id in names
            and called_child(call) in self.norms
        ):
            return called_child(call)
        return ""


def has_sum(cls: type) -> bool:
    """Return whether a forward adds two values in a statement of its own, as layers do and attention does not."""
    try:
        tree = tree_of(forward_of(cls))
    except Unclear:
        return False
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    sums = [value for value in values if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)]
    return any(
        isinstance(one, ast.Name) and (isinstance(other, ast.Name) or called_child(other))
        for each in sums
        for one, other in ((each.left, each.right), (each.right, each.left))
    )
