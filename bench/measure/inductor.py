# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Timing of the kernels between which Inductor chooses: by the GPU's time alone, one process after the other.

Its own timer records an event, calls, and records another, while the GPU empties its L2. A host that is slower than the
GPU at that measures itself, and short kernels look alike. So it once chose a float32 forward of 131072x64 that takes
80.3 us, where 23.2 is to be had (NOTES.md). timer.py's CUDA graphs would not hold its launches, which go to the stream
that was current before.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilegym_rmsnorm.measure.timer import FLUSH_BYTES

PROVIDERS = frozenset(("torch.compile", "torch.compile-max-autotune"))  # whose kernels it chooses
# Part of the names in its caches on disk: choices made by its own timer are not found there. As this module was once
# called: another text would make every cache that is there useless.
CACHE_TAG = "timed by bench.inductor"
TAG_VARIABLE = "TORCH_COMPILE_CACHE_KEY_TAG"  # that tag of processes that this one starts
MOST_ROUNDS, FEWEST_ROUNDS = 25, 5
MOST_SECONDS = 0.025  # of a kernel's rounds, unless FEWEST_ROUNDS take longer
CYCLES_PER_SECOND = 3e9  # more than any GPU's clock: to wait too long costs time alone
MOST_WAITS = 6  # each twice as long as the one before
# Calls with these are left to Inductor: arguments of the call, or another result than one time.
NOT_PLAIN = frozenset(("fn_args", "fn_kwargs", "quantiles", "return_mode", "grad_to_none"))
_is_held = False  # by this process


def time_by_device(lock: Path | None = None) -> None:
    """Gives Inductor, in this process, this timer. lock: the file that processes hold while they measure."""
    try:
        from torch._inductor import config
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch.compiler import config as caches
    except ImportError:
        return
    # Where Inductor has worker processes, they name the files of its choices, by the tag that they were started with.
    caches.cache_key_tag = os.environ[TAG_VARIABLE] = CACHE_TAG
    # Those that began before have another tag, and none is to work while this process measures.
    config.compile_threads = 1
    _name_no_script_in_keys()
    own = type(benchmarker).benchmark

    def benchmark(fn: Callable[..., object], *arguments: object, **options: object) -> object:
        with held(lock):
            is_plain = not arguments and NOT_PLAIN.isdisjoint(options)
            if is_plain and torch.device(options.get("device") or "cpu").type == "cuda" and _runs(fn):
                return device_milliseconds(fn)
            return own(benchmarker, fn, *arguments, **options)

    benchmarker.benchmark = benchmark


def _name_no_script_in_keys() -> None:
    """So that one process finds on disk what another has compiled.

    Keys are pickled, and pickle names torch's memory formats by the first module that has a `torch`: a spawned
    process's `__mp_main__`, else a module of torch's. On an H200 max-autotune compiled 29 shapes anew for that, in 132
    s; now twice as many settings take 17 s.
    """
    if (script := sys.modules.pop("__mp_main__", None)) is not None:
        sys.modules["__mp_main__"] = script  # the last of them


def _runs(call: Callable[[], object]) -> bool:
    """Whether a call raises nothing. Inductor itself knows what means: not this kernel."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def device_milliseconds(call: Callable[[], object]) -> float:
    """The GPU's time of a call from a cold L2, median. The call has run before. The GPU waits until the host has asked
    for all of them; where it did not wait long enough, that is repeated."""
    flushed = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def ask() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        call()
        end.record()
        return start, end

    torch.cuda.synchronize()
    begin = time.perf_counter()
    ask()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole = time.perf_counter() - begin
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(MOST_SECONDS / whole)))
    for wait in range(MOST_WAITS):
        torch.cuda._sleep(int(2 ** (wait + 1) * rounds * host * CYCLES_PER_SECOND))
        pairs = [ask() for _ in range(rounds)]
        has_begun = pairs[0][0].query()
        torch.cuda.synchronize()
        if not has_begun:
            break
    else:
        _warn_of_the_host()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


@functools.cache  # once for a process, of whose kernels any may be concerned
def _warn_of_the_host() -> None:
    warnings.warn(
        f"The GPU began before the host had asked for all calls, also when it waited {2**MOST_WAITS} times as long as "
        "those took at first: the host's time is in what Inductor compares, and its choices may be bad ones",
        RuntimeWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """While no other process holds this file; at once without one, or where this process holds it already."""
    global _is_held
    if lock is None or _is_held:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _is_held = True
        try:
            yield
        finally:
            _is_held = False
