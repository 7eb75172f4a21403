# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows that begin at multiples of 16 bytes, in machine code, whatever else divides their length."""

import re
from collections import Counter
from dataclasses import replace

import compiling
import helpers
import pytest
from helpers import BF16, FP32
from narrow_variants import BACKWARDS, FORWARDS, KERNELS

from tilegym_rmsnorm.backends.cutile.plans.partition import Split

compiling.skip_without_disassembler()

DTYPES = BF16, FP32
# What goes through a row as another of these does: so --every-config alone reads it.
ALIKE = (
    ("forward", "rows, joint"),
    ("forward", "tiles, early"),
    ("forward", "teams, joint"),
    ("forward", "unaligned teams"),
    ("backward", "rows, equal tiles"),
    ("backward", "teams by TMA"),
    ("backward", "unaligned teams"),
    ("backward", "split, reread, ahead"),
)
READ = [kernel for kernel in KERNELS if helpers.every_config or kernel not in ALIKE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "kernel"), READ)
def test_aligned_rows_are_loaded_and_stored_as_those_of_multiples_of_16(op, kernel, dtype, tmp_path):
    """16 bytes at a time as often as there: 100000x72 in 11.8 us instead of 43.7, its backward in 24.6 instead of 87.2
    (bfloat16, an H100). Without --every-config one dtype and the other in turn."""
    if not helpers.every_config and dtype is not DTYPES[READ.index((op, kernel)) % 2]:
        pytest.skip("read with --every-config")
    widths = (1160 if dtype is BF16 else 1164, 1168)
    found, wanted = (accesses(op, kernel, n, dtype, tmp_path / str(n)) for n in widths)
    assert found and found == wanted


def accesses(op, kernel, n, dtype, folder):
    """Count each instruction on global memory in the kernels of a forward or backward, by 16 times as many columns a
    tile: more than one a thread."""
    folder.mkdir()
    # before Hopper the kernel that comes with strips, backward_means, goes without TMA: it needs the divisor there
    machine = compiling.CompilingMachine(80 if kernel == "strips" else 90, keep=folder)
    variant = FORWARDS[kernel] if op == "forward" else BACKWARDS[kernel]
    variant = replace(variant, width=16 * variant.width)
    if getattr(variant, "rest", 0):
        variant = replace(variant, rest=16 * variant.rest)
    if op == "forward":
        compiling.run_forward(machine, variant, n, dtype, dtype)
    elif isinstance(variant, Split):
        variant = replace(variant, rows=64, slab=128)
        compiling.run_backward(machine, variant, n, dtype, dtype, m=128)
    else:
        compiling.run_backward(machine, variant, n, dtype, dtype, has_dw=kernel != "dx, reread")
    return {
        cubin.stem: Counter(re.findall(r"\b(?:LDG|STG|LDGSTS)\.\S+", " ".join(compiling.disassembled(cubin))))
        for cubin in folder.glob("*.cubin")
    }
