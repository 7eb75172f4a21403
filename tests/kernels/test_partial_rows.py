# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The partial rows of dw and their sum, in the interpreter: as many as rows of x, some, and only one."""

from dataclasses import replace

import plain_calls
import pytest
import torch
from cutile_runs import plan_for, run_backward
from helpers import BF16, FP32, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.backends.cutile.launch import Backward
from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.rules import sum_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

CPU = torch.device("cpu")
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
