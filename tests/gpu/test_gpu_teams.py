# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Blocks that wait for each other (team.py) on a GPU: they end, and are right, whatever else runs there, and with as
many calls at once as docs/limits.md allows, in CUDA graphs of the ops."""

import functools

import plain_calls
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
from planning import plan

from tilegym_rmsnorm import rms_norm_forward
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardPipelinedTeam, BackwardTeam, ForwardTeam
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

NUMBERS = [
    {"width": 8192, "warps": 4, "occupancy": 2, "latency": 2, "members": 4},
    {"width": 4096, "warps": 4, "occupancy": 2, "latency": 2, "members": 8},
    {"width": 2048, "warps": 8, "occupancy": 4, "latency": 2, "members": 16},
]
FORWARDS = {numbers["members"]: ForwardTeam(**numbers) for numbers in NUMBERS}
# The ways by TMA, with the next row's rstd, without, and packed: of a backward alone.
TILE = {"width": 4096, "warps": 4, "latency": 4, "members": 8}
WIDE = {"width": 8192, "warps": 8, "latency": 4, "members": 2}
BACKWARDS = [
    *(BackwardTeam(**numbers) for numbers in NUMBERS),
    BackwardPipelinedTeam(occupancy=2, rstd_ahead=True, **TILE),
    BackwardPipelinedTeam(occupancy=3, **TILE),
    BackwardPipelinedTeam(occupancy=1, pieces=2, rstd_ahead=True, packed=True, **WIDE),
]
every_team = pytest.mark.parametrize(
    "team",
    BACKWARDS,
    ids=lambda team: f"{team.members} members" + f" by TMA, {team.occupancy} an SM" * team.uses_tma,
)


def backward_of(inputs, team, factor=1):
    """A call of the backward by this team, and x's rstd. The machine takes its GPU for one with `factor` times as many
    SMs, and launches as many blocks."""
    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    x, dy, weight, eps, *_ = inputs
    _, rstd = rms_norm_forward(x, weight, eps, backend="cutile")
    machine = machine_of(DEVICE)
    facts = machine.facts._replace(sm_count=factor * machine.facts.sm_count)
    made = plan(team, "backward", x.shape[1], x.dtype, weight=weight.dtype, facts=facts)
    return functools.partial(plain_calls.backward, norm.Backward(machine, made), x, dy, weight, rstd, 0.0)


def forward_of(inputs, team):
    """A call of the forward by a team of as many members."""
    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    x, _, weight, eps, *_ = inputs
    machine, first = machine_of(DEVICE), FORWARDS[team.members]
    made = plan(first, "forward", x.shape[1], x.dtype, weight=weight.dtype, facts=machine.facts)
    return functools.partial(plain_calls.forward, norm.Forward(machine, made), x, weight, eps, 0.0)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.much_memory
@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_team
def test_teams_that_do_not_all_fit_the_gpu_take_turns(team, dtype):
    """Eight times as many blocks as there is room for, so most teams start when others have ended."""
    if dtype is FP16 and not team.packed:
        pytest.skip("bfloat16 will do")
    inputs = make_inputs(8 * 2 * 132 * 4 // team.members + 5, 32768, dtype, FP32)
    expected = expected_results(inputs)
    calls = {("dx", "dw"): backward_of(inputs, team, factor=8)}
    if not team.uses_tma:
        calls["y", "rstd"] = forward_of(inputs, team)
    for names, run in calls.items():
        first = run()
        wait_for_the_gpu()
        assert_within(expected, **dict(zip(names, first, strict=True)))
        for _ in range(50):
            results = run()
            wait_for_the_gpu()
            assert all(map(torch.equal, results, first))


@pytest.mark.usefixtures("poisoned_empty")
@every_team
def test_teams_of_many_launches_at_once(team):
    """The blocks of 24 streams share the GPU, so teams of several launches are incomplete at a time."""
    streams = [torch.cuda.Stream() for _ in range(24)]
    inputs = [make_inputs(131, 32768, BF16, FP32, seed=seed) for seed in range(4)]
    ops = (backward_of,) if team.uses_tma else (forward_of, backward_of)
    calls = [op(each, team) for op in ops for each in inputs]
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


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_no_bits_of_the_input_keep_a_team_waiting(dtype):
    """A slot of the board is empty while it holds -1, which read as float32 is a NaN."""
    inputs = make_inputs(67, 32768, dtype, FP32)
    for array in (inputs.x, inputs.dy):
        array.view(torch.int16 if dtype is BF16 else torch.int32)[5] = -1
    team = BackwardTeam(width=4096, warps=4, occupancy=2, latency=2, members=8)
    (y, rstd), (dx, dw) = forward_of(inputs, team)(), backward_of(inputs, team)()
    wait_for_the_gpu()
    assert y[5].isnan().all() and rstd.isnan().nonzero().tolist() == [[5]]
    assert dx[5].isnan().all() and dw.isnan().all()
    assert not dx[:5].isnan().any() and not dx[6:].isnan().any()


if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

AT_ONCE = 8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 131, 1024])
def test_eight_graphs_at_once(rows):
    numbers = 0.0, "once", 1.0, None, None
    calls = []
    for seed in range(AT_ONCE):
        x, dy, weight, eps, *_ = make_inputs(rows, 32768, BF16, BF16, seed=seed)

        def run(x=x, dy=dy, weight=weight, eps=eps):
            y, rstd, _ = FORWARD(x, None, weight, None, 1, eps, *numbers, "cutile")
            return y, *BACKWARD(dy, x, weight, rstd, None, 3, 1, *numbers, None, None, "cutile")[:2]

        expected = run()  # compiles, before the capture
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        wait_for_the_gpu()
        with torch.cuda.graph(graph, stream=stream):
            results = run()
        calls.append((graph, stream, results, expected, run))  # run: with the inputs, which no graph keeps
    for _ in range(200):
        for graph, stream, results, *_ in calls:
            with torch.cuda.stream(stream):
                for each in results:
                    each.fill_(float("nan"))
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        wait_for_the_gpu()
        for _, _, results, expected, _ in calls:
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
