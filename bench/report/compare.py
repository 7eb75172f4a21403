# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The "cutile" backend against the best of all peers, cell by cell, and against the project's targets.

A peer is every provider that is none of this package's backends. Ratios are of device times: above 1, cutile is faster.
"""

from __future__ import annotations

import functools

from bench.block.families import ALL_OPS
from bench.measure.shapes import Record, Result, kind_of, shape_of, shape_text
from bench.report import block_targets, width_targets
from bench.report.cells import (
    LARGE_BYTES,
    Comparison,
    Target,
    behind,
    compare,
    failed_cells,
    lines_of,
    mean_ratio,
    moved,
    name_of,
    of_copy,
    of_mean,
    of_op,
    peers_of,
)
from bench.report.text import figure_text, table_text

NO_DW_BYTES = 100e6
SMALL_ELEMENTS = 4 << 20
WIDEST_LARGE_BACKWARD = 16384  # columns
PARTIAL_ROWS_PER_SM = 8
BACKWARD_MEAN = 1.25
SHARE = {"backward": 0.94, "forward": 0.96}
SMALL_TIME = 0.7
DW_COST = 0.03


def table(result: Result, op: str, style: str = "simple") -> str:
    """A line for each cell: cutile's GB/s, the best peer and its own, the ratio, cutile's share of the copy ceiling."""
    rows = []
    for each in compare(result, op):
        row = [each.shape, rate_text(each.ours), rate_text(each.peer), name_of(each.peer)]
        rows.append([*row, f"{each.ratio:.2f}", figure_text(each.ours["copy_fraction"])])
    headers = ["rows x cols", "cutile GB/s", "best peer GB/s", "best peer", "ratio", "cutile / copy"]
    return table_text(rows, headers, style, left=(0, 3))


def summary(result: Result) -> str:
    """Tables, means, workspace and targets, as text; empty where there is nothing to compare, or no GPU was."""
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
    if parts:
        parts.append("\n".join(target_lines(result)))
    return "\n\n".join(parts)


def targets(result: Result) -> list[Target]:
    """The targets that this result's kind and dtype have, each over the result's own cells."""
    if kind_of(result) == "block":
        return block_targets.targets(result)
    if kind_of(result) == "widths":
        return width_targets.targets(result)
    dtype = result["records"][0]["dtype"] if result["records"] else ""
    backward, forward = compare(result, "backward"), compare(result, "forward")
    failed, every = functools.partial(failed_cells, result), "at least 1.00x the best peer in every cell"
    large = {op: [each for each in of_op(result, op) if moved(each) >= LARGE_BYTES] for op in SHARE}
    narrow = [each for each in large["backward"] if each["cols"] <= WIDEST_LARGE_BACKWARD]
    where = f"{LARGE_BYTES / 1e6:.0f} MB or more move"
    found = [
        _at_least(f"backward: {every}", backward, failed("backward"), 1.0),
        _at_least(f"forward: {every}, within the spread", forward, failed("forward")),
        of_copy("backward", SHARE["backward"], narrow, f"{where}, up to {WIDEST_LARGE_BACKWARD} columns"),
        of_copy("forward", SHARE["forward"], large["forward"], where),
        _small(backward),
        _workspace(result),
        _dw_cost(result),
    ]
    if dtype != "float32":
        found.insert(1, of_mean("backward", BACKWARD_MEAN, backward))
    return found


def target_lines(result: Result) -> list[str]:
    """One line for each target of which the result has cells."""
    return lines_of(targets(result))


def workspace_table(result: Result, style: str = "simple") -> str:
    """cutile's backward in each cell: its workspace in bytes, as rows of float32, those per SM, and what dw costs."""
    costs = {shape_of(record): cost for record, cost in dw_costs(result)}
    rows = []
    for record in of_op(result, "backward"):
        if record["workspace_bytes"] is not None:
            count = partial_rows(record)
            per_sm = f"{count / result['sms']:.2f}" if result.get("sms") else ""
            row = [shape_text(record), record["workspace_bytes"], f"{count:.0f}", per_sm]
            rows.append([*row, figure_text(costs.get(shape_of(record)), "+.1%")])
    return table_text(rows, ["rows x cols", "workspace bytes", "P", "P per SM", "dw costs"], style)


def partial_rows(record: Record) -> float:
    """A record's workspace in rows of float32: P, if it holds nothing else."""
    return record["workspace_bytes"] / (4 * record["cols"])


def dw_costs(result: Result) -> list[tuple[Record, float]]:
    """cutile's backward at calls of NO_DW_BYTES or more, and the share by which it takes longer than without dw."""
    alone = {shape_of(record): record["us"] for record in of_op(result, "dx")}
    costs = []
    for record in of_op(result, "backward"):
        us = alone.get(shape_of(record))
        if us is not None and moved(record) >= NO_DW_BYTES:
            costs.append((record, record["us"] / us - 1))
    return costs


def rate_text(record: Record) -> str:
    """Its GB/s."""
    rate = record["gb_per_s"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _at_least(text: str, found: list[Comparison], failed: list[str], least: float | None = None) -> Target:
    worst = min((each.ratio for each in found), default=None)
    missed = failed + behind(found, least)
    return Target(
        text, len(found) + len(failed), missed, "" if worst is None else f"the lowest is {worst:.3f}"
    )


def _small(backward: list[Comparison]) -> Target:
    small = [each for each in backward if each.ours["rows"] * each.ours["cols"] <= SMALL_ELEMENTS]
    missed = [
        f"{each.shape} ({1 / each.ratio:.2f}x {name_of(each.peer)})"
        for each in small
        if 1 / each.ratio > SMALL_TIME
    ]
    text = f"backward of up to {SMALL_ELEMENTS} elements: at most {SMALL_TIME} of the best peer's time"
    return Target(text, len(small), missed)


def _workspace(result: Result) -> Target:
    records = [each for each in of_op(result, "backward") if each["workspace_bytes"] is not None]
    most = PARTIAL_ROWS_PER_SM * (result.get("sms") or 0)
    text = f"backward's workspace: at most P x N x 4 bytes, P at most {PARTIAL_ROWS_PER_SM} per SM"
    missed = [shape_text(each) for each in records if partial_rows(each) > most]
    return Target(text, len(records) if most else 0, missed)


def _dw_cost(result: Result) -> Target:
    costs = dw_costs(result)
    missed = [f"{shape_text(record)} ({cost:+.1%})" for record, cost in costs if cost > DW_COST]
    where = f"{NO_DW_BYTES / 1e6:.0f} MB and more"
    text = f"deterministic dw costs at most {DW_COST:.0%} of the backward at {where}"
    return Target(text, len(costs), missed)
