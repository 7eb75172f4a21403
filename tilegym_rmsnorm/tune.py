# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`python -m tilegym_rmsnorm tune`: finds the fastest right configs of the cuTile kernels on this GPU and keeps them.

For each op, width, dtype and size class it compiles up to --candidates configs, times them, runs the fastest 200
times on 8 sets of data, each compared with float64, and writes it into the user's cache, from which every later process
takes it. What is done is kept when the command is interrupted; --skip-tuned goes on from there. Nothing else should run
on the GPU meanwhile.

The size classes: large, more than 4 Mi elements of x; of others, few, at most 1024 rows, and small, which only widths
below 4096 can be.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilegym_rmsnorm import registry
from tilegym_rmsnorm.backends.cutile import candidates, tables
from tilegym_rmsnorm.backends.cutile.config import Config
from tilegym_rmsnorm.backends.cutile.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.tables import Bucket, Target

if TYPE_CHECKING:
    from tilegym_rmsnorm.backends.cutile.compiling import Job
    from tilegym_rmsnorm.backends.cutile.machine import Machine

Answer = Future[str | None]  # of a job: why it failed

WIDTHS = (
    *(64, 128, 256, 512, 1024, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
    *(12288, 16384, 18432, 32768, 65536),
)


def add_command(commands: Any) -> None:
    """Add `tune` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest configs on this GPU and keep them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--n", type=_widths, default=WIDTHS, metavar="N,...", help="widths; default: those of common models"
    )
    for name, known, default in (
        ("dtype", tuple(tables.ITEMSIZE), ("bfloat16",)),
        ("op", tuple(tables.RULES), tuple(tables.RULES)),
        ("size", tables.SIZES, tables.SIZES),
    ):
        text = f"of {', '.join(known)}; default: {','.join(default)}"
        parser.add_argument(f"--{name}", type=_some_of(known), default=default, help=text)
    parser.add_argument(
        "--candidates",
        type=_positive,
        default=candidates.MOST,
        metavar="COUNT",
        help="at most so many configs for each bucket; default: %(default)s",
    )
    parser.add_argument("--skip-tuned", action="store_true", help="leave out what the table has already")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the table is kept instead of the user's cache"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if every bucket got its entry, 1 otherwise."""
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    request = registry.Request(device, torch.float32, torch.float32, "once", False)
    if unusable := registry.why_unusable("cutile", request):
        return _fail(
            f"tune needs a GPU that the cuTile kernels run on: {unusable.reason}. To mend it: {unusable.remedy}"
        )
    from tilegym_rmsnorm.backends.cutile.machine import machine_of

    machine = machine_of(device)
    target = tables.target_of(machine.model, machine.architecture)
    if target is None:
        return _fail("tileiras does not say its version, and a table belongs to one")
    folder = arguments.out or tables.user_folder()
    if folder is None:
        remedy = f"set {tables.CACHE_VARIABLE}, pip install platformdirs, or name a folder by --out"
        return _fail(f"the user's cache is off. To mend it: {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _fail(f"no table can be kept there: {error}")
    if not os.access(folder, os.W_OK):
        return _fail(f"no table can be kept there: {folder} is not writable")

    buckets = [
        Bucket(op, n, dtype, size)
        for dtype in arguments.dtype
        for op in arguments.op
        for n in arguments.n
        for size in arguments.size
        if rows_of_class(size, n)
    ]
    if arguments.skip_tuned:
        done = tables.table_in(folder, target)
        buckets = [bucket for bucket in buckets if bucket not in done]
    done, failures = tune(buckets, machine, device, target, folder, arguments.candidates)
    print(f"{done} of {len(buckets)} tuned: {tables.table_path(folder, target)}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def tune(
    buckets: list[Bucket], machine: Machine, device: torch.device, target: Target, folder: Path, most: int
) -> tuple[int, list[str]]:
    """Search every bucket and store its entry at once; returns how many have one, and a line on each that has none."""
    from tilegym_rmsnorm.backends.cutile import compiling, search

    done, failures = 0, []
    bar = Progress(len(buckets))
    with compiling.Compilers(machine.architecture, machine.sm_count) as compilers:
        finder = search.Search(machine, device, bar.tell)
        queue = []
        for bucket in buckets:
            configs = candidates.candidates(bucket, tables.ITEMSIZE[bucket.dtype], machine.architecture, most)
            queue.append((bucket, configs, _compile(bucket, configs, compilers.submit)))
        for bucket, configs, answers in queue:
            bar.show(f"{bucket.op} {bucket.dtype} N = {bucket.n} {bucket.size}")
            _await(answers, bar.tell)
            try:
                entry = finder.tune(bucket, configs)
            except search.NothingRightError as error:
                failures.append(f"{bucket}: {error}")
                if lost := _context_lost(device):
                    failures.append(f"the rest: {lost}")
                    break
            else:
                tables.update(folder, target, {bucket: entry})
                done += 1
                bar.tell(_describe(bucket, entry, entry.config == configs[0]))
            bar.advance()
    bar.close()
    return done, failures


class Progress:
    """A bar of tqdm where it is installed, plain lines where not."""

    def __init__(self, total: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(total=total, unit="bucket", dynamic_ncols=True)
        self.total, self.done = total, 0

    def show(self, what: str) -> None:
        if self.bar is not None:
            self.bar.set_description(what, refresh=sys.stderr.isatty())  # a log file gets a line per bucket

    def tell(self, line: str) -> None:
        if self.bar is None:
            print(f"[{self.done}/{self.total}] {line}", flush=True)
        else:
            self.bar.write(line)

    def advance(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _compile(bucket: Bucket, configs: list[Config], submit: Callable[[Job], Answer]) -> list[Answer]:
    """Have the candidates of a bucket compiled for every M at which they are timed."""
    from tilegym_rmsnorm.backends.cutile.compiling import Job
    from tilegym_rmsnorm.backends.cutile.search import rows_of

    op, n, dtype = bucket.op, bucket.n, getattr(torch, bucket.dtype)
    return [submit(Job(op, n, m, dtype, dtype, config)) for config in configs for m in rows_of(bucket)]


def _await(answers: list[Answer], tell: Callable[[str], None]) -> None:
    """Wait until all is compiled. What failed is tried again by the search, which says then what it is about."""
    reasons = [repr(error) if (error := each.exception()) else each.result() for each in answers]
    reasons = [reason for reason in reasons if reason is not None]
    if reasons:
        tell(
            f"{len(reasons)} of {len(answers)} jobs could not be compiled ahead; the first: {reasons[0]:.300}"
        )


def _context_lost(device: torch.device) -> str | None:
    """Why nothing more can run in this process, after a kernel that broke its CUDA context; None if it can."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the CUDA context is lost: {error}"
    return None


def _describe(bucket: Bucket, entry: tables.Entry, is_default: bool) -> str:
    figures = ", ".join(f"M = {t.m}: {t.us:.1f} us, by the rules {t.us_rules:.1f}" for t in entry.timings)
    what = "the rules' config" if is_default else str(entry.config)
    return f"{bucket.op} {bucket.dtype} N = {bucket.n} {bucket.size}: {figures}; {what}"


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def _some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names out of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        if wrong := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(wrong)}")
        return chosen

    return parse


def _widths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(item) for item in text.split(",")))


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
