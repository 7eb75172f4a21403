# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Blocks that wait for each other (team.py) on a GPU: they end, and are right, whatever else runs there."""

import functools

import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    HAS_GPU,
    assert_within,
    expected_results,
    make_inputs,
    wait_for_the_gpu,
    why_skip,
)

from tilegym_rmsnorm import rms_norm_forward
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_empty")]

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

CONFIGS = [
    Config("teams", 8192, 4, 2, 2, members=4),
    Config("teams", 4096, 4, 2, 2, members=8),
    Config("teams", 2048, 8, 4, 2, members=16),
]
# The ways by TMA, with the next row's rstd, without, and packed: of a backward alone.
BY_TMA = [
    *(Config("teams", 4096, 4, occupancy, 4, members=8, tma=True) for occupancy in (2, 3)),
    Config("teams", 8192, 8, 1, 4, pieces=2, members=2, tma=True, packed=True),
]
every_config = pytest.mark.parametrize(
    "config",
    [*CONFIGS, *BY_TMA],
    ids=lambda config: f"{config.members} members" + f" by TMA, {config.occupancy} an SM" * config.tma,
)


class Larger:
    """A machine that takes its GPU for one with `factor` times as many SMs, and launches as many blocks."""

    def __init__(self, machine, factor):
        self._machine, self.sm_count = machine, factor * machine.sm_count

    def __getattr__(self, name):
        return getattr(self._machine, name)


def backward_of(inputs, config, factor=1):
    """A call of the backward by this config, and x's rstd."""
    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    x, dy, weight, eps, *_ = inputs
    _, rstd = rms_norm_forward(x, weight, eps, backend="cutile")
    on = Larger(machine.machine_of(DEVICE), factor)
    backward = launch.Backward(on, config, x.shape[1], True, True, False)
    return functools.partial(backward, x, dy, weight, rstd, 0.0)


def forward_of(inputs, config):
    """A call of the forward by this config."""
    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    x, _, weight, eps, *_ = inputs
    forward = launch.Forward(machine.machine_of(DEVICE), config, x.shape[1], True, False)
    return functools.partial(forward, x, weight, eps, 0.0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_config
def test_teams_that_do_not_all_fit_the_gpu_take_turns(config, dtype):
    """Eight times as many blocks as there is room for, so most teams start when others have ended."""
    if dtype is FP16 and not config.packed:
        pytest.skip("bfloat16 will do")
    inputs = make_inputs(8 * 2 * 132 * 4 // config.members + 5, 32768, dtype, FP32)
    expected = expected_results(inputs)
    calls = {("dx", "dw"): backward_of(inputs, config, factor=8)}
    if not config.tma:
        calls["y", "rstd"] = forward_of(inputs, config)
    for names, run in calls.items():
        first = run()
        wait_for_the_gpu()
        assert_within(expected, **dict(zip(names, first, strict=True)))
        for _ in range(50):
            results = run()
            wait_for_the_gpu()
            assert all(map(torch.equal, results, first))


@every_config
def test_teams_of_many_launches_at_once(config):
    """The blocks of 24 streams share the GPU, so teams of several launches are incomplete at a time."""
    streams = [torch.cuda.Stream() for _ in range(24)]
    inputs = [make_inputs(131, 32768, BF16, FP32, seed=seed) for seed in range(4)]
    ops = (backward_of,) if config.tma else (forward_of, backward_of)
    calls = [op(each, config) for op in ops for each in inputs]
    expected = [call() for call in calls]
    wait_for_the_gpu()
    for _ in range(5):
        results = []
        for number, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                k = number % len(calls)
                results += [(k, calls[k]()) for _ in range(4)]
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        wait_for_the_gpu()
        assert all(torch.equal(a, b) for k, each in results for a, b in zip(each, expected[k], strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_no_bits_of_the_input_keep_a_team_waiting(dtype):
    """A slot of the board is empty while it holds -1, which read as float32 is a NaN."""
    inputs = make_inputs(67, 32768, dtype, FP32)
    for array in (inputs.x, inputs.dy):
        array.view(torch.int16 if dtype is BF16 else torch.int32)[5] = -1
    config = Config("teams", 4096, 4, 2, 2, members=8)
    (y, rstd), (dx, dw) = forward_of(inputs, config)(), backward_of(inputs, config)()
    wait_for_the_gpu()
    assert y[5].isnan().all() and rstd.isnan().nonzero().tolist() == [[5]]
    assert dx[5].isnan().all() and dw.isnan().all()
    assert not dx[:5].isnan().any() and not dx[6:].isnan().any()
