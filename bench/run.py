# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's command line; `bench/run.sh` calls it. See bench/README.md for what is measured and how."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require()

import argparse
import functools
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from bench.block import peers as block_peers
from bench.block.families import ALL_OPS, BLOCK_OPS, GROUPS, Family, Section, by_family
from bench.measure import inductor, widths
from bench.measure.processes import Loss, differences, left_by, lost_records, measure_others
from bench.measure.provenance import RESULTS, choose_tables, describe_run, gpu_slug, one_line
from bench.measure.run_shape import Bench
from bench.measure.session import ContextLostError, run_in_interpreters, this_device
from bench.measure.shapes import (
    CPU_SHAPES,
    DEFAULT_SHAPES,
    DTYPES,
    GRID,
    OPS,
    QUICK_SHAPES,
    Result,
    Shape,
    kind_of,
    parse_shapes,
)
from bench.measure.warm import warm
from bench.providers.ours import (
    BACKENDS,
    BASELINES,
    KERNELS,
    LEVELLED,
    MAX_AUTOTUNE,
    ROW_PARTIALS,
    backend_of,
)
from bench.providers.peers import ALL_PROVIDERS, ALONE, LIBRARIES, why_missing
from bench.report import compare, html_report, levels, tables
from bench.report.join import write
from tilegym_rmsnorm import get_reproducible
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.commands import options
from tilegym_rmsnorm.commands.installation import why_not_writable

GRID_PROVIDERS = ("cutile", "F.rms_norm", "torch.compile", "quack", "liger.triton")
GRID_OPS = ("forward", "backward")


def main(argv: list[str] | None = None) -> int:
    """0 if every backend measured is right; 1 otherwise, and where nothing was measured."""
    arguments = parse_arguments(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        run_in_interpreters()
    choose_tables(arguments.tables)
    origin = describe_run()
    print(one_line(origin))
    if not has_gpu:
        print(f"{tables.CPU_NOTE} The JSON has them; shown is whether results are right.")
    providers, unavailable = choose_providers(arguments, has_gpu)
    sections = choose_sections(arguments, has_gpu)
    folder = default_folder(arguments, origin["gpu"]) if arguments.out is None else arguments.out
    if reason := why_not_writable(folder):
        print(f"no results can be kept there: {reason}", file=sys.stderr)
        return 1
    apart = [name for name in providers if name in ALONE and len(providers) > 1]
    here = tuple(name for name in providers if name not in apart)

    device = this_device()
    if arguments.warm or arguments.peers or arguments.grid:
        warm(here, sections, [DTYPES[name] for name in arguments.dtype], device)
    has_inductor = bool(inductor.PROVIDERS.intersection(here))
    if has_inductor:  # what was not compiled ahead
        inductor.time_by_device()
    bench = Bench(here, sections[0].ops, device)
    ceiling = bench.copy_bytes_per_second
    heading = {
        **origin,
        "copy_gb_per_s": None if ceiling is None else round(ceiling / 1e9, 1),
        "note": None if has_gpu else tables.CPU_NOTE,
        "is_grid": arguments.grid,
        "is_block": all(op in BLOCK_OPS for section in sections for op in section.ops),
        "widths": arguments.widths,
        "inductor_timer": has_inductor,
        "unavailable": unavailable,
    }
    return 0 if measure_dtypes(arguments, bench, heading, sections, apart, folder) else 1


def measure_dtypes(
    arguments: argparse.Namespace,
    bench: Bench,
    heading: Result,
    sections: list[Section],
    apart: list[str],
    folder: Path,
) -> bool:
    """Measures and keeps a result of each dtype; whether every backend measured is right. apart: the providers that are
    measured in processes of their own."""
    here, is_good = bench.providers, True
    ops = tuple(op for section in sections for op in section.ops)
    kind = "" if arguments.part or kind_of(heading) == "models" else f"-{kind_of(heading)}"
    if arguments.share is not None:  # parts of a run do not take each other's place
        kind += "-{}-of-{}".format(*arguments.share)
    kept = []
    loss: Loss | None = None  # of this process, in which nothing runs behind it
    for dtype in arguments.dtype:
        result = {**heading, "records": []}
        path = folder / f"{heading['date'][:10]}-{dtype}{kind}.json"
        for bench.ops, shapes, without in sections:
            bench.providers = tuple(name for name in here if backend_of(name) not in without)
            if loss is not None:
                groups = [(bench.providers, shapes)]
            elif loss := measure_all(bench, shapes, dtype, result, path):
                groups = left_by(loss, bench.providers, shapes)
            else:
                groups = []
            if loss is not None and arguments.part:
                tables.write_json(result | {"lost": loss}, path)
                return False
            groups += [((name,), shapes) for name in apart]
            measure_others(groups, here, bench.ops, dtype, result)
        if not any(record["us"] is not None for record in result["records"]):
            print(f"nothing was measured: {why_nothing(result, (*here, *apart), ops)}", file=sys.stderr)
            is_good = False
        if result["records"]:
            is_good &= publish(result, path)
            kept.append(result)
        elif arguments.part:  # whoever asked for it is to know why
            lacks = {name: lack(name, ops) for name in (*here, *apart)}
            result["unavailable"] = heading["unavailable"] | lacks
            tables.write_json(result, path)
    if kept and not arguments.part and heading["gpu"] is not None:
        write_page(kept, folder / html_report.NAME)
    return is_good


def write_page(results: list[Result], path: Path) -> None:
    """One page of the results of all dtypes, or a line that says why there is none."""
    if reason := html_report.why_none():
        print(f"no {path.name}: {reason}")
        return
    html_report.write(results, path)
    print(f"written: {path}")


def publish(result: Result, path: Path) -> bool:
    """Writes and prints a result; whether this package's backends are right in it."""
    plots = write(result, path)
    costs = levels.summary(result)
    print("\n\n".join(["", tables.by_op(result), compare.summary(result), *costs, *differences(result)]))
    print(f"\nwritten: {path} and .csv{', and plots of ' * bool(plots)}{', '.join(plots)}")
    return not any(each["error"] and backend_of(each["provider"]) in BACKENDS for each in result["records"])


def why_nothing(result: Result, providers: tuple[str, ...], ops: tuple[str, ...]) -> str:
    """Why a result has no figure."""
    reasons = tables.failures(result) or [lack(name, ops) for name in providers]
    return "; ".join([*reasons, *(f"{name}: {reason}" for name, reason in result["unavailable"].items())])


def lack(provider: str, ops: tuple[str, ...]) -> str:
    return f"{provider} has no {' or '.join(ops)}"


def choose_providers(arguments: argparse.Namespace, has_gpu: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Who is measured, and why others are not."""
    unavailable: dict[str, str] = {}
    if arguments.provider is not None or arguments.grid:
        wanted = GRID_PROVIDERS if arguments.provider is None else arguments.provider
    else:
        unavailable = why_not_measured()
        wanted = default_providers(unavailable, arguments, has_gpu)
        libraries = block_peers.LIBRARIES if has_many_cells(arguments) else LIBRARIES
        wanted += (MAX_AUTOTUNE, *libraries) if arguments.peers else ()
    if arguments.levels:
        wanted += tuple(name for name, (backend, _) in LEVELLED.items() if backend in wanted)
    unavailable |= {name: reason for name in wanted if (reason := why_missing(name))}
    return tuple(name for name in wanted if name not in unavailable), unavailable


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description = "Checks every backend against float64, then times it."
    parser = argparse.ArgumentParser(prog="bench/run.sh", description=description)
    names, add = ", ".join, parser.add_argument
    add("--shapes", type=some_shapes, help="ROWSxCOLS,...; default: see bench/measure/shapes.py")
    add("--dtype", type=options.some_of(DTYPES), default=("bfloat16",), help=f"of {names(DTYPES)}")
    default = "the backends that run here and PyTorch's own"
    who = f"of {names(ALL_PROVIDERS)}; default: {default}"
    add("--provider", type=options.some_of(ALL_PROVIDERS), help=who)
    add("--peers", action="store_true", help=f"also {names((MAX_AUTOTUNE, *LIBRARIES))}")
    usual = f"{names(GRID_PROVIDERS)} unless --provider says otherwise"
    add("--grid", action="store_true", help=f"the shapes of the heat maps; {usual}")
    add("--warm", action="store_true", help="compile in many processes first; --peers and --grid do it")
    beside = "what a transformer block asks for beside the plain norm"
    add("--block", action="store_true", help=f"{beside}: {names(BLOCK_OPS)}")
    ops = f"of {names(OPS)}, {names((*BLOCK_OPS, *GROUPS))}"
    drawn = "widths drawn by the seed, wide rows and heads, plain, with a residual and with a bias"
    add(
        "--widths",
        type=int,
        metavar="SEED",
        help=f"{drawn}; of float32 widths that are no multiple of 8 alone",
    )
    add("--share", type=some_share, metavar="K/N", help="of --widths the K-th of N shares")
    add("--op", type=some_ops, help=f"{ops}; default: the first {len(OPS)}, or those of --block, --widths")
    parts = "--quick, --shapes, --share, --op or --provider"
    where = f"bench/results/GPU/, and bench/results/partial/GPU/, which git ignores, with {parts}"
    add("--out", type=options.path, help=f"folder of the results; default: {where}")
    tuned = "tuned settings, which count before those that ship; default: TILEGYM_RMSNORM_CACHE_DIR, or none"
    add("--tables", type=tables_folder, metavar="FOLDER", help=f"of {tuned}")
    add("--quick", action="store_true", help="a few shapes only")
    # Of processes.py: a lost CUDA context ends the run, whose result says so.
    add("--part", action="store_true", help=argparse.SUPPRESS)
    add("--levels", action="store_true", help=f"also {names(LEVELLED)}, of the backends that are measured")
    add("--p-rows", action="store_true", help=f"also {ROW_PARTIALS}: a partial row per input row")
    arguments = parser.parse_args(argv)
    if (arguments.levels or LEVELLED.keys() & (arguments.provider or ())) and get_reproducible() != "run":
        parser.error(f"--levels: expected the level 'run' in effect, got {get_reproducible()!r}")
    if arguments.widths is None and arguments.share is not None:
        parser.error("--share: expected --widths SEED beside it")
    if arguments.widths is not None:
        if arguments.shapes or arguments.block or arguments.grid:
            parser.error("--widths: expected none of --shapes, --block and --grid beside it")
        if len(arguments.dtype) > 1:  # which have other rows
            parser.error(f"--widths: expected one --dtype, got {names(arguments.dtype)}")
        if not choose_sections(arguments, has_gpu=True):
            parser.error("--widths: --op and --share leave nothing to measure")
    return arguments


def some_share(text: str) -> widths.Share:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected K/N with K of 1 to N, got {text}")
    return widths.Share(int(number), int(count))


def some_ops(text: str) -> tuple[str, ...]:
    """Ops by their names, or by that of a group."""
    found = options.some_of((*ALL_OPS, *GROUPS))(text)
    return tuple(dict.fromkeys(op for name in found for op in GROUPS.get(name, (name,))))


def some_shapes(text: str) -> tuple[Shape, ...]:
    """`parse_shapes`, with an error whose text argparse shows."""
    try:
        return parse_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tables_folder(text: str) -> Path:
    folder = options.path(text)
    if not folder.is_dir():  # which would choose nothing, without a word
        raise argparse.ArgumentTypeError(f"expected a folder, got {text}")
    return folder


def default_folder(arguments: argparse.Namespace, gpu: str | None) -> Path:
    """Choose a folder: a run of a part must not replace the kept one of its day."""
    ops = BLOCK_OPS if arguments.block else OPS if arguments.widths is None else widths.OPS
    has_all_ops = arguments.op is None or set(arguments.op) == set(ops)
    is_part = any(each is not None for each in (arguments.shapes, arguments.provider, arguments.share))
    is_partial = arguments.quick or is_part or not has_all_ops or get_reproducible() != "run"
    return (RESULTS / "partial" if is_partial else RESULTS) / gpu_slug(gpu)


def choose_sections(arguments: argparse.Namespace, has_gpu: bool) -> list[Section]:
    """List the measurements: plain ops at the same shapes, and those of each family of block/ at its own."""
    ops = arguments.op
    if arguments.widths is not None:
        share, is_quick = arguments.share, arguments.quick
        found = widths.sections(arguments.widths, arguments.dtype[0], share, is_quick, has_gpu)
        return [each for each in (section.only(ops) for section in found) if each.ops]
    if ops is None:
        ops = BLOCK_OPS if arguments.block else GRID_OPS if arguments.grid else OPS
    sections = []
    for family, of_family in by_family(ops):
        shapes = arguments.shapes or default_shapes(family, arguments, has_gpu)
        without = () if family is None or arguments.provider is not None else family.without
        sections.append(Section(tuple(op for op in ops if op in of_family), shapes, without))
    return sections


def default_shapes(family: Family | None, arguments: argparse.Namespace, has_gpu: bool) -> tuple[Shape, ...]:
    if family is None:
        every, quick, on_cpu = DEFAULT_SHAPES, QUICK_SHAPES, CPU_SHAPES
    else:
        every, quick, on_cpu = family.shapes, family.quick_shapes, family.cpu_shapes
    if not has_gpu:
        return on_cpu[:1] if arguments.quick else on_cpu
    return GRID if arguments.grid and family is None else quick if arguments.quick else every


def why_not_measured() -> dict[str, str]:
    """The backends that cannot run on this machine, with the reason and the remedy."""
    return {
        name: f"{unusable.reason}. To mend it: {unusable.remedy}"
        for name in BACKENDS
        if (unusable := registry.why_unusable(name))
    }


def default_providers(
    without: dict[str, str], arguments: argparse.Namespace, has_gpu: bool
) -> tuple[str, ...]:
    """The backends with kernels alone, of a run with many cells: no page and no gate asks for the others."""
    wanted = KERNELS if has_many_cells(arguments) else BACKENDS
    backends = [name for name in wanted if name not in without]
    if arguments.p_rows and not has_many_cells(arguments) and "cutile" in backends:
        backends.append(ROW_PARTIALS)
    # On a CPU torch.compile would compile C++ for half a minute, of which no figure is shown.
    return (*backends, *(BASELINES if has_gpu else ("F.rms_norm",)))


def has_many_cells(arguments: argparse.Namespace) -> bool:
    return arguments.block or arguments.widths is not None


def measure_all(
    bench: Bench, shapes: tuple[Shape, ...], dtype: str, result: Result, path: Path
) -> Loss | None:
    """Adds the records of every shape to the result, and writes it to PATH after each: a run may be cut off.

    None, or what broke the CUDA context: of that shape only the record of who did it is there, of those behind none.
    """
    with tqdm(shapes, unit="shape", dynamic_ncols=True) as bar:
        for shape in bar:
            label = f"{dtype} {shape[0]}x{shape[1]}"
            progress = functools.partial(_show, bar, label)
            loss = None
            try:
                records = bench.measure(shape, DTYPES[dtype], progress)
            except ContextLostError as lost:
                loss = Loss(lost.provider, shape, lost.text)
                records = lost_records(loss, bench.ops, dtype, result["records"])
            result["records"] += records
            if result["records"]:
                tables.write_json(result, path)
            for line in tables.failures({"records": records}):
                tqdm.write(f"failed: {line}")
            if loss is not None:
                return loss
    return None


def _show(bar: tqdm, label: str, step: str) -> None:
    bar.set_description(f"{label} {step}", refresh=sys.stderr.isatty())  # a log file gets a line per shape


if __name__ == "__main__":
    sys.exit(main())
