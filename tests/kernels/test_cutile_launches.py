# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What launches of the cuTile kernels need beside right kernels: grids that fit, and signals to the next launch."""

from dataclasses import replace

import pytest
import torch
from helpers import BF16, FP32, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

import cutile_runs  # noqa: E402
from cutile_runs import ShuffledMachine, run_backward, run_forward  # noqa: E402

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.interpreter.rebind import Namespace  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config  # noqa: E402

CPU = torch.device("cpu")


def test_every_block_lets_the_next_kernel_in_once(monkeypatch):
    """A kernel that gives no signal costs a launch: 0.5 to 1 us. The interpreter needs none."""
    signals = []

    def signal(namespace):
        namespace._blocks.check_access()  # not before the launch before has ended
        signals.append(namespace._blocks.number)

    monkeypatch.setattr(Namespace, "grid_dependency_control_launch_dependents", signal)
    inputs, late = make_inputs(9, 60, BF16, FP32, device=CPU), Config("rows", 64, 4, 4, 4)
    forwards = {
        late: 9,
        replace(late, early_weight=True): 9,
        replace(late, together=True): 9,
        Config("tiles", 64, 4, 4, 4, rows=2): 5,
        Config("tiles", 64, 4, 4, 4, rows=2, early_weight=True): 5,
        Config("tiles", 32, 4, 4, 4, rows=2, pieces=2, together=True): 5,
        Config("teams", 16, 4, 2, 4, members=4): 1 + 9 * 4,  # one to empty the board
        Config("teams", 16, 4, 2, 4, members=4, together=True): 1 + 9 * 4,
    }
    for config, blocks in forwards.items():
        run_forward(inputs, config)
        assert len(signals) == blocks, config
        signals.clear()
    backwards = {
        late: 3 + 4,  # three SMs; four strips of 16 columns to sum
        Config("fused", 64, 4, 1, 1, rows=4, strip=16, slab=16): 4 + 9,
        Config("teams", 16, 4, 2, 4, members=4): 1 + 4 * 1,
    }
    for config, blocks in backwards.items():
        run_backward(inputs, config)
        assert len(signals) == blocks, config
        signals.clear()


class Sabotage(ShuffledMachine):
    """Launches grids that are wrong in one dimension."""

    change = 0

    def bind(self, function, config, constants):
        run = super().bind(function, config, constants)

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
        ("backward_team", 18432, -1),
        ("backward_team", 18432, 1),
        ("backward_split", 4096, -1),
        ("backward_split", 18448, -1),
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
        size = "few" if victim == "backward_split" else "large"
        has_dw = victim != "backward_reread"
        run_forward(inputs) if victim.startswith("forward") else run_backward(inputs, None, has_dw, size=size)


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
