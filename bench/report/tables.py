# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A result, for people and for programs: tables, JSON, CSV.

A result is one run at one dtype: the provenance of provenance.py, copy_gb_per_s, `unavailable` (why a provider was not
measured), `note` (None on a GPU), `is_grid` (its shapes are those of heat maps), `is_block` (its ops are those of
block/), `widths` (the seed that drew them, or None), `inductor_timer` (whether Inductor was given inductor.py's timer),
`processes` (which providers were measured in processes of their own, at which shapes, and the copy rate there) and
`records` (see measure/run_shape.py).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from bench.block.families import ALL_OPS
from bench.measure.provenance import one_line
from bench.measure.shapes import Record, Result, Shape, kind_of, shape_of
from bench.providers.ours import OURS, OWN
from bench.report import compare
from bench.report.compare import LARGE_BYTES, of_size, spread_of
from bench.report.text import figure_text, table_text

CPU_NOTE = "Not GPU figures: wall-clock times of CPU code and interpreters, taken without a GPU."


def write_json(result: dict[str, Any], path: Path, long_list: str = "records") -> None:
    """The result as JSON, each item of its long list on one line, so that a diff shows cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({key: value for key, value in result.items() if key != long_list}, indent=1)
    items = ",\n".join(f"  {json.dumps(item)}" for item in result[long_list])
    path.write_text(f'{text.removesuffix("}").rstrip()},\n "{long_list}": [\n{items}\n ]\n}}\n')


def write_csv(result: Result, path: Path) -> None:
    """One line for each record, its errors as columns: y_error, rstd_error, dx_error, dw_error, and others it has."""
    rows = [flat(record) for record in result["records"]]
    fields = list(dict.fromkeys(field for row in rows for field in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


def flat(record: Record) -> Record:
    values = {key: value for key, value in record.items() if key not in ("errors", "tried_us")}
    errors = record["errors"]
    return values | {f"{kind}_error": errors.get(kind) for kind in ("y", "rstd", "dx", "dw", *errors)}


def by_op(result: Result, style: str = "simple") -> str:
    """Tabulate by op every provider's GB/s, and its device and host microseconds. Without a GPU their errors alone:
    times of interpreters and of busy cores say nothing."""
    ceiling = result["copy_gb_per_s"]
    parts = []
    for op in ops_of(result):
        if result["gpu"] is None:
            what = "largest error of any result, relative, against float64"
            parts.append(f"{heading(result, op)}: {what}\n\n{op_table(result, op, _error_cell, style)}")
            continue
        rate = "GB/s of compulsory bytes"
        if ceiling is not None:
            rate += f", and their share of this run's device copy ({ceiling:.0f} GB/s)"
        parts.append(f"{heading(result, op)}: {rate}\n\n{op_table(result, op, _rate_cell, style)}")
        unit = "device us ± half of the range from the 10th to the 90th percentile / host us per eager call"
        parts.append(f"{heading(result, op)}: {unit}\n\n{op_table(result, op, _time_cell, style)}")
    parts += [f"failed: {line}" for line in failures(result)]
    parts += [f"not measured: {name}: {reason}" for name, reason in result["unavailable"].items()]
    return "\n\n".join(parts)


def ops_of(result: Result) -> list[str]:
    """The ops that the result has records of."""
    return [op for op in ALL_OPS if any(record["op"] == op for record in result["records"])]


def heading(result: Result, op: str) -> str:
    """'backward, bfloat16'."""
    return f"{op}, {result['records'][0]['dtype']}"


def overview(results: list[Result], sizes: tuple[bool, ...] = ()) -> str:
    """A Markdown table with a line for each result, of cutile against the best peer: how many peers have figures,
    geometric means, cells won before any rounding. Of a transformer block these are of the residual add. sizes: the
    means of small (False) and of large calls (True) too, with their numbers where both are there."""
    limit = f"{LARGE_BYTES / 1e6:.0f} MB"
    of_sizes = [f"{'>=' if is_large else '<'} {limit}" for is_large in sizes]
    rows = []
    for result in results:
        is_block = kind_of(result) == "block"
        ops = ("residual_backward", "residual_forward") if is_block else ("backward", "forward")
        timed = {
            each["provider"]
            for each in result["records"]
            if each["us"] is not None and (each["op"] in ops or not is_block)
        }
        name = f"{result['gpu']}, {result['records'][0]['dtype']}{', residual' if is_block else ''}"
        row = [name, str(len(timed.difference(OWN)))]
        for op in ops:
            comparisons = compare.compare(result, op)
            won = sum(each.ratio >= 1.0 for each in comparisons)
            row.append(figure_text(compare.mean_ratio(comparisons), ".2f"))
            for is_large in sizes:
                cells = of_size(comparisons, is_large)
                number = f" ({len(cells)})" if cells and len(sizes) > 1 else ""
                row.append(figure_text(compare.mean_ratio(cells), ".2f") + number)
            row.append(f"{won} of {len(comparisons)}" if comparisons else "")
        rows.append(row)
    columns = ["mean ratio", *of_sizes, "as fast or faster"]
    of_op = [f"{op}: {what}" for op in ("backward", "forward") for what in columns]
    return table_text(rows, ["GPU, dtype", "peers", *of_op])


def page_parts(result: Result, images: dict[str, str]) -> list[str]:
    """The result as Markdown: of each op its map, and the mean ratio to the best peer; the rest is folded. Where it has
    no peers the GB/s by provider stay unfolded. A grid has its maps and means alone."""
    is_grid = kind_of(result) == "grid"
    parts = []
    for op in sorted(ops_of(result), key=lambda op: op != "backward"):
        if op != "dx":  # it shows what dw costs
            parts += _op_parts(result, op, images, is_grid)
    if not is_grid and (table := compare.workspace_table(result, "pipe")):
        parts += folded("backward of cutile: workspace, and what dw adds to the time", [table])
    return parts


def said_above(result: Result) -> str:
    """Say how a result was measured, and the rate of the copy."""
    lines = [f"{one_line(result)}."]
    if result["note"]:
        lines.append(f"**{result['note']}**")
    if result["copy_gb_per_s"] is not None:
        lines.append(f"Device copy of 256 MiB in the same run: {result['copy_gb_per_s']:.0f} GB/s.")
    return " ".join(lines)


def _op_parts(result: Result, op: str, images: dict[str, str], is_grid: bool) -> list[str]:
    title = heading(result, op)
    comparison = _comparison(result, op)
    pictures = [f"![{title}]({images[name]})" for name in (f"{op}-map", op) if name in images]
    shown = [f"**{title}**", *pictures[:1], *comparison[:1]]
    if is_grid:
        return shown
    if comparison:
        shown += folded(f"{title}: shape by shape", comparison[1:])
    table = op_table(result, op, rate_cell, "pipe", summary=True)
    every = [*pictures[1:], table]
    return shown + (folded(f"{title}: GB/s of every provider", every) if comparison else every)


def _comparison(result: Result, op: str) -> list[str]:
    """The mean ratio, and a table by shape; nothing without peers."""
    comparisons = compare.compare(result, op)
    if not comparisons:
        return []
    mean = compare.mean_ratio(comparisons)
    text = f"Against the best of {', '.join(compare.peers_of(result, op))} at each shape: {mean:.2f} times as fast"
    return [f"{text} (geometric mean of {len(comparisons)}).", compare.table(result, op, "pipe")]


def folded(title: str, parts: list[str]) -> list[str]:
    """Parts that a reader unfolds."""
    return [f"<details><summary>{title}</summary>", *parts, "</details>"]


def op_table(result: Result, op: str, cell: Any, style: str, summary: bool = False) -> str:
    """A table with a row for each shape and a column for each provider; `summary` adds two columns about cutile."""
    records = [record for record in result["records"] if record["op"] == op]
    providers = list(dict.fromkeys(record["provider"] for record in records))
    by_shape: dict[Shape, dict[str, Record]] = {}
    for record in records:
        by_shape.setdefault(shape_of(record), {})[record["provider"]] = record
    rows = []
    for shape, of in by_shape.items():
        row = ["{} x {}".format(*shape), *(cell(of[name]) if name in of else "" for name in providers)]
        if summary and OURS in of:
            host_us = of[OURS]["host_us"]
            row += [figure_text(of[OURS]["copy_fraction"]), figure_text(host_us, ".0f")]
        rows.append(row)
    headers = ["rows x cols", *providers]
    if summary and OURS in providers:
        headers += [f"{OURS} / copy", f"{OURS} host us"]
    return table_text(rows, headers, style)


def failures(result: Result) -> list[str]:
    """One line for each distinct reason why a provider has no figures somewhere, with the cells it concerns."""
    cells: dict[tuple[str, str], list[str]] = {}
    for record in result["records"]:
        if record["error"]:
            cell = f"{record['op']} {record['rows']}x{record['cols']}"
            cells.setdefault((record["provider"], record["error"]), []).append(cell)
    return [f"{provider} ({', '.join(where)}): {error}" for (provider, error), where in cells.items()]


def _rate_cell(record: Record) -> str:
    share = record["copy_fraction"]
    return rate_cell(record) + ("" if share is None else f" {share:4.0%}")


def rate_cell(record: Record) -> str:
    """Its GB/s, or that it failed."""
    return "failed" if record["gb_per_s"] is None else compare.rate_text(record)


def _time_cell(record: Record) -> str:
    if record["us"] is None:
        return "failed"
    cell = f"{record['us']:.1f} ±{spread_of(record):.0%}"
    return cell if record["host_us"] is None else f"{cell} / {record['host_us']:.0f}"


def _error_cell(record: Record) -> str:
    found = [error for error in record["errors"].values() if error is not None]
    return "failed" if record["error"] or not found else f"{max(found):.1e}"
