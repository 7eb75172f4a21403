# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Streams that race on a GPU: their kernels share SMs, and come and go in any order. No result may change a bit."""

import functools
from collections.abc import Callable

import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    FP32,
    Inputs,
    assert_within,
    expected_results,
    make_inputs,
    wait_for_the_gpu,
    why_skip,
)
from table_cases import entries_that_ship

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.reference import compute_rms_norm_rstd_torch

pytestmark = pytest.mark.gpu

STREAMS = 4
GATES, ROUNDS = 3, 10  # at most 8 launches a call: the queue holds what 4 streams ask for in 10 rounds
GATE_CYCLES = 40_000_000  # about 20 ms, several times what queuing takes
ELEMENTS = 2**23  # of x, at most
PARTS = 4

Call = Callable[[], tuple[torch.Tensor, ...]]


@functools.cache
def streams() -> list[torch.cuda.Stream]:
    """The same for every race: torch keeps memory for each stream apart."""
    return [torch.cuda.Stream() for _ in range(STREAMS)]


def assert_racing_changes_no_bit(
    each_inputs: list[Inputs], names: tuple[str, ...], calls: list[Call], *others: list[Call]
) -> None:
    """Of each stream its inputs, and a call with them whose results have these names. Alone its results are within
    tolerance of float64; those of every call that raced have the same bits. `others`: the same calls in another way."""
    alone = [call() for call in calls]
    wait_for_the_gpu()
    for inputs, results in zip(each_inputs, alone, strict=True):
        assert_within(expected_results(inputs), **dict(zip(names, results, strict=True)))
    for racing in (calls, *others):
        held = [race(racing, alone, names) for _ in range(GATES)]
        assert any(held), "nothing raced: each gate opened before all calls were queued"


def race(calls: list[Call], alone: list[tuple[torch.Tensor, ...]], names: tuple[str, ...]) -> bool:
    """Queues every call ROUNDS times on a stream of its own, behind a gate, as kernels would have ended before the host
    launches the next. Whether the gate held until all were queued."""
    gate = torch.cuda.Event()
    torch.cuda._sleep(GATE_CYCLES)
    gate.record()
    for stream in streams():
        stream.wait_event(gate)
    raced: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for stream, call, turns in zip(streams(), calls, raced, strict=True):
            with torch.cuda.stream(stream):
                turns.append(call())
    held = not gate.query()
    for stream in streams():
        torch.cuda.current_stream().wait_stream(stream)
    wait_for_the_gpu()
    wrong = [
        f"{name} of stream {number} in round {turn}"
        for number, (turns, truth) in enumerate(zip(raced, alone, strict=True))
        for turn, results in enumerate(turns)
        for name, value, expected in zip(names, results, truth, strict=True)
        if not torch.equal(value, expected)
    ]
    assert not wrong, f"other bits than without other streams: {len(wrong)} results, {wrong[:9]}"
    return held


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (8192, 1024), (1024, 20000), (300, 32768)])
def test_training_steps_that_race(backend, m, n):
    def step(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        x, dy, weight, eps, *_ = inputs
        y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
        return y, rstd, *rms_norm_backward(x, dy, weight, rstd, backend=backend)

    each_inputs = [make_inputs(m, n, BF16, FP32, seed=seed) for seed in range(STREAMS)]
    calls = [functools.partial(step, inputs) for inputs in each_inputs]
    assert_racing_changes_no_bit(each_inputs, ("y", "rstd", "dx", "dw"), calls)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_every_config_of_the_shipped_tables_that_races(op, dtype, part):
    """The streams share a config's launcher, as the layers of a model do. On NaN, and without: what writes it stands
    between two launches, and the second of them would not start early."""
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    from tilegym_rmsnorm.backends.cutile.machine import machine_of

    wrong = {}
    for bucket, entry in entries_that_ship(machine_of(DEVICE), op, dtype)[part::PARTS]:
        print(
            f"racing: {bucket} {entry.config}", flush=True
        )  # what pytest shows of a test that ends the process
        try:
            check_racing(machine_of(DEVICE), bucket, entry.config)
        except Exception as error:
            wrong[bucket] = repr(error)
    assert not wrong, wrong


def check_racing(machine, bucket, config):
    """At a multiple of 16 rows and with a weight of x's dtype: the kernels that were timed."""
    from tilegym_rmsnorm.backends.cutile import search

    m, dtype = min(search.rows_of(bucket)[0], ELEMENTS // bucket.n // 16 * 16), getattr(torch, bucket.dtype)
    each_inputs = [
        make_inputs(m, bucket.n, dtype, dtype, eps=search.EPS, seed=seed) for seed in range(STREAMS)
    ]
    arguments = [
        (x, dy, weight, compute_rms_norm_rstd_torch(x, eps)) for x, dy, weight, eps, *_ in each_inputs
    ]
    runs = (search.runner(each, bucket, config) for each in (search.Poisoned(machine), machine))
    on_nan, as_users_do = ([functools.partial(run, *one) for one in arguments] for run in runs)
    names = ("y", "rstd") if bucket.op == "forward" else ("dx", "dw")
    assert_racing_changes_no_bit(each_inputs, names, on_nan, as_users_do)
