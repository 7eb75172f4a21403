# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What holds for DTensors of every op, in each of four processes on a CPU.

test_four_processes.py starts it: python tests/distributed/laws_of_dtensors.py
"""

import itertools

import processes
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
from every_op import OPS
from torch.distributed.tensor import Replicate, Shard, debug

KINDS = [(op, kind) for op in OPS for kind in op.placed.values()]


def compare(call, mesh, places, dys):
    """Compare both passes with plain tensors. Return what was communicated, and the placements of the results."""
    leaves = processes.placed(call.recorded(), mesh, places)
    with debug.CommDebugMode() as mode:
        results = call.public(*leaves, *call.fixed.values())
    gradients = torch.autograd.grad(results, leaves, processes.placed(call.dys, mesh, [dys] * len(results)))
    limit = 1e-2 if torch.bfloat16 in {each.dtype for each in call.tensors} else 1e-5
    for one, other in zip((*results, *gradients), call.both_passes(), strict=True):
        torch.testing.assert_close(one.full_tensor().detach(), other, rtol=limit, atol=limit)
    return mode.get_total_counts(), [each.placements for each in results]


def sharded_alike(mesh):
    """In each dimension but the last. Nothing is gathered, unless there are fewer elements than processes."""
    for op, kind in KINDS:
        call = op.make(op.longer(op.longer(kind)), device="cpu")
        rows = next(iter(call.leaves.values()))
        for dim in range(rows.ndim - 1):
            at = Shard(dim)
            of_heads = Shard(0) if dim == rows.ndim - 2 else Replicate()
            places = [
                at if each.ndim == rows.ndim else of_heads if each.ndim == 2 else Replicate()
                for each in call.leaves.values()
            ]
            if any(each.ndim == rows.ndim and each.shape[dim] < 4 for each in call.leaves.values()):
                compare(call, mesh, places, at)
            else:
                assert compare(call, mesh, places, at) == (0, [(at,)] * len(call.dys)), (op.name, kind, dim)


def sharded_otherwise(mesh):
    """Leaves of rows in every dimension, each in another one or none: also within rows, which a process then has a
    part of."""
    for op, kinds in itertools.groupby(KINDS, lambda each: each[0]):
        calls = [op.make(op.longer(op.longer(kind)), device="cpu") for _, kind in kinds]
        call = max(
            calls, key=lambda call: [leaf.ndim for leaf in call.leaves.values()].count(call.dys[0].ndim)
        )
        shapes = [leaf.ndim for leaf in call.leaves.values()]
        choices = [Replicate(), *map(Shard, range(max(shapes)))]
        for places in itertools.product(
            *(choices if ndim == max(shapes) else [Replicate()] for ndim in shapes)
        ):
            compare(call, mesh, places, Replicate())


if __name__ == "__main__":
    processes.run_cases(globals())
