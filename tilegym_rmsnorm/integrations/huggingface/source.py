# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Read the source of a function as a syntax tree, if the source is what the function was compiled from.

A file may have been edited since it was imported, and its new text does not run. So the text is compiled again, and the
result compared with the code of the function.
"""

from __future__ import annotations
import __future__

import ast
import bisect
import dis
import functools
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

_NO_SOURCE = "has no source that can be read"
# The same call is compiled to one or the other, by what else its file imports.
_SAME = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL", "CALL_FUNCTION": "CALL"}
_LEFT_OUT = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ARGUMENT_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class Unclear(Exception):
    """Raised where a forward cannot be read. The message ends a sentence whose subject is the forward."""


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of the source that a function was compiled from: the same object for the same code, not to
    be changed. Raise `Unclear` where there is none.

    A decorator that returned another function does not go unnoticed: that function is given here, with other code than
    the source has, or with `__wrapped__`.
    """
    if hasattr(function, "__wrapped__"):
        raise Unclear(f"is wrapped by {function.__code__.co_name!r}")
    return _tree_of(function, function.__code__)


@functools.lru_cache(maxsize=256)
def _tree_of(function: FunctionType, code: CodeType) -> ast.FunctionDef:
    """Read a tree. code: that of the function, which may be given another."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError, IndentationError):
        raise Unclear(_NO_SOURCE) from None
    if not isinstance(tree, ast.FunctionDef) or not _is_source_of(tree, function):
        raise Unclear(_NO_SOURCE)
    return tree


def assignment(statement: ast.AST) -> tuple[Any, ast.expr | None]:
    """Return target and value of `target = value` or `target: T = value`; a value of None for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0], statement.value
    return (statement.target, statement.value) if isinstance(statement, ast.AnnAssign) else (None, None)


def compiled_as(tree: ast.stmt, code: CodeType) -> CodeType:
    """Compile a module that has only this statement, with the `from __future__` imports of `code`."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    return compile(ast.Module([tree], []), code.co_filename, "exec", flags, dont_inherit=True)


def _is_source_of(tree: ast.FunctionDef, function: FunctionType) -> bool:
    alone = ast.FunctionDef(**{**dict(ast.iter_fields(tree)), "decorator_list": []})
    # super() needs a class to be compiled. In a class named _, private names are not mangled.
    around: Any = ast.parse("class _: pass").body[0]
    around.body = [ast.copy_location(alone, tree)]
    (cls,) = _codes_in(compiled_as(around, function.__code__))
    essence = _essence(function.__code__, function.__qualname__)
    return any(_essence(each, f"_.{tree.name}") == essence for each in _codes_in(cls))


def _codes_in(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _essence(code: CodeType, name: str) -> tuple[Any, ...]:
    """Return all that code does, but not where the code stands. name: the qualified name of its outermost function."""
    kept = [each for each in dis.get_instructions(code) if each.opname not in _LEFT_OUT]
    offsets = [each.offset for each in kept]

    def place(offset: int) -> int:
        return bisect.bisect_left(offsets, offset)

    def operand(each: dis.Instruction) -> Any:
        if each.opcode in _JUMPS:
            return place(each.argval)
        return _constant(each.argval, name) if each.opcode in dis.hasconst else each.argval

    instructions = [(_SAME.get(each.opname, each.opname), operand(each)) for each in kept]
    handlers = [
        (place(each.start), place(each.end), place(each.target), each.depth, each.lasti)
        for each in getattr(dis.Bytecode(code), "exception_entries", ())  # of Python 3.11 and later
    ]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    arguments = counts, code.co_flags & _ARGUMENT_FLAGS
    return code.co_name, arguments, code.co_names, code.co_varnames, code.co_freevars, instructions, handlers


def _constant(value: Any, name: str) -> Any:
    if isinstance(value, CodeType):
        return _essence(value, name)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if isinstance(value, str):  # maybe the qualified name of a function inside
        value = value.removeprefix(f"{name}.<locals>.")
    return repr(value)  # as text: 1, 1.0 and True are equal
