# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Branches around loads, in machine code: one around each keeps loads from overlapping, and no result tells."""

import pytest
import torch
from compiling import CompilingMachine, disassembled, run_backward, skip_without_disassembler
from planning import by_rules, device

from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardSplitReread

skip_without_disassembler()


@pytest.mark.parametrize("n", [32768, 131072])
def test_slabs_have_no_branch_around_each_load(n, tmp_path):
    """`rows.at_least_zero` leaves 7 branches instead of 31 for 37 loads, of tiles of 1024 columns, and 7 instead of 19
    for 31, of tiles of 512, beside the one in front of the wait (`wait_for_launch_before`)."""
    machine = CompilingMachine(90, keep=tmp_path)
    slabs = by_rules("backward", n, size="few", facts=device(most_members=1))
    assert isinstance(slabs.first, BackwardSplitReread)
    run_backward(machine, slabs, n, torch.bfloat16, torch.bfloat16, m=128)
    code = disassembled(tmp_path / "backward_split_reread.cubin")
    assert "BRA" in code[next(place for place, line in enumerate(code) if "ACQBULK" in line) - 1]
    branches, loads = (sum(f" {name}" in line for line in code) - (name == "BRA") for name in ("BRA", "LDG"))
    assert 4 * branches < loads, (branches, loads)
