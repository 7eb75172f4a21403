# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Trace the forward, loss and backward of a model into one graph, as trainers that compile by graph passes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule

from bench.studies.traced import as_it_is, fused_norms, regional, trace
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
) -> Callable[[Tensor], Tensor]:
    """Return a function of tokens that adds to no gradient, but sets it, and returns the loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def step(tokens: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        def call(inputs: Tensor) -> Any:
            return functional_call(model, dict(zip(names, parameters, strict=True)), (inputs,))

        loss = loss_of(call)(tokens)
        return loss, *torch.autograd.grad(loss, parameters)

    run = change(*trace(step, tokens, *(each.detach().requires_grad_() for each in parameters)))

    def traced_step(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            loss, *gradients = run(tokens, *parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    return traced_step
