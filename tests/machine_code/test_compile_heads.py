# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tile kernels of heads (B, T, H, N) in machine code. test_compile_forms.py compiles what the rules choose for them."""

import re
from collections import Counter

import pytest
import torch
from compiling import CompilingMachine, disassembled, skip_without_disassembler
from helpers import BF16
from tile_runs import Outputs, Tile, backward_call
from variants import Variant, make

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles

skip_without_disassembler()

PLAIN = Variant(BF16, (2, 32, 32, 128), weight_dtype=BF16, layout="heads")


@pytest.mark.parametrize("tile", [Tile(rows=1, heads=16, tma=True), Tile(rows=4, heads=4, tma=True)], ids=str)
def test_strided_heads_come_by_tma(tile, tmp_path):
    """A backward of a q slice and a transposed dy has LDG for rstd and the weight alone, and STG for dw alone."""
    inputs = make(PLAIN, device=torch.device("cpu"))
    call = backward_call(PLAIN, inputs, inputs.x, tile, 2, Outputs())
    call.named["DEPENDENT"] = True
    hints = ForwardTiles(width=call.named["WIDTH"], warps=4, occupancy=2, latency=2)
    machine = CompilingMachine(90, keep=tmp_path)
    machine.bind(call.kernel, hints, call.arguments(True))((call.blocks,), call.arguments(False))
    code = " ".join(disassembled(tmp_path / "backward_tiles.cubin"))
    found = Counter(re.findall(r"\b(LDG|STG|UTMALDG|UTMASTG)\b", code))
    assert found["UTMALDG"] and found["UTMASTG"], found
    assert found["LDG"] <= 4 and found["STG"] <= 2, found
