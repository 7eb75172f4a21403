# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows of 16-bit numbers that stay packed while they are summed, by one block or by a team, or are widened in pairs, in
the interpreter."""

import cuda.tile as ct
import pytest
import torch
from cutile_runs import run_backward, run_forward
from helpers import BF16, FP16, FP32, make_inputs

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.kernels.tiles import (
    packed_row_as_float32,
    paired_row_as_float32,
    row_as_float32,
)
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    BackwardTeam,
    ForwardRows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("again", [packed_row_as_float32, paired_row_as_float32])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_number_is_the_same(dtype, again):
    """All bits of all 16-bit numbers, NaN, infinities and zeros of either sign among them, in their places."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, -1)
    plain, other = torch.full((2, 1, 2**16), torch.nan)

    def widen(x, plain, other):
        tiles = (ct.reshape(ct.load(x, (0, 0), (1, 2**16)), (2**16,)),)
        ct.store(plain, (0, 0), ct.reshape(row_as_float32(tiles)[0], (1, 2**16)))
        ct.store(other, (0, 0), ct.reshape(again(tiles)[0], (1, 2**16)))

    interpreter.launch(widen, (1,), (numbers, plain, other))
    assert torch.equal(plain.view(torch.int32), numbers.float().view(torch.int32))
    assert torch.equal(other.view(torch.int32), plain.view(torch.int32))


def with_numbers_that_a_wrong_widening_shows(m, n, dtype, weight_dtype):
    """Rows of zeros, of -0 and a denormal."""
    inputs = make_inputs(m, n, dtype, weight_dtype, offset=1.0, device=CPU)
    inputs.x[0], inputs.x[1, :2] = 0.0, torch.tensor([-0.0, torch.finfo(dtype).tiny / 2])
    return inputs


def assert_same_bits(got, expected, variant):
    for name, value in expected.items():
        bits = torch.int32 if value.dtype == FP32 else torch.int16
        assert torch.equal(got[name].view(bits), value.view(bits)), (name, variant)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "pieces"), [(128, 1), (32, 3)])
def test_packed_rows_give_the_same_bits(width, pieces, dtype, weight_dtype):
    inputs = with_numbers_that_a_wrong_widening_shows(6, 84, dtype, weight_dtype)
    settings = {"width": width, "pieces": pieces, "occupancy": 1, "latency": 2}
    packed_rows = BackwardRows(warps=4, **settings, packed=True)
    by_tma = BackwardPipelined(warps=8, **settings, packed=True)
    for run, plain, variants in (
        (run_forward, ForwardRows(warps=4, **settings), (ForwardRows(warps=4, **settings, packed=True),)),
        (run_backward, BackwardRows(warps=4, **settings), (packed_rows, by_tma)),
    ):
        expected = run(inputs, plain)
        for variant in variants:
            assert_same_bits(run(inputs, variant), expected, variant)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "pieces", "members"), [(64, 1, 2), (16, 2, 3), (16, 3, 2)])
def test_packed_teams_give_the_same_bits(width, pieces, members, dtype, weight_dtype):
    """Teams by gathers agree, with dw and without."""
    inputs = with_numbers_that_a_wrong_widening_shows(11, 84, dtype, weight_dtype)
    settings = {
        "width": width,
        "warps": 8,
        "occupancy": 1,
        "latency": 2,
        "pieces": pieces,
        "members": members,
    }
    packed = BackwardPipelinedTeam(**settings, rstd_ahead=True, packed=True)
    expected = run_backward(inputs, BackwardTeam(**settings))
    assert_same_bits(run_backward(inputs, packed), expected, packed)
    alone = run_backward(inputs, packed, has_dw=False)
    assert_same_bits(alone, {"dx": expected["dx"]}, packed)
