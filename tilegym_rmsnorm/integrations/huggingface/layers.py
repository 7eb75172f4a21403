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
import functools
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch

from tilegym_rmsnorm.integrations.huggingface.norms import PatchedType, add_norm, subclass
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, compiled_as, tree_of

_ADD_NORM, _SUM, _FORWARD = "tilegym_add_norm", "tilegym_sum", "tilegym_forward"  # names that no layer has
_NAMES_SEEN = "locals", "vars", "dir", "eval", "exec"  # show a function the names of its locals


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
    function = forward_of(cls)
    tree = tree_of(function)
    if [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)][:1] != ["self"]:
        raise Unclear("does not call its module self")
    code = function.__code__
    found = [*code.co_freevars, *(name for name in _NAMES_SEEN if name in code.co_names)]
    if found:
        names = ", ".join(found).replace("__class__", "super()")
        raise Unclear(f"uses {names}, which cannot be compiled again")
    rewriter = _Rewriter(norms)
    rewriter.generic_visit(tree)
    if not rewriter.found:
        raise Unclear("has no sum that one of its norms follows at once")
    outermost = inspect.getattr_static(cls, "forward")
    return _wrapped_again(outermost, function, _compiled(tree, function)), tuple(rewriter.found)


def forward_of(cls: type) -> FunctionType:
    """Return the forward that the author of a class wrote, without its decorators."""
    outermost = inspect.getattr_static(cls, "forward", None)
    if not isinstance(outermost, FunctionType):
        raise Unclear("is no plain function")
    try:
        function: Any = inspect.unwrap(outermost)
    except ValueError:
        raise Unclear("is wrapped by itself") from None
    if not isinstance(function, FunctionType):
        raise Unclear(f"is wrapped by {outermost.__code__.co_name!r}")
    return function


def _wrapped_again(outermost: FunctionType, old: FunctionType, new: FunctionType) -> FunctionType:
    """Wrap `new` in the decorators around `old`. A decorator calls the wrapped function by one variable of its closure.
    By another it may compare itself with what is called, as the one that checkpoints transformers' layers does."""
    if outermost is old:
        return new
    inside: Any = outermost.__wrapped__  # type: ignore[attr-defined]
    cells = outermost.__closure__ or ()
    holding = [cell for cell in cells if _content(cell) is inside]
    if len(holding) != 1:
        raise Unclear(f"is wrapped by {outermost.__code__.co_name!r}")
    inner, own = CellType(_wrapped_again(inside, old, new)), CellType()
    others = {id(holding[0]): inner} | {id(cell): own for cell in cells if _content(cell) is outermost}
    closure = tuple(others.get(id(cell), cell) for cell in cells)
    made = FunctionType(
        outermost.__code__, outermost.__globals__, outermost.__name__, outermost.__defaults__, closure
    )
    made.__kwdefaults__ = outermost.__kwdefaults__
    functools.update_wrapper(made, outermost)
    made.__dict__["__wrapped__"] = inner.cell_contents
    own.cell_contents = made
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


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
        total, value = _assigned(statements[0])
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return None
        copy, count = "", 1
        if len(statements) > 1:
            name, copied = _assigned(statements[1])
            if isinstance(copied, ast.Name) and copied.id == total:
                copy, count = name, 2
        if len(statements) <= count:
            return None
        y, call = _assigned(statements[count])
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
        for part in (part for statement in new for part in ast.walk(statement)):
            ast.copy_location(part, statements[count])
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
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "self"
            and call.func.attr in self.norms
        ):
            return call.func.attr
        return ""


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """Return the name and the value of `name = value`; "" and None for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, statement.value
    return "", None


def _compiled(tree: ast.FunctionDef, function: FunctionType) -> FunctionType:
    code = function.__code__
    arguments = tree.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    tree.returns = None
    tree.decorator_list = []  # they returned this function
    # The defaults are set below: they were evaluated when the class was made.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]
    tree.name = _FORWARD  # its own name may also be a global that it uses
    maker = ast.parse(f"def make({_ADD_NORM}):\n    return {_FORWARD}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body.insert(0, tree)
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    found: dict[str, Any] = {}
    exec(compiled_as(ast.fix_missing_locations(maker), code), function.__globals__, found)
    result = found["make"](add_norm)
    names = ("co_name", "co_qualname") if hasattr(code, "co_qualname") else ("co_name",)
    result.__code__ = result.__code__.replace(**{name: getattr(code, name) for name in names})
    result.__name__ = function.__name__
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    result.__annotations__, result.__doc__ = function.__annotations__, function.__doc__
    result.__module__ = function.__module__
    result.__dict__.update(function.__dict__)
    return result


def children_that_are(module: torch.nn.Module, kept: Collection[torch.nn.Module]) -> list[str]:
    """Return the names of the direct children that are among `kept`."""
    wanted = set(map(id, kept))
    return [name for name, child in module.named_children() if id(child) in wanted]


def has_sum(cls: type) -> bool:
    """Return whether a forward adds two values in a statement of its own, as layers do and attention does not."""
    try:
        tree = tree_of(forward_of(cls))
    except Unclear:
        return False
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    sums = [value for value in values if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)]
    return any(
        isinstance(one, ast.Name) and (isinstance(other, ast.Name) or _is_own_call(other))
        for each in sums
        for one, other in ((each.left, each.right), (each.right, each.left))
    )


def _is_own_call(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    )
