# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What each of two processes runs, with a GPU of its own and NCCL between them; test_gpu_distributed.py starts them.

torchrun --nproc-per-node 2 tests/distributed/two_gpus.py CASE
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tilegym_rmsnorm import RMSNorm, rms_norm
from tilegym_rmsnorm.registry import AUTO_ORDER, is_backend_available

N = 4096
RANK = int(os.environ.get("RANK", 0))
DEVICE = torch.device("cuda", RANK)


class Gather(torch.autograd.Function):
    """As tensor parallelism gathers by hand: the gradient may still be on its way when the norm's backward begins."""

    @staticmethod
    def forward(ctx, y):
        return collectives.all_gather_tensor(y, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, dy):
        scattered = collectives.reduce_scatter_tensor(dy, "sum", 0, dist.group.WORLD)
        assert isinstance(scattered, collectives.AsyncCollectiveTensor)
        return scattered


def gradient_of_a_collective() -> None:
    x, weight = torch.randn(512, N, device=DEVICE), torch.rand(N, device=DEVICE) + 0.5

    def gradients(norm):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = Gather.apply(norm(leaves[0], (N,), leaves[1], 1e-6))
        # Another factor for each row; small ones, or the rounding of dw's sum alone would show.
        (y.sin() * torch.linspace(0, 1, len(y), device=DEVICE)[:, None]).sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(F.rms_norm)
    for backend in ("auto", *filter(is_backend_available, AUTO_ORDER)):
        got = gradients(lambda *arguments, backend=backend: rms_norm(*arguments, backend=backend))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def input_of_a_collective() -> None:
    gathered = collectives.all_gather_tensor(torch.randn(512, N, device=DEVICE), 0, dist.group.WORLD)
    for backend in ("auto", *filter(is_backend_available, AUTO_ORDER)):
        y = rms_norm(gathered, (N,), None, 1e-6, backend=backend)
        torch.testing.assert_close(y, F.rms_norm(gathered.wait(), (N,), None, 1e-6), rtol=1e-4, atol=1e-4)


def sequence_parallel() -> None:
    """As many collectives as PyTorch's own norm has, and the gradient of weight placed as there."""
    mesh = init_device_mesh("cuda", (2,))

    def step(norm, batch):
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(norm(N)).to(DEVICE), torch.randn(batch, 64, N, device=DEVICE)
        parallelize_module(model, mesh, {"0": SequenceParallel()})
        with CommDebugMode() as communication:
            y = model(distribute_tensor(x, mesh, [Shard(1)]))
            y.sum().backward()
        dw = model[0].weight.grad
        return (communication.get_total_counts(), y.placements, dw.placements), (
            y.full_tensor(),
            dw.full_tensor(),
        )

    for batch in (1, 2):
        (ours, values), (theirs, expected) = step(RMSNorm, batch), step(torch.nn.RMSNorm, batch)
        assert ours == theirs, (ours, theirs)
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other)


def fully_sharded() -> None:
    """FSDP2 with bfloat16 parameters: the losses of a few steps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def losses(norm):
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(1024, 1024), norm(1024), torch.nn.GELU()) for _ in range(3)
        ]
        model = torch.nn.Sequential(*blocks).to(DEVICE)
        for part in (*blocks, model):
            fully_shard(part, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(RANK)
        for _ in range(8):
            loss = (
                (model(torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)).float() - 1)
                .square()
                .mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    for one, other in zip(list(losses(RMSNorm)), list(losses(torch.nn.RMSNorm)), strict=True):
        assert abs(one - other) < 0.02 * other


CASES = {
    case.__name__: case
    for case in (gradient_of_a_collective, input_of_a_collective, sequence_parallel, fully_sharded)
}

if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    CASES[sys.argv[1]]()
    torch.cuda.synchronize()
    dist.destroy_process_group()
