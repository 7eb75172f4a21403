# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Subnormal numbers, in machine code: tests/backends/test_extremes.py shows them on a GPU alone."""

import re

import helpers
import pytest
from compiling import code_of_call, skip_without_disassembler
from helpers import FP32
from narrow_variants import BACKWARDS, FORWARDS

skip_without_disassembler()

N = 96


@pytest.mark.parametrize("architecture", [90, 100])
def test_no_cutile_kernel_flushes_subnormal_numbers(architecture, tmp_path):
    """MUFU.RSQ does, so the compiler scales what is below 1.2e-38 first."""
    if architecture != 90 and not helpers.every_config:
        pytest.skip("compiled with --every-config only")
    calls = [
        ("forward", variant) for variant in (FORWARDS[name] for name in ("rows", "tiles", "teams", "reread"))
    ]
    calls += [("backward", BACKWARDS[name]) for name in ("rows", "tiles", "split", "strips")]
    for op, variant in calls:
        for name, code in code_of_call(tmp_path, op, variant, N, FP32, FP32, architecture).items():
            assert not [line for line in code if re.search(r" (FADD|FMUL|FFMA|MUFU)\S*\.FTZ", line)], name
            if name.startswith("forward"):
                assert any("MUFU.RSQ" in line for line in code), name
                assert any("1.175494350822287508e-38" in line for line in code), name
