# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The source of a function, where it is what the function was compiled from.

A file may have been edited since it was imported, and its new text is none of what runs. So the text is compiled again,
and all that it is compiled to is compared with the code of the function.
"""

from __future__ import annotations
import __future__

import ast
import bisect
import dis
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

_NO_SOURCE = "has no source that can be read"
# By other imports of a file the same call is compiled to another of these.
_SAME = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL", "CALL_FUNCTION": "CALL"}
_LEFT_OUT = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ARGUMENT_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class Unclear(Exception):
    """Why a forward cannot be read. The text ends a sentence that begins with its name."""


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, by the source it was compiled from. Raises `Unclear` where there is none.

    A decorator that gave back another function is seen: that one is what is read here, or it has `__wrapped__`.
    """
    if hasattr(function, "__wrapped__"):
        raise Unclear(f"is wrapped by {function.__code__.co_name!r}")
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError, IndentationError):
        raise Unclear(_NO_SOURCE) from None
    if not isinstance(tree, ast.FunctionDef) or not _is_source_of(tree, function):
        raise Unclear(_NO_SOURCE)
    return tree


def compiled_as(tree: ast.stmt, code: CodeType) -> CodeType:
    """The code of a module that has this statement alone, with what `code` had of `from __future__`."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    return compile(ast.Module([tree], []), code.co_filename, "exec", flags, dont_inherit=True)


def _is_source_of(tree: ast.FunctionDef, function: FunctionType) -> bool:
    alone = ast.FunctionDef(**{**dict(ast.iter_fields(tree)), "decorator_list": []})
    # super() is compiled in a class. A class of this name changes no private name.
    (around,) = ast.parse("class _: pass").body
    assert isinstance(around, ast.ClassDef)
    around.body = [ast.copy_location(alone, tree)]
    (cls,) = _codes_in(compiled_as(around, function.__code__))
    essence = _essence(function.__code__, function.__qualname__)
    return any(_essence(each, f"_.{tree.name}") == essence for each in _codes_in(cls))


def _codes_in(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _essence(code: CodeType, name: str) -> tuple[Any, ...]:
    """All that a code does, and nothing of where it stands. name: the qualified one of the function it is of or in."""
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
    counts = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & _ARGUMENT_FLAGS,
    )
    return code.co_name, counts, code.co_names, code.co_varnames, code.co_freevars, instructions, handlers


def _constant(value: Any, name: str) -> Any:
    if isinstance(value, CodeType):
        return _essence(value, name)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if isinstance(value, str):  # maybe the qualified name of what is made inside
        value = value.removeprefix(f"{name}.<locals>.")
    return repr(value)  # 1, 1.0 and True are equal
