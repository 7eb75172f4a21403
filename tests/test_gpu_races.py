# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Streams that race on a GPU: their kernels share SMs, and come and go in any order. No result may change a bit."""

from collections.abc import Callable

import pytest
import torch
from helpers import BF16, DEVICE, FP32, Inputs, assert_within, expected_results, make_inputs, why_skip
from table_cases import serving

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_empty")]

STREAMS, ROUNDS = 4, 25
ELEMENTS = (
    2**23
)  # of x, at most: enough for every SM, and few enough that launches of several streams are under way

Results = dict[str, torch.Tensor]


def assert_racing_changes_no_bit(calls: list[tuple[Inputs, Callable[[], Results]]]) -> None:
    """Of each stream its inputs, and a call with them. Alone its results are within tolerance of float64; those of
    every call that raced have the same bits."""
    alone = [call() for _, call in calls]
    for (inputs, _), results in zip(calls, alone, strict=True):
        assert_within(expected_results(inputs), **results)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    raced: list[list[Results]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for stream, (_, call), results in zip(streams, calls, raced, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    wrong = [
        (stream, turn, name)
        for stream, (turns, truth) in enumerate(zip(raced, alone, strict=True))
        for turn, results in enumerate(turns)
        for name, value in results.items()
        if not torch.equal(value, truth[name])
    ]
    assert not wrong, (
        f"other bits than without other streams: {len(wrong)} results, (stream, turn, name) {wrong[:9]}"
    )


@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (8192, 1024), (1024, 20000), (300, 32768)])
def test_training_steps_that_race(backend, m, n):
    def step_of(inputs: Inputs) -> Callable[[], Results]:
        x, dy, weight, eps, *_ = inputs

        def step() -> Results:
            y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
            dx, dw = rms_norm_backward(x, dy, weight, rstd, backend=backend)
            return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}

        return step

    each_inputs = [make_inputs(m, n, BF16, FP32, seed=seed) for seed in range(STREAMS)]
    assert_racing_changes_no_bit([(inputs, step_of(inputs)) for inputs in each_inputs])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_configs_of_the_shipped_tables_that_race(op, dtype):
    """The streams share a config's launcher, as the layers of a model do."""
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    from tilegym_rmsnorm.backends.cutile import search, tables
    from tilegym_rmsnorm.backends.cutile.machine import machine_of

    machine = machine_of(DEVICE)
    found = tables.tables_of(machine.model, machine.architecture)
    [table] = [table for path, table in found.items() if path.parent == tables.SHIPPED_FOLDER] or [{}]
    entries = serving(table, op, dtype)
    if not entries:
        pytest.skip(f"no table ships with entries of {op} and {dtype} for {machine.model} and this toolkit")
    for bucket, entry in entries.items():
        m = min(search.rows_of(bucket)[0], max(ELEMENTS // bucket.n, 1))
        call_of = calls_by(machine, op, entry.config, bucket.n)
        each_inputs = [
            make_inputs(m, bucket.n, getattr(torch, dtype), FP32, seed=seed) for seed in range(STREAMS)
        ]
        try:
            assert_racing_changes_no_bit([(inputs, call_of(inputs)) for inputs in each_inputs])
        except AssertionError as error:
            raise AssertionError(f"{bucket}, {m} rows, {entry.config}") from error


def calls_by(machine, op, config, n) -> Callable[[Inputs], Callable[[], Results]]:
    """What makes a call of `op` by this config with given inputs."""
    from tilegym_rmsnorm.backends.cutile import launch

    if op == "forward":
        forward = launch.Forward(machine, config, n, True, False)
        return lambda inputs: lambda: _named("y rstd", forward(inputs.x, inputs.weight, inputs.eps, 0.0))
    backward = launch.Backward(machine, config, n, True, True, False)

    def backward_of(inputs: Inputs) -> Callable[[], Results]:
        x, dy, weight, eps, *_ = inputs
        rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
        return lambda: _named("dx dw", backward(x, dy, weight, rstd, 0.0))

    return backward_of


def _named(names: str, values: tuple[torch.Tensor, ...]) -> Results:
    return dict(zip(names.split(), values, strict=True))
