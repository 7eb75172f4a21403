# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope of DTensors in each of four processes on a CPU.

test_four_processes.py starts it: python tests/distributed/rope_of_dtensors.py
"""

import itertools

import processes
import rope_calls
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
from torch.distributed.tensor import Replicate, Shard

from tilegym_rmsnorm import qk_norm_rope

# Of five tokens two processes have two, one has one, one has none.
SIZES = {"b": 4, "t": 5, "hq": 8, "hk": 4, "d": 16, "device": "cpu"}
POSITIONS = torch.tensor([7, 0, 3, 3, 1])


def passes(leaves, tables, **options):
    outputs = qk_norm_rope(*leaves, *tables, eps=rope_calls.EPS, **options)
    sum(each.sin().sum() for each in outputs).backward()
    return [*outputs, *(each.grad for each in leaves if each is not None)]


def sharded(mesh):
    for dim, tables, weights in itertools.product(
        range(3), ("T", "BT", "1T", "positions"), ("both", "heads")
    ):
        tensors = rope_calls.case(**SIZES, tables=tables, weights=weights)
        options = {"position_ids": POSITIONS} if tables == "positions" else {}
        leaves = [each.clone().requires_grad_() for each in tensors[:4]]
        of_weights = Shard(0) if weights == "heads" and dim == 2 else Replicate()
        placed = processes.placed(leaves, mesh, (Shard(dim),) * 2 + (of_weights,) * 2)
        want, got = passes(leaves, tensors[4:], **options), passes(placed, tensors[4:], **options)
        assert [each.placements for each in got[:2]] == [(Shard(dim),)] * 2
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, msg=f"{dim} {tables} {weights}")


def fewer_elements_than_shards(mesh):
    """Then PyTorch's operations run the call, which would gather by the op."""
    for dim, sizes in ((1, {"t": 1}), (0, {"b": 3}), (2, {"hq": 2, "hk": 1})):
        tensors = rope_calls.case(**SIZES | sizes)
        leaves = [each.clone().requires_grad_() for each in tensors[:4]]
        placed = processes.placed(leaves, mesh, (Shard(dim),) * 2 + (Replicate(),) * 2)
        want, got = passes(leaves, tensors[4:]), passes(placed, tensors[4:])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


def placed_otherwise(mesh):
    """q and k that are sharded in different dimensions, or within heads, are redistributed."""
    tensors = rope_calls.case(**SIZES)
    leaves = [each.clone().requires_grad_() for each in tensors[:4]]
    want = passes(leaves, tensors[4:])
    for of_q, of_k in ((Shard(1), Shard(0)), (Shard(3), Shard(3)), (Shard(0), Replicate())):
        placements = of_q, of_k, Replicate(), Replicate()
        placed = processes.placed(leaves, mesh, placements)
        for one, other in zip(passes(placed, tensors[4:]), want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


if __name__ == "__main__":
    processes.run(sharded, placed_otherwise, fewer_elements_than_shards)
