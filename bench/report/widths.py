# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of `bench/run.sh --widths`, by part (measure/widths.py) and direction."""

from __future__ import annotations

from bench.measure.shapes import Record, Result, shape_text
from bench.measure.widths import OPS, PARTS, part_of
from bench.report.compare import compare, of_op
from bench.report.text import table_text

GOOD = {"forward": 0.985, "backward": 1.0}  # times the best peer: as fast


def table(result: Result) -> str:
    """Markdown: of each part and direction the cells, and the worst of them against the best peer and the copy."""
    rows = []
    for part in PARTS:
        of_part = {**result, "records": [each for each in result["records"] if part_of(each["cols"]) == part]}
        for direction, good in GOOD.items():
            ops = [op for op in OPS if op.endswith(direction)]
            records = [each for op in ops for each in of_op(of_part, op)]
            if not records:
                continue
            row = [part, direction, str(len(records))]
            found = [each for op in ops for each in compare(of_part, op)]
            if worst := min(found, key=lambda each: each.ratio, default=None):
                share = sum(each.ratio >= good for each in found) / len(found)
                row += [f"{worst.ratio:.3f}", _cell(worst.ours), f"{share:.0%} at {good}x"]
            else:
                row += ["", "", ""]
            timed = [each for each in records if each["copy_fraction"] is not None]
            lowest = min(timed, key=lambda each: each["copy_fraction"], default=None)
            row += [f"{lowest['copy_fraction']:.1%}", _cell(lowest)] if lowest else ["", ""]
            rows.append(row)
    headers = ["part", "direction", "cells", "lowest ratio", "at", "cells as fast"]
    return table_text(rows, [*headers, "lowest share of the copy", "at"], left=(0, 1, 4, 7))


def _cell(record: Record) -> str:
    return f"{record['op']} {shape_text(record)}"
