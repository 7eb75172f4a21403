# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tiles of rows by gathers: what stands for rows past the last and columns past the last, and which calls have them."""

from dataclasses import replace

import pytest
import torch
from cutile_runs import run_backward, run_forward
from helpers import BF16, FP32, assert_llama_rounds, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.backends.cutile.interpreter.rebind import _OPERATIONS
from tilegym_rmsnorm.backends.cutile.interpreter.tile import Tile
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardSplit, BackwardSplitReread, ForwardTiles

CPU = torch.device("cpu")
TILE = {"rows": 4, "strip": 16, "slab": 8}
STRIPS = {
    "whole rows": BackwardSplit(width=64, warps=4, occupancy=1, latency=1, **TILE),
    "rows in two tiles, ahead": BackwardSplit(width=32, warps=4, occupancy=1, latency=2, rest=32, **TILE),
    "chunks": BackwardSplitReread(width=32, warps=4, occupancy=1, latency=1, gathers=True, **TILE),
    "chunks, ahead": BackwardSplitReread(width=32, warps=4, occupancy=1, latency=3, **TILE),
}
LATE = ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=4)
EARLY, JOINT = (replace(LATE, weight_load=when) for when in ("early", "joint"))


@pytest.fixture(params=STRIPS)
def strips(request):
    return STRIPS[request.param]


def far_from_each_other(x):
    """Copy the rows in between NaN columns."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan, dtype=x.dtype)
    return wide[:, 4:-5].copy_(x)


@pytest.mark.parametrize("m", [1, 3, 8, 13])
@pytest.mark.parametrize("n", [48, 50, 64])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_strips(strips, m, n, weight):
    """13 rows are two slabs, of which the last has a tile of one row; 8 are one, which is dw, of weight's dtype."""
    inputs = make_inputs(m, n, BF16, weight, offset=0.5, device=CPU)
    found = run_backward(inputs, strips)
    assert_within(expected_results(inputs), **found)
    strided = inputs._replace(x=far_from_each_other(inputs.x), dy=far_from_each_other(inputs.dy))
    again = run_backward(strided, strips, seed=1)
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_strips_round_as_llama_does(strips):
    inputs = make_inputs(13, 50, BF16, FP32, casting="llama", device=CPU)
    found = run_backward(inputs, strips)
    assert_within(expected_results(inputs), **found)
    assert_llama_rounds(inputs, found, run_backward(inputs._replace(casting="once"), strips))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["dy", "x"])
def test_a_last_row_that_is_not_finite(strips, name, value):
    """The row stands in for rows past the last: 0 times infinity reaches no column that the row does not."""
    inputs = make_inputs(13, 50, BF16, FP32, device=CPU)
    inputs.x[-1, 7] = 1.0
    finite = run_backward(inputs, strips)["dw"]
    getattr(inputs, name)[-1, 7] = value
    dw = run_backward(inputs, strips)["dw"]
    others = torch.arange(50) != 7
    if name == "dy":
        assert dw[7].isnan() if value != value else dw[7] == value
        assert torch.equal(dw[others], finite[others])
    elif value != value:
        assert dw.isnan().all(), "rstd of that row is NaN"
    else:  # rstd of that row is 0
        without = inputs._replace(x=inputs.x[:-1], dy=inputs.dy[:-1])
        assert dw[7].isnan()
        assert torch.equal(dw[others], run_backward(without, strips)["dw"][others])


@pytest.mark.parametrize(
    ("variant", "by_tiles"),
    [
        *(pytest.param(variant, kind == "chunks, ahead", id=kind) for kind, variant in STRIPS.items()),
        pytest.param(EARLY, False, id="early weight"),
        pytest.param(JOINT, False, id="joint weight"),
        pytest.param(LATE, True, id="late weight"),
    ],
)
@pytest.mark.parametrize("n", [64, 56, 50])
def test_what_is_loaded_by_gathers(variant, by_tiles, n, monkeypatch):
    """And with which conditions: where tiles end with x, none. 50 bfloat16 are no multiple of 16 bytes: no such row is
    loaded by tiles (test_widths.py)."""
    tiles, conditions = [], []
    load, gather = (_OPERATIONS[name] for name in ("load", "gather"))

    def counting_load(array, index, shape, **options):
        tiles.append(len(shape) == 2 and shape[0] == 4)  # not those of the sum
        return load(array, index, shape, **options)

    def counting_gather(array, index, **options):
        if isinstance(index, tuple) and isinstance(index[0], Tile) and index[0].shape == (4, 1):
            conditions.append(options["check_bounds"])
        return gather(array, index, **options)

    monkeypatch.setitem(_OPERATIONS, "load", counting_load)
    monkeypatch.setitem(_OPERATIONS, "gather", counting_gather)
    inputs = make_inputs(13, n, BF16, FP32, device=CPU)
    run_forward(inputs, variant) if isinstance(variant, ForwardTiles) else run_backward(inputs, variant)
    by_tiles = by_tiles and n != 50
    assert any(tiles) is by_tiles
    assert set(conditions) == (set() if by_tiles else {n != 64})


@pytest.mark.parametrize("m", [1, 4, 13])
@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.parametrize("weight", [BF16, FP32, None])
@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("variant", [EARLY, JOINT], ids=["early", "joint"])
def test_the_forward_has_the_bits_of_its_tiles(variant, m, n, weight, casting):
    inputs = make_inputs(m, n, BF16, weight, casting=casting, offset=0.5 if weight else 0.0, device=CPU)
    strided = inputs._replace(x=far_from_each_other(inputs.x))
    found = run_forward(strided, variant)
    assert_within(expected_results(inputs), **found)
    tiles = run_forward(inputs, LATE)
    assert all(torch.equal(tiles[name], value) for name, value in found.items())
