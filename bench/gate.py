# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Fails where a run is slower than the kept results of the same GPU model.

    python -m bench.gate RESULT...     exit status 1 if a kernel of this package became slower

RESULT is a JSON file that the benchmark wrote, or a folder of them.

A cell (op, rows, cols, dtype, provider) is compared with the newest kept result that has it, and with the fastest of
those that the same toolkit compiled: a kernel that becomes a little slower with each result would never fail against
the newest alone.

Under a level of reproducibility ("cutile[batch]") a kernel is a provider of its own. What takes longer beside its
backend without than is aimed at (report/levels.py) is named, and does not fail. Nothing is aimed at for vLLM's order,
whose cost is named in any case.

Only this package's own kernels count: a slower baseline is not a defect here. A shape that was not run this time is
named and does not fail, but a result that has none of those that are kept of its dtypes does.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch")

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.measure.provenance import RESULTS, gpu_slug, kept_in
from bench.measure.shapes import Cell, Record, Result, cell_of, kind_of, level_of
from bench.providers.ours import KERNELS, LEVELLED, backend_of
from bench.report import levels
from tilegym_rmsnorm.commands import options

THRESHOLD = 0.05  # runs of the same kernels on one H100 differ by about 2 %
GATED_PROVIDERS = (*KERNELS, *LEVELLED)


@dataclass(frozen=True)
class Slowdown:
    """A slowdown to let pass: a cell, its microseconds that are accepted, and why, such as a check that a kernel was
    wrong without. It is a limit of its own: a figure may be as far above `us` as it may be above a kept one."""

    gpu: str  # as results name it
    op: str
    rows: int
    cols: int
    dtype: str
    provider: str
    us: float
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            what = f"{self.provider} {self.op}"
            raise ValueError(f"reason: expected why {what} may take {self.us} us, got none")


ACCEPTED: tuple[Slowdown, ...] = ()


class Verdict(NamedTuple):
    """Number of cells compared, one line for each that fails, the kept cells that were not run, and one line for each
    slowdown that was let pass."""

    compared: int
    failed: list[str]
    missing: list[Cell]
    accepted: tuple[str, ...] = ()


def load_kept(gpu: str | None, results: Path = RESULTS, leave_out: Sequence[Path] = ()) -> list[Result]:
    """The kept results of the GPU model, oldest first, without grids and the files named: a run is not its baseline."""
    skipped = {path.resolve() for path in leave_out}
    kept = [
        each
        for path, each in kept_in(results, f"{gpu_slug(gpu)}/*.json")
        if each["gpu"] == gpu
        and "records" in each
        and kind_of(each) != "grid"
        and path.resolve() not in skipped
    ]
    return sorted(kept, key=lambda each: each["date"])


def joined(news: Sequence[Result]) -> list[Result]:
    """One result of each GPU model, kind and level, with all records: parts of a run have other providers or shapes,
    and of a cell that several have each counts."""
    by_kind: dict[tuple[str | None, str, str], Result] = {}
    for new in news:
        key = new["gpu"], kind_of(new), level_of(new)
        records = [*by_kind.get(key, {"records": []})["records"], *new["records"]]
        by_kind[key] = {**new, "records": records}
    return list(by_kind.values())


def compare(
    new: Result,
    kept: list[Result],
    threshold: float = THRESHOLD,
    providers: tuple[str, ...] = GATED_PROVIDERS,
    accepted: Sequence[Slowdown] = (),
) -> Verdict:
    """The new result against the kept ones, which must be of the same GPU model and oldest first."""
    before = _timed(kept)
    fastest = _fastest(kept, new)
    passed = {_cell(each): each for each in accepted if each.gpu == new["gpu"]}
    dtypes = {record["dtype"] for record in new["records"]}
    now: dict[Cell, list[Record]] = {}
    for record in new["records"]:
        now.setdefault(cell_of(record), []).append(record)
    run = {cell[:-1] for cell in now}
    compared, failed, missing, let_pass = 0, [], [], []
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
            line = _slowdown(record, old, fastest.get(cell, old), threshold)
            if line and cell in passed and record["us"] <= passed[cell].us * (1 + threshold):
                let_pass.append(f"{line}: up to {passed[cell].us:.1f} us: {passed[cell].reason}")
            elif line:
                failed.append(line)
    return Verdict(compared, failed, missing, tuple(let_pass))


def _timed(results: Sequence[Result]) -> dict[Cell, Record]:
    """Return the last record with a figure of each cell."""
    return {cell_of(each): each for result in results for each in result["records"] if each["us"] is not None}


def _fastest(results: Sequence[Result], new: Result) -> dict[Cell, Record]:
    """Return each cell's record of the lowest figure by the new result's toolkit."""
    records = [
        each
        for result in results
        for each in result["records"]
        if each["us"] is not None
        and toolkit_of(result, each["provider"]) == toolkit_of(new, each["provider"])
    ]
    return {cell_of(each): each for each in sorted(records, key=lambda record: -record["us"])}


def toolkit_of(result: Result, provider: str) -> tuple[str | None, ...]:
    """Return versions of a provider's toolkit: another may be faster for reasons of its own."""
    versions = result.get("versions", {})
    if backend_of(provider) == "triton":
        return (versions.get("triton"),)
    return result.get("tileiras"), versions.get("cuda-tile")


def _slowdown(record: Record, old: Record, fastest: Record, threshold: float) -> str | None:
    """One line about the newest kept figure or, where that one is within the threshold, about the fastest."""
    for us, when in ((old["us"], "before"), (fastest["us"], "in the fastest kept result")):
        slowdown = record["us"] / us - 1
        if slowdown > threshold:
            now = f"{record['us']:.1f} us now ({slowdown:+.1%})"
            return f"{_name(cell_of(record))}: {us:.1f} us {when}, {now}"
    return None


def _cell(slowdown: Slowdown) -> Cell:
    return slowdown.op, slowdown.rows, slowdown.cols, slowdown.dtype, slowdown.provider


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
    """Say in lines what was compared and found."""
    if new["gpu"] is None:
        return "gate: nothing compared: the run had no GPU"
    if not kept:
        what = "" if kind_of(new) == "models" else " of this kind"
        return f"gate: nothing compared: no kept results{what} of {new['gpu']}"
    lines = [f"gate: slower: {line}" for line in verdict.failed]
    lines += [f"gate: accepted: {line}" for line in verdict.accepted]
    run = {record["provider"] for record in new["records"]}
    if absent := dict.fromkeys(cell[-1] for cell in verdict.missing if cell[-1] not in run):
        lines.append(f"gate: not run: {', '.join(absent)}")
    if left := [cell for cell in verdict.missing if cell[-1] in run]:
        shapes = dict.fromkeys(f"{rows}x{cols}" for _, rows, cols, _, _ in left)
        lines.append(f"gate: not run: {len(left)} kept cells, of {', '.join(shapes)}")
    if reason := why_nothing(new, verdict):
        lines.append(f"gate: nothing compared: {reason}")
    lines.append(
        f"gate: {verdict.compared} cells compared on {new['gpu']}, {len(verdict.failed)} failed, "
        f"{len(verdict.missing)} not run"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=options.path, nargs="+", help="a result or a folder of results")
    parser.add_argument("--results", type=options.path, default=RESULTS, help="folder of the kept results")
    parser.add_argument(
        "--threshold", type=options.share, default=THRESHOLD, help="slowdown that is accepted"
    )
    arguments = parser.parse_args(argv)
    paths: list[Path] = []
    for given in arguments.result:
        paths += sorted(given.glob("*.json")) if given.is_dir() else [given]
    found = (json.loads(path.read_text()) for path in paths)
    news = [new for new in found if "records" in new]  # not of training
    if not news:
        parser.error(f"no results in {', '.join(map(str, arguments.result))}")
    has_failed = False
    for new in joined(news):
        every = load_kept(new["gpu"], arguments.results, leave_out=paths)
        same = [each for each in every if kind_of(each) == kind_of(new)]
        kept = [each for each in same if level_of(each) == level_of(new)]
        verdict = compare(new, kept, arguments.threshold, accepted=ACCEPTED)
        for record in levels.above(new):
            text = (
                f"{record['level_ratio']:.2f} times its backend without, the aim is {levels.most(record):.2f}"
            )
            print(f"gate: above what a level may cost: {_name(cell_of(record))}: {text}")
        for line in levels.without_aim(new):
            print(f"gate: no aim: {line}")
        print(explain(new, kept, verdict))
        has_failed |= bool(verdict.failed or why_nothing(new, verdict))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
