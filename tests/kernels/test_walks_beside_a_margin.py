# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""SMs left free: every kernel that walks rows is right with every margin, with the same bits for the same one."""

import plain_calls
import pytest
import torch
from cutile_runs import ShuffledMachine, plan_for, run_backward
from helpers import BF16, FP32, assert_within, expected_results, make_inputs
from narrow_variants import BACKWARDS

from tilegym_rmsnorm.backends.cutile.launch import Backward
from tilegym_rmsnorm.backends.cutile.plans.problem import Policy

CPU = torch.device("cpu")
SMS = 3  # of ShuffledMachine
ROWS = 21  # three walks of them differ in length


SERVED = [
    pytest.param(first, op, id=f"{name}-{op}")
    for name, first in BACKWARDS.items()
    for op in ("backward", "dx")
    if op in first.serves or (op == "dx" and first.serves_dx_alone)
]


@pytest.mark.parametrize("margin", range(SMS))
@pytest.mark.parametrize(("first", "op"), SERVED)
def test_every_backward_is_right_with_every_margin(first, op, margin):
    """And has the same bits in another order of blocks."""
    inputs = make_inputs(ROWS, 80, BF16, FP32, device=CPU, seed=margin)
    policy = Policy(sm_margin=margin)
    one, again = (
        run_backward(inputs, first, op == "backward", policy=policy, seed=seed) for seed in range(2)
    )
    assert_within(expected_results(inputs), **one)
    assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("name", [name for name, first in BACKWARDS.items() if first.walks])
def test_a_walk_leaves_so_many_sms_free(name):
    """Blocks fill the SMs that are left."""
    first = BACKWARDS[name]
    has_dw = "backward" in first.serves
    inputs = make_inputs(120, 80, BF16, FP32, device=CPU)
    for margin in range(SMS):
        machine = ShuffledMachine()
        op, policy = "backward" if has_dw else "dx", Policy(sm_margin=margin)
        plan = plan_for(inputs, op, machine, first, policy=policy)
        run = Backward(machine, plan)
        plain_calls.backward(run, inputs.x, inputs.dy, inputs.weight, torch.ones(120), 0.0)
        [blocks] = [grid[0] for step, grid in zip(plan.steps, machine.grids, strict=False) if step == first]
        left = (SMS - margin) * first.occupancy
        assert blocks <= max(left, first.members)
        assert blocks > left - first.occupancy * first.members, "as many as fit"
