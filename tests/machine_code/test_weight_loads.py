# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Forwards whose weight is loaded jointly with x, in machine code: what they are there for, all loads before the first
sum."""

import re
from dataclasses import replace

import helpers
import pytest
from compiling import code_of_call, skip_without_disassembler
from helpers import BF16, FP16, FP32, in_turn
from planning import by_rules

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardRows, ForwardTeam, ForwardTiles

skip_without_disassembler()

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
    (8192, BF16, ForwardRows(width=8192, warps=8, occupancy=2, latency=4)),
    (16384, BF16, ForwardRows(width=2048, warps=8, occupancy=2, latency=4, pieces=8, packed=True)),
]


@pytest.mark.parametrize(("n", "dtype", "variant"), ROWS)
def test_rows_ask_for_x_and_the_weight_before_any_sum(n, dtype, variant, tmp_path):
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype)
    loads, sums, [signal] = places(LOAD, code), places(SUMMED, code), places(re.compile("PREEXIT"), code)
    assert loads and max(loads) < min(sums), "all loads come first"
    assert signal < min(loads), "and the signal before them"
    late = forward_code(tmp_path, variant, n, dtype)
    assert max(places(LOAD, late)) > min(places(SUMMED, late)), "nothing would be gained"


@pytest.mark.parametrize(("n", "dtype"), [(4096, BF16), (4104, FP16)])
def test_aligned_rows_of_16_bits_are_taken_two_elements_at_a_time(n, dtype, tmp_path):
    """One at a time each has a permute of its own: 8192x8192 95.9 us instead of 91.5 (bfloat16, an H100)."""
    variant = ForwardRows(width=4096, warps=8, occupancy=3, latency=4, rest=0 if n == 4096 else 512)
    joint, early = (
        forward_code(tmp_path, replace(variant, weight_load=when), n, dtype) for when in ("joint", "early")
    )
    elements = variant.lanes // (32 * variant.warps)
    most = len(early) + 2 * elements  # one for two elements, and some to begin with
    assert len(joint) < most


TILES = [
    (64, ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=32)),
    (256, ForwardTiles(width=256, warps=4, occupancy=4, latency=4, rows=8)),
    (512, ForwardTiles(width=128, warps=4, occupancy=2, latency=4, rows=8, pieces=4)),
]
DTYPES = [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32)]


@pytest.mark.parametrize(("tile", "dtypes"), in_turn(TILES, DTYPES, of=2))
def test_tiles_ask_for_x_and_the_weight_before_any_sum(tile, dtypes, tmp_path):
    (n, variant), (dtype, weight) = tile, dtypes
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype, weight)
    loads, sums = places(LOAD, code), places(SUMMED, code)
    assert loads and max(loads) < min(sums)
    if weight is dtype and variant.width * dtype.itemsize <= 512:
        assert not places(SHARED, code), "each thread asked for what it multiplies by"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("warps", [4, 8])
def test_rows_of_a_warp_are_summed_without_shared_memory(dtype, warps, tmp_path):
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
    joint, late = (
        forward_code(tmp_path, each, n, dtype) for each in (replace(variant, weight_load="joint"), variant)
    )
    for code, is_late in ((joint, False), (late, True)):
        loads, sums = places(LOAD, code), places(SUMMED, code)
        assert any(min(loads) < each < max(loads) for each in sums) is is_late


@pytest.mark.parametrize("n", [2048, 4096, 14336, 20480] if helpers.every_config else [2048, 14336])
def test_a_float32_weight_comes_to_the_threads_that_need_it(n, tmp_path):
    """Tiles of x of 16 bits give a thread four elements, 16 bytes of the weight. In the rules' tiles of eight the
    weight goes through shared memory."""
    own, rule = (by_rules("forward", n, BF16, weight=weight).first for weight in (FP32, BF16))
    through_memory = {}
    for variant in (own, rule):
        code = code_of_call(tmp_path, "forward", variant, n, BF16, FP32)["forward_rows"]
        through_memory[variant] = sum("STS.128" in line or "LDS.128" in line for line in code)
    assert through_memory[own] == 0 < through_memory[rule]
