# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton's kernels under `reproducible("batch")`, in the machine code of sm_90: a kernel adds each row in one order,
wherever in a tile it lies and in a walk it comes. That a row has one kernel is in compiled/test_triton_keys.py."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiling import disassembled, skip_without_disassembler
from helpers import BF16, every_config
from orders import differing, sums_of_rows
from rope_cases import RopeCase

from tilegym_rmsnorm.reproducibility import BATCH, VLLM

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
skip_without_disassembler()

PROGRAM = Path(__file__).parents[1] / "support" / "triton_compile.py"
# Sums that begin with a zero, as those of strips and chunks do.
IN_CHUNKS = {"forward_reread", "forward_vllm", "backward_dx_reread", "backward_c"}
WIDTHS = (64, 72, 640, 1024, 4096, 2880, 12288, 5120, 18432, 8192, 16384)
BASE = {"dtype": "bfloat16", "weight_dtype": "bfloat16", "reproducible": BATCH}
FORMS = {
    "plain": {},
    "llama": {"casting": "llama", "weight_dtype": "float32"},
    "residual": {"residual_dtype": "bfloat16", "residual_out_dtype": "bfloat16", "alpha": 0.5},
    "float32, a bias": {"dtype": "float32", "bias_dtype": "bfloat16"},
    "vllm": {"reproducible": BATCH | VLLM},
}
ROPES = {
    "plain": {},
    "interleaved": {"interleaved": True, "n": 80, "rotary_dim": 20},
    "weights of heads": {"weight": ("heads", "vector"), "tables": "half", "n": 66, "rotary_dim": 34},
}


def kernels_of(call, folder):
    """Compile a call. Return the machine code of its kernels that add rows, by their names."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    request = json.dumps([90, [call], str(folder)], default=str)
    options = {"env": environment, "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, PROGRAM], input=request + "\n", **options)
    assert result.returncode == 0 and json.loads(result.stdout), result.stderr[-3000:]
    found = {}
    for path in folder.rglob("*.cubin"):
        name = re.search(r"\.entry (\w+)\(", path.with_suffix(".ptx").read_text())[1]
        # A division of 64 bits is called and adds no floats: read the code as if it went on behind the call.
        called = re.compile(r"CALL\b.*|RET\b.*")
        found[name] = [
            called.sub(lambda match: "NOP ;" if match[0][0] == "C" else "EXIT ;", line)
            for line in disassembled(path)
        ]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_adds_each_row_in_one_order(form, tmp_path):
    """Without --every-config of one width, another one each."""
    for n in WIDTHS if every_config else WIDTHS[2 * list(FORMS).index(form) :][:1]:
        kernels = kernels_of(BASE | FORMS[form] | {"N": n}, tmp_path / str(n))
        del kernels["sum_partials"]
        if n > 16384:
            del kernels["backward_dx"]  # of backward_c's sums
        assert len(kernels) == 2
        for name, code in kernels.items():
            assert not differing(sums_of_rows(code, in_chunks=name in IN_CHUNKS)), name


@pytest.mark.parametrize("form", ROPES)
def test_a_kernel_of_rope_adds_each_head_in_one_order(form, tmp_path):
    """A head is two tiles or more, each with a sum of its own: the sum of these has the most additions."""
    case = RopeCase(BF16, heads=(8, 2), n=128, rotary_dim=64, layout="packed")._replace(**ROPES[form])
    kernels = kernels_of(case._asdict() | {"reproducible": BATCH}, tmp_path)
    for name in ("rope_forward", "rope_backward"):
        sums = sums_of_rows(kernels[name])
        most = max(each.additions for each in sums)
        assert len([each for each in sums if each.additions == most]) == 1, name
