# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Makes plain (gate.py) the tensors that can be: waits for collectives, fills zeros, applies minus signs, unwraps."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.gate import has_own_operations, is_batched, is_plain

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def resolved(tensor: Any) -> Any:
    """`tensor`, or a plain one of the same values; what cannot be made plain, or is no tensor, is returned as it is.

    Differentiable, so that gradients reach `tensor`.
    """
    if not isinstance(tensor, Tensor) or is_plain(tensor):
        return tensor
    # Dead are tensors kept from inside transforms of torch.func that have ended, with a wrapper for each transform.
    while (inner := _unwrap_if_dead(tensor)) is not tensor:
        tensor = inner
    tensor = _waited(tensor)
    if has_own_operations(tensor) or is_batched(tensor):
        return tensor
    if tensor._is_zerotensor():
        return tensor.clone()  # the copy of a tensor of zeros has memory
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _waited(tensor: Tensor) -> Tensor:
    """The result of a collective that may still be running."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None or not isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Wait.apply(tensor)
    return tensor.wait()


class _Wait(torch.autograd.Function):
    """Waits, without the copy that any operation on the tensor would make."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.wait().detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient
