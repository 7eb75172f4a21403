# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Forwards whose weight is awaited together with x: the results of others to the bit, and in machine code what they are
there for, all loads before the first sum."""

import re
from dataclasses import replace

import pytest
from cutile_runs import run_forward
from helpers import BF16, FP16, FP32, assert_within, expected_results, make_inputs

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.rules import beside_float32_config, forward_config

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
import torch  # noqa: E402
from compiling import code_of_call, skip_without_disassembler  # noqa: E402

CPU = torch.device("cpu")
TOGETHER = {
    "rows": Config("rows", 64, 4, 2, 4, together=True),
    "rows in two tiles": Config("rows", 32, 4, 2, 4, 32, together=True),
    "packed rows in equal tiles": Config("rows", 16, 4, 2, 4, pieces=4, packed=True, together=True),
    "tiles": Config("tiles", 64, 4, 4, 4, rows=4, together=True),
    "tiles of a warp": Config("tiles", 16, 4, 4, 4, rows=4, pieces=4, together=True),
    "teams": Config("teams", 16, 4, 1, 1, members=4, together=True),
    "packed teams": Config("teams", 16, 4, 1, 1, pieces=2, members=2, packed=True, together=True),
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
@pytest.mark.parametrize("kind", TOGETHER)
def test_the_bits_are_those_of_the_weight_loaded_late(kind, weight, casting, dtype, n):
    """With what an exclusive or could spoil: rows of zeros of both signs, of infinities and NaN. A weight of another
    dtype is not awaited: there an early one is compared with a late one."""
    config = TOGETHER[kind]
    if config.packed and dtype is FP32:
        config = replace(config, packed=False)
    inputs = make_inputs(13, n, dtype, weight, casting=casting, offset=0.5 if weight else 0.0, device=CPU)
    found = run_forward(inputs, config)
    assert_within(expected_results(inputs), **found)
    inputs.x[2], inputs.x[3, ::2], inputs.x[3, 1::2] = 0.0, -0.0, 0.0
    inputs.x[5, 7], inputs.x[6, 9] = -torch.inf, torch.nan
    if weight is not None:
        inputs.weight[4] = torch.inf
    found = run_forward(inputs, config)
    late = replace(config, together=False)
    if config.kernel == "tiles":  # cannot have pieces late, and adds its squares as rows of such tiles do
        late = replace(late, kernel="rows", rows=1)
    again = run_forward(inputs, late)
    assert all(bits(again[name]).equal(bits(value)) for name, value in found.items())


def bits(tensor):
    return torch.where(tensor.isnan(), torch.nan, tensor).view(
        torch.int32 if tensor.dtype is FP32 else torch.int16
    )


LOAD = re.compile(r"\bLDG\b")
SUMMED = re.compile(r"\bSHFL\b")  # across the lanes of a warp; across warps, by shared memory, comes behind
SHARED = re.compile(r"\b(?:STS|LDS)\b")


def forward_code(folder, config, n, dtype, weight_dtype=None):
    [code] = [
        code
        for name, code in code_of_call(folder, "forward", config, n, dtype, weight_dtype or dtype).items()
        if name != "clear_board"
    ]
    return code


def places(pattern, code):
    return [place for place, line in enumerate(code) if pattern.search(line)]


# Those of which the machine code was read; the first three load the weight behind the first sum otherwise.
ROWS = [
    (4096, FP16, Config("rows", 4096, 8, 3, 4)),
    (4096, FP32, Config("rows", 4096, 8, 3, 4)),
    (4096, FP16, Config("rows", 2048, 4, 2, 4, 2048)),
    (4096, BF16, Config("rows", 4096, 8, 3, 4)),
    (8192, BF16, Config("rows", 8192, 8, 2, 4)),
    (16384, BF16, Config("rows", 2048, 8, 2, 4, pieces=8, packed=True)),
]


@pytest.mark.parametrize(("n", "dtype", "config"), ROWS)
def test_rows_ask_for_x_and_the_weight_before_any_sum(n, dtype, config, tmp_path):
    skip_without_disassembler(is_module=False)
    code = forward_code(tmp_path, replace(config, together=True), n, dtype)
    loads, sums, [signal] = places(LOAD, code), places(SUMMED, code), places(re.compile("PREEXIT"), code)
    assert loads and max(loads) < min(sums), "all loads come first"
    assert signal < min(loads), "and the signal before them"
    late = forward_code(tmp_path, config, n, dtype)
    assert max(places(LOAD, late)) > min(places(SUMMED, late)), "nothing would be gained"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("n", [4096, 4104])
def test_aligned_rows_of_16_bits_are_taken_two_elements_at_a_time(n, dtype, tmp_path):
    """One at a time each has a permute of its own: 8192x8192 95.9 us instead of 91.5 (bfloat16, an H100)."""
    skip_without_disassembler(is_module=False)
    config = Config("rows", 4096, 8, 3, 4, rest=0 if n == 4096 else 512, together=True)
    together, early = (
        forward_code(tmp_path, each, n, dtype)
        for each in (config, replace(config, together=False, early_weight=True))
    )
    elements = config.lanes // (32 * config.warps)
    most = len(early) + 2 * elements  # one for two elements, and some to begin with
    assert len(together) < most


@pytest.mark.parametrize(("dtype", "weight"), [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize(
    ("n", "config"),
    [
        (64, Config("tiles", 64, 4, 4, 4, rows=32)),
        (256, Config("tiles", 256, 4, 4, 4, rows=8)),
        (512, Config("tiles", 128, 4, 2, 4, rows=8, pieces=4)),
    ],
)
def test_tiles_ask_for_x_and_the_weight_before_any_sum(n, config, dtype, weight, tmp_path):
    skip_without_disassembler(is_module=False)
    code = forward_code(tmp_path, replace(config, together=True), n, dtype, weight)
    loads, sums = places(LOAD, code), places(SUMMED, code)
    assert loads and max(loads) < min(sums)
    if weight is dtype and config.width * dtype.itemsize <= 512:
        assert not places(SHARED, code), "each thread asked for what it multiplies by"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("warps", [4, 8])
def test_rows_of_a_warp_are_summed_without_shared_memory(dtype, warps, tmp_path):
    skip_without_disassembler(is_module=False)
    width = 512 // dtype.itemsize
    config = Config("tiles", width, warps, 2, 4, rows=warps, pieces=1024 // width, together=True)
    code = forward_code(tmp_path, config, 1024, dtype)
    assert places(SUMMED, code) and not places(SHARED, code)
    in_one_tile = forward_code(tmp_path, replace(config, width=1024, pieces=1), 1024, dtype)
    assert places(SHARED, in_one_tile), "nothing would be gained"


@pytest.mark.parametrize(
    ("n", "dtype", "config"),
    [
        (32768, BF16, Config("teams", 8192, 8, 2, 4, members=4)),
        (65536, BF16, Config("teams", 8192, 4, 2, 2, members=8, packed=True)),
    ],
)
def test_teams_ask_for_the_weight_before_any_sum(n, dtype, config, tmp_path):
    skip_without_disassembler(is_module=False)
    together, late = (
        forward_code(tmp_path, each, n, dtype) for each in (replace(config, together=True), config)
    )
    for code, is_late in ((together, False), (late, True)):
        loads, sums = places(LOAD, code), places(SUMMED, code)
        assert any(min(loads) < each < max(loads) for each in sums) is is_late


@pytest.mark.parametrize("n", [2048, 4096, 14336, 20480])
def test_a_float32_weight_comes_to_the_threads_that_need_it(n, tmp_path):
    """Beside x of 16 bits, in tiles of which a thread has four elements, 16 bytes of the weight. In the rules' tiles of
    eight it goes through shared memory."""
    skip_without_disassembler(is_module=False)
    own, rule = beside_float32_config("forward", n, 2, 90, "large"), forward_config(n, 2, 90)
    through_memory = {}
    for config in (own, rule):
        code = code_of_call(tmp_path, "forward", config, n, BF16, FP32)["forward_rows"]
        through_memory[config] = sum("STS.128" in line or "LDS.128" in line for line in code)
    assert through_memory[own] == 0 < through_memory[rule]
