# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Print the package's structure in figures: how deep its imports are, and where files name an op that is not theirs.

    python scripts/structure.py

Levels are computed from imports, those inside functions too: a file that imports none of the package has level 1, any
other one more than the highest file that it imports. A folder's level counts imports between folders, where two that
import each other are one.
"""

from __future__ import annotations

import graphlib
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "project"), str(ROOT / "tests" / "support")]

from test_imports import PACKAGE, imports, modules  # noqa: E402

OP = re.compile(r"\brope|_rope|Rope|ROPE")  # the second op; the first one has the package's name
OWN_FILE = re.compile(r"rope")  # a file's or a folder's name that is the op's own
MAY_NAME = ("integrations", "nn", "commands")  # their users choose an op by its name


def main() -> None:
    known = {name: path for name, path in modules().items() if name != PACKAGE}
    graph = {
        name: {each for each in imports(name, path, known) if each in known and each != name}
        for name, path in known.items()
    }
    folder = {name: _folder(path) for name, path in known.items()}
    of_files = levels(graph)
    between = {
        each: {folder[other] for name in graph if folder[name] == each for other in graph[name]} - {each}
        for each in set(folder.values())
    }
    of_folders = levels(without_circles(between))
    print(f"import levels: {max(of_files.values())} of files, {max(of_folders.values())} of folders")
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in known.items()}
    own = {name for name, path in known.items() if OWN_FILE.search(_relative(path).as_posix())}
    others = {
        name: len(found)
        for name, path in known.items()
        if name not in own and _relative(path).parts[0] not in MAY_NAME
        if (found := OP.findall(path.read_text(encoding="utf-8")))
    }
    print(f"files that name an op of another file: {len(others)}")
    for name in sorted(others):
        print(f"    {_relative(known[name])}: {others[name]}")
    by_folder: Counter[tuple[str, bool]] = Counter()
    for name, count in lines.items():
        by_folder[folder[name], name in own] += count
    print(f"lines: {sum(lines.values())}, of them in qk_norm_rope's own files {sum(lines[n] for n in own)}")
    for each in sorted(set(folder.values())):
        print(f"    {each or '.'}: {by_folder[each, False]} + {by_folder[each, True]}")


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the level of each node, from those that it leads to."""
    found: dict[str, int] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        found[node] = 1 + max((found[each] for each in graph.get(node, ())), default=0)
    return found


def without_circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Make one node, the first by name, of nodes that lead to each other."""
    reached = {node: _reached(graph, node) for node in graph}
    first = {node: min([node, *(each for each in reached[node] if node in reached[each])]) for node in graph}
    merged: dict[str, set[str]] = {each: set() for each in first.values()}
    for node, others in graph.items():
        merged[first[node]] |= {first[each] for each in others} - {first[node]}
    return merged


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for each in graph[waiting.pop()] - found:
            found.add(each)
            waiting.append(each)
    return found


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT / PACKAGE)


def _folder(path: Path) -> str:
    parent = _relative(path).parent.as_posix()
    return "" if parent == "." else parent


if __name__ == "__main__":
    main()
