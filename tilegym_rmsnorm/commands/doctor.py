# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`python -m tilegym_rmsnorm doctor`: list what this machine has, which backends work, and what mends the others.

Exit status 0 only if the best backend possible on this machine works: cutile where there is an NVIDIA GPU of an
architecture that it supports, triton where there is another GPU, torch, which "auto" takes for CPU tensors, where there
is none. A GPU that the driver shows and PyTorch does not see counts, unless CUDA_VISIBLE_DEVICES hides every GPU on
purpose. Where a GPU counts, the kernels must run on it: the variables that run them as Python over CPU tensors are
ignored.

A broken installation may raise anything, so every question is guarded by itself and the rest still gets an answer.
Kernels run in a process for each backend: a crash, or a CUDA context that a fault has spoiled, stays in there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tilegym_rmsnorm
from tilegym_rmsnorm import functional, settings
from tilegym_rmsnorm.backends import cutile, registry
from tilegym_rmsnorm.commands import installation
from tilegym_rmsnorm.ops.norm import reference

ROWS, COLUMNS, EPS = 37, 320, 1e-6
# Largest error over largest value, against float64. The backends make up to 3e-7 in float32; a column left out of the
# mean shows as 4e-3 in y, a row left out of dw as 3e-1.
TOLERANCE = 1e-5
INTERPRETERS = (cutile.INTERPRET_VARIABLE, "TRITON_INTERPRET")
ON_CPU = "torch"  # what "auto" takes there
WITHOUT_GPU = (
    "No GPU is seen here: the kernels of cutile and triton need one, or their interpreters. "
    f'For CPU tensors "auto" takes {ON_CPU}, plain PyTorch, and it'
)
KERNEL_SECONDS = 300  # compiling takes a few: a process that is not done by then hangs


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine and what mends the rest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--backend",
        type=_backend,
        choices=settings.AUTO_ORDER,
        help="run only this backend's kernels, with the traceback of a failure",
    )
    parser.set_defaults(run=run)


def _backend(name: str) -> str:
    try:
        settings.check_name("backend", name, settings.AUTO_ORDER)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("backend: ")) from None
    return name


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit status, 141 where who read it left early, as `doctor | head` does."""
    with without_interpreters() as ignored:
        try:
            status = _report(arguments, ignored)
            sys.stdout.flush()
        except BrokenPipeError:
            # The rest of the output goes nowhere, or Python would complain about the pipe as it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141  # 128 and SIGPIPE, which Windows does not name
        return status


@contextlib.contextmanager
def without_interpreters() -> Iterator[list[str]]:
    """Hide the variables that let a backend work without a GPU, where there is one; yield those that were set."""
    ignored = {name: os.environ[name] for name in INTERPRETERS if name in os.environ}
    if not installation.visible_gpus():
        ignored = {}
    for name in ignored:
        del os.environ[name]
    try:
        yield list(ignored)
    finally:
        os.environ.update(ignored)


def _report(arguments: argparse.Namespace, ignored: list[str]) -> int:
    wrong = None
    try:
        settings.kernel_limits()
    except ValueError as error:
        wrong = str(error)
    if arguments.backend:
        result = run_kernels(arguments.backend) if wrong is None else {"works": False, "reason": wrong}
        print(json.dumps(result) if arguments.json else result.get("traceback") or _describe(result))
        return 0 if result["works"] else 1

    show = (lambda line: None) if arguments.json else (lambda line: print(line, flush=True))
    show(f"tilegym_rmsnorm {tilegym_rmsnorm.__version__}\n\nmachine")
    facts = installation.describe()
    if ignored:
        facts["ignored here"] = f"{' and '.join(ignored)}: kernels must run on the GPU"
    if unknown := settings.unknown_variables():
        facts["environment"] = f"{unknown}, which changes nothing"
    for name, fact in facts.items():
        show(f"  {name:<16} {fact}")
    best = best_possible_backend()
    backends: dict[str, dict[str, Any]] = {}
    if wrong is None:
        problem = _report_backends(best, backends, show)
        works = backends[best]["works"] and problem is None
    else:  # whatever works here, no call gets there
        works, problem = (
            False,
            f"calls fail: {wrong}. To mend it: unset this variable, or set it to a known value.",
        )
        show(f"\nBefore all else, {problem}")
    if arguments.json:
        report = {
            "works": works,
            "problem": problem,
            "best_possible": best,
            "machine": facts,
            "backends": backends,
        }
        print(json.dumps(report, indent=2))
    return 0 if works else 1


def _report_backends(
    best: str, backends: dict[str, dict[str, Any]], show: Callable[[str], None]
) -> str | None:
    """Run each backend's kernels, and show and store what they say. Return why calls that name none fail, or None."""
    has_gpu = best != ON_CPU
    show(f"\nbackends, fastest first{'' if has_gpu else ' on a GPU'}")
    for name in settings.AUTO_ORDER:
        backends[name] = check_backend(name)
        show(f"  {name:<16} {_describe(backends[name], is_by_name=not has_gpu and name != ON_CPU)}")
        if not backends[name]["works"]:
            show(f"  {'':<16} to mend it: {backends[name]['remedy']}")
    verdict = f"The best backend possible on this machine is {best}, and it" if has_gpu else WITHOUT_GPU
    show(f"\n{verdict} {'works' if backends[best]['works'] else 'does not work'}.")
    if problem := default_problem(backends):
        show(f"But {problem}")
    return problem


def default_problem(backends: dict[str, dict[str, Any]]) -> str | None:
    """Why calls that name no backend fail all the same, and what to do; None where they do not."""
    mend = f"unset {settings.BACKEND_VARIABLE}, or set it to a backend that works here, or auto"
    try:
        name = settings.get_current_backend()
    except ValueError as error:
        return f"calls that name no backend fail: {error}. To mend it: {mend}."
    if name == "auto" or backends[name]["works"]:
        return None
    reason = backends[name]["reason"]
    return f"calls that name no backend ask for {name}, which does not work: {reason}. To mend it: {mend}."


def best_possible_backend() -> str:
    """The fastest backend that could work on this machine once everything it needs is installed."""
    gpus = installation.visible_gpus()
    if not gpus:
        return ON_CPU
    return "cutile" if any(gpu.architecture in cutile.ARCHITECTURES for gpu in gpus) else "triton"


def check_backend(backend: str) -> dict[str, Any]:
    """Whether a backend works here: asks it, then runs its kernels in another process."""
    try:
        unusable = registry.why_unusable(backend)
    except Exception as error:  # whatever a broken installation raises
        return _failure(backend, error)
    if unusable is not None:
        return {"works": False, "reason": unusable.reason, "remedy": unusable.remedy}
    return run_kernels_apart(backend)


def run_kernels_apart(backend: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tilegym_rmsnorm", "doctor", "--backend", backend, "--json"]
    package_root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    remedy = f"see {' '.join(['python', *command[1:-1]])}"
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=KERNEL_SECONDS,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {"works": False, "reason": f"its kernels took more than {KERNEL_SECONDS} s", "remedy": remedy}
    try:
        return json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        code = answer.returncode
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return {"works": False, "reason": f"its process ended {end}: {last}", "remedy": remedy}


def run_kernels(backend: str) -> dict[str, Any]:
    """Run a backend's forward and backward on a small problem and compare them with the reference in float64."""
    start = time.perf_counter()
    try:
        device, errors = kernel_errors(backend)
    except Exception as error:  # whatever a broken installation raises
        return _failure(backend, error)
    result = {"device": device, "errors": errors, "seconds": round(time.perf_counter() - start, 2)}
    # NaN is wrong too.
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]
    if wrong:
        remedy = "compare versions with constraints.txt, run tests/run.sh, and report what it says"
        return {"works": False, "reason": f"wrong results: {', '.join(wrong)}", "remedy": remedy, **result}
    return {"works": True, **result}


def kernel_errors(backend: str) -> tuple[str, dict[str, float]]:
    """The device used, and the error of each result relative to its largest value."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [*(torch.device("cuda", i) for i in range(count)), torch.device("cpu")]
    requests = [registry.Request(device, torch.float32, torch.float32, "once") for device in devices]
    device = next((r.device for r in requests if registry.why_unusable(backend, r) is None), devices[0])
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
    weight = torch.rand(COLUMNS, generator=generator) + 0.5

    y, rstd = functional.rms_norm_forward(x.to(device), weight.to(device), EPS, backend=backend)
    dx, dw = functional.rms_norm_backward(
        x.to(device), dy.to(device), weight.to(device), rstd, backend=backend
    )

    exact_y, exact_rstd = reference.rms_norm_forward_torch(x.double(), weight.double(), EPS)
    exact_dx, exact_dw = reference.rms_norm_backward_torch(
        x.double(), dy.double(), weight.double(), exact_rstd
    )
    pairs: dict[str, tuple[Any, Any]] = {"y": (y, exact_y), "rstd": (rstd, exact_rstd)}
    pairs |= {"dx": (dx, exact_dx), "dw": (dw, exact_dw)}
    errors = {
        name: ((got.cpu().double() - exact).abs().max() / exact.abs().max()).item()
        for name, (got, exact) in pairs.items()
    }
    return str(device), errors


def _failure(backend: str, error: Exception) -> dict[str, Any]:
    return {
        "works": False,
        "reason": installation.one_line(error),
        "remedy": f"see the traceback: python -m tilegym_rmsnorm doctor --backend {backend}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _describe(result: dict[str, Any], is_by_name: bool = False) -> str:
    if not result["works"]:
        return f"not usable: {result['reason']}"
    errors = ", ".join(f"{name} {error:.0e}" for name, error in result["errors"].items())
    usable = "usable by name" if is_by_name else "usable"
    return f"{usable}: ran on {result['device']} in {result['seconds']} s, errors {errors}"
