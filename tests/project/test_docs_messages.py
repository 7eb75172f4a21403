# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""docs/troubleshooting.md quotes every message that a caller may get, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING, PACKAGE = ROOT / "docs" / "troubleshooting.md", ROOT / "tilegym_rmsnorm"

# Of these no caller of a public function hears: kernels' settings and tables, which a warning tells of; the
# interpreter; the commands' own options; what the package calls itself.
UNHEARD = (
    "interpreter",
    "plans/partition",
    "plans/records",
    "plans/variants",
    "plans/select",
    "plans/tables.py:",
)
UNHEARD += ("cutile/choice", "backends/versions", "measure/", "commands/options")
HOLE = "…"


def template(node: ast.AST | None) -> str | None:
    """The text that an expression gives, with holes where values come in; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(each) or HOLE for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or HOLE) + (template(node.right) or HOLE)
    return None


def texts(path: Path) -> list[str]:
    """Every text of a module."""
    found = map(template, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [text for text in found if text]


def messages(path: Path) -> Iterator[str]:
    """What a module raises, warns of, and gives as a reason."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, (ast.FunctionDef, ast.Module)):
            continue
        named = dict(assigned(function))
        for node in function.body if isinstance(function, ast.Module) else ast.walk(function):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            place = {"_fail": 2, "Unusable": 0, "warn": 0, "_warn_homeless": 0}.get(name)
            if place is None and isinstance(node, ast.Raise):
                place = 0
            if place is None or len(call.args) <= place:
                if name != "_fail" or not call.args:
                    continue
                place = 0  # of the command tune
            told = call.args[place]
            for text in named.get(told.id, []) if isinstance(told, ast.Name) else [template(told)]:
                if text and text.strip(f"{HOLE}:,. ") not in ("", "expected", f"expected {HOLE}, got"):
                    yield text


def assigned(function: ast.AST) -> dict[str, list[str]]:
    """The texts that a function gives to names, alone or in pairs."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, each in pairs:
                if isinstance(name, ast.Name) and (text := template(each)):
                    found.setdefault(name.id, []).append(text)
    return found


def fragments() -> list[str]:
    """What the page quotes: the code in front of the colon of each point. Many messages are put together of a name,
    "expected" and what the source has."""
    points = re.findall(
        r"^- ((?:`[^`]+`(?:,\s+)?)+):\s", TROUBLESHOOTING.read_text(encoding="utf-8"), re.MULTILINE
    )
    quoted = [each for point in points for each in re.findall(r"`([^`]+)`", point)]
    return [" ".join(each.split()).removeprefix("expected ") for each in quoted]


def fits(fragment: str, text: str) -> bool:
    return re.search(".*".join(map(re.escape, fragment.split(HOLE))), text, re.DOTALL) is not None


def quotes(fragment: str, text: str) -> bool:
    """Whether a fragment stands for a message. One of fewer than three words would fit many: it must be the whole."""
    if len(re.findall(r"[\w'-]+", fragment)) >= 3:
        return fits(fragment, text)
    pattern = ".*".join(map(re.escape, fragment.split(HOLE)))
    return re.fullmatch(rf"(.*: )?(expected )?{pattern}(, got .*)?", text, re.DOTALL) is not None


def test_every_quoted_message_is_in_the_source():
    found = [text for path in PACKAGE.rglob("*.py") for text in texts(path)]
    quoted = fragments()
    assert len(quoted) > 80
    assert not [each for each in quoted if not any(fits(each, text) for text in found)]


def test_every_message_is_quoted():
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(each in name for each in UNHEARD):
            missing += [
                (name, text) for text in messages(path) if not any(quotes(each, text) for each in fragments())
            ]
    assert not missing
