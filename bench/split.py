# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The backward of many rows by two kernels, as the selector has it, and by the kernel of few rows, which splits its
blocks between dx and dw. docs/one-launch-or-two.md shows what came of it.

    python -m bench.split           checks, then times, on one GPU; writes bench/results/GPU/DATE-bfloat16-split.json
    python -m bench.split --docs    measures nothing: puts the newest kept result of each GPU into the page

A result is the provenance of provenance.py, copy_gb_per_s and `cells`. A cell has rows, cols, size (the class), and
`selected`, which the selector gives, and `splits`, of which the fastest counts. Each of those is

plan                                the kernels and their settings
partial_rows, launches              rows of dw_partial; kernels that are launched: one where that is 1
us, us_p10, us_p90, samples         device microseconds per call: median, spread, number of samples
errors                              largest relative error of dx and dw against float64, see check.py
error                               why there are no figures, None where there are
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from bench.measure.check import Inputs, errors_of, make_inputs, run_op
from bench.measure.provenance import RESULTS, ROOT, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.session import ContextLostError, Session
from bench.measure.shapes import Shape, compulsory_bytes
from bench.providers.ours import Provider
from bench.report import readme
from bench.report.tables import write_json
from tilegym_rmsnorm import registry
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket, Device
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.tuning.candidates import by_rules
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable
from tilegym_rmsnorm.measure.accuracy import Errors, Outputs, why_wrong
from tilegym_rmsnorm.measure.timer import Sampler, Timing, calls_needed, interleave, sets_needed

# The shapes of quack's pull request 101.
ROWS = (4096, 8192, 16384, 32768, 65536)
COLUMNS = (256, 512, 1024, 2048, 3072, 4096, 8192)
DTYPE = torch.bfloat16  # of x and of the weight
# Rows of a tile, its columns as a multiple of those for few rows, rows of a slab. Of nine settings, tried on an H100
# and an H200, these and those for few rows themselves have the fastest of every cell.
OTHER_TILES = ((64, 2, 1024), (64, 4, 1024), (64, 4, 256), (128, 2, 512), (32, 4, 512))
PROCESSES = 14  # that compile, each with up to 1.5 GB of tensors
PAGE = ROOT / "docs" / "one-launch-or-two.md"
SECTION = "split"  # of the page: what stands between its markers

Result = dict[str, Any]
Cell = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """0 if every plan of every cell is right and timed; 1 otherwise; 2 where there is nothing to measure on."""
    arguments = parse_arguments(argv)
    if arguments.docs:
        return refresh_page()
    if reason := why_not_here():
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    choose_tables()
    origin = describe_run()
    print(one_line(origin))
    folder = RESULTS / gpu_slug(origin["gpu"]) if arguments.out is None else arguments.out
    if reason := why_not_writable(folder):
        print(f"no results can be kept there: {reason}", file=sys.stderr)
        return 1
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    device = this_gpu()
    shapes = list(itertools.product(ROWS, COLUMNS))
    compile_ahead(shapes, machine_of(device).facts, device)
    session = Session((), ("backward",), device)
    ceiling = session.copy_bytes_per_second
    result = {**origin, "copy_gb_per_s": None if ceiling is None else round(ceiling / 1e9, 1), "cells": []}
    path = folder / f"{origin['date'][:10]}-bfloat16-split.json"
    measure_all(session, shapes, result, path)
    print("\n" + "\n\n".join([summary(result), table(result, "simple"), *failures(result)]))
    print(f"\nwritten: {path}" if result["cells"] else "\nnothing was measured")
    return 0 if len(result["cells"]) == len(shapes) and not failures(result) else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=options.path, help="folder of the result; default: bench/results/GPU/")
    parser.add_argument(
        "--docs",
        action="store_true",
        help="measure nothing: put the kept results into docs/one-launch-or-two.md",
    )
    return parser.parse_args(argv)


def why_not_here() -> str | None:
    """Why this machine cannot measure, None if it can."""
    if not torch.cuda.is_available():
        return "this compares kernels on a GPU, and PyTorch sees none (torch.cuda.is_available() is False)"
    if unusable := registry.why_unusable("cutile"):
        return f"{unusable.reason}. To mend it: {unusable.remedy}"
    return None


def this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# What is compared


def plans_of(shape: Shape, facts: Device) -> list[Plan]:
    """The plan that the selector gives, then those that split."""
    from tilegym_rmsnorm.backends.cutile.launch import plan_for

    bucket = Bucket("backward", shape[1], "bfloat16", size_class(*shape))
    problem = bucket.problem(facts)
    return [plan_for(problem), *(plan_of(problem, each) for each in splits(shape[1], facts))]


def splits(n: int, facts: Device) -> list[Variant]:
    """What the rules give to few rows of n elements, and the same with other tiles and slabs."""
    few = by_rules(Bucket("backward", n, "bfloat16", "few"), facts.architecture, facts.most_members)
    others = (
        dataclasses.replace(few, rows=rows, strip=times * few.strip, slab=slab)
        for rows, times, slab in OTHER_TILES
    )
    return list(dict.fromkeys([few, *others]))


# Compiling


def compile_ahead(shapes: list[Shape], facts: Device, device: torch.device) -> None:
    """Compiles in many processes, so that this one finds the kernels in cuda-tile's cache on disk.

    Processes, since cuda-tile compiles under a lock of its own. What fails here fails again where it is checked.
    """
    calls = calls_to_compile(shapes, facts)
    workers = min(PROCESSES, max(1, (os.cpu_count() or 1) - 2), len(calls))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    with pool, tqdm(total=len(calls), unit="call", desc="compile", dynamic_ncols=True) as bar:
        try:
            for future in as_completed([pool.submit(compile_one, *call, device) for call in calls]):
                future.result()
                bar.update()
        except BrokenProcessPool:  # a compiler that crashes, or too little memory
            tqdm.write("compiling ahead ended early: what is left compiles where it is checked")


def calls_to_compile(shapes: list[Shape], facts: Device) -> list[tuple[int, Plan]]:
    """M and plan of the smallest calls that together need every kernel of these shapes; wide ones, which take longest,
    first.

    A slab is no constant of a kernel. Which kernel M and P need depends on whether 16 divides them: it divides every M.
    """
    found: dict[tuple[object, ...], tuple[int, Plan]] = {}
    for shape in sorted(shapes):
        for plan in plans_of(shape, facts):
            kernels = (
                dataclasses.replace(step, slab=step.rows) if isinstance(step, Split) else step
                for step in plan.steps
            )
            is_aligned = plan.sizes(shape[0]).partial_rows % 16 == 0
            found.setdefault((shape[1], is_aligned, *kernels), (shape[0], plan))
    return sorted(found.values(), key=lambda call: -call[1].problem.n)


def compile_one(m: int, plan: Plan, device: torch.device) -> None:
    """Launches a plan on zeros. A failure is left to the process that measures."""
    with contextlib.suppress(Exception):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        x, rstd = torch.zeros(m, plan.problem.n, dtype=DTYPE, device=device), torch.ones(m, device=device)
        provider_of(plan, device).backward(x, x, x[0].clone(), rstd)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            del x
            torch.cuda.empty_cache()


# Measuring


@dataclasses.dataclass
class Tried:
    """What became of a plan: who runs it, what it computes and how wrong that is, its time, or why there is none."""

    plan: Plan
    provider: Provider | None = None
    outputs: Outputs = dataclasses.field(default_factory=dict)
    errors: Errors = dataclasses.field(default_factory=dict)
    timing: Timing | None = None
    failure: str | None = None

    def fail(self, text: str) -> None:
        self.failure = text

    def record(self, rows: int) -> dict[str, Any]:
        sizes = self.plan.sizes(rows)
        record = {"plan": str(self.plan), "partial_rows": sizes.partial_rows}
        record["launches"] = sum(grid is not None for grid in sizes.grids)
        if self.timing is None:
            record |= dict.fromkeys(("us", "us_p10", "us_p90", "samples"))
        else:
            record |= {name: round(value, 3) for name, value in dataclasses.asdict(self.timing).items()}
        return record | {"errors": rounded(self.errors), "error": self.failure}


def rounded(errors: Errors) -> dict[str, float | None]:
    """Three digits; None for what JSON cannot say (a NaN is in the record's `error`)."""
    return {kind: float(f"{error:.3g}") if math.isfinite(error) else None for kind, error in errors.items()}


def provider_of(plan: Plan, device: torch.device) -> Provider:
    """Who runs a plan, as the benchmark's check and timer call providers."""
    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    run = launch.Backward(machine_of(device), plan)
    return Provider(str(plan), None, lambda x, dy, weight, rstd: run(x, dy, weight, rstd, 0.0), None)


def measure_all(session: Session, shapes: list[Shape], result: Result, path: Path) -> None:
    """Adds the cell of every shape to the result, and writes it to PATH after each: a run may be cut off."""
    with tqdm(shapes, unit="shape", dynamic_ncols=True) as bar:
        for shape in bar:
            bar.set_description("x".join(map(str, shape)), refresh=sys.stderr.isatty())
            try:
                result["cells"].append(measure(session, shape))
            except ContextLostError as lost:  # nothing more can run in this process
                tqdm.write(f"{shape[0]}x{shape[1]}: the CUDA context is lost, and the run ends: {lost}")
                return
            write_json(result, path, "cells")


def measure(session: Session, shape: Shape) -> Cell:
    """One cell: every plan checked once, then those that are right timed in turn."""
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    rows, cols = shape
    tried = [Tried(plan) for plan in plans_of(shape, machine_of(session.device).facts)]
    if isinstance(tried[0].plan.first, Split):  # the user's tables may say so
        tried[0].fail("the selector splits here: there are no two kernels to compare with")
    bytes_of_x = DTYPE.itemsize * (rows + 1) * cols  # and of the weight, as bench.py counts
    inputs = make_inputs(shape, DTYPE, session.device, sets_needed(bytes_of_x, session.device))
    check(session, tried, inputs[0])
    time_in_turn(session, shape, [each for each in tried if each.failure is None], inputs)
    selected, *others = (each.record(rows) for each in tried)
    return {"rows": rows, "cols": cols, "size": size_class(*shape), "selected": selected, "splits": others}


def check(session: Session, tried: list[Tried], inputs: Inputs) -> None:
    """Runs every plan that has not failed on one set, and compares what it computes with float64."""
    for each in tried:
        if each.failure is None:
            with session.contained(str(each.plan), each.fail):
                each.provider = provider_of(each.plan, session.device)
                each.outputs = run_op(each.provider, "backward", inputs)
                if session.is_cuda:  # what goes wrong on the GPU must not surface in another's call
                    torch.cuda.synchronize(session.device)
    outputs = {str(number): each.outputs for number, each in enumerate(tried) if each.failure is None}
    errors, allowed = errors_of(outputs, inputs)
    for number, each in enumerate(tried):
        each.outputs = {}  # large
        if each.failure is None:
            each.errors = errors[str(number)]
            each.failure = why_wrong(each.errors, allowed)


def time_in_turn(session: Session, shape: Shape, right: list[Tried], inputs: list[Inputs]) -> None:
    """Device times of these plans, as cell.py takes them."""
    sets, rate = len(inputs), session.copy_bytes_per_second
    count = 1 if rate is None else calls_needed(sets, compulsory_bytes("backward", shape, DTYPE), rate)
    session.timer.renew_pool()
    samplers: dict[int, Sampler] = {}
    for number, each in enumerate(right):
        backward = each.provider.backward
        calls = [functools.partial(backward, one.x, one.dy, one.weight, one.rstd) for one in inputs]
        with session.contained(str(each.plan), each.fail):
            samplers[number] = session.timer.sampler([calls[i % sets] for i in range(count)])
    for number, timing in interleave(samplers).items():
        right[number].timing = timing


# Tables


def ratio(cell: Cell) -> float | None:
    """The time of the selected plan as a part of the fastest split's; None where either has none."""
    times = [each["us"] for each in cell["splits"] if each["us"] is not None]
    selected = cell["selected"]["us"]
    return None if selected is None or not times else selected / min(times)


def table(result: Result, style: str) -> str:
    """The ratios, a line for each M and a column for each N."""
    ratios = {(cell["rows"], cell["cols"]): ratio(cell) for cell in result["cells"]}
    rows, columns = (list(dict.fromkeys(shape[axis] for shape in ratios)) for axis in (0, 1))
    lines = [
        [str(m), *("-" if (found := ratios.get((m, n))) is None else f"{found:.2f}" for n in columns)]
        for m in rows
    ]
    headers = ["M, N", *map(str, columns)]
    align = ["left"] + ["right"] * len(columns)
    return tabulate(lines, headers, tablefmt=style, colalign=align if lines else None, disable_numparse=True)


def summary(result: Result) -> str:
    """How the two compare over all cells."""
    ratios = [found for cell in result["cells"] if (found := ratio(cell)) is not None]
    if not ratios:
        return "No cell has both times."
    faster = sum(each < 1 for each in ratios)
    return (
        f"Time of two kernels / time of the split: {min(ratios):.2f} to {max(ratios):.2f}. Two kernels are faster in "
        f"{faster} of {len(ratios)} cells."
    )


def failures(result: Result) -> list[str]:
    """One line for each plan without a time."""
    return [
        f"failed: {cell['rows']}x{cell['cols']} by {each['plan']}: {each['error']}"
        for cell in result["cells"]
        for each in (cell["selected"], *cell["splits"])
        if each["error"]
    ]


def kept(results: Path = RESULTS) -> list[Result]:
    return readme.newest_by_gpu(results, "-split.json")


def page_section(results: list[Result]) -> str:
    """The results as Markdown."""
    parts = [
        [f"**{each['gpu']}.** {summary(each)}", table(each, "github"), f"{one_line(each)}."]
        for each in results
    ]
    return "\n\n".join(itertools.chain.from_iterable(parts))


def refresh_page(page: Path = PAGE, results: Path = RESULTS) -> int:
    found = kept(results)
    if not found:  # an empty section would take away what the page had
        print(
            f"no results there: {results}/GPU/*-split.json. To measure: python -m bench.split",
            file=sys.stderr,
        )
        return 1
    readme.refresh(page, SECTION, page_section(found))
    print(f"written: {page}, of {', '.join(each['gpu'] for each in found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
