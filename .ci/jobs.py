# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Runs the jobs of ci.yaml. `.ci/run` makes the environment and calls this; see there for the command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
PYTEST_SUMMARY = re.compile(r"\d+ (passed|failed|errors?|skipped|deselected)\b.* in \d+\.\d+s")


class Job(NamedTuple):
    name: str
    needs: str
    timeout_minutes: float
    commands: list[str]
    by_name: bool = False  # takes long: runs only where it is named


class Result(NamedTuple):
    job: str
    outcome: str  # "passed", "failed: COMMAND", "skipped: REASON"
    seconds: float
    pytest_summary: str | None

    @property
    def is_failure(self) -> bool:
        return self.outcome.startswith("failed")


def load_jobs() -> list[Job]:
    """The jobs of ci.yaml, in its order. A key that is missing or unknown is a TypeError."""
    entries = yaml.safe_load((ROOT / "ci.yaml").read_text(encoding="utf-8"))["jobs"]
    return [Job(name, **entry) for name, entry in entries.items()]


def why_skipped(job: Job, is_asked_for: bool) -> str | None:
    """Why a job does not run, None if it does."""
    if job.by_name and not is_asked_for:
        return f"takes up to {job.timeout_minutes:g} minutes, runs by name only: bash .ci/run {job.name}"
    has, reason = NEEDS[job.needs]
    return None if has() else reason


@functools.cache
def has_gpu() -> bool:
    """Whether PyTorch sees a CUDA device; asked in a process of its own, so that this one holds no CUDA context."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def has_index() -> bool:
    """Whether pip can get what pyproject.toml says that a wheel is built with."""
    options = ["--quiet", "--no-deps", "--retries=0", "--timeout=10"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "setuptools>=77"]
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def has_mkdocs() -> bool:
    """Whether the extra docs is installed."""
    return all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers"))


# What a job may need, how that is asked, and why the job is skipped without it.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "nothing": (lambda: True, ""),
    "gpu": (has_gpu, "needs a GPU"),
    "index": (has_index, "needs an index of packages that pip can reach"),
    "mkdocs": (has_mkdocs, "needs MkDocs: pip install '.[docs]'"),
}


def run_job(job: Job) -> Result:
    """Run a job's commands until one fails or its time is over."""
    print(f"\n=== {job.name}", flush=True)
    start = time.monotonic()
    outcome, summary = "passed", None
    for command in job.commands:
        print(f"+ {command}", flush=True)
        left = job.timeout_minutes * 60 - (time.monotonic() - start)
        failure, last_summary = run_command(command, left)
        summary = last_summary or summary
        if failure:
            outcome = f"failed: {command}: {failure}"
            break
    return Result(job.name, outcome, time.monotonic() - start, summary)


def run_command(command: str, seconds: float) -> tuple[str | None, str | None]:
    """Run a command, passing its output on. Returns why it failed, if it did, and pytest's summary line, if any."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a group of its own, so that the time limit ends pytest's workers too
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(seconds, 0), end)
    timer.start()
    summary = None
    for line in process.stdout:
        print(line, end="", flush=True)
        if PYTEST_SUMMARY.search(line):
            summary = line.rstrip()
    status = process.wait()
    timer.cancel()
    if is_late.is_set():
        return "over its time limit", summary
    return (f"exit status {status}" if status else None), summary


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=".ci/run",
        description="Run the jobs of ci.yaml that this machine can run and that do not take long.",
    )
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help="only these, long ones too; one that cannot run here fails"
    )
    parser.add_argument(
        "--list", action="store_true", help="name the jobs and whether they run here, run none"
    )
    arguments = parser.parse_args()
    jobs = load_jobs()
    known = [job.name for job in jobs]
    if unknown := set(arguments.jobs) - set(known):
        parser.error(f"unknown job {', '.join(sorted(unknown))}; known: {', '.join(known)}")

    results = []
    for job in jobs:
        if arguments.jobs and job.name not in arguments.jobs:
            continue
        if reason := why_skipped(job, job.name in arguments.jobs):
            print(f"{job.name}: skipped: {reason}", flush=True)
            results.append(Result(job.name, f"skipped: {reason}", 0, None))
        elif arguments.list:
            print(f"{job.name}: runs here", flush=True)
        else:
            results.append(run_job(job))
    if arguments.list:
        return 0

    print("\n=== summary")
    for result in results:
        print(f"{result.job}: {result.outcome}" + (f" ({result.seconds:.0f} s)" if result.seconds else ""))
    for result in results:
        if result.pytest_summary:
            print(result.pytest_summary)
    is_refused = bool(arguments.jobs) and any(result.outcome.startswith("skipped") for result in results)
    return int(is_refused or any(result.is_failure for result in results))


if __name__ == "__main__":
    sys.exit(main())
