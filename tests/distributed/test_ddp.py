# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""DistributedDataParallel around a model with RMSNorm, in one process on a CPU."""

import pytest
import torch

from tilegym_rmsnorm import RMSNorm

dist = pytest.importorskip("torch.distributed")


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_ddp_gives_the_gradients_of_the_model_alone():
    def gradients(wrap):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), RMSNorm(8), torch.nn.Linear(8, 1)))
        model(torch.randn(4, 8)).sin().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(lambda model: model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = gradients(torch.nn.parallel.DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
