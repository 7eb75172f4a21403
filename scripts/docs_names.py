# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Writes the table of docs/api.md: each public name with the first sentence of its docstring.

python scripts/docs_names.py     after a change of a public name or docstring
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
TABLE = re.compile(r"^\| name \|.*\n(?:\|.*\n)+", re.MULTILINE)
ENTRY = re.compile(r"^::: (tilegym_rmsnorm[\w.]*)\.(\w+)$", re.MULTILINE)
sys.path.insert(0, str(ROOT))

import tilegym_rmsnorm  # noqa: E402


def names(page: str) -> list[str]:
    """The public names of which the page has the docstring, in the page's order."""
    return [name for module, name in ENTRY.findall(page) if module == "tilegym_rmsnorm"]


def files() -> dict[str, str]:
    """The file of each name that the package imports, from its root."""
    tree = ast.parse((ROOT / "tilegym_rmsnorm" / "__init__.py").read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            path = node.module.replace(".", "/")
            path += "/__init__.py" if (ROOT / path).is_dir() else ".py"
            found |= {each.name: path for each in node.names}
    return found


def table(page: str) -> str:
    rows, file_of = ["| name | what it is |", "|---|---|"], files()
    for name in names(page):
        docstring = inspect.getdoc(getattr(tilegym_rmsnorm, name))
        summary = " ".join(docstring.partition("\n\n")[0].split())
        rows.append(f"| [`{name}`](../{file_of[name]}) | {summary} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(page), page), encoding="utf-8")


if __name__ == "__main__":
    main()
