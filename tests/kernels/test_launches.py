# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Launches of the cuTile kernels: grids that fit, rows walked beside SMs that are left free, the partial rows of dw
and their sum, and signals to the next launch."""

from dataclasses import replace

import cutile_runs
import plain_calls
import pytest
import torch
from cutile_runs import ShuffledMachine, plan_for, run_backward, run_forward
from helpers import BF16, FP32, assert_within, expected_results, make_inputs
from narrow_variants import BACKWARDS

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends.cutile.host.norm import Backward
from tilegym_rmsnorm.backends.cutile.interpreter.rebind import Namespace
from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.problem import Policy
from tilegym_rmsnorm.backends.cutile.plans.rules import sum_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

CPU = torch.device("cpu")


def test_every_block_lets_the_next_kernel_in_once(monkeypatch):
    """A kernel that gives no signal costs a launch: 0.5 to 1 us. The interpreter needs none."""
    signals = []

    def signal(namespace):
        namespace._blocks.check_access()  # not before the launch before has ended
        signals.append(namespace._blocks.number)

    monkeypatch.setattr(Namespace, "grid_dependency_control_launch_dependents", signal)
    inputs = make_inputs(9, 60, BF16, FP32, device=CPU)
    settings = {"width": 64, "warps": 4, "occupancy": 4, "latency": 4}
    team = {"width": 16, "warps": 4, "occupancy": 2, "latency": 4, "members": 4}
    forwards = {
        variants.ForwardRows(**settings): 9,
        variants.ForwardRows(**settings, weight_load="early"): 9,
        variants.ForwardRows(**settings, weight_load="joint"): 9,
        variants.ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=2): 5,
        variants.ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=2, weight_load="early"): 5,
        variants.ForwardTiles(
            width=32, warps=4, occupancy=4, latency=4, rows=2, pieces=2, weight_load="joint"
        ): 5,
        variants.ForwardTeam(**team): 1 + 9 * 4,  # one to empty the board
        variants.ForwardTeam(**team, weight_load="joint"): 1 + 9 * 4,
    }
    for variant, blocks in forwards.items():
        run_forward(inputs, variant)
        assert len(signals) == blocks, variant
        signals.clear()
    backwards = {
        variants.BackwardRows(**settings): 3 + 4,  # three SMs; four strips of 16 columns to sum
        variants.BackwardSplit(width=64, warps=4, occupancy=1, latency=1, rows=4, strip=16, slab=16): 4 + 9,
        variants.BackwardTeam(**team): 1 + 4 * 1,
    }
    for variant, blocks in backwards.items():
        run_backward(inputs, variant)
        assert len(signals) == blocks, variant
        signals.clear()


class Sabotage(ShuffledMachine):
    """Launches grids that are wrong in one dimension."""

    change = 0

    def bind(self, function, variant, constants):
        run = super().bind(function, variant, constants)

        def launch_changed(grid, arguments):
            if function.__name__ == self.victim:
                grid = (grid[0] + self.change, *grid[1:])
            run(grid, arguments)

        return launch_changed


VICTIMS = {  # a width that each serves, and how its grid may be wrong
    "forward_rows": (2048, -1, 1),
    "forward_tiles": (64, -1, 1),
    "backward_rows": (4096, -1, 1),
    "backward_tiles": (64, 1),
    "backward_means": (18500, -1),
    "backward_reread": (33001, -1, 1),
    "forward_team": (33008, -1, 1),
    "backward_pipelined": (14336, -1, 1),
    "backward_team": (33008, -1, 1),
    "backward_pipelined_team": (24576, -1, 1),
    "backward_split": (4096, -1),
    "backward_split_reread": (18448, -1),
    "sum_partials": (4096, -1, 1),
}


@pytest.mark.parametrize(
    ("victim", "n", "change"),
    [(victim, n, change) for victim, (n, *changes) in VICTIMS.items() for change in changes],
)
def test_a_wrong_grid_is_noticed(victim, n, change, monkeypatch):
    """A block too few leaves rows or columns unwritten, one too many reaches outside: none of it passes in silence."""
    monkeypatch.setattr(Sabotage, "victim", victim, raising=False)
    monkeypatch.setattr(Sabotage, "change", change)
    monkeypatch.setattr(cutile_runs, "ShuffledMachine", Sabotage)
    m = {64: 200, 18448: 16}.get(n, 9)  # 16: two whole tiles, so that the last block has a row
    inputs = make_inputs(m, n, BF16, FP32, device=CPU)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        size = "few" if victim in ("backward_split", "backward_split_reread", "backward_team") else "large"
        has_dw = victim != "backward_reread"
        sm_count = 6 if victim.endswith("team") else 3  # several teams: that a block too few leaves one
        if victim.startswith("forward"):
            run_forward(inputs)
        else:
            run_backward(inputs, None, has_dw, size=size, sm_count=sm_count)


@pytest.mark.parametrize("n", [64, 20000])
def test_another_default_device_changes_nothing(n, monkeypatch):
    """The interpreter's own memory lies beside the arrays, on the CPU; it was made on the default device."""
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
    inputs = make_inputs(5, n, FP32, FP32, device=CPU)

    def run():
        y, rstd = rms_norm_forward(inputs.x, inputs.weight, 1e-3, backend="cutile")
        return y, rstd, *rms_norm_backward(inputs.x, inputs.dy, inputs.weight, rstd, backend="cutile")

    expected = run()
    with torch.device("meta"):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


SLABS_OF_TWO_ROWS = variants.BackwardSplitReread(
    width=4096, warps=4, occupancy=1, latency=1, rows=2, strip=512, slab=2, gathers=True
)


@pytest.mark.parametrize("n", [1, 64, 1000, 4096, 18448, 18500, 73744])
def test_one_partial_row_per_row(n):
    inputs = make_inputs(19, n, BF16, FP32, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, partials="own"))


@pytest.mark.parametrize(
    ("m", "n", "first", "tile"),
    [
        (300, 20, variants.BackwardRows(width=32, warps=4, occupancy=1, latency=4), (128, 16)),
        (300, 20, variants.BackwardRows(width=32, warps=4, occupancy=2, latency=4), (256, 16)),
        # the last row is alone in its step
        (129, 20, variants.BackwardRows(width=32, warps=4, occupancy=1, latency=4), (128, 16)),
        (257, 20, variants.BackwardRows(width=32, warps=4, occupancy=2, latency=4), (256, 16)),
        (35, 16656, variants.BackwardTeam(width=8192, warps=4, occupancy=1, latency=4, members=3), (32, 128)),
        (11, 16656, SLABS_OF_TWO_ROWS, (4, 512)),
    ],
)
def test_every_partial_row_is_added_once_in_several_steps(m, n, first, tile):
    """The last step of the sum is not full, nor are all its blocks."""
    chosen = sum_of(first, n, 90)
    assert (chosen.rows, chosen.width) == tile
    is_split = isinstance(first, Split)
    p = -(-m // first.slab) if is_split else m
    assert p > chosen.rows and p % chosen.rows and n % chosen.width
    inputs = make_inputs(m, n, BF16, FP32, device=CPU)
    results = run_backward(inputs, first, partials="shared" if is_split else "own")
    assert_within(expected_results(inputs), **results)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [48, 50])
def test_the_way_without_the_loop_computes_the_same(n, m):
    """3 SMs: a block a row up to 3 rows, of which each leaves its partial row."""
    inputs = make_inputs(m, n, BF16, FP32, offset=1.0, device=CPU)
    loop = variants.BackwardRows(width=32, warps=4, occupancy=1, latency=4, rest=32)
    for options in ({}, {"has_dw": False}, {"partials": "own"}):
        expected = run_backward(inputs, loop, **options)
        assert_within(expected_results(inputs), **expected)
        found = run_backward(inputs, replace(loop, short=True), **options)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("n", [64, 4096, 5000, 18448, 18500])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", ["few", "large"])
def test_the_only_partial_row_is_dw(n, dtype, size):
    """One block, or one slab, leaves nothing to add: dw, of weight's dtype, takes the place of dw_partial."""
    inputs = make_inputs(1, n, dtype, dtype, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, size=size))


class Counting(InterpretedMachine):
    """Keeps the blocks of each launch, by the kernel's name."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, int] = {}

    def bind(self, function, variant, constants):
        launch = super().bind(function, variant, constants)

        def run(grid, arguments):
            self.grids[function.__name__] = grid[0]
            launch(grid, arguments)

        return run


def test_a_share_of_the_blocks_leaves_as_many_partial_rows():
    rows = variants.BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4, pieces=4, grid_percent=72)
    teams = variants.BackwardPipelinedTeam(
        width=2048, warps=4, occupancy=2, latency=4, pieces=3, members=3, rstd_ahead=True, grid_percent=72
    )
    tiles = variants.BackwardTiles(width=1024, warps=8, occupancy=2, latency=4, rows=4, grid_percent=72)
    assert [each.most_partial_rows(132) for each in (rows, teams, tiles)] == [95, 63, 190]
    assert rows.partial_rows(4096, 16384, 132) == 94, "no more than leave the longest walk at 44 rows"
    assert teams.partial_rows(4096, 18432, 132) == 63 and tiles.partial_rows(8 * 10**6, 1024, 132) == 190
    assert rows.partial_rows(1, 16384, 1) == rows.most_partial_rows(1) == 1


@pytest.mark.parametrize(
    "variant",
    [
        variants.BackwardPipelined(width=32, warps=4, occupancy=4, latency=2, pieces=3),
        variants.BackwardTeam(width=16, warps=4, occupancy=4, latency=2, pieces=3, members=2),
        variants.BackwardTiles(width=128, warps=4, occupancy=4, latency=2, rows=2),
    ],
    ids=lambda variant: variant.kernel,
)
def test_a_share_of_the_blocks_computes_the_same(variant):
    inputs = make_inputs(37, 84, BF16, FP32, offset=1.0, device=CPU)
    x, dy, weight, eps, *_ = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    results, blocks = [], []
    for percent in (100, 50):
        machine = Counting()
        run = Backward(machine, plan_for(inputs, "backward", machine, replace(variant, grid_percent=percent)))
        gradients = plain_calls.backward(run, x, dy, weight, rstd, inputs.offset)
        results.append(dict(zip(("dx", "dw"), gradients, strict=True)))
        blocks.append(machine.grids[variant.kernel])
    assert blocks[1] < blocks[0]
    assert torch.equal(results[0]["dx"], results[1]["dx"])
    for each in results:
        assert_within(expected_results(inputs), **each)


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
