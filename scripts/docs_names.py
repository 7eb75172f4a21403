# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Writes the table of docs/api.md: each public name with the first sentence of its docstring.

python scripts/docs_names.py     after a change of a public name or docstring
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
TABLE = re.compile(r"^\| name \|.*\n(?:\|.*\n)+", re.MULTILINE)
ENTRY = re.compile(r"^::: (tilegym_rmsnorm\.[\w.]+)\.(\w+)$", re.MULTILINE)
sys.path.insert(0, str(ROOT))

import tilegym_rmsnorm  # noqa: E402


def entries(page: str) -> list[tuple[str, str]]:
    """Module and name of each public object of which the page has the docstring, in the page's order."""
    found = ENTRY.findall(page)
    return [each for each in found if getattr(public(each[1]), "__module__", None) == each[0]]


def public(name: str) -> object:
    return getattr(tilegym_rmsnorm, name) if name in tilegym_rmsnorm.__all__ else None


def table(page: str) -> str:
    rows = ["| name | what it is |", "|---|---|"]
    for module, name in entries(page):
        summary = " ".join(inspect.getdoc(public(name)).partition("\n\n")[0].split())
        rows.append(f"| [`{name}`](../{module.replace('.', '/')}.py) | {summary} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(page), page), encoding="utf-8")


if __name__ == "__main__":
    main()
