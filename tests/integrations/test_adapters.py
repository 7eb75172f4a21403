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
@pytest.mark.parametrize("library", ["tilegym", "quack", "liger", "apex", "transformer_engine"])
def test_the_script_of_their_tests_puts_adapters_in(library, tmp_path):
    """With a checkout that holds nothing but the modules that the script looks for, and a test of each file's name."""
    fill = {
        "tilegym": {
            "src/tilegym/__init__.py": "",
            "src/tilegym/backend/__init__.py": "",
            "src/tilegym/backend/dispatcher.py": "_REGISTRY = {}\n\ndef register_impl(name, backend):\n"
            "    return lambda function: _REGISTRY.setdefault(name, {}).update({backend: function})\n",
            "tests/ops/test_rms_norm.py": "def test_op():\n    from tilegym.backend import dispatcher\n"
            "    found = dispatcher._REGISTRY['rms_norm']['cutile']\n",
            "tests/ops/experimental/test_rmsnorm_backward.py": "def test_op():\n"
            "    from tilegym_rmsnorm.integrations.tilegym import rms_norm as found\n",
        },
        "quack": {
            "quack/__init__.py": "from quack.rmsnorm import rmsnorm\n",
            "quack/rmsnorm.py": "rmsnorm = rmsnorm_fwd = rmsnorm_bwd = None\n",
            "tests/test_rmsnorm.py": "from quack.rmsnorm import rmsnorm as found\n\ndef test_it():\n",
        },
        "liger": {
            "src/liger_kernel/__init__.py": "",
            "src/liger_kernel/transformers/__init__.py": "",
            "src/liger_kernel/transformers/functional.py": "liger_rms_norm = None\n",
            "src/liger_kernel/transformers/rms_norm.py": "LigerRMSNorm = None\n",
            "src/liger_kernel/transformers/fused_add_rms_norm.py": "LigerFusedAddRMSNorm = None\n",
            "test/transformers/test_rms_norm.py": "from liger_kernel.transformers.rms_norm import LigerRMSNorm as "
            "found\n\ndef test_it():\n",
            "test/transformers/test_fused_add_rms_norm.py": "from liger_kernel.transformers.functional import "
            "liger_rms_norm as found\n\ndef test_it():\n",
        },
        "apex": {
            "apex/__init__.py": "",
            "apex/normalization/__init__.py": "FusedRMSNorm = MixedFusedRMSNorm = None\n",
            "apex/normalization/fused_layer_norm.py": "",
            "tests/L0/run_fused_layer_norm/test_fused_layer_norm.py": "from apex.normalization import "
            "FusedRMSNorm as found\n\ndef test_rms():\n",
        },
        "transformer_engine": {
            "tests/pytorch/test_numerics.py": "import transformer_engine_torch as tex\n"
            "from transformer_engine.common import recipe\n"
            "from transformer_engine.pytorch import DType, RMSNorm as found, is_fp8_available\n\n"
            "assert is_fp8_available() is False and is_fp8_available(return_reason=True)[0] is False\n"
            "assert not isinstance(1, DType) and tex.anything and recipe.Recipe\n\n"
            "def test_rmsnorm_accuracy():\n",
            "tests/pytorch/test_fusible_ops.py": "import transformer_engine.pytorch.ops as te_ops\n"
            "from transformer_engine.pytorch.ops.fused import BackwardAddRMSNorm\n\n"
            "class TestBasicOps:\n  def test_rmsnorm(self):\n    found = te_ops.RMSNorm\n",
        },
    }[library]
    for name, text in fill.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith("test_"):
            text += "    assert found.__module__.startswith('tilegym_rmsnorm.integrations.')\n"
        path.write_text(text)
    command = [
        "bash",
        str(SCRIPT),
        library,
        str(tmp_path),
        "--rootdir",
        str(tmp_path),
        "--import-mode=importlib",
    ]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and f"{sum('test_' in name for name in fill)} passed" in done.stdout, (
        done.stdout + done.stderr
    )
