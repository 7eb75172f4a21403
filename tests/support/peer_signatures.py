# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Signatures of other libraries' functions, as text: names, order and defaults. Those of an installed library are read
from its files, since most import on a GPU alone."""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def signature(function: Callable[..., Any], *, without: tuple[str, ...] = ()) -> str:
    """Return a function's signature, or a class's constructor's, without annotations and these keyword-only parameters,
    which are ours."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name not in without
    ]
    assert all(
        inspect.signature(function).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        for name in without
    )
    return str(inspect.Signature(parameters))


def installed_signature(package: str, file: str, name: str) -> str:
    """Read the signature of `name` in an installed package's file, or skip."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(found.submodule_search_locations[0]) / file
    if not path.exists():
        pytest.skip(f"this {package} has no {file}")
    [node] = [
        each
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if getattr(each, "name", None) == name
    ]
    if isinstance(node, ast.ClassDef):
        [node] = [each for each in node.body if getattr(each, "name", None) == "__init__"]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    for each in [*arguments.args, *arguments.kwonlyargs, arguments.kwarg]:
        if each is not None:
            each.annotation = None
    if arguments.args[0].arg == "self":
        del arguments.args[0]
    # Python's own text of each default, so that 0.000001 is 1e-06.
    arguments.defaults = [ast.Constant(ast.literal_eval(each)) for each in arguments.defaults]
    return f"({ast.unparse(arguments)})"
