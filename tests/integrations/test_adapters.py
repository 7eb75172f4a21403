# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What holds for all adapters of other libraries' names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import why_skip

from tilegym_rmsnorm import use_backend
from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm

SCRIPT = Path(__file__).parents[2] / "scripts" / "peers_tests.sh"
NAMES = (
    "tilegym",
    "quack",
    "liger_kernel",
    "vllm",
    "flashinfer",
    "apex",
    "transformer_engine",
    "triton",
    "cuda.tile",
)


def test_importing_them_imports_no_library_of_others():
    program = f"""
import sys
from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm
found = set({NAMES!r}) & set(sys.modules)
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


CALLS = {
    "tilegym": lambda x, w: tilegym.rms_norm(x, None, w, 1e-6),
    "quack": lambda x, w: quack.rmsnorm(x, w),
    "liger": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, 0.0, "gemma"),
    "vllm": lambda x, w: vllm.rms_norm(x, w, 1e-6),
    "flashinfer": lambda x, w: flashinfer.rmsnorm(x, w),
    "apex": lambda x, w: apex.fused_rms_norm_affine(x, w, 8),
    "transformer_engine": lambda x, w: transformer_engine.RMSNorm(8, 1e-6, device=x.device)(x),
}


@pytest.mark.parametrize("library", CALLS)
def test_they_run_on_the_backend_in_effect(library, backend):
    x, weight = torch.randn(3, 8), torch.ones(8)
    if torch.cuda.is_available():
        x, weight = x.cuda(), weight.cuda()
    with use_backend(backend):
        y = CALLS[library](x, weight)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), None, 1e-6))


def test_none_falls_back_where_a_backend_was_named():
    """float64, which no kernel takes."""
    if reason := why_skip("triton"):
        pytest.skip(reason)
    x = torch.randn(3, 8, dtype=torch.float64)
    for library, call in CALLS.items():
        if library == "transformer_engine":  # takes x in its weight's dtype
            continue
        with use_backend("triton"), pytest.raises(RuntimeError, match="backend 'triton' was asked for"):
            call(x, torch.ones(8, dtype=torch.float64))


@pytest.mark.slow
def test_the_script_of_their_tests_puts_adapters_in(tmp_path):
    """With a checkout that holds nothing but the module that the script looks for, and a test."""
    find = "from quack.rmsnorm import rmsnorm as found\n\ndef test_it():\n"
    for name, text in {
        "quack/__init__.py": "from quack.rmsnorm import rmsnorm\n",
        "quack/rmsnorm.py": "rmsnorm = rmsnorm_fwd = rmsnorm_bwd = None\n",
        "tests/test_rmsnorm.py": find
        + "    assert found.__module__ == 'tilegym_rmsnorm.integrations.quack'\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = ["bash", SCRIPT, "quack", tmp_path, "--rootdir", tmp_path, "--import-mode=importlib"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
