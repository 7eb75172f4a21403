# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Trace the forward, loss and backward of a model into one graph, as trainers that compile by graph passes do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.fx import GraphModule, Node

from bench.studies.traced import as_it_is, fused_norms, regional, trace
from bench.train.parallel import DTensor, local, placed_like
from tilegym_rmsnorm.integrations.fx import REPLACED, replace_rmsnorm_pass

Change = Callable[[GraphModule, FakeTensorMode], Callable[..., Any]]


def replaced(gm: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """Put this package's ops in the place of the fused norms."""
    count = fused_norms(gm)
    gm = replace_rmsnorm_pass(gm)
    if gm.meta[REPLACED] != count:
        raise RuntimeError(f"{fused_norms(gm)} of {count} fused norms are left in the graph")
    return gm


# Passes over the graph, by name. "traced" runs it operation by operation: nothing is compiled.
CHANGES: dict[str, Change] = {"traced": as_it_is, "regional": regional, "replaced": replaced}


def step_of(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    tokens: Tensor,
    change: Change,
    fsdp: DeviceMesh | None = None,
    unsharded: nn.Module | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return a function of tokens that adds to no gradient, but sets it, and returns the loss.

    fsdp: the mesh over which FSDP2 shards the model's parameters. The graph gathers them itself, once for both passes.
    unsharded: the model without FSDP2, which is traced; its own parameters are not read.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    traced_model = model if unsharded is None else unsharded
    placed = dict(traced_model.named_parameters())

    def step(tokens: Tensor, *shards: Tensor) -> tuple[Tensor, ...]:
        whole = dict(zip(names, shards, strict=True))
        if fsdp is not None:
            whole = {name: gathered(shard, placed[name], fsdp) for name, shard in whole.items()}
        gradients: dict[str, Tensor] = {}

        def keep(name: str, gradient: Tensor) -> None:
            # A hook, since communication has to start before autograd.grad returns the gradients of all.
            gradients[name] = gradient if fsdp is None else scattered(gradient, placed[name], fsdp)

        for name, leaf in whole.items():
            leaf.register_hook(functools.partial(keep, name))

        def call(inputs: Tensor) -> Any:
            return functional_call(traced_model, whole, (inputs,))

        loss = loss_of(call)(tokens)
        torch.autograd.grad(loss, list(whole.values()))
        return loss, *(gradients[name] for name in names)

    given = [local(each).detach().requires_grad_(fsdp is None) for each in parameters]
    gm, mode = trace(step, tokens, *given)
    by_gloo = fsdp is not None and dist.get_backend(fsdp.get_group()) == "gloo"
    schedule(gm, gathers_at_once=not by_gloo)
    run = change(gm, mode)

    def traced_step(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            loss, *found = run(tokens, *map(local, parameters))
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = placed_like(parameter, gradient)
        return loss

    return traced_step


def gathered(shard: Tensor, placed: Tensor, fsdp: DeviceMesh) -> Tensor:
    """Return a leaf, a parameter in bfloat16 as `placed` is: plain, or a DTensor of a mesh of tensor parallelism."""
    whole = funcol.all_gather_tensor(shard.bfloat16(), 0, fsdp)
    if whole.shape != local(placed).shape:
        raise ValueError(f"expected parameters that divide by {fsdp.size()}, got {tuple(placed.shape)}")
    return placed_like(placed, whole).requires_grad_()


def scattered(gradient: Tensor, placed: Tensor, fsdp: DeviceMesh) -> Tensor:
    """Return this rank's part of the mean of all ranks' gradients, in float32."""
    if isinstance(gradient, DTensor):  # of norms: partial sums over the parts of a sequence
        gradient = gradient.redistribute(placements=placed.placements).to_local()
    gradient = gradient.float()
    if fsdp.device_type == "cuda":  # as FSDP2 does
        return funcol.reduce_scatter_tensor(gradient, "avg", 0, fsdp)
    return funcol.reduce_scatter_tensor(gradient / fsdp.size(), "sum", 0, fsdp)  # gloo has no mean


def schedule(gm: GraphModule, gathers_at_once: bool = True) -> None:
    """Leave out what nothing reads, and wait for what a collective returns where it is first read, so that other work
    runs meanwhile.

    gathers_at_once: whether this holds for gathers too. PyTorch 2.13's gloo corrupts memory where dozens run at once.
    """
    gm.graph.eliminate_dead_code()  # PyTorch 2.11 also traces how DTensors find the shapes of whole tensors
    aten = torch.ops.aten
    collectives = torch.ops._c10d_functional
    late = collectives.wait_tensor.default, aten.view.default, aten.detach.default
    gather = collectives.all_gather_into_tensor.default
    deferred = set()

    def bring_inputs(node: Node, reader: Node) -> None:
        for each in node.all_input_nodes:
            if each in deferred:
                deferred.remove(each)
                bring_inputs(each, reader)
                reader.prepend(each)

    for node in list(gm.graph.nodes):
        waits_here = not gathers_at_once and any(each.target is gather for each in node.all_input_nodes)
        if node.target in late and node.users and not waits_here:
            deferred.add(node)
        else:
            bring_inputs(node, node)
    gm.graph.lint()
    gm.recompile()
