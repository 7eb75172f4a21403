# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Spread a decoder over several devices: FSDP2 over one dimension of a mesh, tensor and sequence parallelism over
another."""

from __future__ import annotations

import datetime
import os
import sys
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.train.decoder import Decoder, NormAndRotation, NormAndRotationInOne

TIMEOUT = datetime.timedelta(minutes=10)  # the first step compiles


class Meshes(NamedTuple):
    """The two dimensions of one mesh."""

    fsdp: DeviceMesh
    tp: DeviceMesh


def start(fsdp: int, tp: int) -> Meshes | None:
    """Join the processes that torchrun started, as a mesh of fsdp x tp; None of one process alone.

    Raises ValueError where these are another number of processes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if fsdp * tp != world:
        start_by = f"torchrun --nproc-per-node {fsdp * tp} -m bench.train ..."
        raise ValueError(f"--fsdp and --tp: expected {world} processes in all, got {fsdp} x {tp}; {start_by}")
    if world == 1:
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=TIMEOUT)
    return meshes_of(kind, fsdp, tp)


def meshes_of(kind: str, fsdp: int, tp: int) -> Meshes:
    compile_anew()
    both = init_device_mesh(kind, (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    return Meshes(both["fsdp"], both["tp"])


def compile_anew() -> None:
    """Take no graph from AOTAutograd's cache. Its keys lack the names of process groups, which its graphs have: a rank
    would take another's."""
    functorch_config.enable_autograd_cache = False


def leave(status: int) -> NoReturn:
    """End a process of torchrun's at once: threads of its process groups may outlive what Python and C++ destroy at an
    exit, and abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class HeadsParallel(ParallelStyle):
    """Run a module that takes q, k, cos and sin on the heads that a rank has. Its weights are replicated, so that the
    parts of their gradients are summed."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        placed = Shard(2), Shard(2), Replicate(), Replicate()

        def to_dtensors(
            module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh
        ) -> tuple[DTensor, ...]:
            return tuple(
                DTensor.from_local(each, mesh, (where,), run_check=False)
                for each, where in zip(inputs, placed, strict=True)
            )

        def to_local(module: nn.Module, outputs: tuple[DTensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(each.to_local() for each in outputs)

        return distribute_module(module, mesh, input_fn=to_dtensors, output_fn=to_local)


def spread(model: Decoder, meshes: Meshes, is_compiled: bool) -> None:
    """Change the model in place: each rank keeps its part. Layers compute in bfloat16, gradients are summed in float32,
    parameters stay float32."""
    if meshes.tp.size() > 1:
        _split(model, meshes.tp)
    if is_compiled:  # layer by layer, since FSDP gathers parameters so
        for block in model.blocks:
            block.compile(fullgraph=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=meshes.fsdp, mp_policy=policy)


def without_fsdp(bare: Decoder, model: Decoder, meshes: Meshes) -> Decoder:
    """Split a model on the meta device as `spread` does, but for FSDP2, and give it the other's tables."""
    if meshes.tp.size() > 1:
        _split(bare, meshes.tp)
    bare.cos, bare.sin = model.cos, model.sin
    return bare


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(like: Tensor, part: Tensor) -> Tensor:
    """Make a DTensor of what this rank has of it, where `like` is one."""
    if not isinstance(like, DTensor):
        return part
    whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **whole)


def _split(model: Decoder, mesh: DeviceMesh) -> None:
    """Between the matrices of a layer each rank has a part of the sequence, as DTensors: norms and sums of residuals
    communicate nothing."""
    whole, sequence = Replicate(), Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(
                input_layouts=whole, output_layouts=sequence, use_local_output=False
            ),
            "norm": SequenceParallel(),
            "logits": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        },
    )
    for block in model.blocks:
        tables = (None, None)  # cos and sin are the same on each rank
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(sequence, *tables), desired_input_layouts=(whole, *tables)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
            "attention.out": RowwiseParallel(output_layouts=sequence, use_local_output=False),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        }
        rotation = block.attention.rotation
        if isinstance(rotation, NormAndRotationInOne):
            plan["attention.rotation"] = HeadsParallel()
        elif isinstance(rotation, NormAndRotation):
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {f"attention.rotation.{name}": heads for name in ("q_norm", "k_norm")}
        parallelize_module(block, mesh, plan)
