# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""docs/troubleshooting.md quotes messages that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLE = "…"  # stands for a value in a message


def template(node: ast.AST | None) -> str | None:
    """The text that an expression gives, with holes where values come in; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(each) or HOLE for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or HOLE) + (template(node.right) or HOLE)
    return None


def fragments() -> list[str]:
    """Quotes: the code in front of the colon of each point. "expected" is put in front of many by one function."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    points = re.findall(r"^- ((?:`[^`]+`(?:,\s+)?)+):\s", text, re.MULTILINE)
    quoted = [each for point in points for each in re.findall(r"`([^`]+)`", point)]
    return [" ".join(each.split()).removeprefix("expected ") for each in quoted]


def test_every_quoted_message_is_in_the_source():
    paths = (ROOT / "tilegym_rmsnorm").rglob("*.py")
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = list(filter(None, map(template, nodes)))
    patterns = {
        each: re.compile(".*".join(map(re.escape, each.split(HOLE))), re.DOTALL) for each in fragments()
    }
    assert len(patterns) > 80
    assert not [each for each, pattern in patterns.items() if not any(map(pattern.search, found))]
