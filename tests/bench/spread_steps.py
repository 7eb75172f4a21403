# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Steps of bench.train's decoders over FSDP x TP processes on a CPU, beside one process that has the batches of all.

    torchrun --nproc-per-node 4 tests/bench/spread_steps.py 2 2 decoder-4096 decoder-2048-qk

Every way's gradients of a first step and losses of the next ones are compared with those of F.rms_norm in one process.
"""

import dataclasses
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from training_steps import CPU, distances, sizes_of, with_weights

from bench.train import parallel
from bench.train.measure import SEED, Plan, Trainee, agreed, on_all_ranks, whole
from bench.train.norms import ways_of

STEPS = 6
# Of gradients and losses: ways, and sums over ranks, round in other places. At most 0.030 and 0.0007 was found.
FAR, LOSS_FAR = 0.06, 0.002
TEXT = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def whole_gradient(parameter: torch.nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, parallel.DTensor) else gradient


def of_all(tokens: Tensor, meshes: parallel.Meshes) -> Tensor:
    """Gather the batches of a step. The ranks of one tensor-parallel group have one batch, others have others."""
    found = {}
    for name, mesh in meshes._asdict().items():
        found[name] = [torch.empty_like(tokens) for _ in range(mesh.size())]
        dist.all_gather(found[name], tokens, group=mesh.get_group())
    assert all(torch.equal(each, tokens) for each in found["tp"]), "a tensor-parallel group has one batch"
    assert sum(torch.equal(each, tokens) for each in found["fsdp"]) == 1, "each of the others has its own"
    return torch.cat(found["fsdp"])


def compare(model: str, name: str, meshes: parallel.Meshes) -> None:
    plan = Plan(sizes_of(model), False, STEPS, CPU, meshes, keeps_start=False)
    ways = {each: with_weights(way) for each, way in ways_of(model).items()}
    alone = Trainee(ways["F.rms_norm"], dataclasses.replace(plan, meshes=None), TEXT, None)
    way = ways[name]
    with way.around():
        spread = Trainee(way, plan, TEXT, None)
        source = spread.batches(SEED)
        losses, expected = [], []
        for step in range(STEPS):
            tokens = next(source)
            losses.append(spread.gradients(tokens))
            expected.append(alone.gradients(of_all(tokens, meshes)))
            if step == 0:
                found = {path: whole_gradient(each) for path, each in spread.model.named_parameters()}
                theirs = {path: each.grad for path, each in alone.model.named_parameters()}
                far = distances(found, theirs)
                assert max(far.values()) < FAR, (model, name, far)
            spread.optimizer.step()
            alone.optimizer.step()
    apart = max(abs(a - float(b)) for a, b in zip(whole(losses, plan), expected, strict=True))
    assert apart < LOSS_FAR < float(max(expected) - min(expected)), (model, name, apart, expected)
    assert all(each.dtype == torch.float32 for each in spread.parameters)
    assert all(isinstance(each, parallel.DTensor) for each in spread.parameters)
    if dist.get_rank() == 0:
        print("passed", model, name, f"{max(far.values()):.4f} {apart:.5f}", flush=True)


if __name__ == "__main__":
    sizes, models = [*map(int, sys.argv[1:3])], sys.argv[3:]
    meshes = parallel.start(*sizes)
    assert meshes is not None and [mesh.size() for mesh in meshes] == sizes
    one = Plan(sizes_of("decoder-4096"), False, STEPS, CPU, meshes)
    assert agreed(dist.get_rank() + 5, one) == 5, "the first rank decides"
    assert on_all_ranks(True, one) and not on_all_ranks(dist.get_rank() == 0, one), "each rank has a say"
    for model in models:
        for name in ways_of(model):
            compare(model, name, meshes)
    dist.barrier()  # no rank ends while another's threads still talk to it
    dist.destroy_process_group()
    parallel.leave(0)
