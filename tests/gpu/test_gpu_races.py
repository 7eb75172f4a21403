# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Streams that race on a GPU: their kernels share SMs, and come and go in any order. No result may change a bit."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    FP32,
    Inputs,
    alignment,
    assert_within,
    expected_results,
    make_inputs,
    wait_for_the_gpu,
)
from table_cases import entries_that_ship

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.reference import compute_rms_norm_rstd_torch

pytestmark = pytest.mark.gpu

STREAMS, ROUNDS = 4, 6
RACES, MOST_TRIES = 3, 8
GATE_CYCLES = 40_000_000  # about 20 ms, to begin with
ELEMENTS = 2**23  # of x, at most
PARTS = 4

Results = tuple[torch.Tensor, ...]
Call = Callable[[], Results]


@functools.cache
def streams() -> list[torch.cuda.Stream]:
    """The same for every race: torch keeps memory for each stream apart."""
    return [torch.cuda.Stream() for _ in range(STREAMS)]


def assert_racing_changes_no_bit(
    each_inputs: list[Inputs], names: tuple[str, ...], calls: list[Call], *others: list[Call], what: str = ""
) -> None:
    """STREAMS inputs, and a call with each whose results have these names. Alone its results are within tolerance of
    float64; those of every call that raced have the same bits. `others`: the same calls made in another way."""
    alone = [call() for call in calls]
    wait_for_the_gpu(what)
    for inputs, results in zip(each_inputs, alone, strict=True):
        assert_within(expected_results(inputs), **dict(zip(names, results, strict=True)))
    for racing in (calls, *others):
        cycles, races = GATE_CYCLES, 0
        for _ in range(MOST_TRIES):
            if race(racing, alone, names, cycles, what):
                races += 1
            else:
                cycles *= 2
            if races == RACES:
                break
        assert races == RACES, f"{races} races of {MOST_TRIES}: the others began before all calls were queued"


def race(calls: list[Call], alone: list[Results], names: tuple[str, ...], cycles: int, what: str) -> bool:
    """Queues ROUNDS calls on each stream behind a gate, since kernels would have ended before the host launches the
    next. Each call of a stream has other inputs than the one before, so what it left behind is wrong for this one.
    Whether the gate held until all were queued."""
    all_streams = streams()
    gate = torch.cuda.Event()
    torch.cuda._sleep(cycles)
    gate.record()
    for stream in all_streams:
        stream.wait_event(gate)
    raced: list[tuple[int, int, int, Results]] = []
    for turn in range(ROUNDS):
        for number, stream in enumerate(all_streams):
            with torch.cuda.stream(stream):
                which = (number + turn) % len(calls)
                raced.append((number, turn, which, calls[which]()))
    held = not gate.query()
    for stream in all_streams:
        torch.cuda.current_stream().wait_stream(stream)
    wait_for_the_gpu(what)
    wrong = [
        f"{name} of stream {number} in round {turn}"
        for number, turn, which, results in raced
        for name, value, expected in zip(names, results, alone[which], strict=True)
        if not torch.equal(value, expected)
    ]
    assert not wrong, f"other bits than without other streams: {len(wrong)} results, {wrong[:9]}"
    return held


@pytest.mark.parametrize("memory", ["of NaN", "as it is"])
@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (8192, 1024), (1024, 20000), (300, 32768)])
def test_training_steps_that_race(backend, m, n, memory, request):
    if memory == "of NaN":
        request.getfixturevalue("poisoned_empty")

    def step(inputs: Inputs) -> Results:
        x, dy, weight, eps, *_ = inputs
        y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
        return y, rstd, *rms_norm_backward(x, dy, weight, rstd, backend=backend)

    each_inputs = [make_inputs(m, n, BF16, FP32, seed=seed) for seed in range(STREAMS)]
    calls = [functools.partial(step, inputs) for inputs in each_inputs]
    assert_racing_changes_no_bit(each_inputs, ("y", "rstd", "dx", "dw"), calls)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_host_threads_may_share_kernels(backend):
    inputs = [make_inputs(257, 1024, BF16, FP32, seed=seed) for seed in range(8)]

    def run(one):
        with torch.cuda.stream(torch.cuda.Stream()):
            y, rstd = rms_norm_forward(one.x, one.weight, one.eps, backend=backend)
            dx, dw = rms_norm_backward(one.x, one.dy, one.weight, rstd, backend=backend)
            torch.cuda.current_stream().synchronize()
        return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        for one, results in zip(inputs, pool.map(run, inputs), strict=True):
            assert_within(expected_results(one), **results)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_every_entry_that_ships_as_it_races(backend, op, dtype, part):
    """The streams share a plan's launcher, as the layers of a model do. Once on memory filled with NaN, and once as
    it is: the fills keep a call's first kernel from starting while the call before still runs."""
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    machine, wrong = machine_of(DEVICE), {}
    for bucket, variant in entries_that_ship(machine, op, dtype)[part::PARTS]:
        try:
            check_racing(machine, bucket, variant)
        except Exception as error:
            wrong[bucket] = repr(error)
    assert not wrong, wrong


def check_racing(machine, bucket, variant):
    from tilegym_rmsnorm.backends.cutile.tuning import search

    m, dtype = rows_that_race(machine, bucket, variant), getattr(torch, bucket.dtype)
    weight_dtype = search.weight_dtype_of(bucket)
    each_inputs = [
        make_inputs(m, bucket.n, dtype, weight_dtype, eps=search.EPS, seed=seed) for seed in range(STREAMS)
    ]
    arguments = [
        (x, dy, weight, compute_rms_norm_rstd_torch(x, eps)) for x, dy, weight, eps, *_ in each_inputs
    ]
    runs = (search.runner(each, bucket, variant) for each in (search.Poisoned(machine), machine))
    on_nan, as_it_is = ([functools.partial(run, *one) for one in arguments] for run in runs)
    names = search.RESULTS[bucket.op]
    assert_racing_changes_no_bit(each_inputs, names, on_nan, as_it_is, what=f"{bucket} {variant}")


def rows_that_race(machine, bucket, variant) -> int:
    """As many as ELEMENTS allow for which cuda-tile compiles the kernels that were timed: a multiple of 16, and so is
    the number of partial rows if it was."""
    from tilegym_rmsnorm.backends.cutile.tuning.search import rows_of

    timed = rows_of(bucket)[0]
    most = min(timed, ELEMENTS // bucket.n // 16 * 16)
    if bucket.op == "forward":
        return most

    def class_of_partials(m: int) -> str:
        return alignment(variant.partial_rows(m, bucket.n, machine.facts.sm_count))

    return next(m for m in range(most, 0, -16) if class_of_partials(m) == class_of_partials(timed))
