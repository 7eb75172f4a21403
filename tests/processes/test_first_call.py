# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The first call of a process."""

import subprocess
import sys

import pytest
import torch
from torch.torch_version import TorchVersion


def test_the_first_call_of_a_process_may_be_traced():
    """torch 2.11 traces no import, so the reference has to be there before."""
    code = """
import torch, tilegym_rmsnorm
norm = torch.compile(tilegym_rmsnorm.rms_norm, backend="eager", fullgraph=True)
x = torch.ones(2, 8, requires_grad=True)
norm(x, (8,), torch.ones(8), backend="torch").sum().backward()
assert x.grad is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.11", reason="regions are tested from torch 2.11 on")
def test_the_first_call_of_a_process_may_be_in_a_compiled_region():
    code = """
import torch, tilegym_rmsnorm
region = torch.compiler.nested_compile_region(
    lambda x: tilegym_rmsnorm.rms_norm(x, (8,), None, 1e-6, residual=x)[0]
)
x = torch.randn(3, 8)
y = torch.compile(lambda x: region(region(x)), backend="eager", fullgraph=True)(x)
once = torch.nn.functional.rms_norm(2 * x, (8,), None, 1e-6)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(2 * once, (8,), None, 1e-6))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
