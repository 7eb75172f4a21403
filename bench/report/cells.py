# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A result's cells: those of the "cutile" backend beside the best of all peers, and what a target says of them.

A peer is every provider that is none of this package's backends. Ratios are of device times: above 1, cutile is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from bench.measure.shapes import Record, Result, Shape, shape_of, shape_text
from bench.providers.ours import OURS, OWN
from bench.report.text import figure_text

LARGE_BYTES = 200e6  # calls that move at least this much should run at a share of the copy ceiling


class Comparison(NamedTuple):
    """One cell: the two records, and how many times as long the peer takes."""

    ours: Record
    peer: Record
    ratio: float

    @property
    def shape(self) -> str:
        return shape_text(self.ours)

    @property
    def spread(self) -> float:
        """The spreads of both, added up."""
        return spread_of(self.ours) + spread_of(self.peer)


def spread_of(record: Record) -> float:
    """Half of the range from the 10th to the 90th percentile, relative to the median."""
    return (record["us_p90"] - record["us_p10"]) / record["us"] / 2


class Target(NamedTuple):
    """A target: in how many cells it holds, in which it is missed, and one line about the figures."""

    text: str
    cells: int
    missed: list[str]
    figures: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where the result has no such cell."""
        return None if self.cells == 0 else not self.missed


def lines_of(targets: Iterable[Target], shows_open: bool = False) -> list[str]:
    """'met' or 'NOT MET', the target and the cells that miss it; targets without cells are left out, or 'open'."""
    lines = []
    for target in targets:
        if target.is_met is None:
            lines += [f"open    {target.text} (no cells)"] if shows_open else []
            continue
        line = f"{'met    ' if target.is_met else 'NOT MET'} {target.text} ({target.cells} cells)"
        line += f": {target.figures}" if target.figures else ""
        lines.append(line + (f"; missed by {', '.join(target.missed)}" if target.missed else ""))
    return lines


def compare(result: Result, op: str) -> list[Comparison]:
    """Every cell of the op where cutile and at least one peer have figures."""
    cells: dict[Shape, list[Record]] = {}
    for record in result["records"]:
        if record["op"] == op and record["us"] is not None:
            cells.setdefault(shape_of(record), []).append(record)
    comparisons = []
    for records in cells.values():
        ours = next((each for each in records if each["provider"] == OURS), None)
        peers = [each for each in records if each["provider"] not in OWN]
        peer = min(peers, key=lambda each: each["us"], default=None)
        if ours is not None and peer is not None:
            comparisons.append(Comparison(ours, peer, peer["us"] / ours["us"]))
    return comparisons


def of_size(comparisons: list[Comparison], is_large: bool) -> list[Comparison]:
    """The cells whose calls move LARGE_BYTES or more, or the others."""
    return [each for each in comparisons if (moved(each.ours) >= LARGE_BYTES) == is_large]


def of_copy(op: str, share: float, records: list[Record], where: str) -> Target:
    """At least this share of the copy ceiling in these cells, of which `where` speaks."""
    timed = [each for each in records if each["copy_fraction"] is not None]
    low = [each for each in timed if each["copy_fraction"] < share]
    missed = [f"{shape_text(each)} ({each['copy_fraction']:.1%})" for each in low]
    return Target(f"{op}: at least {share:.0%} of the copy ceiling where {where}", len(timed), missed)


def of_mean(op: str, least: float, comparisons: list[Comparison]) -> Target:
    mean = mean_ratio(comparisons)
    missed = [] if mean is None or mean >= least else ["the mean"]
    text = f"{op}: geometric mean over cells at least {least}"
    return Target(text, len(comparisons), missed, figure_text(mean, ".3f"))


def behind(comparisons: list[Comparison], least: float | None = None) -> list[str]:
    """The cells whose ratio is lower than `least`. None: than 1 less the cell's own spread."""
    low = [each for each in comparisons if each.ratio < (1 - each.spread if least is None else least)]
    return [f"{each.shape} ({each.ratio:.3f}x {name_of(each.peer)})" for each in low]


def mean_ratio(comparisons: list[Comparison]) -> float | None:
    """The geometric mean over the cells."""
    return statistics.geometric_mean(each.ratio for each in comparisons) if comparisons else None


def peers_of(result: Result, op: str) -> list[str]:
    """The peers that the result has records of for the op, measured or not."""
    names = dict.fromkeys(record["provider"] for record in result["records"] if record["op"] == op)
    return [name for name in names if name not in OWN]


def name_of(record: Record) -> str:
    """The provider, and its settings where it was measured with several."""
    settings = record.get("settings")
    return f"{record['provider']} ({settings})" if settings else record["provider"]


def of_op(result: Result, op: str) -> list[Record]:
    """cutile's records of the op that have figures."""
    return [each for each in _ours(result, op) if each["us"] is not None]


def failed_cells(result: Result, op: str) -> list[str]:
    """The cells of the op that cutile should have figures of, and has not."""
    return [f"{shape_text(each)} (failed)" for each in _ours(result, op) if each["us"] is None]


def _ours(result: Result, op: str) -> list[Record]:
    return [each for each in result["records"] if each["op"] == op and each["provider"] == OURS]


def moved(record: Record) -> float:
    """The compulsory bytes of a record's call."""
    return record["gb_per_s"] * 1e3 * record["us"]
