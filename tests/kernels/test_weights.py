# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Forwards whose weight is loaded jointly with x: the results of others to the bit."""

from dataclasses import replace

import helpers
import pytest
import torch
from cutile_runs import run_forward
from helpers import BF16, FP16, FP32, assert_within, expected_results, in_turn, make_inputs

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardRows, ForwardTeam, ForwardTiles

CPU = torch.device("cpu")
JOINT = {
    "rows": ForwardRows(width=64, warps=4, occupancy=2, latency=4, weight_load="joint"),
    "rows in two tiles": ForwardRows(width=32, warps=4, occupancy=2, latency=4, rest=32, weight_load="joint"),
    "packed rows in equal tiles": ForwardRows(
        width=16, warps=4, occupancy=2, latency=4, pieces=4, packed=True, weight_load="joint"
    ),
    "tiles": ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=4, weight_load="joint"),
    "tiles of a warp": ForwardTiles(
        width=16, warps=4, occupancy=4, latency=4, rows=4, pieces=4, weight_load="joint"
    ),
    "teams": ForwardTeam(width=16, warps=4, occupancy=1, latency=1, members=4, weight_load="joint"),
    "packed teams": ForwardTeam(
        width=16, warps=4, occupancy=1, latency=1, pieces=2, members=2, packed=True, weight_load="joint"
    ),
}


DTYPES = (BF16, FP32, FP16) if helpers.every_config else (BF16, FP32)
CALLS = [  # dtype, weight, casting
    *((dtype, *each) for dtype in DTYPES for each in ((dtype, "once"), (dtype, "llama"))),
    *((dtype, FP32, "llama") for dtype in DTYPES if dtype is not FP32),
    *((dtype, None, "once") for dtype in DTYPES),
]


@pytest.mark.parametrize(("kind", "call", "n"), in_turn(JOINT, CALLS, [56, 50], of=2), ids=str)
def test_the_bits_are_those_of_the_weight_loaded_late(kind, call, n):
    """Rows hold what an exclusive or could spoil: zeros of both signs, infinities, NaN. A weight of another dtype is
    not awaited: there an early one is compared with a late one. Without --every-config one width and the other in turn,
    and no float16, which takes bfloat16's branches."""
    (dtype, weight, casting), variant = call, JOINT[kind]
    if "packed" in kind and dtype is FP32:
        variant = replace(variant, packed=False)
    inputs = make_inputs(13, n, dtype, weight, casting=casting, offset=0.5 if weight else 0.0, device=CPU)
    found = run_forward(inputs, variant)
    assert_within(expected_results(inputs), **found)
    inputs.x[2], inputs.x[3, ::2], inputs.x[3, 1::2] = 0.0, -0.0, 0.0
    inputs.x[5, 7], inputs.x[6, 9] = -torch.inf, torch.nan
    if weight is not None:
        inputs.weight[4] = torch.inf
    found = run_forward(inputs, variant)
    late = replace(variant, weight_load="late")
    if isinstance(
        variant, ForwardTiles
    ):  # cannot have pieces late, and adds its squares as rows of such tiles do
        late = ForwardRows(width=late.width, warps=4, occupancy=4, latency=4, pieces=late.pieces)
    again = run_forward(inputs, late)
    assert all(bits(again[name]).equal(bits(value)) for name, value in found.items())


def bits(tensor):
    return torch.where(tensor.isnan(), torch.nan, tensor).view(
        torch.int32 if tensor.dtype is FP32 else torch.int16
    )
