# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A call for the tests of known calls, and how to make it known."""

import torch
from helpers import BF16, DEVICE

from tilegym_rmsnorm import rms_norm

N = 8
X, W, R, B = torch.randn(3, N), torch.rand(N) + 0.5, torch.randn(3, N), torch.rand(N)


def rows(*size, dtype=BF16):
    return torch.randn(size, dtype=dtype, device=DEVICE)


def call(**changes):
    arguments = {
        "input": X,
        "normalized_shape": (N,),
        "weight": W,
        "eps": 1e-6,
        "backend": "torch",
        **changes,
    }
    return rms_norm(**arguments)


def make_known(checks: list, **arguments) -> None:
    call(**arguments)
    checks.clear()
    call(**arguments)
    assert not checks, "a call like the one before went through all checks"
