# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Fails where a run is slower than the kept results of the same GPU model.

    python -m bench.gate RESULT...     exit status 1 if a kernel of this package became slower

RESULT is a JSON file that the benchmark wrote, or a folder of them.

A cell (op, rows, cols, dtype, provider) is compared with the newest kept result that has it. Only this package's own
kernels count: a slower baseline is not a defect here. A cell that had figures and now has an error fails too, and one
of cutile where only others were run. A shape that was not run this time is named and does not fail, but a result that
has none of those that are kept of its dtypes does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.provenance import RESULTS, gpu_slug

THRESHOLD = 0.05  # runs of the same kernels on one H100 differ by about 2 %
GATED_PROVIDERS = ("cutile", "triton")

Result = dict[str, Any]
Cell = tuple[str, int, int, str, str]


class Verdict(NamedTuple):
    """How many cells were compared, one line for each that fails, and the kept cells that were not run."""

    compared: int
    failed: list[str]
    missing: list[Cell]


def load_kept(gpu: str | None, results: Path = RESULTS, leave_out: Sequence[Path] = ()) -> list[Result]:
    """The kept results of the GPU model, oldest first, without grids and the files named: a run is not its baseline."""
    if gpu is None:
        return []
    skipped = {path.resolve() for path in leave_out}
    paths = [
        path for path in sorted((results / gpu_slug(gpu)).glob("*.json")) if path.resolve() not in skipped
    ]
    kept = [json.loads(path.read_text()) for path in paths]
    kept = [each for each in kept if "records" in each and each["gpu"] == gpu and not each.get("is_grid")]
    return sorted(kept, key=lambda each: each["date"])


def joined(news: Sequence[Result]) -> list[Result]:
    """One result of each GPU model, with all records: parts of a run have other providers or shapes, and of a cell that
    several have each counts."""
    by_gpu: dict[str | None, Result] = {}
    for new in news:
        records = [*by_gpu.get(new["gpu"], {"records": []})["records"], *new["records"]]
        by_gpu[new["gpu"]] = {**new, "records": records}
    return list(by_gpu.values())


def compare(
    new: Result,
    kept: list[Result],
    threshold: float = THRESHOLD,
    providers: tuple[str, ...] = GATED_PROVIDERS,
) -> Verdict:
    """The new result against the kept ones, which must be of the same GPU model and oldest first."""
    before = {
        cell_of(record): record for old in kept for record in old["records"] if record["us"] is not None
    }
    dtypes = {record["dtype"] for record in new["records"]}
    now: dict[Cell, list[dict[str, Any]]] = {}
    for record in new["records"]:
        now.setdefault(cell_of(record), []).append(record)
    run = {cell[:-1] for cell in now}
    compared, failed, missing = 0, [], []
    for cell, old in before.items():
        if old["provider"] not in providers or old["dtype"] not in dtypes:
            continue
        if cell not in now and old["provider"] == "cutile" and cell[:-1] in run:
            failed.append(f"{_name(cell)}: had {old['us']:.1f} us, now only other providers were run")
        elif cell not in now:
            missing.append(cell)
        for record in now.get(cell, ()):
            if record["us"] is None:
                failed.append(f"{_name(cell)}: had {old['us']:.1f} us, now fails: {record['error']}")
                continue
            compared += 1
            slowdown = record["us"] / old["us"] - 1
            if slowdown > threshold:
                failed.append(
                    f"{_name(cell)}: {old['us']:.1f} us before, {record['us']:.1f} us now ({slowdown:+.1%})"
                )
    return Verdict(compared, failed, missing)


def cell_of(record: dict[str, Any]) -> Cell:
    return record["op"], record["rows"], record["cols"], record["dtype"], record["provider"]


def _name(cell: Cell) -> str:
    op, rows, cols, dtype, provider = cell
    return f"{provider} {op} {rows}x{cols} {dtype}"


def why_nothing(new: Result, verdict: Verdict) -> str | None:
    """Why a result is none that a gate could pass, though it may have no cell that fails; None if it is one."""
    if not new["records"]:
        return "the run has no records"
    if verdict.compared == 0 and verdict.missing:
        return "the run has no cell of those that are kept"
    return None


def explain(new: Result, kept: list[Result], verdict: Verdict) -> str:
    """What was compared and found, one line each."""
    if new["gpu"] is None:
        return "gate: nothing compared: the run had no GPU"
    if not kept:
        return f"gate: nothing compared: no kept results of {new['gpu']}"
    lines = [f"gate: slower: {line}" for line in verdict.failed]
    if verdict.missing:
        shapes = dict.fromkeys(f"{rows}x{cols}" for _, rows, cols, _, _ in verdict.missing)
        lines.append(f"gate: not run: {len(verdict.missing)} kept cells, of {', '.join(shapes)}")
    if reason := why_nothing(new, verdict):
        lines.append(f"gate: nothing compared: {reason}")
    lines.append(
        f"gate: {verdict.compared} cells compared on {new['gpu']}, {len(verdict.failed)} failed, "
        f"{len(verdict.missing)} not run"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, nargs="+", help="a result or a folder of results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="the slowdown that is still accepted"
    )
    arguments = parser.parse_args(argv)
    paths = [
        path
        for given in arguments.result
        for path in (sorted(given.glob("*.json")) if given.is_dir() else [given])
    ]
    news = [
        new for new in (json.loads(path.read_text()) for path in paths) if "records" in new
    ]  # not of training
    if not news:
        parser.error(f"no results in {', '.join(map(str, arguments.result))}")
    has_failed = False
    for new in joined(news):
        kept = load_kept(new["gpu"], arguments.results, leave_out=paths)
        verdict = compare(new, kept, arguments.threshold)
        print(explain(new, kept, verdict))
        has_failed |= bool(verdict.failed or why_nothing(new, verdict))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
