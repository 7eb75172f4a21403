# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cost of a level of reproducibility: a backend's device time under it over its time in the same run without."""

from __future__ import annotations

import math

from bench.measure.shapes import Record, Result, cell_of
from bench.providers.ours import LEVELLED, VLLM
from bench.report.compare import moved
from bench.report.text import table_text

LARGE_BYTES = 100e6  # that a large call moves
MOST_LARGE, MOST_SMALL = 1.10, 1.25


def most(record: Record) -> float:
    """The largest ratio that is aimed at for a call of its bytes; none for vLLM's order, which another library sets."""
    if LEVELLED[record["provider"]][1] == VLLM:
        return math.inf
    return MOST_LARGE if moved(record) >= LARGE_BYTES else MOST_SMALL


def above(result: Result) -> list[Record]:
    """The records of what costs more than is aimed at."""
    return [each for each in _measured(result) if each["level_ratio"] > most(each)]


def without_aim(result: Result) -> list[str]:
    """A line for each provider and op whose cost has no aim."""
    found: dict[tuple[str, str], list[float]] = {}
    for each in _measured(result):
        if most(each) == math.inf:
            found.setdefault((each["provider"], each["op"]), []).append(each["level_ratio"])
    return [
        f"{provider} {op}: {min(ratios):.2f} to {max(ratios):.2f} times its backend without, in {len(ratios)} cells"
        for (provider, op), ratios in found.items()
    ]


def table(result: Result, style: str = "pipe") -> str:
    """A line for each cell, with the ratio of each backend and level, and the aim where that is less. Nothing,
    where none was measured under a level."""
    lines: dict[tuple[str, int, int], dict[str, str]] = {}
    for each in _measured(result):
        op, rows, cols, _, provider = cell_of(each)
        limit = f" > {most(each):.2f}" if each["level_ratio"] > most(each) else ""
        lines.setdefault((op, rows, cols), {})[provider] = f"{each['level_ratio']:.2f}{limit}"
    names = list(dict.fromkeys(name for of_cell in lines.values() for name in of_cell))
    rows = [
        [op, f"{m} x {n}", *(of_cell.get(name, "") for name in names)]
        for (op, m, n), of_cell in lines.items()
    ]
    return table_text(rows, ["op", "rows x cols", *names], style, left=(0, 1))


def summary(result: Result) -> list[str]:
    """The table with a line above it, as parts of a text; none, where none was measured under a level."""
    text = table(result, "simple")
    return (
        [f"levels of reproducibility: device time over that of the backend without\n\n{text}"] if text else []
    )


def _measured(result: Result) -> list[Record]:
    return [each for each in result["records"] if each.get("level_ratio") is not None]
