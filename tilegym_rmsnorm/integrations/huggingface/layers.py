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

A rewritten layer computes the same (test_layers_that_could_lie.py tries to show that it does not), since

- no statement stands between the sum and the norm, so that nothing can run there but the two of them, in one
  state: of memory, of autograd, of autocast, of the norm;
- both operands are evaluated in their order, and `self.NORM` after them, as it was;
- where the norm cannot take both, or something sees its calls, `add_norm` adds and calls it. It decides so for each
  call, by the tensors and the module of that call;
- the sum is held by locals alone, which nobody else reads. In `try` and `with` it might be read after the norm raised:
  there statements stay, as they do in loops. So they do where a name is global, or shared with a function inside;
- the gradient of the sum that autograd hands out, to a hook or to torch.autograd.grad, lacks the part through the norm,
  which reaches the operands at once. So the sum may only be used in arithmetic afterwards, for its shape, or for a new
  tensor that a method of it makes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tilegym_rmsnorm.integrations.huggingface import rewriting
from tilegym_rmsnorm.integrations.huggingface.classes import PatchedType, subclass
from tilegym_rmsnorm.integrations.huggingface.expressions import text_of_node
from tilegym_rmsnorm.integrations.huggingface.norms import add_norm
from tilegym_rmsnorm.integrations.huggingface.rewriting import assigned
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

_ADD_NORM, _SUM = "tilegym_add_norm", "tilegym_sum"  # names that no layer has
# Attributes of the sum that a layer may read, and methods that it may call: no result is the sum itself.
_READ = ("device", "dtype", "ndim", "shape")
_CALLED = set("chunk clone dim mean permute reshape size split sum transpose unsqueeze view".split())


@dataclass(frozen=True)
class LayerPatch:
    """Description from which a patched class is made, beside its base class: the names of the norms that add."""

    norms: tuple[str, ...]

    def fits(self, base: type) -> bool:
        return rewritten(base, self.norms)[1] == self.norms

    def made(self, base: type) -> PatchedType:
        return subclass(base, self, {"forward": rewritten(base, self.norms)[0]})


def rewritten(cls: type, norms: Collection[str]) -> tuple[FunctionType, tuple[str, ...]]:
    """Move the adds of a forward into the norms of these names. Return the new forward, and the names of the norms that
    add. Raise `Unclear` where no norm adds."""
    function, tree = rewriting.forward_and_tree(cls)
    tree = copy.deepcopy(tree)  # others read it
    stated = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    rewriter = _Rewriter(norms, stated.union(function.__code__.co_cellvars))
    tree.body = rewriter.block(tree.body, [])
    if not rewriter.found:
        raise Unclear(rewriter.reason)
    return rewriting.compiled_again(cls, tree, {_ADD_NORM: add_norm}), tuple(rewriter.found)


class _Rewriter:
    """Rewrite the statements of a forward. shared: names that other functions may read, to which no sum is bound."""

    def __init__(self, norms: Collection[str], shared: set[str]) -> None:
        self.norms, self.shared = norms, shared
        self.found: list[str] = []
        self.reason = "has no sum that one of its norms follows at once"

    def block(self, statements: list[ast.stmt], behind: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a block. behind: the statements that run after it."""
        result: list[ast.stmt] = []
        while statements:
            new, count = self._replaced(statements, behind)
            statements = statements[count:]
            for each in new:
                if isinstance(each, ast.If):
                    rest = [*statements, *behind]
                    each.body, each.orelse = self.block(each.body, rest), self.block(each.orelse, rest)
            result += new
        return result

    def _replaced(self, statements: list[ast.stmt], behind: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
        """Return the statements that take the place of the first ones of these, and how many they replace."""
        as_it_is = statements[:1], 1
        total, value = assigned(statements[0])
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return as_it_is
        copy, count = "", 1
        if len(statements) > 1:
            name, copied = assigned(statements[1])
            if isinstance(copied, ast.Name) and copied.id == total:
                copy, count = name, 2
        if len(statements) <= count or {total, copy} & self.shared:
            return as_it_is
        y, call = assigned(statements[count])
        norm, x = rewriting.child_and_argument(call)
        is_of_sum = isinstance(x, ast.Name) and x.id in {total, copy} - {""}
        if norm not in self.norms or not is_of_sum or not y:
            return as_it_is
        held = [name for name in dict.fromkeys((total, copy)) if name and name != y]
        other = self._other_use(set(held), [*statements[count + 1 :], *behind])
        if other is not None:
            self.reason = (
                f"uses the sum before {norm} in another way than in arithmetic: {text_of_node(other)}"
            )
            return as_it_is
        self.found.append(norm)
        # Bind the sum to each name that the old statements leave bound to it: later statements may read it.
        first, *others = held or [_SUM]
        lines = [f"{y}, {first} = {_ADD_NORM}(None, None, self.{norm})"]
        lines += [f"{name} = {first}" for name in others] if held else [f"del {_SUM}"]
        new = ast.parse("\n".join(lines)).body
        for statement in new:
            rewriting.replacing(statements[count], statement)
        assignment: Any = new[0]
        assignment.value.args[:2] = value.left, value.right
        return new, count + 1

    def _other_use(self, names: set[str], statements: list[ast.stmt]) -> ast.stmt | None:
        """Return the first of the statements that does more than arithmetic with what has these names; None: none."""
        for statement in statements:
            target, value = assigned(statement)
            if isinstance(value, ast.Name) and value.id in names and target not in self.shared:
                names = {*names, target}
                continue
            if not _only_computes(statement, names):
                return statement
            names = names - {target}
        return None


def _only_computes(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node uses what has these names in arithmetic alone, for its shape, or for a new tensor."""
    if isinstance(node, ast.Name):
        return node.id not in names or not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
        return False
    read: list[ast.AST] = []  # parts that may be one of these names
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.BinOp):
        read = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):  # +x is x
        read = [node.operand]
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Attribute) and node.attr in _READ):
        read = [node.value]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        read = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLED:
        read = [node.func.value]
        parts = [*read, *node.args, *node.keywords]
    inside = (each for each in parts if not (each in read and isinstance(each, ast.Name)))
    return all(_only_computes(each, names) for each in inside)


def has_sum(cls: type) -> bool:
    """Return whether a forward adds two values in a statement of its own, as layers do and attention does not."""
    try:
        tree = tree_of(rewriting.forward_of(cls))
    except Unclear:
        return False
    # A forward with another name than self is not rewritten, but reported.
    module = next((each.arg for each in (*tree.args.posonlyargs, *tree.args.args)), "")
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    sums = [value for value in values if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)]
    return any(
        isinstance(one, ast.Name) and (isinstance(other, ast.Name) or rewriting.called_child(other, module))
        for each in sums
        for one, other in ((each.left, each.right), (each.right, each.left))
    )
