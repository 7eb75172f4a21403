# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What override_aten adds on the host to a call that it declines, by the reason.

    python -m bench.studies.declined

A call of aten's op is timed with the override and without it, in turn. The kernel below the override does nothing, so
that the difference is the override's: to be asked, to decide, and to call that kernel. The least of all samples counts,
since other work on the machine can only add.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch", "tabulate", "tqdm")

import argparse
import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

import tilegym_rmsnorm as tr
from bench.measure.provenance import describe_run, one_line
from bench.measure.session import run_in_interpreters, this_device
from bench.studies.traced import default_backend
from tilegym_rmsnorm.commands.options import positive
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, Override
from tilegym_rmsnorm.measure.timer import wall_sampler

CALLS = 200  # of a sample: no kernel is launched, and no queue fills


class Case(NamedTuple):
    """A call of an op that is declined: why, and of which tensor that is so."""

    op: str
    reason: str
    tensor: str
    arguments: tuple[Any, ...]
    backend: str = "cutile"


def cases(device: torch.device) -> list[Case]:
    make = functools.partial(torch.ones, device=device)
    x, weight, dy, rstd = make(4, 64), make(64), make(4, 64), make(4, 1)
    shared = [torch._lazy_clone(each.clone()) for each in (weight, dy, rstd)]  # until they are written
    shape, mask = [64], [True, True]
    forwards = [
        ("dtype", "x", (x.double(), shape, weight.double(), 1e-6)),
        ("eps", "", (x, shape, weight, -1.0)),
        ("backend", "", (x, shape, weight, 1e-6), "torch"),
        ("memory", "x without rows", (x[:0], shape, weight, 1e-6)),
        ("shape", "weight", (x, shape, weight[:1], 1e-6)),
        ("memory", "weight", (x, shape, shared[0], 1e-6)),
    ]
    backwards = [
        ("dtype", "x", (dy.double(), x.double(), shape, rstd.double(), weight.double(), mask)),
        ("backend", "", (dy, x, shape, rstd, weight, mask), "torch"),
        ("memory", "x without rows", (dy[:0], x[:0], shape, rstd[:0], weight, mask)),
        ("shape", "weight", (dy, x, shape, rstd, weight[:1], mask)),
        ("shape", "dy", (dy[:1], x, shape, rstd, weight, mask)),
        ("shape", "rstd", (dy, x, shape, rstd[:1], weight, mask)),
        ("memory", "weight", (dy, x, shape, rstd, shared[0], mask)),
        ("memory", "dy", (shared[1], x, shape, rstd, weight, mask)),
        ("memory", "rstd", (dy, x, shape, shared[2], weight, mask)),
    ]
    return [
        Case(op, *each)
        for op, of_op in ((ATEN_FORWARD, forwards), (ATEN_BACKWARD, backwards))
        for each in of_op
    ]


@contextlib.contextmanager
def kernels_that_do_nothing(device: torch.device) -> Iterator[None]:
    """For both ops at the device's key."""
    results = torch.ones(4, 64, device=device), torch.ones(4, 1, device=device)
    key = {"cuda": "CUDA", "cpu": "CPU"}[device.type]
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that a kernel is overridden
        for op in (ATEN_FORWARD, ATEN_BACKWARD):
            library.impl(op, lambda *_: results, key, allow_override=True)
        yield


@contextlib.contextmanager
def as_on_a_gpu(override: Override) -> Iterator[None]:
    """Where a CPU's override asks in every call whether an interpreter is switched on, a GPU's remembers."""
    patch = override._patch
    assert patch is not None
    before, patch.device_type = patch.device_type, "cuda"
    try:
        yield
    finally:  # else nobody would take the patch away
        patch.device_type = before


def added(case: Case, device: torch.device, samples: int) -> tuple[float, float]:
    """Microseconds of a call without the override, and how many it adds. RuntimeError where the reason is another."""
    call = functools.partial(getattr(torch.ops.aten, case.op).default, *case.arguments)
    sample, warm = (wall_sampler([call] * calls) for calls in (CALLS, CALLS // 10))
    without, with_it = [], []
    with torch.no_grad():
        for _ in range(samples):
            warm()
            without.append(sample())
            with (
                default_backend(case.backend),
                tr.override_aten(device.type) as override,
                as_on_a_gpu(override),
            ):
                warm()
                with_it.append(sample())
                counts = override.stats[case.op]
            if {reason for reason, count in counts.items() if count} != {case.reason}:
                raise RuntimeError(f"{case.op}: expected {case.reason!r}, counted {counts}")
    return min(without), min(with_it) - min(without)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.declined",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=positive, default=60)
    arguments = parser.parse_args(argv)
    device = this_device()
    if device.type == "cpu":
        run_in_interpreters()
    print(one_line(describe_run()), end="\n\n")
    with kernels_that_do_nothing(device):
        rows = [
            (*case[:3], *(f"{us:.1f}" for us in added(case, device, arguments.samples)))
            for case in cases(device)
        ]
    headers = "op", "reason", "of", "us without the override", "us added"
    print(tabulate(rows, headers, disable_numparse=True, colalign=["left"] * 3 + ["right"] * 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
