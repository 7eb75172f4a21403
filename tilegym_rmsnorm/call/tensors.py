# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ask what kind of tensor one is, and make it plain where that can be.

A kernel reads and writes by address: nobody waits, unwraps or records for it. So a tensor must be *plain*: its values
stand at its address, as its strides say, with no negation pending. Many are not: a DTensor, a gradient that is still
being communicated, a tensor of zeros without memory, one that a tracer records.

    is_plain         a kernel may be given it: asked of every tensor, so as cheaply as can be
    resolved         a plain tensor of the same values, where there is one
    why_not_plain    the kind of a tensor that no kernel can be given, in words

DTensors are known without an import of torch.distributed.tensor, which takes a second.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilegym_rmsnorm.call.watched import is_traced

PLAIN_TYPES = (Tensor, Parameter)  # a subclass may answer for its properties with anything

_is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
_get_unwrapped = torch._C._functorch.get_unwrapped
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
_NO_DISPATCH = Tensor.__torch_dispatch__  # what a subclass without a __torch_dispatch__ of its own has

# No view of freed memory is so far from the storage's start, and nearly all memory on 64 bits is beyond.
_TEBIBYTE = 2**40


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may be given `tensor`. False too for tensors without elements, which no kernel needs.

    Only a tensor of exactly PLAIN_TYPES is asked, so that the answers are PyTorch's own. Those with nothing at an
    address of their own (zero, functional, wrapped by torch.func, freed by FSDP) say 0 or raise. Complex tensors and
    those with a tangent are plain too: their values are there, and `why_not_plain` names them.
    """
    if type(tensor) not in PLAIN_TYPES:
        return False
    try:
        address = tensor.data_ptr()
        # Of a view of freed memory the address is its offset. Asked where it could be: that takes two more calls.
        if address < _TEBIBYTE and address == tensor.storage_offset() * tensor.itemsize:
            return False
        return not tensor.is_neg()
    except RuntimeError:
        return False


def resolved(tensor: Any) -> Any:
    """`tensor`, or a plain one of the same values: waits for collectives, fills zeros, applies minus signs, unwraps.
    A tensor that cannot be made plain, or no tensor, is returned as it is.

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


def why_not_plain(tensor: Tensor) -> str | None:
    """The kind of a tensor that `resolved` returned and no kernel can be given; None if a kernel can."""
    if tensor.is_complex():
        return "is complex"
    if tensor.is_nested:
        return "is a nested tensor"
    if has_own_operations(tensor):
        return f"is a {type(tensor).__name__}"
    if torch._is_functional_tensor(tensor):
        return "is a functional tensor"
    if is_batched(tensor):
        return "is a tensor of torch.func, outside of its transform"
    return "has a tangent of forward-mode differentiation" if has_tangent(tensor) else None


def savable(tensor: Tensor | None) -> Tensor | None:
    """`tensor`, or a copy of one made under torch.inference_mode, which autograd refuses to save."""
    return tensor if tensor is None or not tensor.is_inference() else tensor.clone()


def is_batched(tensor: Tensor) -> bool:
    """Whether `tensor` is a wrapper of torch.func's, as vmap's are, or of autograd.grad's is_grads_batched."""
    return _is_legacy_batchedtensor(tensor) or _is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether `tensor` has a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def has_own_operations(tensor: Tensor) -> bool:
    """Whether `tensor` is of a subclass that computes its operations itself, as DTensor and FakeTensor do."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def has_no_memory(tensor: Tensor) -> bool:
    """Whether `tensor`, which is otherwise plain, has elements whose storage was freed, as FSDP does between uses.
    PyTorch's own operations read address 0 there: a segmentation fault."""
    if tensor.is_meta or has_own_operations(tensor):
        return False
    try:
        while _is_functorch_wrapped_tensor(tensor):  # the memory is that of what is wrapped
            tensor = _get_unwrapped(tensor)
        # numel last: it is a tensor while torch.jit.trace records, which warns where one is compared.
        is_freed = tensor.untyped_storage().nbytes() == 0 and not tensor._is_zerotensor()
        return is_freed and tensor.numel() != 0
    except (RuntimeError, NotImplementedError):  # tensors without a storage have their memory elsewhere
        return False


def check_memory(**tensors: Tensor | None) -> None:
    """That the memory of these tensors, by their names, is there. Not asked while Dynamo traces: there is none yet."""
    if is_traced():
        return
    for name, tensor in tensors.items():
        if tensor is not None and has_no_memory(tensor):
            raise ValueError(
                f"{name}: expected memory behind its elements, got a storage of 0 bytes: it was freed. Parameters of "
                "FSDP have memory inside the forward and backward of their own module alone: call that, or unshard() "
                "it first"
            )


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor: by the name of its class. Dynamo knows names."""
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, Tensor)


def splits_rows(tensor: Any, dims: int) -> bool:
    """Whether `tensor`, a DTensor or its description, is sharded in its last `dims` dimensions: several processes have
    parts of a row."""
    for placement in getattr(tensor, "placements", ()):
        # By `dim`, which every kind of shard has: is_shard() says no to some.
        dim = getattr(placement, "dim", None)
        if dim is not None and dim % tensor.ndim >= tensor.ndim - dims:
            return True
    return False


def shards_of(tensor: Any) -> dict[int, int]:
    """How many shards each sharded dimension of a DTensor has. One may be sharded on several dimensions of a mesh."""
    shards: dict[int, int] = {}
    for i, placement in enumerate(getattr(tensor, "placements", ())):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shards[dim] = shards.get(dim, 1) * tensor.device_mesh.size(i)
    return shards


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
