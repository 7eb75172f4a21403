# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backwards of rows and of teams by TMA, compiled by tileiras. `tune` tries them on any GPU from Hopper on, and one
whose warps wait for registers that nobody gives back would hang there."""

import helpers
import pytest
import torch
from compiling import CompilingMachine, disassembled, run_backward, skip_without_compiler
from helpers import in_turn

from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardPipelined, BackwardPipelinedTeam

skip_without_compiler()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIR = BackwardPipelinedTeam(
    width=8192, warps=8, occupancy=1, latency=4, pieces=2, members=2, rstd_ahead=True, packed=True
)
# Most of what the entries have.
CASES = [
    (16384, BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4, pieces=4)),
    (16384, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=8)),
    (12288, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=6)),
    (3584, BackwardPipelined(width=2048, warps=8, occupancy=2, latency=4, pieces=2)),
    (18432, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=9, packed=True)),
    (32768, PAIR),
]
KERNELS = ("backward_pipelined", "backward_pipelined_team")
CALLS = {
    "bfloat16": {"dtype": BF16, "weight_dtype": BF16},
    "float16, dx alone": {"dtype": FP16, "weight_dtype": FP16, "has_dw": False},
    "float32 weight, llama, odd M": {"dtype": BF16, "weight_dtype": FP32, "round_xhat": True, "m": 4097},
    "no weight, one row": {"dtype": BF16, "weight_dtype": None, "m": 1},
}


ARCHITECTURES = (90, 100, 120)


@pytest.mark.parametrize(("case", "architecture"), in_turn(range(len(CASES)), ARCHITECTURES, of=3))
def test_no_warp_waits_for_registers(case, architecture):
    """One kind of call of each on one architecture, in turn; with --every-config all."""
    (n, variant), calls = CASES[case], [*CALLS.values()]
    if not helpers.every_config:
        calls = calls[(case // 2 + ARCHITECTURES.index(architecture)) % 4 :: 4]
    machine = CompilingMachine(architecture)
    for call in calls:
        run_backward(machine, variant, n, **call)
    found = [each for each in machine.results if each.name in KERNELS]
    assert len(found) == len(calls) and not any(each.lacking > 0 for each in found), found


HELD = [
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
    (5120, BackwardPipelined(width=1024, warps=8, occupancy=1, latency=4, pieces=5), FP32, FP32, 0),
]


@pytest.mark.parametrize(
    ("n", "variant", "dtype", "weight_dtype", "most_stack"),
    [case for case in HELD if helpers.every_config or case[2] is not FP16],
)
def test_registers_hold_rows_and_dw(n, variant, dtype, weight_dtype, most_stack):
    """Kernels add a row to dw before its products are summed. After that 8 * 2048 columns took 256 bytes of stack.
    float16, whose bytes are bfloat16's, with --every-config alone."""
    machine = CompilingMachine(90)
    run_backward(machine, variant, n, dtype, weight_dtype)
    [found] = [each for each in machine.results if each.name in KERNELS]
    assert found.stack <= most_stack


@pytest.mark.parametrize("call", ["bfloat16", "float32 weight, llama, odd M"])
def test_teams_of_three_blocks_an_sm_keep_no_weight_in_registers(call, tmp_path):
    """Keeping it took 32 and 112 bytes of stack. `not_hoisted` still tells that 16 bytes lie together."""
    machine = CompilingMachine(90, keep=tmp_path)
    variant = BackwardPipelinedTeam(width=4096, warps=4, occupancy=3, latency=4, members=8)
    run_backward(machine, variant, 32768, **CALLS[call])
    [found] = [each for each in machine.results if each.name == "backward_pipelined_team"]
    assert found.stack == 0
    code = disassembled(tmp_path / "backward_pipelined_team.cubin")
    loads = [line for line in code if "LDG.E" in line]
    # Of a thread's 32 columns, but for rstd and what a team exchanges.
    assert sum("LDG.E.128" in line for line in loads) == (4 if call == "bfloat16" else 8)
