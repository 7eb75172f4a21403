# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The search for the fastest variant that is right for a bucket: time all, time the best again, check in that order.

Most of its time cuda-tile compiles, on one core. So several processes may search, each another bucket, and take turns
on the GPU (workers.py): what runs there does so in `Search.turn`, and compiles before, while CUDA graphs are captured.

`cuda.tile.tune.exhaustive_search` does not fit. It times one kernel of fixed arguments, launch by launch. A backward is
two kernels or more that overlap by programmatic dependent launch, a variant decides their grids and temporary rows, and
small calls take less than the launches around them. So whole calls are timed, through the same classes that serve
users, by the timer of the benchmark: in CUDA graphs, with a cold L2, the candidates in turn.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.records import Record
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, power_of_two
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine
from tilegym_rmsnorm.backends.cutile.tuning import calls
from tilegym_rmsnorm.backends.cutile.tuning.candidates import with_other_shares
from tilegym_rmsnorm.measure.timer import SAMPLING_SECONDS, DeviceTimer, calls_needed, interleave, sets_needed

# Bytes of x, at most, where large problems are timed. At the last alone a variant won that was 2 % slower at twice as
# many (backward of 8192 columns on an H100); at the last two, on an H200, teams of 32768 columns by 96 % of the blocks,
# whose longest walk at twice as many is 66 rows instead of 63.
LARGE = (256 * 2**20, 128 * 2**20, 64 * 2**20)
FINALISTS = 6  # are timed again, for longer
VARIED = 3  # of the fastest, by as many other shares as they have
SPREAD = 1.01  # two timings of one variant in one process differ by about as much
FIRST_SPREAD = 1.03  # in the first round, which is shorter: five samples each
# Of a variant that is taken: the largest ratio to the time of the rules', at any of the numbers of rows timed. Few rows
# are 1 to 1024, and what is best for 8 is not for 512: backward of 8192 bfloat16 columns on an H100 2.72 instead of
# 2.95 us, and 12.06 instead of 11.80.
MOST_LOSS = {"large": SPREAD, "small": SPREAD, "few": 1.03}
RUNS, DATA_SETS = 200, 8  # of the check; one kernel that raced was wrong in a single run of 40
OVERLAPPING = 6  # calls with each data set that follow one another; of RUNS each waits for NaN to be written

Times = dict[Variant, tuple[float, ...]]  # microseconds at each M of the bucket
Tell = Callable[[str], None]
Turn = AbstractContextManager[object]
ALONE: Turn = contextlib.nullcontext()


class NothingRightError(RuntimeError):
    """No candidate computes what it should, the variant of the rules included."""


def rows_of(bucket: Bucket) -> tuple[int, ...]:
    """The numbers of rows at which a bucket's variants are timed: of a large class the largest powers of two with at
    most LARGE bytes, else the most there are, an eighth of that and, of few rows, an eighth of that too. They are of
    the class, and multiples of 16 where they are more than 16 and the class has one.

    Powers of two, since batches of sequences mostly are.
    """
    rows, bytes_of_row = rows_of_class(bucket.size, bucket.n), bucket.n * ITEMSIZE[bucket.dtype]
    wanted = {
        "large": [power_of_two(most // bytes_of_row // 2 + 1) for most in LARGE],
        "small": [rows[-1], rows[-1] // 8],
        "few": [rows[-1], rows[-1] // 8, rows[-1] // 64],
    }
    return tuple(dict.fromkeys(_aligned(max(m, rows.start), rows) for m in wanted[bucket.size]))


def _aligned(m: int, rows: range) -> int:
    """The multiple of 16 up to m, or else the next one, if it is in `rows`; m itself if that is at most 16."""
    below = m // 16 * 16
    candidates = (below, below + 16) if m > 16 else ()
    return next((each for each in candidates if each in rows), m)


def choose(
    variants: list[Variant],
    measure: Callable[[list[Variant], float], Times],
    why_wrong: Callable[[Variant], str | None],
    tell: Tell,
    others_of: Callable[[Variant], list[Variant]] = lambda variant: [],
    most_loss: float = SPREAD,
) -> tuple[Variant, Times]:
    """The fastest variant that is right, and its times. variants[0] is the one of the rules: another takes its place
    only if it is faster by more than the spread in the mean over all M, and takes more than most_loss times as long at
    none.

    measure(variants, seconds) times those that run, for so many seconds each and M: all of them, and the others_of the
    fastest; then the fastest of both and the rules' again. why_wrong is asked in the order of speed, until a variant is
    right; where none of the fastest is, the rules' is next. Raises NothingRightError where none is.
    """
    default = variants[0]
    first, most_first_loss = measure(variants, 0.0), most_loss * FIRST_SPREAD / SPREAD
    fastest = _rank(first, default, most_first_loss)[:VARIED]
    others = dict.fromkeys(each for variant in fastest for each in others_of(variant) if each not in first)
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
    if default in times and geometric_mean(times[default]) <= SPREAD * geometric_mean(times[ranking[0]]):
        ranking.insert(0, default)
    for variant in dict.fromkeys([*ranking, *first_ranking]):
        if (reason := why_wrong(variant)) is None:
            return variant, times if variant in times else first
        tell(f"rejected {variant}: {reason}")
    raise NothingRightError(f"none of {len(variants)} variants is right")


def _rank(times: Times, default: Variant, most_loss: float) -> list[Variant]:
    """Sort by geometric mean over all M, where a tenth gained counts alike at each; last those that take more than
    most_loss times as long as the default at any M."""

    def rank(variant: Variant) -> tuple[bool, float]:
        pairs = zip(times[variant], times.get(default, times[variant]), strict=True)
        return any(own > most_loss * rules for own, rules in pairs), geometric_mean(times[variant])

    return sorted(times, key=rank)


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

    def tune(self, bucket: Bucket, variants: list[Variant]) -> Record:
        """The entry of a bucket, chosen from variants, of which the first is the one of the rules."""
        rows = rows_of(bucket)

        def measure(some: list[Variant], seconds: float) -> Times:
            columns = [self.times_at(m, bucket, some, seconds) for m in rows]
            ran = [variant for variant in some if all(variant in column for column in columns)]
            return {variant: tuple(column[variant] for column in columns) for variant in ran}

        def why_wrong(variant: Variant) -> str | None:
            with self.turn:
                reason = self.why_wrong(bucket, variant)
                torch.cuda.empty_cache()  # gigabytes of float64, which the next process needs
                return reason

        others_of = functools.partial(with_other_shares, bucket=bucket)
        variant, times = choose(variants, measure, why_wrong, self.tell, others_of, MOST_LOSS[bucket.size])
        before, target = times.get(variants[0], times[variant]), self.machine.facts.target
        gpu = {"gpu": target.gpu} if target else {}
        figures = zip(rows, before, times[variant], strict=True)
        evidence = tuple(gpu | {"m": m, "before": round(a, 3), "us": round(b, 3)} for m, a, b in figures)
        op, n, dtype, size, weight, form = bucket
        serves, settings = ((op,), (dtype,), (weight,), (size,), n, n), (variant.settings(),)
        return Record(*serves, variant.kernel, settings, evidence=evidence, forms=(form,), is_entry=True)

    def times_at(self, m: int, bucket: Bucket, some: list[Variant], seconds: float) -> dict[Variant, float]:
        """Microseconds a call takes with m rows, of those variants that run."""
        reads, writes = calls.rows_moved(bucket)
        bytes_x = m * bucket.n * ITEMSIZE[bucket.dtype]
        sets = sets_needed(reads * bytes_x, self.device)
        count = calls_needed(sets, (reads + writes) * bytes_x, self.copy_bytes_per_second)
        with self.turn:
            torch.cuda.empty_cache()  # the pools of graphs that are gone
            inputs = list(calls.timed_inputs(m, bucket, sets, self.device))
            self.synchronize()

        self.timer.renew_pool()
        samplers = {}
        for variant in some:
            try:
                run = calls.runner(self.machine, bucket, variant)
                in_turn = [functools.partial(run, inputs[i % sets]) for i in range(count)]
                samplers[variant] = self.timer.cold_sampler(in_turn)
            except Exception as error:  # whatever the compiler or a launch says of a variant
                self.tell(f"does not run: {variant}: {error!r:.300}")
        with self.turn:
            for sample in samplers.values():
                sample()
            return {variant: timing.us for variant, timing in interleave(samplers, seconds).items()}

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def why_wrong(self, bucket: Bucket, variant: Variant) -> str | None:
        """Why a variant is not to be trusted, None if it is: RUNS runs on NaN, the first with each data set against
        float64, the others against its bits, and then OVERLAPPING calls on memory as it comes. Every other set has an
        odd M, for which other kernels are compiled, a float32 weight and, of a forward with a residual, an alpha
        (`calls.checked_inputs`)."""
        run, overlapping = (
            calls.runner(each, bucket, variant) for each in (Poisoned(self.machine), self.machine)
        )
        rows, fewest = rows_of(bucket), rows_of_class(bucket.size, bucket.n).start
        for seed in range(DATA_SETS):
            is_odd = seed % 2
            m = max(fewest, rows[seed // 2 % len(rows)] - 3 * is_odd)
            inputs = calls.checked_inputs(m, bucket, self.device, seed)
            outputs = run(inputs)
            if (reason := calls.why_wrong(inputs, outputs)) is not None:
                return f"{m} x {bucket.n}: {reason}"
            for number in range(1, RUNS // DATA_SETS):
                if not _are_equal(run(inputs), outputs):
                    return f"{m} x {bucket.n}: run {number} has other bits than the first"
            for again in [overlapping(inputs) for _ in range(OVERLAPPING)]:
                if not _are_equal(again, outputs):
                    return f"{m} x {bucket.n}: one of calls that follow one another has other bits"
        return None


def _are_equal(outputs: calls.Outputs, others: calls.Outputs) -> bool:
    return all(torch.equal(output, others[name]) for name, output in outputs.items())


class Poisoned:
    """A machine whose new arrays hold NaN, so that what a kernel fails to write cannot look right."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        array = self._machine.empty(shape, dtype)
        return array.fill_(math.nan) if dtype.is_floating_point else array.fill_(torch.iinfo(dtype).max)
