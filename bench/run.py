# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark's command line; `bench/run.sh` calls it. See bench/README.md for what is measured and how."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import readme, report
from bench.measure import Bench, ContextLostError
from bench.plots import plot_result
from bench.provenance import RESULTS, ROOT, describe_run, gpu_slug, one_line
from bench.providers import BACKENDS, BASELINES, PROVIDERS, ROW_PARTIALS
from bench.shapes import CPU_QUICK_SHAPES, CPU_SHAPES, DEFAULT_SHAPES, OPS, QUICK_SHAPES, Shape, parse_shapes
from tilegym_rmsnorm import registry

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: list[str] | None = None) -> int:
    """0 if every backend measured is right; 1 otherwise."""
    arguments = parse_arguments(argv)
    if arguments.readme:
        refresh_readme(arguments.readme)
        return 0
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        run_in_interpreters()
    origin = describe_run()
    print(one_line(origin))
    if not has_gpu:
        print(report.CPU_NOTE)
    unavailable = {} if arguments.provider else why_not_measured()
    providers = arguments.provider or default_providers(unavailable, arguments.p_rows, has_gpu)
    shapes = arguments.shapes or default_shapes(arguments.quick, has_gpu)
    folder = arguments.out or default_folder(arguments, origin["gpu"])

    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    bench = Bench(providers, arguments.op, device)
    ceiling = bench.copy_bytes_per_second
    is_good = True
    for dtype in arguments.dtype:
        result = {
            **origin,
            "copy_gb_per_s": None if ceiling is None else round(ceiling / 1e9, 1),
            "note": None if has_gpu else report.CPU_NOTE,
            "unavailable": unavailable,
            "records": [],
        }
        stem = folder / f"{origin['date'][:10]}-{dtype}"
        lost = measure_all(bench, shapes, dtype, result, stem)
        print(f"\n{report.tables(result)}")
        report.write_csv(result, stem.with_name(f"{stem.name}.csv"))
        plots = plot_result(result, stem)
        print(f"\nwritten: {stem}.json, .csv and plots of {', '.join(plots)}")
        is_good &= not any(each["error"] and each["provider"] in BACKENDS for each in result["records"])
        if lost is not None:
            print(f"stopped: the CUDA context was lost by {lost}", file=sys.stderr)
            return 1
    return 0 if is_good else 1


def run_in_interpreters() -> None:
    """Makes kernels run as Python. Triton reads its variable when it is imported, which nothing has done yet."""
    os.environ.setdefault("TILEGYM_RMSNORM_INTERPRET", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.sh", description="Checks every backend against float64, then times it."
    )
    names = ", ".join
    parser.add_argument("--shapes", type=some_shapes, help="ROWSxCOLS,...; default: see bench/shapes.py")
    parser.add_argument("--dtype", type=one_of(DTYPES), default=("bfloat16",), help=f"of {names(DTYPES)}")
    parser.add_argument(
        "--provider",
        type=one_of(PROVIDERS),
        help=f"of {names(PROVIDERS)}; default: all that run here but P=M",
    )
    parser.add_argument("--op", type=one_of(OPS), default=OPS, help=f"of {names(OPS)}; default: all")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results; default: bench/results/GPU/, and bench/results/partial/GPU/, which git ignores, "
        "with --quick, --shapes, --op or --provider",
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument(
        "--p-rows", action="store_true", help=f"also {ROW_PARTIALS}: a partial row per input row"
    )
    parser.add_argument(
        "--readme",
        type=readme.result_file("records"),
        nargs="+",
        metavar="JSON",
        help="measure nothing: put results into README.md",
    )
    return parser.parse_args(argv)


def one_of(known: Any) -> Any:
    """A parser of comma-separated names out of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if wrong := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(wrong)}")
        return chosen

    return parse


def some_shapes(text: str) -> tuple[Shape, ...]:
    """`parse_shapes`, with an error whose text argparse shows."""
    try:
        return parse_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def default_folder(arguments: argparse.Namespace, gpu: str | None) -> Path:
    """Where results go: a run of a part must not replace the kept one of its day."""
    is_partial = arguments.quick or arguments.shapes or arguments.provider or set(arguments.op) != set(OPS)
    return (RESULTS / "partial" if is_partial else RESULTS) / gpu_slug(gpu)


def default_shapes(is_quick: bool, has_gpu: bool) -> tuple[Shape, ...]:
    if has_gpu:
        return QUICK_SHAPES if is_quick else DEFAULT_SHAPES
    return CPU_QUICK_SHAPES if is_quick else CPU_SHAPES


def why_not_measured() -> dict[str, str]:
    """The backends that cannot run on this machine, with the reason and the remedy."""
    return {
        name: f"{unusable.reason}. To mend it: {unusable.remedy}"
        for name in BACKENDS
        if (unusable := registry.why_unusable(name))
    }


def default_providers(unavailable: dict[str, str], has_row_partials: bool, has_gpu: bool) -> tuple[str, ...]:
    backends = [name for name in BACKENDS if name not in unavailable]
    if has_row_partials and "cutile" in backends:
        backends.append(ROW_PARTIALS)
    # On a CPU torch.compile would show the same C++ as "inductor", for another half minute of compiling.
    return (*backends, *(BASELINES if has_gpu else ("F.rms_norm",)))


def measure_all(
    bench: Bench, shapes: tuple[Shape, ...], dtype: str, result: dict[str, Any], stem: Path
) -> str | None:
    """Adds the records of every shape to the result, and writes STEM.json after each: a run may be cut off.

    None, or what broke the CUDA context, which ends the run.
    """
    path = stem.with_name(f"{stem.name}.json")
    with tqdm(shapes, unit="shape", dynamic_ncols=True) as bar:
        for shape in bar:
            label = f"{dtype} {shape[0]}x{shape[1]}"
            progress = functools.partial(_show, bar, label)
            try:
                records = bench.measure(shape, DTYPES[dtype], progress)
            except ContextLostError as lost:
                return str(lost)
            result["records"] += records
            report.write_json(result, path)
            for line in report.failures({"records": records}):
                tqdm.write(f"failed: {line}")
    return None


def _show(bar: tqdm, label: str, step: str) -> None:
    bar.set_description(f"{label} {step}", refresh=sys.stderr.isatty())  # a log file gets a line per shape


def refresh_readme(paths: list[Path]) -> None:
    """Puts the tables of these results, and the plots beside them, into README.md."""
    sections = []
    for path in paths:
        images = {op: path.with_name(f"{path.stem}-{op}.png").resolve() for op in OPS}
        links = {op: image.relative_to(ROOT).as_posix() for op, image in images.items() if image.exists()}
        sections.append(report.readme_section(json.loads(path.read_text()), links))
    readme.refresh(ROOT / "README.md", "bench", "\n\n".join(sections))


if __name__ == "__main__":
    sys.exit(main())
