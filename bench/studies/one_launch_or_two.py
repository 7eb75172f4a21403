# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compare the two kernels of a backward of many rows with the split of few rows, at the shapes of quack's PR 101.

    python -m bench.studies.one_launch_or_two    checks, then times, on a GPU; writes DATE-bfloat16-split.json

A result is the provenance of provenance.py, copy_gb_per_s and `cells`: rows, cols, and records of run_shape.py, one of
the two kernels (`selected`) and one of the split (`splits`; in older results one for each of its settings).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from bench.measure.cell import Cell
from bench.measure.check import make_inputs
from bench.measure.provenance import RESULTS, ROOT, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import ContextLostError, Session, this_device
from bench.measure.shapes import Record, Shape
from bench.providers.ours import Provider, run_backward
from bench.report import readme, tables
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.plans import partition, problem, sizes
from tilegym_rmsnorm.backends.cutile.plans.plan import plan_of
from tilegym_rmsnorm.backends.cutile.tuning.candidates import by_rules
from tilegym_rmsnorm.commands import installation, options
from tilegym_rmsnorm.measure.timer import sets_needed

SHAPES = list(itertools.product((4096, 8192, 16384, 32768, 65536), (256, 512, 1024, 2048, 3072, 4096, 8192)))
DTYPE = torch.bfloat16  # of x and of the weight
# Rows of a tile, its columns as a multiple of those for few rows, rows of a slab. Of nine settings, tried on an H100
# and an H200, these and those for few rows themselves have the fastest of every cell.
OTHER_TILES = ((64, 2, 1024), (64, 4, 1024), (64, 4, 256), (128, 2, 512), (32, 4, 512))
PAGE, PROG = ROOT / "docs" / "one-launch-or-two.md", "python -m bench.studies.one_launch_or_two"


def main(argv: list[str] | None = None) -> int:
    """0 if every plan of every cell is right and timed; 1 otherwise; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(PROG, None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=options.path, help="folder of the result; default: bench/results/GPU/")
    arguments = parser.parse_args(argv)
    if unusable := registry.why_unusable("cutile") if torch.cuda.is_available() else ("PyTorch sees no GPU",):
        print(f"nothing was measured: {'. To mend it: '.join(unusable)}", file=sys.stderr)
        return 2
    choose_tables()
    origin = describe_run()
    folder = arguments.out or RESULTS / gpu_slug(origin["gpu"])
    if reason := installation.why_not_writable(folder):
        sys.exit(f"no results can be kept there: {reason}")
    session, lost = Session(("selected", "split"), ("backward",), this_device()), []
    ceiling = session.copy_bytes_per_second
    result = {**origin, "copy_gb_per_s": ceiling and round(ceiling / 1e9, 1), "cells": []}
    path = folder / f"{origin['date'][:10]}-bfloat16-split.json"
    for shape in tqdm(SHAPES, unit="shape", dynamic_ncols=True):
        try:
            result["cells"].append(measure(session, shape))
        except ContextLostError as error:  # nothing more can run in this process
            lost = [f"failed: {shape[0]}x{shape[1]}: the CUDA context is lost, and the run ends: {error}"]
            break
        finally:  # after each cell: a run may be cut off
            tables.write_json(result, path, "cells")
    print("\n\n".join([section(result), *failures(result), *lost, f"written: {path}"]))
    return 1 if lost or failures(result) else 0


class Plans(Cell):
    """The benchmark's cell, of plans: each is a setting of the provider "selected" or "split"."""

    def make_providers(self, name: str) -> list[Provider]:
        from tilegym_rmsnorm.backends.cutile.host import norm
        from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

        machine = machine_of(self.bench.device)
        asked = problem.Bucket("backward", self.shape[1], "bfloat16", sizes.size_class(*self.shape))
        plans = [norm.plan_for(asked.problem(machine.facts))]
        if name == "selected" and isinstance(plans[0].first, partition.Split):  # the user's tables may say so
            raise ValueError(f"selected: expected two kernels to compare with, got {plans[0].first}")
        if name == "split":
            few = by_rules(asked._replace(size="few"), machine.facts.architecture, machine.facts.most_members)
            others = [replace(few, rows=m, strip=k * few.strip, slab=slab) for m, k, slab in OTHER_TILES]
            plans = [plan_of(asked.problem(machine.facts), each) for each in dict.fromkeys([few, *others])]
        runs = {str(plan): partial(run_backward, norm.Backward(machine, plan)) for plan in plans}
        return [Provider(name, None, run, None, settings=plan) for plan, run in runs.items()]


def measure(session: Session, shape: Shape) -> Record:
    """One cell: every plan checked against float64, then those that are right timed in turn."""
    sets = sets_needed(DTYPE.itemsize * (shape[0] + 1) * shape[1], session.device)
    cell = Plans(session, shape, DTYPE, make_inputs(shape, DTYPE, session.device, sets))
    selected, split = cell.measure("backward")
    return {"rows": shape[0], "cols": shape[1], "selected": selected, "splits": [split]}


def ratio(cell: Record) -> float | None:
    """The time of the selected plan as a part of the fastest split's; None where either has none."""
    times, us = [each["us"] for each in cell["splits"] if each["us"]], cell["selected"]["us"]
    return us / min(times) if us and times else None


def failures(result: Record) -> list[str]:
    """A line for each plan without a time."""
    return [
        f"failed: {cell['rows']}x{cell['cols']} by {plan}: {us}"
        for cell in result["cells"]
        for record in (cell["selected"], *cell["splits"])
        for plan, us in (record["tried_us"] or {record["provider"]: record["error"]}).items()
        if not isinstance(us, float)
    ]


def section(result: Record) -> str:
    """The result as Markdown: the ratios, a line for each M and a column for each N."""
    ratios = [each for each in map(ratio, result["cells"]) if each]
    if not ratios:
        return f"**{result['gpu']}.** No cell has both times.\n\n{one_line(result)}."
    lines = [
        {"M, N": rows, **{cell["cols"]: ratio(cell) for cell in cells}}
        for rows, cells in itertools.groupby(result["cells"], lambda cell: cell["rows"])
    ]
    table = tabulate(lines, "keys", "github", floatfmt=".2f", colalign=["left"], missingval="-")
    return (
        f"**{result['gpu']}.** Time of two kernels / time of the split: {min(ratios):.2f} to {max(ratios):.2f}. "
        f"Two kernels are faster in {sum(each < 1 for each in ratios)} of {len(ratios)} cells.\n\n"
        f"{table}\n\n{one_line(result)}."
    )


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    return readme.refresh_study(page, "split", results, "-split.json", section)


if __name__ == "__main__":
    sys.exit(main())
