# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backwards of rows and of teams by TMA, compiled by tileiras. `tune` tries them on any GPU from Hopper on, and one
whose warps wait for registers that nobody gives back would hang there."""

import helpers
import pytest
import torch

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from compiling import CompilingMachine, disassembled, run_backward, skip_without_compiler  # noqa: E402

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config  # noqa: E402

skip_without_compiler()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Most of what the tables have.
CASES = [
    (16384, Config("rows", 4096, 8, 1, 4, pieces=4, tma=True)),
    (16384, Config("rows", 2048, 8, 1, 4, pieces=8, tma=True)),
    (12288, Config("rows", 2048, 8, 1, 4, pieces=6, tma=True)),
    (3584, Config("rows", 2048, 8, 2, 4, pieces=2, tma=True)),
    (18432, Config("rows", 2048, 8, 1, 4, pieces=9, tma=True, packed=True)),
    (32768, Config("teams", 8192, 8, 1, 4, pieces=2, members=2, tma=True, packed=True)),
]
VARIANTS = {
    "bfloat16": {"dtype": BF16, "weight_dtype": BF16},
    "float16, dx alone": {"dtype": FP16, "weight_dtype": FP16, "has_dw": False},
    "float32 weight, llama, odd M": {"dtype": BF16, "weight_dtype": FP32, "round_xhat": True, "m": 4097},
    "no weight, one row": {"dtype": BF16, "weight_dtype": None, "m": 1},
}


@pytest.mark.parametrize("architecture", [90, 100, 120])
@pytest.mark.parametrize(("n", "config"), CASES, ids=lambda case: str(case) if isinstance(case, int) else "")
def test_no_warp_waits_for_registers(n, config, architecture):
    """Two variants of each, in turn, but for the first on Hopper and with --every-config, which take all."""
    case = CASES.index((n, config))
    variants = [*VARIANTS.values()]
    if not helpers.every_config and (case, architecture) != (0, 90):
        variants = variants[(case + architecture // 10) % 2 :: 2]
    machine = CompilingMachine(architecture)
    for variant in variants:
        run_backward(machine, config, n, **variant)
    found = [each for each in machine.results if each.name in ("backward_pipelined", "backward_team")]
    assert len(found) == len(variants) and not any(each.lacking > 0 for each in found), found


@pytest.mark.parametrize(
    ("n", "config", "dtype", "weight_dtype", "most_stack"),
    [
        (16384, CASES[0][1], BF16, BF16, 8),
        (16384, CASES[1][1], BF16, BF16, 0),
        (16384, CASES[1][1], FP16, FP16, 0),
        (12288, CASES[2][1], BF16, BF16, 0),
        (18432, CASES[4][1], BF16, BF16, 0),
        (18432, CASES[4][1], FP16, FP16, 0),
        (18432, CASES[4][1], BF16, FP32, 0),
        (32768, CASES[5][1], BF16, BF16, 0),
        (32768, CASES[5][1], FP16, FP16, 0),
        (32768, CASES[5][1], BF16, FP32, 0),
        (5120, Config("rows", 1024, 8, 1, 4, pieces=5, tma=True), FP32, FP32, 0),
    ],
)
def test_registers_hold_rows_and_dw(n, config, dtype, weight_dtype, most_stack):
    """What adds a row to dw before its products are summed. After that 8 * 2048 columns took 256 bytes of stack."""
    machine = CompilingMachine(90)
    run_backward(machine, config, n, dtype, weight_dtype)
    [found] = [each for each in machine.results if each.name in ("backward_pipelined", "backward_team")]
    assert found.stack <= most_stack


@pytest.mark.parametrize("variant", ["bfloat16", "float32 weight, llama, odd M"])
def test_teams_of_three_blocks_an_sm_keep_no_weight_in_registers(variant, tmp_path):
    """With it they took 32 and 112 bytes of stack. `columns_again` still tells that 16 bytes lie together."""
    machine = CompilingMachine(90, keep=tmp_path)
    run_backward(machine, Config("teams", 4096, 4, 3, 4, members=8, tma=True), 32768, **VARIANTS[variant])
    [found] = [each for each in machine.results if each.name == "backward_team"]
    assert found.stack == 0
    [cubin] = tmp_path.glob("backward_team*.cubin")
    loads = [line for line in disassembled(cubin) if "LDG.E" in line]
    # Of a thread's 32 columns, but for rstd and what a team exchanges.
    assert sum("LDG.E.128" in line for line in loads) == (4 if variant == "bfloat16" else 8)
