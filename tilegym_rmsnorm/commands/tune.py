# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`python -m tilegym_rmsnorm tune`: find the fastest right settings of the cuTile kernels on this GPU and keep them.

For each op, width, dtype and size class it compiles up to --candidates variants, times them, of large backwards the
three fastest by 68 to 100 % of the blocks that fit, runs the fastest 200 times on 8 sets of data, each compared with
float64, and writes its settings into the user's cache, from which every later process takes them. Several processes
compile, one at a time uses the GPU; nothing else should run there meanwhile. An interrupted command keeps the results
it has; --skip-tuned goes on from there.

The ops: forward, backward, which is dx and dw, and dx, a backward whose weight is frozen, or that has none.

The size classes: large, more than 4 Mi elements of x; of others, few, at most 1024 rows, and small, which only widths
below 4096 can be.

The weight has x's dtype, or with --weight float32, for x of 16 bits, that one, as under autocast: those calls take
entries of their own before any rule, and before entries of a weight of x's dtype.

The forms: plain; residual; d_residual, a backward that writes the gradients of x and of the residual as two tensors, as
one with residual_alpha does; bias. An entry serves calls that have that and no more. Ops without such calls are left
out, and so are widths that no kernel takes with the form.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.plans import problem, rules
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket, Target
from tilegym_rmsnorm.backends.cutile.plans.records import Record
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder
from tilegym_rmsnorm.backends.cutile.tuning import candidates
from tilegym_rmsnorm.commands import installation, options

if TYPE_CHECKING:
    from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine

GO_ON = "To go on from there: the same command with --skip-tuned"

WIDTHS = (
    *(64, 128, 256, 512, 1024, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
    *(12288, 16384, 18432, 32768, 65536),
)


def add_command(commands: Any) -> None:
    """Add `tune` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest settings on this GPU and keep them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--n", type=_widths, default=WIDTHS, metavar="N,...", help="widths; default: those of common models"
    )
    for name, known, default in (
        ("dtype", tuple(problem.ITEMSIZE), ("bfloat16",)),
        ("op", problem.OPS, problem.OPS),
        ("size", SIZES, SIZES),
        ("weight", problem.WEIGHTS, (problem.SAME,)),
        ("form", problem.FORMS, (problem.PLAIN_ROWS,)),
    ):
        text = f"of {', '.join(known)}; default: {','.join(default)}"
        parser.add_argument(f"--{name}", type=options.some_of(known), default=default, help=text)
    parser.add_argument(
        "--candidates",
        type=options.positive,
        default=candidates.MOST,
        metavar="COUNT",
        help="at most so many variants for each bucket; default: %(default)s",
    )
    parser.add_argument(
        "--processes",
        type=options.positive,
        metavar="COUNT",
        help="compile side by side and take turns on the GPU; default: by this machine's cores and GPU memory",
    )
    parser.add_argument("--skip-tuned", action="store_true", help="leave out what the table has already")
    parser.add_argument(
        "--out",
        type=options.path,
        metavar="FOLDER",
        help="where the table is kept instead of the user's cache",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if every bucket got its entry, 1 otherwise."""
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    request = registry.Request(device, torch.float32, torch.float32, "once")
    if unusable := registry.why_unusable("cutile", request):
        return _fail(
            f"tune needs a GPU that the cuTile kernels run on: {unusable.reason}. To mend it: {unusable.remedy}"
        )
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    machine = machine_of(device)
    target = machine.facts.target
    if target is None:
        return _fail("tileiras does not say its version, and a table belongs to one")
    folder = user_folder() if arguments.out is None else arguments.out
    if folder is None:
        remedy = f"set {CACHE_VARIABLE}, pip install platformdirs, or name a folder by --out"
        return _fail(f"the user's cache is off. To mend it: {remedy}")
    if reason := installation.why_not_writable(folder):
        return _fail(f"no table can be kept there: {reason}")

    asked = arguments.form, arguments.weight, arguments.dtype, arguments.op, arguments.n, arguments.size
    buckets = [
        bucket
        for form, weight, dtype, op, n, size in itertools.product(*asked)
        if _has_calls(bucket := Bucket(op, n, dtype, size, weight, form), machine)
    ]
    if not settings.teams():
        buckets = _without_teams(buckets, machine)
    if arguments.skip_tuned:
        known = {bucket for record in tables.table_in(folder, target) for bucket in record.buckets()}
        buckets = [bucket for bucket in buckets if bucket not in known]
    done, failures = tune(buckets, machine, device, target, folder, arguments.candidates, arguments.processes)
    print(f"{done} of {len(buckets)} tuned: {tables.table_path(folder, target)}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _has_calls(bucket: Bucket, machine: Machine) -> bool:
    """Whether kernels run a call of it at all."""
    if not bucket.has_calls or not rows_of_class(bucket.size, bucket.n):
        return False
    if bucket.weight != problem.SAME and problem.ITEMSIZE[bucket.dtype] != 2:
        return False
    return rules.is_fused(bucket.problem(machine.facts))


def _without_teams(buckets: list[Bucket], machine: Machine) -> list[Bucket]:
    """Drop buckets that teams serve, by rules or entries: another kernel's entry would keep teams out of processes that
    allow them."""
    from tilegym_rmsnorm.backends.cutile.host.norm import plan_for

    kept = [bucket for bucket in buckets if plan_for(bucket.problem(machine.facts)).first.members == 1]
    if left_out := len(buckets) - len(kept):
        print(f"{left_out} buckets are left out: teams serve them, which {settings.TEAMS_VARIABLE} rules out")
    return kept


def tune(
    buckets: list[Bucket],
    machine: Machine,
    device: torch.device,
    target: Target,
    folder: Path,
    most: int,
    processes: int | None = None,
) -> tuple[int, list[str]]:
    """Search every bucket and store its entry at once; returns how many have one, and a line on each that has none."""
    from tilegym_rmsnorm.backends.cutile.tuning import workers

    done, failures = 0, []
    if processes is None:
        processes = workers.count_processes(device, len(buckets))
    bar = Progress(len(buckets))
    bar.tell(f"{len(buckets)} buckets in {processes} {'process' if processes == 1 else 'processes'}")
    try:
        for bucket, entry, lines, failure, lost in workers.search_all(buckets, device, most, processes):
            for line in lines:
                bar.tell(line)
            if entry is None:
                failures.append(failure)
            else:
                tables.update(folder, target, [entry])
                done += 1
                bar.tell(_describe(bucket, entry, machine))
            bar.advance()
            if lost:
                failures.append(f"the rest: not searched after that. {GO_ON}")
    except workers.DiedError as error:
        failures.append(f"the rest: {error}. {GO_ON}")
    except KeyboardInterrupt:
        failures.append(f"the rest: interrupted. {GO_ON}")
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


def _describe(bucket: Bucket, entry: Record, machine: Machine) -> str:
    figures = [f"M = {e['m']}: {e['us']:.1f} us, by the rules {e['before']:.1f}" for e in entry.evidence]
    variant, facts = entry.variant(bucket.n), machine.facts
    is_default = variant == candidates.by_rules(bucket, facts.architecture, facts.most_members)
    what = "the rules' settings" if is_default else str(variant)
    beside = "" if bucket.weight == problem.SAME else f" beside a {bucket.weight} weight"
    beside += "" if bucket.form == problem.PLAIN_ROWS else f", {bucket.form}"
    return f"{bucket.op} {bucket.dtype} N = {bucket.n} {bucket.size}{beside}: {', '.join(figures)}; {what}"


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def _widths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(options.positive, text.split(","))))
