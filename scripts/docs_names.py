# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Writes the table of docs/api.md: each public name with its arguments, and the first sentence of its docstring.

python scripts/docs_names.py     after a change of a public signature or docstring
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
TABLE = re.compile(r"^\| name and arguments \|.*\n(?:\|.*\n)+", re.MULTILINE)
sys.path.insert(0, str(ROOT))

import tilegym_rmsnorm  # noqa: E402


def table(page: str) -> str:
    """A line for each name of which the page has the docstring, in the page's order."""
    rows = ["| name and arguments | what it is |", "|---|---|"]
    for module, name in re.findall(r"^::: tilegym_rmsnorm\.(\w+)\.(\w+)$", page, re.MULTILINE):
        thing = getattr(tilegym_rmsnorm, name)
        summary = " ".join(inspect.getdoc(thing).partition("\n\n")[0].split())
        rows.append(f"| [`{call(name, thing)}`](../tilegym_rmsnorm/{module}.py) | {summary} |")
    return "\n".join(rows) + "\n"


def call(name: str, thing: object) -> str:
    """The name with its arguments and their defaults; of an exception the name alone."""
    if isinstance(thing, type) and issubclass(thing, Exception):
        return name
    parameters = [
        each.replace(annotation=each.empty) for each in inspect.signature(thing).parameters.values()
    ]
    text = str(inspect.Signature([each for each in parameters if each.name != "self"]))
    return name + text.replace("'", '"')


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(page), page), encoding="utf-8")


if __name__ == "__main__":
    main()
