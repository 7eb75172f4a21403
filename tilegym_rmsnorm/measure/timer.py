# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The one timer: device microseconds per call, host microseconds per eager call, and the copy ceiling.

Device time, on a GPU: `calls` (each over its own inputs) are captured into one CUDA graph, every replay is timed by
events, and the time is divided by the calls in it: no host time. The L2 is cold: the inputs of one replay overflow it
(see `sets_needed`), outputs are kept alive during capture so that no two calls write to the same memory, and a copy
of FLUSH_BYTES runs before each replay. The samples of all providers are taken in turn, so that a drift of the clocks
hits all of them alike.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Name = TypeVar("Name")  # whatever tells samplers apart
Sampler = Callable[[], float]  # takes one sample and returns microseconds per call

COPY_BYTES = 256 << 20
FLUSH_BYTES = COPY_BYTES  # over four times the L2 of an H100; takes longer than to launch the replay after it
L2_OVERFLOW = 4
REPLAY_SECONDS = 2e-3  # a replay is at least this long, so that its own launch (about 5 us) is below 0.5 %
MAX_CALLS = 1024  # of a graph; tiny shapes reach it before they overflow the L2: the copy empties it for them
HOST_CALLS = 16  # of one host sample: few enough that the queue of about 1000 launches never fills and blocks
MIN_SAMPLES, MAX_SAMPLES = 5, 31
SAMPLING_SECONDS = 0.06  # for each provider and op


@dataclass(frozen=True)
class Timing:
    """Median and spread of some samples, in microseconds."""

    us: float
    us_p10: float
    us_p90: float
    samples: int


def summarize(samples: Sequence[float]) -> Timing:
    if len(samples) < 2:
        raise ValueError(f"samples: expected at least 2, got {len(samples)}")
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), deciles[0], deciles[-1], len(samples))


def interleave(samplers: dict[Name, Sampler], seconds: float = SAMPLING_SECONDS) -> dict[Name, Timing]:
    """One sample of each in turn, round after round; each leaves once it has used `seconds` and has MIN_SAMPLES."""
    samples: dict[Name, list[float]] = {name: [] for name in samplers}
    used = dict.fromkeys(samplers, 0.0)
    for _ in range(MAX_SAMPLES):
        for name, sample in samplers.items():
            if used[name] >= seconds and len(samples[name]) >= MIN_SAMPLES:
                continue
            start = time.perf_counter()
            samples[name].append(sample())
            used[name] += time.perf_counter() - start
    return {name: summarize(values) for name, values in samples.items()}


def sets_needed(bytes_read: int, device: torch.device) -> int:
    """Count distinct sets of `bytes_read` that overflow the L2 L2_OVERFLOW times; at least 2."""
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_CALLS, max(2, math.ceil(L2_OVERFLOW * l2_bytes / bytes_read)))


def calls_needed(sets: int, bytes_moved: int, copy_bytes_per_second: float) -> int:
    """Count the calls of a replay of REPLAY_SECONDS at the copy ceiling: a multiple of `sets`, at most MAX_CALLS."""
    floor_seconds = bytes_moved / copy_bytes_per_second + 2e-6  # no kernel takes less than about 2 us
    cycles = math.ceil(REPLAY_SECONDS / floor_seconds / sets)
    return max(1, min(cycles, MAX_CALLS // sets)) * sets


class DeviceTimer:
    """Builds samplers of device time, on a GPU from CUDA graphs.

    Graphs made between two calls of `renew_pool` share one memory pool, since only one of them runs at a time and
    nobody reads what they write.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            self._source = torch.ones(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.empty_like(self._source)
            self._stream = torch.cuda.Stream(device)
            self.renew_pool()

    def renew_pool(self) -> None:
        """Start a new memory pool: torch refuses one whose last graph is gone."""
        if self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()

    def sampler(self, calls: Sequence[Call]) -> Sampler:
        """A sampler of the mean device time of `calls`, already warm."""
        sample = self.cold_sampler(calls)
        sample()
        return sample

    def cold_sampler(self, calls: Sequence[Call]) -> Sampler:
        """A sampler whose first sample is worth nothing. Nothing has run on the GPU before that, although kernels that
        were never launched are compiled now."""
        if self.device.type != "cuda":
            return wall_sampler(calls)
        graph = self._capture(calls)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            self._target.copy_(self._source)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / len(calls)

        return sample

    def copy_bytes_per_second(self) -> float:
        """Device memory's rate for a copy of COPY_BYTES, bytes read and written: the ceiling of this run."""
        pairs = [
            (self._source, self._target),
            (torch.ones_like(self._source), torch.empty_like(self._source)),
        ]
        calls = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs * 6]
        timing = interleave({"copy": self.sampler(calls)}, seconds=0.2)["copy"]
        self.renew_pool()
        return 2 * COPY_BYTES / (timing.us * 1e-6)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """One graph of all calls. As torch.cuda.graph does it, but the stream is left when the capture fails too."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                # relaxed: a kernel's first launch loads it; and what other threads of the process do meanwhile must not
                # spoil the capture, nor the garbage of other libraries, whose kernels unload when it is collected
                with _no_collection():
                    graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                    try:
                        outputs = [call() for call in calls]  # kept, so that no call reuses another's memory
                    finally:
                        graph.capture_end()
        except BaseException:
            self._abandon_pool()
            raise
        del outputs
        return graph

    def _abandon_pool(self) -> None:
        # Before torch 2.12 a failed capture_end leaves the allocator recording into the pool, and every later capture
        # then dies of "captures_underway.empty()" (pytorch#180395).
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        except RuntimeError:
            pass  # it was not recording any more: the graph itself gives the pool back
        else:
            torch._C._cuda_releasePool(self.device.index, self._pool)
        self.renew_pool()


def wall_sampler(calls: Sequence[Call]) -> Sampler:
    """A sampler of wall-clock time per call, for machines without a GPU."""

    def sample() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6 / len(calls)

    return sample


def host_sampler(call: Call, device: torch.device) -> Sampler:
    """A sampler of the time the host spends in one eager call: HOST_CALLS of them with no synchronisation inside.

    The device's own work does not count: it starts idle, and the calls of one sample fit in its launch queue.
    """

    def sample() -> float:
        torch.cuda.synchronize(device)
        with _no_collection():
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            return (time.perf_counter() - start) * 1e6 / HOST_CALLS

    return sample


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile; afterwards it is as before, whatever was raised."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
