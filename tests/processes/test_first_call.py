# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The first call of a process."""

import subprocess
import sys


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
