# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Teams of blocks that share a row (team.py), in the interpreter: whatever order blocks start and go on in, and however
few run at a time, a team ends and adds up the same bits."""

from dataclasses import replace

import helpers
import plain_calls
import pytest
import torch
from cutile_runs import plan_for
from helpers import BF16, FP32, assert_llama_rounds, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardPipelinedTeam, BackwardTeam, ForwardTeam
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

CPU = torch.device("cpu")


class Scheduled(InterpretedMachine):
    """Three SMs, that run at most `resident` blocks at a time, in a random order."""

    def __init__(self, seed: int = 0, **schedule) -> None:
        super().__init__()
        self.generator, self.schedule = torch.Generator().manual_seed(seed), schedule

    def bind(self, function, variant, constants):
        def run(grid, arguments):
            order = torch.randperm(torch.Size(grid).numel(), generator=self.generator).tolist()
            interpreter.launch(
                function, grid, arguments + constants, order=order, dependent=True, **self.schedule
            )

        return run


def backward_of(inputs, team, machine):
    x, dy, weight, eps, offset, _ = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    run = norm.Backward(machine, plan_for(inputs, "backward", machine, team))
    return plain_calls.backward(run, x, dy, weight, rstd, offset)


def forward_of(inputs, team, machine):
    x, _, weight, eps, offset, _ = inputs
    run = norm.Forward(machine, plan_for(inputs, "forward", machine, team))
    return plain_calls.forward(run, x, weight, eps, offset)


RUN = {"forward": (forward_of, ("y", "rstd")), "backward": (backward_of, ("dx", "dw"))}
# Four members, each with one tile.
FOUR = {"width": 16, "warps": 4, "occupancy": 1, "latency": 1, "members": 4}
FOURS = {"forward": ForwardTeam(**FOUR), "backward": BackwardTeam(**FOUR)}

SMALL_TEAMS = [(16, 2, 1), (13, 3, 1), (13, 3, 3)]  # rows, members, pieces
# Many seconds each, so of one dtype; what they exchange is float32 always. Without --every-config one for each op.
LARGE_TEAMS = [(32, 8, 1), (13, 13, 2), (16, 16, 1)]


# What members tell each other does not depend on how they load: by TMA those whose blocks load the next row's rstd, two
# an SM, and those that do not.
@pytest.mark.parametrize(
    ("op", "tma", "dtype", "team"),
    [
        *((op, False, dtype, team) for op in RUN for team in SMALL_TEAMS for dtype in (BF16, FP32)),
        *((op, False, BF16, team) for op in RUN for team in LARGE_TEAMS),
        *(("backward", True, BF16, team) for team in (SMALL_TEAMS[0], SMALL_TEAMS[2])),
    ],
)
def test_every_schedule_gives_the_same_bits(op, tma, dtype, team):
    """The last member's last tile is partial, and there are more teams than one that stays. A board has rows to spare
    for any M, multiples of 16 included."""
    if team in LARGE_TEAMS and team != LARGE_TEAMS[op == "backward"] and not helpers.every_config:
        pytest.skip("run with --every-config")
    run, names = RUN[op]
    m, members, pieces = team
    kernel = ForwardTeam if op == "forward" else BackwardPipelinedTeam if tma else BackwardTeam
    settings = {
        "width": 16,
        "warps": 4,
        "occupancy": members,
        "latency": 1,
        "members": members,
        "pieces": pieces,
    }
    variant = kernel(**settings, **({"rstd_ahead": members < 3} if tma else {}))
    inputs = make_inputs(m, variant.lanes - 5, dtype, FP32, offset=1.0, device=CPU)
    schedules = [
        {"seed": seed, "lockstep": lockstep, "resident": resident}
        for seed in range(2 if m * members < 64 and helpers.every_config else 1)
        for lockstep in (False, True)
        for resident in (None, members, members + 1)
    ]
    first, *others = (run(inputs, variant, Scheduled(**schedule)) for schedule in schedules)
    assert interpreter.unwritten(first[0]) == interpreter.unwritten(first[1]) == 0
    assert_within(expected_results(inputs), **dict(zip(names, first, strict=True)))
    for schedule, results in zip(schedules[1:], others, strict=True):
        assert all(map(torch.equal, results, first)), schedule


@pytest.mark.parametrize("op", RUN)
def test_a_team_that_does_not_fit_would_wait_forever(op):
    """So a device's most_members must be true: a team is not launched where it does not fit."""
    run, _ = RUN[op]
    with pytest.raises(RuntimeError, match="wait for each other forever"):
        run(make_inputs(3, 64, device=CPU), FOURS[op], Scheduled(resident=3))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weight_dtype", [FP32, None])
@pytest.mark.parametrize("casting", ["once", "llama"])
def test_each_way_of_the_forward(packed, weight_dtype, casting):
    team = replace(FOURS["forward"], packed=packed)
    inputs = make_inputs(9, 60, BF16, weight_dtype, casting=casting, device=CPU)
    y, rstd = forward_of(inputs, team, Scheduled())
    assert_within(expected_results(inputs), y=y, rstd=rstd)
    if casting == "llama" and weight_dtype is not None:
        once, _ = forward_of(inputs._replace(casting="once"), team, Scheduled())
        assert_llama_rounds(inputs, {"y": y}, {"y": once})


def test_casting_like_llama_rounds_what_dw_sums():
    inputs = make_inputs(5, 64, BF16, FP32, casting="llama", device=CPU)
    once, rounded = (
        {"dw": backward_of(inputs._replace(casting=casting), FOURS["backward"], Scheduled())[1]}
        for casting in ("once", "llama")
    )
    assert_within(expected_results(inputs), **rounded)
    assert_llama_rounds(inputs, rounded, once)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_no_bits_of_the_input_keep_a_team_waiting(dtype):
    """A slot of the board is empty while it holds -1, which read as float32 is a NaN: one that these inputs make."""
    inputs = make_inputs(7, 64, dtype, FP32, device=CPU)
    for array in (inputs.x, inputs.dy):
        array.view(torch.int16 if dtype is BF16 else torch.int32)[5] = -1
    dx, dw = backward_of(inputs, FOURS["backward"], Scheduled())
    assert dx[5].isnan().all() and dw.isnan().all()
    assert not dx[:5].isnan().any() and not dx[6:].isnan().any()
    y, rstd = forward_of(inputs, FOURS["forward"], Scheduled())
    assert y[5].isnan().all() and rstd.isnan().nonzero().tolist() == [[5]]
