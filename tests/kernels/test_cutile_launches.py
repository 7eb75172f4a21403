# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Launches of the cuTile kernels: grids that fit, and signals to the next launch."""

import cutile_runs
import pytest
import torch
from cutile_runs import ShuffledMachine, run_backward, run_forward
from helpers import BF16, FP32, make_inputs

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends.cutile.interpreter.rebind import Namespace
from tilegym_rmsnorm.backends.cutile.plans import variants

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


@pytest.mark.parametrize(
    ("victim", "n", "change"),
    [
        ("forward_rows", 2048, -1),
        ("forward_rows", 2048, 1),
        ("forward_tiles", 64, -1),
        ("forward_tiles", 64, 1),
        ("backward_rows", 4096, 1),
        ("backward_rows", 4096, -1),
        ("backward_tiles", 64, 1),
        ("backward_means", 18500, -1),
        ("backward_reread", 33001, -1),
        ("backward_reread", 33001, 1),
        ("forward_team", 33008, -1),
        ("forward_team", 33008, 1),
        ("backward_pipelined", 14336, -1),
        ("backward_pipelined", 14336, 1),
        ("backward_team", 33008, -1),
        ("backward_team", 33008, 1),
        ("backward_pipelined_team", 24576, -1),
        ("backward_pipelined_team", 24576, 1),
        ("backward_split", 4096, -1),
        ("backward_split_reread", 18448, -1),
        ("sum_partials", 4096, -1),
        ("sum_partials", 4096, 1),
    ],
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
