# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define `accumulate_main_grad`, which marks weights of norms (routes/main_grad.py)."""

from __future__ import annotations

import torch
from torch.nn import Module

from tilegym_rmsnorm.call.options import checked_bool
from tilegym_rmsnorm.call.tensors import PLAIN_TYPES
from tilegym_rmsnorm.call.validation import fail
from tilegym_rmsnorm.routes.main_grad import mark


def accumulate_main_grad(module: Module, enabled: bool = True) -> int:
    """Add the gradients of norms' weights to `weight.main_grad`, in the kernel that sums them.

    A trainer sets main_grad, as Megatron-Core does: a contiguous float32 tensor of the weight's shape and device. The
    backward reads it, and adds dw in float32, once for each use of the weight. `weight.grad` stays as it is. Where the
    weight has `grad_added_to_main_grad`, as Megatron's weights have, that becomes True and autograd gets zeros, so that
    the trainer's hooks run. While main_grad is missing or None, `weight.grad` gets the gradient. `torch.autograd.grad`
    returns it, and adds nothing.

    The norms are `RMSNorm`, those of the adapters, and those that `patch_model` patched. The mark is an attribute of
    the parameter: a parameter that takes its place, a deepcopy or one of FSDP's, is not marked. A bias has a gradient
    as before. Calls that no kernel takes add by an operation of PyTorch's. `torch.compile` breaks its graph at a call
    that adds.

    Args:
        module: A norm, or a module that holds some.
        enabled: False takes the marks away.

    Returns:
        The number of weights that it found.

    Raises:
        TypeError: module is no `torch.nn.Module`, enabled is no bool, or a weight is a DTensor or another subclass. No
            mark is changed. In a backward: main_grad is no plain float32 tensor.
        ValueError: module has no weight of such a norm. In a backward: main_grad has another shape, device or layout,
            requires grad, or has memory of the weight.
        RuntimeError: This release of torch cannot say what a backward runs. In a forward: a transform of torch.func or
            a tracer sees the call. In a backward: create_graph, compiled autograd, or hooks of the weight.
            Nothing is added to that weight then.
    """
    if not isinstance(module, Module):
        fail(TypeError, "module", "a torch.nn.Module", type(module).__name__)
    checked_bool("enabled", enabled)
    weights = {id(weight): weight for each in module.modules() if (weight := _weight_of(each)) is not None}
    for weight in weights.values():
        if type(weight) not in PLAIN_TYPES:
            fail(TypeError, "weight", "a plain parameter", type(weight).__name__)
    if enabled and not weights:
        expected = "weights of norms of this package in it, as patch_model gives them to a model"
        fail(ValueError, "module", expected, "none")
    for weight in weights.values():
        mark(weight, enabled)
    return len(weights)


def _weight_of(norm: Module) -> torch.Tensor | None:
    """Return the parameter that a norm of ours multiplies by."""
    patch = getattr(type(norm), "patched_from", (None, None))[1]
    match = getattr(patch, "match", None)
    packages = [each.__module__.partition(".")[0] for each in type(norm).__mro__]
    if match is None and "tilegym_rmsnorm" not in packages:
        return None
    return norm._parameters.get("weight" if match is None else match.weight)
