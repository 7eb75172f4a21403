# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Forwards whose weight is loaded jointly with x: the results of others to the bit, and in machine code what they are
there for, all loads before the first sum."""

import re
from dataclasses import replace

import pytest
from cutile_runs import run_forward
from helpers import BF16, FP16, FP32, assert_within, expected_results, make_inputs
from planning import by_rules

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardRows, ForwardTeam, ForwardTiles

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
import torch  # noqa: E402
from compiling import code_of_call, skip_without_disassembler  # noqa: E402

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


@pytest.mark.parametrize("n", [56, 50])
@pytest.mark.parametrize(
    ("dtype", "weight", "casting"),
    [
        *((dtype, *each) for dtype in (BF16, FP16, FP32) for each in ((dtype, "once"), (dtype, "llama"))),
        *((dtype, FP32, "llama") for dtype in (BF16, FP16)),
        *((dtype, None, "once") for dtype in (BF16, FP16, FP32)),
    ],
)
@pytest.mark.parametrize("kind", JOINT)
def test_the_bits_are_those_of_the_weight_loaded_late(kind, weight, casting, dtype, n):
    """With what an exclusive or could spoil: rows of zeros of both signs, of infinities and NaN. A weight of another
    dtype is not awaited: there an early one is compared with a late one."""
    variant = JOINT[kind]
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


LOAD = re.compile(r"\bLDG\b")
SUMMED = re.compile(r"\bSHFL\b")  # across the lanes of a warp; across warps, by shared memory, comes behind
SHARED = re.compile(r"\b(?:STS|LDS)\b")


def forward_code(folder, variant, n, dtype, weight_dtype=None):
    [code] = [
        code
        for name, code in code_of_call(folder, "forward", variant, n, dtype, weight_dtype or dtype).items()
        if name != "clear_board"
    ]
    return code


def places(pattern, code):
    return [place for place, line in enumerate(code) if pattern.search(line)]


# Those of which the machine code was read; the first three load the weight behind the first sum otherwise.
ROWS = [
    (4096, FP16, ForwardRows(width=4096, warps=8, occupancy=3, latency=4)),
    (4096, FP32, ForwardRows(width=4096, warps=8, occupancy=3, latency=4)),
    (4096, FP16, ForwardRows(width=2048, warps=4, occupancy=2, latency=4, rest=2048)),
    (4096, BF16, ForwardRows(width=4096, warps=8, occupancy=3, latency=4)),
    (8192, BF16, ForwardRows(width=8192, warps=8, occupancy=2, latency=4)),
    (16384, BF16, ForwardRows(width=2048, warps=8, occupancy=2, latency=4, pieces=8, packed=True)),
]


@pytest.mark.parametrize(("n", "dtype", "variant"), ROWS)
def test_rows_ask_for_x_and_the_weight_before_any_sum(n, dtype, variant, tmp_path):
    skip_without_disassembler(is_module=False)
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype)
    loads, sums, [signal] = places(LOAD, code), places(SUMMED, code), places(re.compile("PREEXIT"), code)
    assert loads and max(loads) < min(sums), "all loads come first"
    assert signal < min(loads), "and the signal before them"
    late = forward_code(tmp_path, variant, n, dtype)
    assert max(places(LOAD, late)) > min(places(SUMMED, late)), "nothing would be gained"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("n", [4096, 4104])
def test_aligned_rows_of_16_bits_are_taken_two_elements_at_a_time(n, dtype, tmp_path):
    """One at a time each has a permute of its own: 8192x8192 95.9 us instead of 91.5 (bfloat16, an H100)."""
    skip_without_disassembler(is_module=False)
    variant = ForwardRows(width=4096, warps=8, occupancy=3, latency=4, rest=0 if n == 4096 else 512)
    joint, early = (
        forward_code(tmp_path, replace(variant, weight_load=when), n, dtype) for when in ("joint", "early")
    )
    elements = variant.lanes // (32 * variant.warps)
    most = len(early) + 2 * elements  # one for two elements, and some to begin with
    assert len(joint) < most


@pytest.mark.parametrize(("dtype", "weight"), [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize(
    ("n", "variant"),
    [
        (64, ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=32)),
        (256, ForwardTiles(width=256, warps=4, occupancy=4, latency=4, rows=8)),
        (512, ForwardTiles(width=128, warps=4, occupancy=2, latency=4, rows=8, pieces=4)),
    ],
)
def test_tiles_ask_for_x_and_the_weight_before_any_sum(n, variant, dtype, weight, tmp_path):
    skip_without_disassembler(is_module=False)
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype, weight)
    loads, sums = places(LOAD, code), places(SUMMED, code)
    assert loads and max(loads) < min(sums)
    if weight is dtype and variant.width * dtype.itemsize <= 512:
        assert not places(SHARED, code), "each thread asked for what it multiplies by"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("warps", [4, 8])
def test_rows_of_a_warp_are_summed_without_shared_memory(dtype, warps, tmp_path):
    skip_without_disassembler(is_module=False)
    width = 512 // dtype.itemsize
    settings = {"warps": warps, "occupancy": 2, "latency": 4, "rows": warps, "weight_load": "joint"}
    code = forward_code(tmp_path, ForwardTiles(width=width, pieces=1024 // width, **settings), 1024, dtype)
    assert places(SUMMED, code) and not places(SHARED, code)
    in_one_tile = forward_code(tmp_path, ForwardTiles(width=1024, **settings), 1024, dtype)
    assert places(SHARED, in_one_tile), "nothing would be gained"


@pytest.mark.parametrize(
    ("n", "dtype", "variant"),
    [
        (32768, BF16, ForwardTeam(width=8192, warps=8, occupancy=2, latency=4, members=4)),
        (65536, BF16, ForwardTeam(width=8192, warps=4, occupancy=2, latency=2, members=8, packed=True)),
    ],
)
def test_teams_ask_for_the_weight_before_any_sum(n, dtype, variant, tmp_path):
    skip_without_disassembler(is_module=False)
    joint, late = (
        forward_code(tmp_path, each, n, dtype) for each in (replace(variant, weight_load="joint"), variant)
    )
    for code, is_late in ((joint, False), (late, True)):
        loads, sums = places(LOAD, code), places(SUMMED, code)
        assert any(min(loads) < each < max(loads) for each in sums) is is_late


@pytest.mark.parametrize("n", [2048, 4096, 14336, 20480])
def test_a_float32_weight_comes_to_the_threads_that_need_it(n, tmp_path):
    """Beside x of 16 bits, in tiles of which a thread has four elements, 16 bytes of the weight. In the rules' tiles of
    eight it goes through shared memory."""
    skip_without_disassembler(is_module=False)
    own, rule = (by_rules("forward", n, BF16, weight=weight).first for weight in (FP32, BF16))
    through_memory = {}
    for variant in (own, rule):
        code = code_of_call(tmp_path, "forward", variant, n, BF16, FP32)["forward_rows"]
        through_memory[variant] = sum("STS.128" in line or "LDS.128" in line for line in code)
    assert through_memory[own] == 0 < through_memory[rule]
