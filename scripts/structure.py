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

from test_imports import OPS, PACKAGE, imports, modules  # noqa: E402

OPS = [each for each in OPS if each != "norm"]  # the first op has the package's name
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
    owners = {
        name: next((op for op in OPS if op in _relative(path).as_posix()), "") for name, path in known.items()
    }
    for op in OPS:
        spelled = re.compile(rf"\b{op}|_{op}|{op.title()}|{op.upper()}")
        others = {
            name: len(found)
            for name, path in known.items()
            if owners[name] != op and _relative(path).parts[0] not in MAY_NAME
            if (found := spelled.findall(path.read_text(encoding="utf-8")))
        }
        print(f"files that name {op} and are not its own: {len(others)}")
        for name in sorted(others):
            print(f"    {_relative(known[name])}: {others[name]}")
    by_folder: Counter[tuple[str, str]] = Counter()
    for name, count in lines.items():
        by_folder[folder[name], owners[name]] += count
    print(f"lines: {sum(lines.values())}")
    for each in sorted(set(folder.values())):
        of_ops = "".join(f" + {by_folder[each, op]} of {op}" for op in OPS if by_folder[each, op])
        print(f"    {each or '.'}: {by_folder[each, '']}{of_ops}")


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
