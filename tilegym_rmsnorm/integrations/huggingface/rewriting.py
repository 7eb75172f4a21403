# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compile the forward of a class again, after some of its statements were replaced. Decorators around forward stay."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from tilegym_rmsnorm.integrations.huggingface.source import Unclear, assignment, compiled_as, tree_of

_FORWARD = "tilegym_forward"  # a name that no forward has
_NAMES_SEEN = "locals", "vars", "dir", "eval", "exec"  # show a function the names of its locals


def forward_and_tree(cls: type) -> tuple[FunctionType, ast.FunctionDef]:
    """Return the forward that the author of a class wrote, and its syntax tree, which others read too. Raise
    `Unclear` where it cannot be compiled again."""
    function = forward_of(cls)
    tree = tree_of(function)
    if [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)][:1] != ["self"]:
        raise Unclear("does not call its module self")
    if any(map(_binds_self, ast.walk(tree))):
        raise Unclear("binds self to something else")
    code = function.__code__
    found = [*code.co_freevars, *(name for name in _NAMES_SEEN if name in code.co_names)]
    if found:
        names = ", ".join(found).replace("__class__", "super()")
        raise Unclear(f"uses {names}, which cannot be compiled again")
    return function, tree


def _binds_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "self" and not isinstance(node.ctx, ast.Load)
    # Names that imports, handlers of errors, functions inside and patterns bind.
    return any(getattr(node, field, None) == "self" for field in ("name", "asname", "rest"))


def compiled_again(cls: type, tree: ast.FunctionDef, helpers: dict[str, Any]) -> FunctionType:
    """Compile the changed tree of a class's forward, in the decorators around it. It runs until the class gets another
    forward. helpers: values of names that it uses, besides those of its module."""
    function = forward_of(cls)
    outermost = inspect.getattr_static(cls, "forward")
    made = _wrapped_again(outermost, function, _compiled(tree, function, helpers))
    result = while_current(cls, made)
    for cell in made.__closure__ or ():
        if _content(cell) is made:  # a decorator compares itself with the forward of the class
            cell.cell_contents = result
    return result


def forward_now(module: Any, base: type) -> Callable[..., Any]:
    """Return the forward that a patched module has without its patch. base: the class it had."""
    classes = type(module).__mro__
    made: Any = classes[classes.index(base) - 1]
    return super(made, module).forward


def while_current(base: Any, forward: Any) -> Any:
    """Wrap a forward that takes the place of base's, so that it runs until base gets another one. It takes 0.3 us.

    A patched class has a forward of its own, which hides that of its base. So each call compares the base's forward
    with the one that was there when the patch was made, and runs another one as it would run without the patch.
    """
    old = base.forward

    @functools.wraps(forward)
    def current(self: Any, *args: Any, **named: Any) -> Any:
        if base.forward is old:
            return forward(self, *args, **named)
        return forward_now(self, base)(*args, **named)

    return current


def assigned(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """Return the name and the value of `name = value` or `name: T = value`; "" and None for other statements."""
    target, value = assignment(statement)
    return (target.id, value) if isinstance(target, ast.Name) and value is not None else ("", None)


def called_child(node: ast.AST | None, module: str = "self") -> str:
    """Return NAME of a call `self.NAME(...)`; "" of anything else. module: the name for self."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return node.func.attr if isinstance(owner, ast.Name) and owner.id == module else ""
    return ""


def child_and_argument(node: ast.AST | None) -> tuple[str, ast.expr | None]:
    """Return NAME and e of a call `self.NAME(e)`; "" and None of anything else."""
    name = called_child(node)
    if not name or not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return "", None
    return ("", None) if isinstance(node.args[0], ast.Starred) else (name, node.args[0])


def names_read_by(cls: type) -> tuple[str, ...]:
    """Return the names of globals and attributes that the forward of a class reads; none if it is no plain function."""
    try:
        return forward_of(cls).__code__.co_names
    except Unclear:
        return ()


def replacing(old: ast.AST, new: ast.AST) -> None:
    """Give each part of a new node the place of the old one in the source, which errors name."""
    for part in ast.walk(new):
        ast.copy_location(part, old)


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


def _compiled(tree: ast.FunctionDef, function: FunctionType, helpers: dict[str, Any]) -> FunctionType:
    code = function.__code__
    arguments = tree.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.returns = None
    tree.decorator_list = []  # they returned this function
    # The defaults are set below: they were evaluated when the class was made.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]
    tree.name = _FORWARD  # its own name may also be a global that it uses
    maker: Any = ast.parse(f"def make({', '.join(helpers)}):\n    return {_FORWARD}").body[0]
    maker.body.insert(0, tree)
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    found: dict[str, Any] = {}
    exec(compiled_as(ast.fix_missing_locations(maker), code), function.__globals__, found)
    result = found["make"](**helpers)
    names = ("co_name", "co_qualname") if hasattr(code, "co_qualname") else ("co_name",)
    result.__code__ = result.__code__.replace(**{name: getattr(code, name) for name in names})
    result.__name__ = function.__name__
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    result.__annotations__, result.__doc__ = function.__annotations__, function.__doc__
    result.__module__ = function.__module__
    result.__dict__.update(function.__dict__)
    return result
