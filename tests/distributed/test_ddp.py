# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""DistributedDataParallel around a model with RMSNorm, in one process, on each backend."""

import copy

import pytest
import torch
from helpers import DEVICE

from tilegym_rmsnorm import RMSNorm

dist = pytest.importorskip("torch.distributed")


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_gradients_are_those_of_the_model_in_float64(backend):
    norm = RMSNorm(8, eps=1e-5, backend=backend)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 1)).to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    x, exact = torch.randn(4, 8, device=DEVICE), copy.deepcopy(model).double()
    exact[1] = torch.nn.RMSNorm(8, eps=1e-5, dtype=torch.float64, device=DEVICE)
    exact[1].load_state_dict(norm.state_dict())
    exact(x.double()).sin().sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(x).sin().sum().backward()
    finally:
        dist.destroy_process_group()
    for got, expected in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)
