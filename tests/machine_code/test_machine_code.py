# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Machine code of a backward: multiplications that are fused with an addition, and a team's loop that asks anew each
time."""

import pytest
import torch
from compiling import CompilingMachine, disassembled, run_backward, skip_without_disassembler
from control_flow import loops
from planning import by_rules

from tilegym_rmsnorm.backends.cutile.plans import variants

skip_without_disassembler()

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("n", "choice", "least"),
    [
        (4096, variants.BackwardRows(width=4096, warps=8, occupancy=1, latency=6), 0.6),
        (4096, variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=4, tma=True), 0.6),
        (32768, by_rules("backward", 32768), 0.6),
        (
            4096,
            by_rules("backward", 4096, size="few"),
            0.4,
        ),  # its blocks for dw multiply dy and rstd once more
    ],
)
def test_two_of_five_multiplications_are_fused_with_an_addition(n, choice, least, tmp_path):
    """An early return in terms_of_dw, or dx as g - x * factor, would leave one of them in two instructions: h, g and
    their product with x are multiplied, dw and dx multiplied and added."""
    machine = CompilingMachine(90, keep=tmp_path)
    run_backward(machine, choice, n, BF16, BF16)
    [cubin] = tmp_path.glob("backward_*.cubin")
    code = disassembled(cubin)
    multiplied, fused = (sum(f" {name} " in line for line in code) for name in ("FMUL", "FFMA"))
    assert least * multiplied < fused < multiplied, (multiplied, fused)


def test_a_team_asks_for_its_slots_again_and_again(tmp_path):
    """A compiler that took the question out of the loop would leave one that never ends. Atomics are what it keeps."""
    machine = CompilingMachine(90, keep=tmp_path)
    choice = by_rules("backward", 32768)
    assert isinstance(choice.first, variants.BackwardPipelinedTeam)
    run_backward(machine, choice, 32768, BF16, BF16)
    code = disassembled(tmp_path / "backward_pipelined_team.cubin")
    lines = [[code[place] for place in places] for places in loops(code)]
    # The loop over rows writes dx.
    asking = [loop for loop in lines if not any("STG" in line for line in loop)]
    assert any("ATOMG.E.OR" in line for loop in asking for line in loop)
