# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The partial rows of dw and their sum, in the interpreter: as many as rows of x, some, and only one."""

from dataclasses import replace

import pytest
import torch
from helpers import BF16, FP32, assert_within, expected_results, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from cutile_runs import run_backward  # noqa: E402

from tilegym_rmsnorm.backends.cutile.launch import Backward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.rules import row_partials_config, sum_config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.sizes import most_partial_rows, partial_rows  # noqa: E402
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 64, 1000, 4096, 18448, 18500, 73744])
def test_one_partial_row_per_row(n):
    inputs = make_inputs(19, n, BF16, FP32, device=CPU)
    config = row_partials_config(n, 2, 90)
    assert_within(expected_results(inputs), **run_backward(inputs, config, shares_partials=False))


@pytest.mark.parametrize(
    ("m", "n", "config", "tile"),
    [
        (300, 20, Config("rows", 32, 4, 1, 4), (128, 16)),
        (300, 20, Config("rows", 32, 4, 2, 4), (256, 16)),
        (129, 20, Config("rows", 32, 4, 1, 4), (128, 16)),  # the last row is alone in its step
        (257, 20, Config("rows", 32, 4, 2, 4), (256, 16)),
        (35, 16656, Config("teams", 8192, 4, 1, 4, members=3), (32, 128)),
        (11, 16656, Config("fused_chunks", 4096, 4, 1, 1, rows=2, strip=512, slab=2), (4, 512)),
    ],
)
def test_every_partial_row_is_added_once_in_several_steps(m, n, config, tile):
    """The last step of the sum is not full, nor are all its blocks."""
    chosen = sum_config(config, n, 90)
    assert (chosen.rows, chosen.width) == tile
    p = -(-m // config.slab) if config.is_fused else m
    assert p > chosen.rows and p % chosen.rows and n % chosen.width
    inputs = make_inputs(m, n, BF16, FP32, device=CPU)
    results = run_backward(inputs, config, shares_partials=config.is_fused)
    assert_within(expected_results(inputs), **results)


@pytest.mark.parametrize("n", [64, 4096, 5000, 18448, 18500])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", ["few", "large"])
def test_the_only_partial_row_is_dw(n, dtype, size):
    """With one block, or one slab, there is nothing to add: dw, of weight's dtype, takes the place of dw_partial."""
    inputs = make_inputs(1, n, dtype, dtype, device=CPU)
    assert_within(expected_results(inputs), **run_backward(inputs, size=size))


class Counting(InterpretedMachine):
    """Keeps the blocks of each launch, by the kernel's name."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, int] = {}

    def bind(self, function, config, constants):
        launch = super().bind(function, config, constants)

        def run(grid, arguments):
            self.grids[function.__name__] = grid[0]
            launch(grid, arguments)

        return run


def test_a_share_of_the_blocks_leaves_as_many_partial_rows():
    rows = Config("rows", 4096, 8, 1, 4, pieces=4, tma=True, share=72)
    teams = Config("teams", 2048, 4, 2, 4, pieces=3, members=3, tma=True, share=72)
    tiles = Config("tiles", 1024, 8, 2, 4, rows=4, share=72)
    assert [most_partial_rows(each, 132) for each in (rows, teams, tiles)] == [95, 63, 190]
    assert partial_rows(4096, 16384, rows, 132) == 94, "no more than leave the longest walk at 44 rows"
    assert partial_rows(4096, 18432, teams, 132) == 63 and partial_rows(8 * 10**6, 1024, tiles, 132) == 190
    assert partial_rows(1, 16384, rows, 1) == most_partial_rows(rows, 1) == 1


@pytest.mark.parametrize(
    "config",
    [
        Config("rows", 32, 4, 4, 2, pieces=3, tma=True),
        Config("teams", 16, 4, 4, 2, pieces=3, members=2),
        Config("tiles", 128, 4, 4, 2, rows=2),
    ],
    ids=lambda config: config.kernel,
)
def test_a_share_of_the_blocks_computes_the_same(config):
    inputs = make_inputs(37, 84, BF16, FP32, offset=1.0, device=CPU)
    x, dy, weight, eps, *_ = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    results, blocks = [], []
    for share in (100, 50):
        machine = Counting()
        run = Backward(machine, replace(config, share=share), 84, True, True, False)
        results.append(dict(zip(("dx", "dw"), run(x, dy, weight, rstd, inputs.offset), strict=True)))
        blocks.append(machine.grids["backward_pipelined" if config.kernel == "rows" else "backward_team"])
    assert blocks[1] < blocks[0]
    assert torch.equal(results[0]["dx"], results[1]["dx"])
    for each in results:
        assert_within(expected_results(inputs), **each)
