# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A compiled function that differentiates in forward mode keeps the tangent, which no op of a graph passes on."""

import pytest
import torch
from helpers import DEVICE
from torch.autograd import forward_ad

from tilegym_rmsnorm import RMSNorm, rms_norm, rms_norm_rope

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X, TABLE = torch.randn(3, 2, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
CALLS = {
    "rms_norm": lambda x: rms_norm(x, (8,), None, 1e-5),
    "an eps that is an int": lambda x: rms_norm(x, 8, None, 1, backend="auto"),
    "RMSNorm": RMSNorm(8, device=DEVICE).requires_grad_(False),
    "rms_norm_rope": lambda x: rms_norm_rope(x, None, TABLE, TABLE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_level_inside_of_the_compiled_function(name):
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(CALLS[name](forward_ad.make_dual(x, x * x))).tangent

    found = torch.compile(tangent, backend="aot_eager", fullgraph=True)(X)
    torch.testing.assert_close(found, tangent(X))
