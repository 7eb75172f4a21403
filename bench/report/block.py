# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Pages of results of `bench/run.sh --block`, and what docs/performance.md has of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.block.families import BLOCK_OPS, CONTROLS, heads_of
from bench.measure.shapes import Result, Shape, shape_of, shape_text
from bench.report.compare import compare, name_of, of_op, rate_text
from bench.report.tables import folded, heading, op_table, rate_cell
from bench.report.text import figure_text, table_text

HEADS_OPS = ("qk_norm_forward", "qk_norm_backward")
ROWS_OPS = tuple(op for op in BLOCK_OPS if op not in (*HEADS_OPS, *CONTROLS.values()))
WITHOUT = {op: "strides" if op in HEADS_OPS else "bias" for op in CONTROLS}
PEER = "the best peer"
ITSELF = "*Itself* is cutile at the same shape without the bias, or with contiguous heads."

Cells = dict[Shape, float]  # a figure by rows and columns


def ratios_to_itself(result: Result, op: str) -> Cells:
    """The time without what the op has more over its own: below 1 that costs time."""
    without = {shape_of(each): each["us"] for each in of_op(result, CONTROLS[op])}
    return {
        shape_of(each): without[shape_of(each)] / each["us"]
        for each in of_op(result, op)
        if shape_of(each) in without
    }


def ratios(result: Result) -> dict[tuple[str, str], Cells]:
    """The ratios of each op to the best peer and to itself, where there are some."""
    found = {}
    for op in (*ROWS_OPS, *HEADS_OPS):
        found[op, PEER] = {shape_of(each.ours): each.ratio for each in compare(result, op)}
        if op in CONTROLS:
            found[op, f"itself without {WITHOUT[op]}"] = ratios_to_itself(result, op)
    return {key: cells for key, cells in found.items() if cells}


def overview(results: list[Result]) -> str:
    """The mean ratio of each op and its lowest, to the best peer and to itself; nothing without results."""
    found = [ratios(each) for each in results]
    rows = []
    for op in dict.fromkeys(op for of_result in found for op, _ in of_result):
        row = [op]
        for of_result in found:
            for against in (PEER, f"itself without {WITHOUT.get(op)}"):
                cells = of_result.get((op, against), {}).values()
                row.append(f"{statistics.geometric_mean(cells):.2f} ({min(cells):.3f})" if cells else "")
        rows.append(row)
    headers = [f"{each['gpu']}: {against}" for each in results for against in (PEER, "itself")]
    return table_text(rows, ["op", *headers])


def means_table(result: Result) -> str:
    """Tabulate each op's mean and lowest ratio, to the best peer and to itself."""
    rows = []
    for key, cells in ratios(result).items():
        lowest = min(cells, key=lambda shape: cells[shape])
        mean = statistics.geometric_mean(cells.values())
        row = [*key, str(len(cells)), f"{mean:.2f}", f"{cells[lowest]:.3f}"]
        rows.append([*row, "{} x {}".format(*lowest)])
    headers = ["op", "against", "cells", "mean ratio", "lowest ratio", "at rows x cols"]
    return table_text(rows, headers, left=(0, 1))


def rows_table(result: Result) -> str:
    """A line for each op and shape of rows."""
    rows = []
    for op in ROWS_OPS:
        peers = {shape_of(each.ours): each for each in compare(result, op)}
        itself = ratios_to_itself(result, op) if op in CONTROLS else {}
        for record in of_op(result, op):
            shape = shape_of(record)
            row = [op, shape_text(record), rate_text(record), figure_text(record["copy_fraction"], ".1%")]
            peer = peers.get(shape)
            row += ["", ""] if peer is None else [name_of(peer.peer), f"{peer.ratio:.2f}"]
            rows.append([*row, f"{itself[shape]:.3f}" if shape in itself else ""])
    headers = [
        "op",
        "rows x cols",
        "GB/s",
        "share of the copy",
        "best peer",
        "ratio to it",
        "ratio to itself",
    ]
    return table_text(rows, headers, left=(0, 1, 4))


def heads_map(result: Result, op: str, text: Callable[[Shape], str]) -> str:
    """Tabulate `text` of each shape, H downwards and D to the right."""
    shapes = [shape_of(each) for each in of_op(result, op)]
    sizes = sorted({cols for _, cols in shapes})
    by_heads: dict[int, dict[int, str]] = {}
    for rows, cols in shapes:
        by_heads.setdefault(heads_of(rows)[2], {})[cols] = text((rows, cols))
    lines = [[str(heads), *(of.get(size, "") for size in sizes)] for heads, of in sorted(by_heads.items())]
    return table_text(lines, ["heads", *(f"D = {size}" for size in sizes)])


def page_parts(result: Result) -> list[str]:
    """The result as Markdown; rates by provider and settings are folded."""
    parts = [ITSELF, means_table(result), rows_table(result)]
    for op in HEADS_OPS:
        parts += _heads_parts(result, op)
    for op in (*ROWS_OPS, *HEADS_OPS):
        if of_op(result, op):
            every = op_table(result, op, rate_cell, "pipe", summary=True)
            parts += folded(f"{heading(result, op)}: GB/s of every provider", [every])
    return parts + folded("The kernel that served, and its settings", [settings_table(result)])


def _heads_parts(result: Result, op: str) -> list[str]:
    """Two maps of q as a slice of (B, T, 3, H, D): the rate, and both ratios."""
    records = {shape_of(each): each for each in of_op(result, op)}
    if not records:
        return []
    peers = {shape_of(each.ours): each.ratio for each in compare(result, op)}
    itself = ratios_to_itself(result, op)

    def rate(shape: Shape) -> str:
        share = figure_text(records[shape]["copy_fraction"], ".1%")
        return rate_text(records[shape]) + (f" ({share})" if share else "")

    def both(shape: Shape) -> str:
        return " / ".join(f"{of[shape]:.2f}" if shape in of else "-" for of in (itself, peers))

    return [
        f"**{heading(result, op)}** of B = 4, T = 4096: GB/s, and the share of the copy",
        heads_map(result, op, rate),
        f"**{heading(result, op)}**: ratio to itself on contiguous heads / ratio to the best peer",
        heads_map(result, op, both),
    ]


def settings_table(result: Result) -> str:
    rows = [
        [op, shape_text(each), each.get("settings") or ""]
        for op in (*ROWS_OPS, *HEADS_OPS)
        for each in of_op(result, op)
    ]
    return table_text(rows, ["op", "rows x cols", "kernel"], left=(0, 1, 2))
