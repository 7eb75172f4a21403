# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Selections for rows of every width, as text: `selected.txt` beside this file.

    python tests/plans/selection.py           writes the file anew, for all widths up to WIDEST (five minutes)

First the selections, each behind a name of its own (letters of its hash, so that a change renames no other). Then
blocks: the keys (GPU, op, dtype, weight, size class, and what divides the width) that have the same ranges of widths in
common, and these, each with the name of what is selected. Widths are told apart by what divides them, since that
decides what is selected. Of calls with more than plain rows (FORMS) it is a sample.
"""

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from planning import H100, H200, device, problem

from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import OPS as PROBLEM_OPS
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN, WEIGHTS, Form, Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of

WIDEST = 140_000
NARROW = 4096  # up to which every width is asked for
BLOCK = 64  # beyond, if the first width of a block and its last have the same, so have those between (see `ranges`)
FILE = Path(__file__).with_name("selected.txt")
DIVISORS = (16, 8, 4, 2, 1)  # the largest of them that divides a width
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
# Of calls that have more, "residual_forward" and so on: on some GPUs, in some dtypes and size classes.
FORMS = {
    "residual": Form(residual=True),
    "d_residual": Form(residual=True, d_residual=True),
    "bias": Form(bias=True),
    "mixed": Form(narrowest=2),  # rows of 2 bytes beside float32
    "heads": Form(heads=28),
    "per_head": Form(heads=32, per_head=True),
}
GPUS_OF_FORMS, SIZES_OF_FORMS = ("h100", "sm_100"), ("few", "large")
Key = tuple[str, str, str, str, str]
Ranges = list[tuple[int, int, str]]  # first and last width, and what is selected


def keys() -> Iterator[Key]:
    for gpu, op, dtype in itertools.product(DEVICES, OPS, ("bfloat16", "float16", "float32")):
        for weight in WEIGHTS if dtype != "float32" else WEIGHTS[:1]:
            for size in ("large",) if op == "row_partials" else SIZES:
                yield gpu, op, dtype, weight, size
    cases = itertools.product(GPUS_OF_FORMS, FORMS, PROBLEM_OPS, ("bfloat16", "float32"), SIZES_OF_FORMS)
    for gpu, form, op, dtype, size in cases:
        key = gpu, f"{form}_{op}", dtype, "same", size
        has_calls = asked_of_key(key, 1).bucket.has_calls and not (form == "mixed" and dtype == "bfloat16")
        if has_calls:
            yield key


def form_of(op: str) -> tuple[str, Form]:
    """An op of a key as problems have it, and its form."""
    name, _, of_form = op.rpartition("_")
    return (of_form, FORMS[name]) if name in FORMS else (op, PLAIN)


def asked_of_key(key: Key, n: int, casting: str = "once") -> Problem:
    """The problem of rows of n elements."""
    gpu, op, dtype, weight, size = key
    op, form = form_of(op)
    op, partials = ("backward", "own") if op == "row_partials" else (op, "shared")
    options = {"casting": casting, "partials": partials, "form": form}
    return problem(op, n, dtype, size, weight, DEVICES[gpu], **options)


def plan_of_key(key: Key, n: int, casting: str = "once") -> Plan:
    """The plan for rows of n elements."""
    asked = asked_of_key(key, n, casting)
    return select(asked, tables_of(asked.device.architecture, asked.device.target, None))


def text(key: Key, n: int) -> str | None:
    """Render the plan; None where no number of rows of n elements is of the size class, or no kernel takes the form."""
    has_calls = rows_of_class(key[-1], n) and is_fused(asked_of_key(key, n))
    return str(plan_of_key(key, n)) if has_calls else None


def divisor_of(n: int) -> int:
    """Return the first of DIVISORS that divides n."""
    return next(each for each in DIVISORS if n % each == 0)


def borders(key: Key) -> set[int]:
    """Return the widths that begin records or follow their ends."""
    facts = DEVICES[key[0]]
    tables = tables_of(facts.architecture, facts.target, None)
    records = itertools.chain(*tables.entries, *tables.rules)
    return {n for each in records for n in (each.first, each.last + 1) if n <= WIDEST}


def ranges(key: Key) -> tuple[Key, dict[int, Ranges]]:
    """Return the ranges of widths of one selection, for each divisor.

    A selection changes at a record's border, and, since tiles of rows of more than NARROW columns are of BLOCK columns
    or more, right behind a multiple of BLOCK.
    """
    found = {}
    marks = borders(key)
    for divisor in DIVISORS:
        runs: list[list] = []

        def add(n: int, now: str | None, runs: list[list] = runs) -> None:
            if not runs or runs[-1][2] != now:
                runs.append([n, n, now])
            runs[-1][1] = n

        for start in range(0, WIDEST, BLOCK):
            widths = range(start + 1, min(start + BLOCK, WIDEST) + 1)
            asked = [n for n in widths if divisor_of(n) == divisor]
            if not asked:
                continue
            ends = text(key, asked[0]), text(key, asked[-1])
            if start >= NARROW and ends[0] == ends[1] and marks.isdisjoint(widths[1:]):
                add(asked[0], ends[0])
                add(asked[-1], ends[1])
                continue
            for n in asked:
                add(n, text(key, n))
        found[divisor] = [(first, last, now) for first, last, now in runs if now is not None]
    return key, found


def render(found: Iterable[tuple[Key, dict[int, Ranges]]]) -> str:
    names: dict[str, str] = {}
    blocks: dict[str, list[str]] = {}
    for key, by_divisor in found:
        for divisor, runs in by_divisor.items():
            parts = []
            for first, last, now in runs:
                name = names.setdefault(now, hashlib.sha256(now.encode()).hexdigest()[:5])
                parts.append(f"{first}-{last}:{name}")
            if parts:
                blocks.setdefault(" ".join(parts), []).append(" ".join((*key, str(divisor))))
    assert len(set(names.values())) == len(names), "two selections have one name: take more letters"
    lines = sorted(f"{selection} = {name}" for selection, name in names.items())
    for body, keys_of_body in blocks.items():
        lines += ["", *keys_of_body, body]
    return "\n".join(lines) + "\n"


def read(file: Path = FILE) -> Iterator[tuple[Key, int, Ranges]]:
    """The keys with their divisors and ranges."""
    first, *blocks = file.read_text(encoding="utf-8").strip().split("\n\n")
    selections = {name: selection for selection, name in (line.split(" = ") for line in first.splitlines())}
    for block in blocks:
        *names, body = block.splitlines()
        runs = []
        for part in body.split():
            widths, name = part.split(":")
            low, _, high = widths.partition("-")
            runs.append((int(low), int(high), selections[name]))
        for line in names:
            gpu, op, dtype, weight, size, divisor = line.split()
            yield (gpu, op, dtype, weight, size), int(divisor), runs


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        FILE.write_text(render(pool.map(ranges, keys())), encoding="utf-8")
