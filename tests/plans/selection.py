# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What is selected for rows of every width, as text: `selected.txt` beside this file.

    python tests/plans/selection.py           writes the file anew, for all widths up to WIDEST (ten minutes)

First the selections, numbered. Then blocks: the keys (GPU, op, dtype, weight, size class, and what divides the width)
that have the same ranges of widths in common, and these, each with the number of what is selected. Widths are told
apart by what divides them, since that decides what is selected.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planning import H100, H200, device, problem

from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import WEIGHTS
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of

WIDEST = 140_000
FILE = Path(__file__).with_name("selected.txt")
DIVISORS = (16, 8, 4, 1)  # the largest of them that divides a width
DEVICES = {
    "h100": device(target=H100),
    "h200": device(target=H200),
    "h100_without_teams": device(most_members=1, target=H100),
    "sm_90": device(),
    "sm_90_without_teams": device(sm_count=7, most_members=1),
    "sm_80": device(80, 108, 13),
    "sm_100": device(100, 148),
    "sm_120": device(120, 188),
}
OPS = ("forward", "backward", "dx", "row_partials")  # the last: a backward with partials="own"
Key = tuple[str, str, str, str, str]
Ranges = list[tuple[int, int, str]]  # first and last width, and what is selected


def keys() -> Iterator[Key]:
    for gpu, op, dtype in itertools.product(DEVICES, OPS, ("bfloat16", "float16", "float32")):
        for weight in WEIGHTS if dtype != "float32" else WEIGHTS[:1]:
            for size in ("large",) if op == "row_partials" else SIZES:
                yield gpu, op, dtype, weight, size


def plan_of_key(key: Key, n: int, casting: str = "once") -> Plan:
    """The plan for rows of n elements."""
    gpu, op, dtype, weight, size = key
    op, partials = ("backward", "own") if op == "row_partials" else (op, "shared")
    facts = DEVICES[gpu]
    asked = problem(op, n, dtype, size, weight, facts, casting=casting, partials=partials)
    return select(asked, tables_of(facts.architecture, facts.target, None))


def text(key: Key, n: int) -> str | None:
    """What is selected; None where no number of rows of n elements is of the size class."""
    return str(plan_of_key(key, n)) if rows_of_class(key[-1], n) else None


def ranges(key: Key) -> tuple[Key, dict[int, Ranges]]:
    """For each divisor the ranges of widths in which the same is selected."""
    found = {}
    for divisor in DIVISORS:
        runs: list[list] = []
        for n in range(divisor, WIDEST + 1, divisor):
            if divisor != next(each for each in DIVISORS if n % each == 0):
                continue
            now = text(key, n)
            if not runs or runs[-1][2] != now:
                runs.append([n, n, now])
            runs[-1][1] = n
        found[divisor] = [(first, last, now) for first, last, now in runs if now is not None]
    return key, found


def render(found: Iterable[tuple[Key, dict[int, Ranges]]]) -> str:
    numbers: dict[str, int] = {}
    blocks: dict[str, list[str]] = {}
    for key, by_divisor in found:
        for divisor, runs in by_divisor.items():
            parts = [f"{first}-{last}:{numbers.setdefault(now, len(numbers))}" for first, last, now in runs]
            if parts:
                blocks.setdefault(" ".join(parts), []).append(" ".join((*key, str(divisor))))
    lines = [f"{number} {selection}" for selection, number in numbers.items()]
    for body, names in blocks.items():
        lines += ["", *names, body]
    return "\n".join(lines) + "\n"


def read(file: Path = FILE) -> Iterator[tuple[Key, int, Ranges]]:
    """The keys with their divisors and ranges."""
    first, *blocks = file.read_text(encoding="utf-8").strip().split("\n\n")
    selections = [line.split(" ", 1)[1] for line in first.splitlines()]
    for block in blocks:
        *names, body = block.splitlines()
        runs = []
        for part in body.split():
            widths, number = part.split(":")
            low, _, high = widths.partition("-")
            runs.append((int(low), int(high or low), selections[int(number)]))
        for name in names:
            gpu, op, dtype, weight, size, divisor = name.split()
            yield (gpu, op, dtype, weight, size), int(divisor), runs


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        FILE.write_text(render(pool.map(ranges, keys())), encoding="utf-8")
