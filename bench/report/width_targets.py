# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Targets of drawn widths, each over a result's own cells of a part (measure/widths.py) and direction.

python -m bench.report.width_targets RESULT.json    a table of the parts, then a line for each target: met, NOT MET with
                                                    the worst cells that miss it, or open without cells; exit status 1
                                                    unless all that have cells are met
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate")

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.measure.provenance import one_line
from bench.measure.shapes import DTYPES, Record, Result, kind_of, shape_of, shape_text
from bench.measure.widths import LARGE, OPS, PARTS, part_of, sections
from bench.report.cells import Comparison, Target, compare, failed_cells, lines_of, name_of, of_op
from bench.report.text import figure_text, read_result, table_text

DIRECTIONS = ("forward", "backward")
LEAST = {  # times the best peer, in every cell
    "wide": {"forward": 0.985, "backward": 0.985},
    "drawn": {"forward": 0.97, "backward": 0.97},
    "heads": {"forward": 0.985},
    "unaligned": {"forward": 0.97, "backward": 0.97},
}
GOOD = {"forward": 0.985, "backward": 1.0}  # times the best peer, in MOST cells of the DRAWN parts
MOST, DRAWN = 0.95, ("drawn", "unaligned")
NARROW = 512  # columns
NAMED = 8  # cells that a target names


class CopyTarget(NamedTuple):
    """The share of the copy that a direction of some parts should reach, in the cells that count."""

    parts: tuple[str, ...]
    direction: str
    share: float
    where: str = "in every cell"
    counts: Callable[[Record], bool] = lambda record: True


COPY_TARGETS = (
    CopyTarget(("wide",), "forward", 0.80),
    CopyTarget(("wide",), "backward", 0.80),
    CopyTarget(("heads",), "backward", 0.85),
    CopyTarget(
        DRAWN,
        "backward",
        0.90,
        f"where x has 200 MB, of {NARROW} columns or more",
        lambda record: _is_large(record) and record["cols"] >= NARROW,
    ),
    CopyTarget(
        DRAWN,
        "backward",
        0.85,
        f"where x has 200 MB, of fewer than {NARROW} columns",
        lambda record: _is_large(record) and record["cols"] < NARROW,
    ),
)


def targets(result: Result) -> list[Target]:
    """All of them; those without cells have none."""
    return [each for part in PARTS for each in _of_part(part, _only(result, part))]


def table(result: Result) -> str:
    """Markdown: of each part and direction the cells, and the worst of them against the best peer and the copy."""
    rows = []
    for part in PARTS:
        of_part = _only(result, part)
        for direction in DIRECTIONS:
            records, found = _timed(of_part, direction), _compared(of_part, direction)
            if not records:
                continue
            row = [part, direction, str(len(records))]
            worst = min(found, key=lambda each: each.ratio, default=None)
            if worst is None:
                row += ["", "", ""]
            else:
                good = sum(each.ratio >= GOOD[direction] for each in found) / len(found)
                row += [f"{worst.ratio:.3f}", _cell(worst.ours), f"{good:.0%} at {GOOD[direction]}x"]
            shares = [each for each in records if each["copy_fraction"] is not None]
            lowest = min(shares, key=lambda each: each["copy_fraction"], default=None)
            row += ["", ""] if lowest is None else [f"{lowest['copy_fraction']:.1%}", _cell(lowest)]
            rows.append(row)
    headers = ["part", "direction", "cells", "lowest ratio", "at", "cells as fast"]
    return table_text(rows, [*headers, "lowest share of the copy", "at"], left=(0, 1, 4, 7))


def _of_part(part: str, result: Result) -> list[Target]:
    failed = [f"{op} {cell}" for op in OPS for cell in failed_cells(result, op)]
    cells = len(failed) + sum(len(of_op(result, op)) for op in OPS)
    text = f"{part}: cutile has a figure in every cell"
    found = [
        Target(text, cells, failed, f"of {_cells_drawn(part, result)} in the whole draw" if cells else "")
    ]
    for direction in DIRECTIONS:
        comparisons = _compared(result, direction)
        if (least := LEAST[part].get(direction)) is not None:
            text = f"{part} {direction}: at least {least}x the best peer in every cell"
            lowest = figure_text(min((each.ratio for each in comparisons), default=None), ".3f")
            missed = _behind(comparisons, least, result)
            found.append(Target(text, len(comparisons), missed, lowest and f"the lowest is {lowest}"))
        if part in DRAWN:
            found.append(_of_most(part, direction, comparisons, result))
        for each in COPY_TARGETS:
            if part in each.parts and direction == each.direction:
                found.append(_of_copy(part, each, _timed(result, direction)))
    return found


def _of_most(part: str, direction: str, comparisons: list[Comparison], result: Result) -> Target:
    good = sum(each.ratio >= GOOD[direction] for each in comparisons)
    is_met = good >= MOST * len(comparisons)
    missed = [] if is_met else _behind(comparisons, GOOD[direction], result)
    text = f"{part} {direction}: at least {GOOD[direction]}x the best peer in {MOST:.0%} of the cells"
    return Target(
        text, len(comparisons), missed, f"{good / len(comparisons):.1%} of them" if comparisons else ""
    )


def _of_copy(part: str, wanted: CopyTarget, records: list[Record]) -> Target:
    timed = [each for each in records if each["copy_fraction"] is not None and wanted.counts(each)]
    low = [(each["copy_fraction"], each) for each in timed if each["copy_fraction"] < wanted.share]
    missed = _worst([(share, f"{_cell(each)} ({share:.1%})") for share, each in low])
    text = f"{part} {wanted.direction}: at least {wanted.share:.0%} of the copy ceiling {wanted.where}"
    return Target(text, len(timed), missed)


def _behind(comparisons: list[Comparison], least: float, result: Result) -> list[str]:
    """The worst cells; of those where backend triton is faster than cutile its ratio too."""
    triton = {
        (each["op"], shape_of(each)): each["us"] for each in result["records"] if each["provider"] == "triton"
    }
    low = []
    for each in comparisons:
        if each.ratio < least:
            text, us = (
                f"{each.ratio:.3f}x {name_of(each.peer)}",
                triton.get((each.ours["op"], shape_of(each.ours))),
            )
            text += f", triton {each.peer['us'] / us:.3f}x" if us and us < each.ours["us"] else ""
            low.append((each.ratio, f"{_cell(each.ours)} ({text})"))
    return _worst(low)


def _worst(found: Sequence[tuple[float, str]]) -> list[str]:
    named = [text for _, text in sorted(found)[:NAMED]]
    return [*named, f"{len(found) - NAMED} more"] if len(found) > NAMED else named


def _only(result: Result, part: str) -> Result:
    return {**result, "records": [each for each in result["records"] if part_of(each["cols"]) == part]}


def _timed(result: Result, direction: str) -> list[Record]:
    return [each for op in OPS if op.endswith(direction) for each in of_op(result, op)]


def _compared(result: Result, direction: str) -> list[Comparison]:
    return [each for op in OPS if op.endswith(direction) for each in compare(result, op)]


def _cells_drawn(part: str, result: Result) -> int:
    """How many cells the whole draw has of a part: a run of a share, or joined ones, may have fewer."""
    every = sections(result["widths"], result["records"][0]["dtype"])
    return sum(len(section.ops) for section in every for _, cols in section.shapes if part_of(cols) == part)


def _is_large(record: Record) -> bool:
    return record["rows"] * record["cols"] * DTYPES[record["dtype"]].itemsize >= LARGE


def _cell(record: Record) -> str:
    return f"{record['op']} {shape_text(record)}"


def _of_widths(text: str) -> Result:
    result = read_result(text)
    if kind_of(result) != "widths" or result["gpu"] is None:
        raise argparse.ArgumentTypeError(f"expected a result of bench/run.sh --widths on a GPU, got {text}")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.width_targets",
        description="Which targets a result of bench/run.sh --widths meets.",
    )
    parser.add_argument("result", type=_of_widths, metavar="RESULT.json")
    result = parser.parse_args(argv).result
    found = targets(result)
    print("\n\n".join([f"{one_line(result)}; seed {result['widths']}", table(result)]) + "\n")
    print("\n".join(lines_of(found, shows_open=True)))
    return int(any(each.is_met is False for each in found))


if __name__ == "__main__":
    sys.exit(main())
