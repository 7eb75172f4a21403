# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The host's time: of small eager calls, in slices, and of the first call of a width.

    python -m bench.studies.host                         microseconds of the host per eager call, ours and F.rms_norm
    python -m bench.studies.host --first-call 4096 5120  seconds of the first call, compiled and from the disk cache

Calls are timed as in timer.py: 16 without synchronisation between them. "empty" is a torch.autograd.Function that
computes nothing: what any Python function pays. On a GPU the backward of all three also pays for autograd's own thread.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require("torch")

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure.provenance import ROOT, choose_tables, describe_run, one_line
from bench.measure.session import this_device
from bench.measure.shapes import DTYPES
from bench.providers.ours import EPS
from tilegym_rmsnorm import rms_norm, rms_norm_forward, settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.call.layout import bound
from tilegym_rmsnorm.commands.options import positive
from tilegym_rmsnorm.measure.timer import host_sampler, wall_sampler
from tilegym_rmsnorm.ops.norm.passes import KNOWN, norm_call
from tilegym_rmsnorm.ops.norm.spec import NORM_OPS, Spec, Wanted

OTHER_WIDTH = 96  # what a process compiles before its first call is timed, so that nothing else is new to it


class Empty(torch.autograd.Function):
    """Takes, saves and returns what RMSNorm does, all of it made before."""

    @staticmethod
    def forward(ctx, x, weight, results):  # type: ignore[override]
        y, rstd, ctx.gradients = results
        ctx.save_for_backward(x, weight, rstd)
        return y.detach()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        return *ctx.gradients, None


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device, dtype = this_device(), DTYPES[arguments.dtype]
    if arguments.child:
        print(*first_calls(arguments.first_call[0], dtype, arguments.backend, device))
        return 0
    request = registry.Request(device, dtype, dtype, "once")
    if unusable := registry.why_unusable(arguments.backend, request):
        print(f"{arguments.backend}: {unusable.reason}. To mend it: {unusable.remedy}", file=sys.stderr)
        return 1
    choose_tables()
    print(one_line(describe_run()))
    if arguments.first_call:
        for n in arguments.first_call:
            print_first_calls(n, arguments)
        return 0
    for leading in ((arguments.rows,), (2, arguments.rows // 2)):
        print_calls((*leading, arguments.columns), request, arguments)
    print_slices((arguments.rows, arguments.columns), request, arguments)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=positive, default=16)
    parser.add_argument("--columns", type=positive, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--backend", choices=settings.AUTO_ORDER, default="cutile")
    parser.add_argument("--samples", type=positive, default=400)
    parser.add_argument("--first-call", type=positive, nargs="+", metavar="N", default=[])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.samples < 2:
        parser.error("--samples: expected at least 2, of which there are percentiles, got 1")
    return arguments


def print_calls(size: tuple[int, ...], request: registry.Request, arguments: argparse.Namespace) -> None:
    """The table of whole calls."""
    device, dtype = request.device, request.dtype
    x, dy = (torch.randn(size, dtype=dtype, device=device) for _ in range(2))
    x.requires_grad_()
    weight = torch.nn.Parameter(torch.ones(size[-1], dtype=dtype, device=device))
    shape = (size[-1],)
    rstd = torch.empty(x.numel() // size[-1], device=device)
    results = (torch.empty_like(x), rstd, (torch.empty_like(x), torch.empty_like(weight)))
    norms = {
        arguments.backend: lambda: rms_norm(x, shape, weight, EPS, backend=arguments.backend),
        "F.rms_norm": lambda: F.rms_norm(x, shape, weight, EPS),
        "empty": lambda: Empty.apply(x, weight, results),
    }
    print(f"\n{'us, median (10 %)':34s}" + "".join(f"{name:>20s}" for name in norms) + f"   {size} {dtype}")
    rows = {"forward": norms, "forward, no_grad": {name: without_grad(norm) for name, norm in norms.items()}}
    outputs = {name: norm() for name, norm in norms.items()}
    rows["backward"] = {
        name: lambda y=y: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        for name, y in outputs.items()
    }
    rows["backward, the node alone"] = {name: node_alone(y, dy) for name, y in outputs.items()}
    rows["both"] = {
        name: lambda norm=norm: torch.autograd.grad(norm(), (x, weight), dy) for name, norm in norms.items()
    }
    for label, calls in rows.items():
        timings = sample_in_turn(list(calls.values()), arguments.samples, device)
        print(f"{label:34s}" + "".join(f"{median:12.1f} ({low:5.1f})" for low, median in timings))


def print_slices(size: tuple[int, int], request: registry.Request, arguments: argparse.Namespace) -> None:
    """The parts of our own calls."""
    n, device, dtype = size[1], request.device, request.dtype
    x, dy = (torch.randn(size, dtype=dtype, device=device) for _ in range(2))
    weight = torch.ones(n, dtype=dtype, device=device)
    spec, numbers = Spec(n, EPS, 0.0, "once"), ((n,), EPS, 0.0, "once", 1.0, None, None)
    rms_norm(x.clone().requires_grad_(), (n,), weight, EPS, backend=arguments.backend)
    _, rstd = rms_norm_forward(x, weight, EPS, backend=arguments.backend)
    forward, backward = (registry.dispatch(op, request, arguments.backend) for op in NORM_OPS)

    tensors, to_backward = (x, weight, None, None), (x, dy, weight, rstd, None)
    bound_forward = bound(forward, spec, tensors)
    bound_backward = bound(backward, spec, to_backward, Wanted(dtype, dw=dtype))

    def find():
        return KNOWN.find(norm_call(tensors, numbers, arguments.backend))

    def run_forward():
        return bound_forward(tensors)

    def run_backward():
        return bound_backward(to_backward)

    slices = {
        "find a known call": find,
        "torch.empty of y": lambda: torch.empty(size, dtype=dtype, device=device),
        "forward below autograd": run_forward,
        "backward below autograd": run_backward,
    }
    if arguments.backend == "cutile" and device.type == "cuda":
        from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

        machine = machine_of(device)
        slices["allocate y"] = lambda: machine.empty(size, dtype)
        slices["forward without ct.launch"] = without_launches(run_forward)
        slices["backward without ct.launch"] = without_launches(run_backward)
    print()
    with torch.no_grad():
        timings = sample_in_turn(list(slices.values()), arguments.samples, device)
    for label, (low, median) in zip(slices, timings, strict=True):
        print(f"{label:34s}{median:12.1f} ({low:5.1f})")


def node_alone(y: Tensor, dy: Tensor) -> Callable[[], object]:
    """The backward of what made y, without the rest of autograd. y is its first output."""
    node = y.grad_fn
    # A Python function's node has `apply`. ATen's own is called itself, with a gradient for each output: of its fused
    # kernel, which GPUs have, rstd is one.
    others = [None] * (len(node._input_metadata) - 1)
    return without_grad(functools.partial(getattr(node, "apply", node), dy, *others))


def without_grad(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def without_launches(call: Callable[[], object]) -> Callable[[], object]:
    """`call` while kernels are not launched; putting ct.launch back and forth costs 0.2 us of the figure."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    launch = machine.launch_kernel

    def run() -> None:
        machine.launch_kernel = _launch_nothing
        try:
            call()
        finally:
            machine.launch_kernel = launch

    return run


def _launch_nothing(*_: object, **__: object) -> None:
    pass


def sample_in_turn(
    calls: list[Callable[[], object]], samples: int, device: torch.device
) -> list[tuple[float, float]]:
    """(10th percentile, median) of each call's microseconds, sampled in turn."""
    samplers, is_cuda = [], device.type == "cuda"
    for call in calls:
        for _ in range(3):
            call()
        samplers.append(host_sampler(call, device) if is_cuda else wall_sampler([call] * 16))
    taken = [[sampler() for sampler in samplers] for _ in range(samples)]
    columns = list(zip(*taken, strict=True))
    return [
        (statistics.quantiles(column, n=10, method="inclusive")[0], statistics.median(column))
        for column in columns
    ]


def print_first_calls(n: int, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for what in ("compiled", "from the disk cache"):
            command = [sys.executable, "-m", "bench.studies.host", "--child", "--first-call", str(n)]
            command += ["--dtype", arguments.dtype, "--backend", arguments.backend]
            environment = {**os.environ, "CUDA_TILE_CACHE_DIR": cache}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"N = {n}, {what}:\n{done.stderr}")
            forward, backward = map(float, done.stdout.split()[-2:])
            took = f"forward {forward:5.2f} s   backward {backward:5.2f} s"
            print(f"N = {n:6d} {arguments.dtype}  {what:20s} {took}")


def first_calls(n: int, dtype: torch.dtype, backend: str, device: torch.device) -> tuple[float, float]:
    """Seconds of the first forward and the first backward of this width, in a process that has run another."""
    for width in (OTHER_WIDTH, n):
        x = torch.randn(4096, width, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(width, dtype=dtype, device=device, requires_grad=True)
        dy = torch.randn_like(x)
        with timed(device) as forward:
            y = rms_norm(x, (width,), weight, EPS, backend=backend)
        with timed(device) as backward:
            torch.autograd.grad(y, (x, weight), dy)
    return forward[0], backward[0]


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    seconds: list[float] = []
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    yield seconds
    wait()
    seconds.append(time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
