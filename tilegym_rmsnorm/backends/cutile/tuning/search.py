# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The search for the fastest config of a bucket that is right: time all, time the best again, check in that order.

Most of its time cuda-tile compiles, on one core. So several processes may search, each another bucket, and take turns
on the GPU (workers.py): what runs there does so in `Search.turn`, and compiles before, while CUDA graphs are captured.

`cuda.tile.tune.exhaustive_search` does not fit. It times one kernel of fixed arguments, launch by launch. A backward is
two kernels or more that overlap by programmatic dependent launch, a config decides their grids and temporary rows, and
small calls take less than the launches around them. So whole calls are timed, through the same classes that serve
users, by the timer of the benchmark: in CUDA graphs, with a cold L2, the candidates in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import MOST_LOSS, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.tables import Entry, Timing
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine
from tilegym_rmsnorm.backends.cutile.tuning.candidates import with_other_shares
from tilegym_rmsnorm.measure import accuracy
from tilegym_rmsnorm.measure.timer import (
    SAMPLING_SECONDS,
    DeviceTimer,
    Sampler,
    calls_needed,
    interleave,
    sets_needed,
)
from tilegym_rmsnorm.reference import compute_rms_norm_rstd_torch

EPS = 1e-6
# Bytes of x, at most, where large problems are timed. At the last alone a config won that was 2 % slower at twice as
# many (backward of 8192 columns on an H100); at the last two, on an H200, teams of 32768 columns by 96 % of the blocks,
# whose longest walk at twice as many is 66 rows instead of 63.
LARGE = (256 * 2**20, 128 * 2**20, 64 * 2**20)
FINALISTS = 6  # are timed again, for longer
VARIED = 3  # of the fastest, by as many variants as they have
SPREAD = 1.01  # two timings of one config in one process differ by about as much
FIRST_SPREAD = 1.03  # in the first round, which is shorter: five samples each
RUNS, DATA_SETS = 200, 8  # of the check; one kernel that raced was wrong in a single run of 40
OVERLAPPING = 6  # calls with each data set that follow one another; of RUNS each waits for NaN to be written

RESULTS = {"forward": ("y", "rstd"), "backward": ("dx", "dw"), "dx": ("dx",)}

Times = dict[Config, tuple[float, ...]]  # microseconds at each M of the bucket
Run = Callable[
    [Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]
]  # x, dy, weight, rstd -> RESULTS of its op
Tell = Callable[[str], None]
Turn = AbstractContextManager[object]
ALONE: Turn = contextlib.nullcontext()


class NothingRightError(RuntimeError):
    """No candidate computes what it should, the config of the rules included."""


def rows_of(bucket: Bucket) -> tuple[int, ...]:
    """The numbers of rows at which a bucket's configs are timed: of a large class the largest powers of two with at
    most LARGE bytes, else the most there are, an eighth of that and, of few rows, an eighth of that too. They are of
    the class, and multiples of 16 where they are more than 16 and the class has one.

    Powers of two, since batches of sequences mostly are.
    """
    rows = rows_of_class(bucket.size, bucket.n)
    bytes_of_row = bucket.n * ITEMSIZE[bucket.dtype]
    parts = {
        "large": tuple(power_of_two(most // bytes_of_row // 2 + 1) for most in LARGE),
        "small": (rows[-1], rows[-1] // 8),
    }
    wanted = parts.get(bucket.size, (rows[-1], rows[-1] // 8, rows[-1] // 64))
    return tuple(dict.fromkeys(_aligned(max(m, rows.start), rows) for m in wanted))


def weight_dtype_of(bucket: Bucket) -> torch.dtype:
    return torch.float32 if bucket.weight == FLOAT32 else getattr(torch, bucket.dtype)


def _aligned(m: int, rows: range) -> int:
    """The multiple of 16 up to m, or else the next one, if it is in `rows`; m itself if that is at most 16."""
    below = m // 16 * 16
    candidates = (below, below + 16) if m > 16 else ()
    return next((each for each in candidates if each in rows), m)


def choose(
    configs: list[Config],
    measure: Callable[[list[Config], float], Times],
    why_wrong: Callable[[Config], str | None],
    tell: Tell,
    variants: Callable[[Config], list[Config]] = lambda config: [],
    most_loss: float = SPREAD,
) -> tuple[Config, Times]:
    """The fastest config that is right, and its times. configs[0] is the one of the rules: another takes its place only
    if it is faster by more than the spread in the mean over all M, and takes more than most_loss times as long at none.

    measure(configs, seconds) times those that run, for so many seconds each and M: all of them, and the variants of the
    fastest; then the fastest of both and the rules' again. why_wrong is asked in the order of speed, until a config is
    right; where none of the fastest is, the rules' is next. Raises NothingRightError where none is.
    """
    default = configs[0]
    first, most_first_loss = measure(configs, 0.0), most_loss * FIRST_SPREAD / SPREAD
    fastest = _rank(first, default, most_first_loss)[:VARIED]
    known = {dataclasses.replace(config, reason="", spills="") for config in first}
    others = {
        each: None
        for config in fastest
        for each in variants(config)
        if dataclasses.replace(each, reason="", spills="") not in known
    }
    if others:
        first |= measure(list(others), 0.0)
    first_ranking = _rank(first, default, most_first_loss)
    # Half of the places are for those that already stay below most_loss: the others may all be found above it.
    sure = _rank(first, default, most_loss)[: FINALISTS // 2]
    finalists = list(dict.fromkeys([*sure, *first_ranking]))[:FINALISTS]
    if default in first and default not in finalists:
        finalists.append(default)
    times = measure(finalists, SAMPLING_SECONDS)
    ranking = _rank(times, default, most_loss)
    if default in times and mean(times[default]) <= SPREAD * mean(times[ranking[0]]):
        ranking.insert(0, default)
    for config in dict.fromkeys([*ranking, *first_ranking]):
        if (reason := why_wrong(config)) is None:
            return config, times if config in times else first
        tell(f"rejected {config}: {reason}")
    raise NothingRightError(f"none of {len(configs)} configs is right")


def _rank(times: Times, default: Config, most_loss: float) -> list[Config]:
    """By the mean over all M. Last those that take more than most_loss times as long as the default at any M."""

    def rank(config: Config) -> tuple[bool, float]:
        pairs = zip(times[config], times.get(default, times[config]), strict=True)
        return any(own > most_loss * rules for own, rules in pairs), mean(times[config])

    return sorted(times, key=rank)


def mean(times: Iterable[float]) -> float:
    """The geometric mean: a tenth gained counts alike at every M."""
    times = tuple(times)
    return math.exp(sum(map(math.log, times)) / len(times))


class Search:
    """The search of one device.

    turn: held while the device works, by a lock that the processes of a search share.
    """

    def __init__(self, machine: Machine, device: torch.device, tell: Tell, turn: Turn = ALONE) -> None:
        self.machine, self.device, self.tell, self.turn = machine, device, tell, turn
        with self.turn:
            self.timer = DeviceTimer(device)
            is_cuda = device.type == "cuda"
            self.copy_bytes_per_second = self.timer.copy_bytes_per_second() if is_cuda else 1e9

    def tune(self, bucket: Bucket, configs: list[Config]) -> Entry:
        """The entry of a bucket, chosen from configs, of which the first is the one of the rules."""
        rows = rows_of(bucket)

        def measure(some: list[Config], seconds: float) -> Times:
            columns = [self.times_at(m, bucket, some, seconds) for m in rows]
            return {
                config: tuple(c[config] for c in columns)
                for config in some
                if all(config in c for c in columns)
            }

        def why_wrong(config: Config) -> str | None:
            with self.turn:
                return self.why_wrong(bucket, config)

        variants = functools.partial(with_other_shares, bucket=bucket)
        config, times = choose(configs, measure, why_wrong, self.tell, variants, MOST_LOSS[bucket.size])
        before = times.get(configs[0], times[config])
        figures = zip(rows, before, times[config], strict=True)
        return Entry(config, tuple(Timing(m, round(a, 3), round(b, 3)) for m, a, b in figures))

    def times_at(self, m: int, bucket: Bucket, configs: list[Config], seconds: float) -> dict[Config, float]:
        """Microseconds a call takes with m rows, of those configs that run."""
        dtype = getattr(torch, bucket.dtype)
        bytes_x = m * bucket.n * dtype.itemsize
        bytes_read, bytes_moved = (
            (bytes_x, 2 * bytes_x) if bucket.op == "forward" else (2 * bytes_x, 3 * bytes_x)
        )
        sets = sets_needed(bytes_read, self.device)
        count = calls_needed(sets, bytes_moved, self.copy_bytes_per_second)
        with self.turn:
            x, dy = (torch.randn(sets, m, bucket.n, dtype=dtype, device=self.device) for _ in range(2))
            # Of each set its own, as in the benchmark and of each layer: or else they come from L2
            weight_dtype = weight_dtype_of(bucket)
            weights = [torch.ones(bucket.n, dtype=weight_dtype, device=self.device) for _ in range(sets)]
            rstds = [torch.ones(m, device=self.device) for _ in range(sets)]
            inputs = list(zip(x, dy, weights, rstds, strict=True))
            self.synchronize()

        self.timer.renew_pool()
        samplers: dict[Config, Sampler] = {}
        for config in configs:
            try:
                run = runner(self.machine, bucket, config)
                calls = [functools.partial(run, *inputs[i % sets]) for i in range(count)]
                samplers[config] = self.timer.cold_sampler(calls)
            except Exception as error:  # whatever the compiler or a launch says of a config
                self.tell(f"does not run: {config}: {error!r:.300}")
        with self.turn:
            for sample in samplers.values():
                sample()
            return {config: timing.us for config, timing in interleave(samplers, seconds).items()}

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def why_wrong(self, bucket: Bucket, config: Config) -> str | None:
        """Why a config is not to be trusted, None if it is: RUNS runs on NaN, the first with each data set against
        float64, the others against its bits, and then OVERLAPPING calls on memory as it comes. Every other set has an
        odd M, for which other kernels are compiled, and a float32 weight, whose gradient hides nothing (so all have
        where the bucket's is float32)."""
        run, overlapping = (
            runner(machine, bucket, config) for machine in (Poisoned(self.machine), self.machine)
        )
        rows, dtype = rows_of(bucket), getattr(torch, bucket.dtype)
        fewest = rows_of_class(bucket.size, bucket.n).start
        names = RESULTS[bucket.op]
        for seed in range(DATA_SETS):
            m, is_odd = rows[seed // 2 % len(rows)], seed % 2
            x, dy, weight = _data(max(fewest, m - 3 * is_odd), bucket.n, dtype, self.device, seed)
            if is_odd or bucket.weight == FLOAT32:
                weight = weight.float()
            rstd = compute_rms_norm_rstd_torch(x, EPS)
            outputs = dict(zip(names, run(x, dy, weight, rstd), strict=True))
            errors, allowed = accuracy.errors_of({"": outputs}, x, dy, weight, EPS)
            if (reason := accuracy.why_wrong(errors[""], allowed)) is not None:
                return f"{x.shape[0]} x {bucket.n}: {reason}"
            for number in range(1, RUNS // DATA_SETS):
                again = run(x, dy, weight, rstd)
                if not all(map(torch.equal, again, outputs.values())):
                    return f"{x.shape[0]} x {bucket.n}: run {number} has other bits than the first"
            for again in [overlapping(x, dy, weight, rstd) for _ in range(OVERLAPPING)]:
                if not all(map(torch.equal, again, outputs.values())):
                    return f"{x.shape[0]} x {bucket.n}: one of calls that follow one another has other bits"
        return None


class Poisoned:
    """A machine whose new arrays hold NaN, so that what a kernel fails to write cannot look right."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        array = self._machine.empty(shape, dtype)
        return array.fill_(math.nan) if dtype.is_floating_point else array.fill_(torch.iinfo(dtype).max)


def runner(machine: Machine, bucket: Bucket, config: Config) -> Run:
    """What runs a bucket's op by a config, as launch.py does it for users."""
    if bucket.op == "forward":
        forward = launch.Forward(machine, config, bucket.n, True, False)
        return lambda x, dy, weight, rstd: forward(x, weight, EPS, 0.0)
    results = len(RESULTS[bucket.op])  # without dw the second is None
    backward = launch.Backward(machine, config, bucket.n, True, bucket.op == "backward", False)
    return lambda x, dy, weight, rstd: backward(x, dy, weight, rstd, 0.0)[:results]


def _data(
    m: int, n: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy (M, N) and weight (N,) that tell wrong from right: rows of different scale, an outlier column."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    x = normal(m, n) * normal(m, 1).exp()
    x[:, n // 3] *= 8
    return x.to(dtype), normal(m, n).to(dtype), (normal(n) * 0.5 + 1.5).to(dtype)
