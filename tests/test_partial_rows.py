# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The partial rows of dw and their sum, in the interpreter: as many as rows of x, some, and only one."""

import pytest
import torch
from helpers import BF16, FP32, assert_within, expected_results, make_inputs

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from cutile_runs import run_backward  # noqa: E402

from tilegym_rmsnorm.backends.cutile.config import row_partials_config, sum_config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.kernel_config import Config  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 64, 1000, 4096, 18448, 18500])
def test_one_partial_row_per_row(n):
    inputs = make_inputs(19, n, BF16, FP32, device=CPU)
    config = row_partials_config(n, 2, 90)
    assert_within(expected_results(inputs), **run_backward(inputs, config, shares_partials=False))


@pytest.mark.parametrize(
    ("m", "n", "config", "tile"),
    [
        (300, 20, Config("rows", 32, 4, 1, 4), (128, 16)),
        (300, 20, Config("rows", 32, 4, 2, 4), (256, 16)),
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
