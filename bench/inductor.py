# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""How Inductor times the kernels between which it chooses: here by the GPU's time alone, one process after the other.

Its own timer records an event, calls, and records another, and goes on while the GPU empties its L2. Where the host
takes longer for that than the GPU, the host's time is what it compares, and short kernels look alike. In kept results
a forward of 131072x64 takes 80 us, by a block for each row, and 13 us by other choices of other runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilegym_rmsnorm.timer import FLUSH_BYTES

PROVIDERS = frozenset(("inductor", "torch.compile", "torch.compile-max-autotune"))  # whose kernels it chooses
MOST_ROUNDS, FEWEST_ROUNDS = 25, 5
MOST_SECONDS = 0.025  # of a kernel's rounds, as far as FEWEST_ROUNDS are fewer
CYCLES_PER_SECOND = 2e9  # at least the clock of a GPU: to wait longer does no harm
ANOTHER_RESULT = frozenset(
    ("quantiles", "return_mode", "grad_to_none")
)  # what such a caller asks is not a median


def time_by_device(lock: Path | None = None) -> None:
    """Gives Inductor, in this process, this timer. lock: the file that processes hold while they measure."""
    try:
        from torch._inductor.runtime.benchmarking import benchmarker
    except ImportError:
        return
    own = type(benchmarker).benchmark

    def benchmark(fn: Callable[..., object], *arguments: object, **options: object) -> object:
        with held(lock):
            is_plain = not arguments and torch.device(options.get("device") or "cpu").type == "cuda"
            if is_plain and ANOTHER_RESULT.isdisjoint(options):
                with contextlib.suppress(Exception):  # Inductor knows which failures mean: not this kernel
                    return device_milliseconds(fn)
            return own(benchmarker, fn, *arguments, **options)

    benchmarker.benchmark = benchmark


def device_milliseconds(call: Callable[[], object]) -> float:
    """The GPU's time of a call from a cold L2, median. The GPU waits until the host has asked for all of them."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def ask() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        call()
        end.record()
        return start, end

    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    ask()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole = time.perf_counter() - begin
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(MOST_SECONDS / whole)))
    torch.cuda._sleep(int(2 * rounds * host * CYCLES_PER_SECOND))
    pairs = [ask() for _ in range(rounds)]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


@contextlib.contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """While no other process holds this file; None: at once."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
