# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The "cutile" backend against the best of all peers, cell by cell.

A peer is every provider that is none of this package's backends. Ratios are of device times: above 1, cutile is faster.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from bench.block.families import ALL_OPS
from bench.measure.shapes import Record, Result, Shape, shape_of, shape_text
from bench.providers.ours import OURS, OWN
from bench.report.text import figure_text, table_text

LARGE_BYTES = 200e6  # that a large call moves
NO_DW_BYTES = 100e6  # of calls of which is said what dw costs


class Comparison(NamedTuple):
    """One cell: the two records, and how many times as long the peer takes."""

    ours: Record
    peer: Record
    ratio: float

    @property
    def shape(self) -> str:
        return shape_text(self.ours)


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


def mean_ratio(comparisons: list[Comparison]) -> float | None:
    """The geometric mean over the cells."""
    return statistics.geometric_mean(each.ratio for each in comparisons) if comparisons else None


def peers_of(result: Result, op: str) -> list[str]:
    """The peers that the result has records of for the op, measured or not."""
    names = dict.fromkeys(record["provider"] for record in result["records"] if record["op"] == op)
    return [name for name in names if name not in OWN]


def of_op(result: Result, op: str) -> list[Record]:
    """cutile's records of the op that have figures."""
    of_ours = (each for each in result["records"] if each["op"] == op and each["provider"] == OURS)
    return [each for each in of_ours if each["us"] is not None]


def moved(record: Record) -> float:
    """The compulsory bytes of a record's call."""
    return record["gb_per_s"] * 1e3 * record["us"]


def spread_of(record: Record) -> float:
    """Half of the range from the 10th to the 90th percentile, relative to the median."""
    return (record["us_p90"] - record["us_p10"]) / record["us"] / 2


def name_of(record: Record) -> str:
    """The provider, and its settings where it was measured with several."""
    settings = record.get("settings")
    return f"{record['provider']} ({settings})" if settings else record["provider"]


def rate_text(record: Record) -> str:
    """Its GB/s."""
    rate = record["gb_per_s"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def table(result: Result, op: str, style: str = "simple") -> str:
    """A line for each cell: cutile's GB/s, the best peer and its own, the ratio, cutile's share of the copy ceiling."""
    rows = []
    for each in compare(result, op):
        row = [each.shape, rate_text(each.ours), rate_text(each.peer), name_of(each.peer)]
        rows.append([*row, f"{each.ratio:.2f}", figure_text(each.ours["copy_fraction"])])
    headers = ["rows x cols", "cutile GB/s", "best peer GB/s", "best peer", "ratio", "cutile / copy"]
    return table_text(rows, headers, style, left=(0, 3))


def workspace_table(result: Result, style: str = "simple") -> str:
    """cutile's backward in each cell: its workspace in bytes, as rows of float32, and those per SM; of large calls the
    share by which it takes longer than without dw."""
    alone = {shape_of(each): each["us"] for each in of_op(result, "dx")}
    rows = []
    for record in of_op(result, "backward"):
        if record["workspace_bytes"] is not None:
            count = record["workspace_bytes"] / (4 * record["cols"])  # P, if it holds nothing else
            per_sm = f"{count / result['sms']:.2f}" if result.get("sms") else ""
            us = alone.get(shape_of(record)) if moved(record) >= NO_DW_BYTES else None
            cost = None if us is None else record["us"] / us - 1
            row = [shape_text(record), record["workspace_bytes"], f"{count:.0f}", per_sm]
            rows.append([*row, figure_text(cost, "+.1%")])
    return table_text(rows, ["rows x cols", "workspace bytes", "P", "P per SM", "dw costs"], style)


def summary(result: Result) -> str:
    """Tables, means and workspace, as text; empty where there is nothing to compare, or no GPU was."""
    if result["gpu"] is None:
        return ""
    parts = []
    for op in ALL_OPS:
        if comparisons := compare(result, op):
            parts.append(f"{op}: cutile against the best of {', '.join(peers_of(result, op))}")
            parts.append(table(result, op))
            parts.append(f"geometric mean of {len(comparisons)} ratios: {mean_ratio(comparisons):.3f}")
    if text := workspace_table(result):
        parts.append(f"backward of cutile: P partial rows of float32, and what dw adds to the time\n\n{text}")
    return "\n\n".join(parts)
