# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Decide whether a kernel can take a tensor (then the tensor is *plain*), and make other tensors plain where possible.

A kernel reads and writes memory by address. It cannot wait for a collective, unwrap a subclass or be recorded. So the
values of a plain tensor lie at its data_ptr(), spaced by its strides, with no negation pending (`Tensor.is_neg`). Not
plain are a DTensor, an AsyncCollectiveTensor, a zero tensor (`Tensor._is_zerotensor`) and the tensors of tracers.

`is_plain` is asked for every tensor, so it must be cheap. `why_not_plain` decides for tensors that are not plain, and
for complex ones and those with a tangent, which are.

Refuse a subclass in `why_not_plain` alone: `is_plain` is False for all subclasses, and kernels take those without
operations of their own (`has_own_operations`).

DTensor checks avoid importing torch.distributed.tensor, which takes a second.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilegym_rmsnorm.call.watched import is_traced

PLAIN_TYPES = (Tensor, Parameter)  # other subclasses may override data_ptr() and each property


class _OfPlainType(ABC):  # noqa: B024
    """Stands for PLAIN_TYPES in `isinstance`, subclasses left out. For `type(tensor)` Dynamo would guard on a class,
    and a graph with such a guard cannot be kept on disk (`caching_precompile`). From PyTorch 2.14 on Dynamo refuses
    metaclasses with an `__instancecheck__` or a `__subclasscheck__` other than ABCMeta's."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return kind in PLAIN_TYPES


OfPlainType: Any = _OfPlainType  # mypy would take the tensor for an instance

_is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
_get_unwrapped = torch._C._functorch.get_unwrapped
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
_NO_DISPATCH = Tensor.__torch_dispatch__  # inherited by subclasses that do not define __torch_dispatch__

# More than the storage offset of any view, less than nearly all addresses on 64 bits.
TEBIBYTE = 2**40


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can take `tensor`. False also for tensors without elements, which need no kernel.

    Only tensors of exactly PLAIN_TYPES are asked, so that PyTorch itself answers. For tensors without memory (zero
    tensors, functional tensors, wrappers of torch.func, parameters freed by FSDP) data_ptr() returns 0 or raises.
    Complex tensors and tensors with a tangent are plain, since their values are in memory: `why_not_plain` names them.
    """
    if type(tensor) not in PLAIN_TYPES:
        return False
    try:
        address = tensor.data_ptr()
        # Where the storage was freed, a view's address is its offset; without elements it is 0. Comparing takes two
        # more calls: only if small.
        if address < TEBIBYTE and address in (0, tensor.storage_offset() * tensor.itemsize):
            return False
        return not tensor.is_neg()
    except RuntimeError:
        return False


def resolved(tensor: Any) -> Any:
    """Make `tensor` plain: wait for collectives, unwrap, fill zero tensors, apply pending negations. Other objects, and
    tensors that cannot be made plain, are returned unchanged.

    Differentiable, so that gradients reach `tensor`.
    """
    if not isinstance(tensor, Tensor) or is_plain(tensor):
        return tensor
    # A tensor kept from inside a transform of torch.func has a dead wrapper for each transform that has ended.
    while (inner := _unwrap_if_dead(tensor)) is not tensor:
        tensor = inner
    tensor = _waited(tensor)
    if has_own_operations(tensor) or is_batched(tensor):
        return tensor
    if tensor._is_zerotensor():
        return tensor.clone()  # which allocates memory
    # resolve_neg would read freed memory, which the checks refuse later.
    return tensor.resolve_neg() if tensor.is_neg() and not has_no_memory(tensor) else tensor


def made_plain(*tensors: Any) -> tuple[bool, tuple[Any, ...]]:
    """Make tensors plain where possible. Return whether all are plain, as None counts, and the tensors. While Dynamo
    traces, none is plain."""
    if is_traced():
        return False, tensors
    if all([tensor is None or is_plain(tensor) for tensor in tensors]):  # a list: 0.4 us less
        return True, tensors
    tensors = tuple(map(resolved, tensors))
    return all(tensor is None or is_plain(tensor) for tensor in tensors), tensors


def why_not_plain(tensor: Tensor) -> str | None:
    """Say in words why no kernel can take a tensor that `resolved` returned; None if a kernel can."""
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


def are_aligned(n: int, *tensors: Tensor | None) -> bool:
    """Whether each row of n elements begins at a multiple of 16 bytes, in these tensors and in packed copies of them.
    True where no row lies in memory of its own."""
    return all([each is None or not is_plain(each) or _is_aligned(n, each) for each in tensors])


def _is_aligned(n: int, x: Tensor) -> bool:
    itemsize = x.itemsize
    offsets = x.data_ptr() | n * itemsize
    rows = 1 if x.is_contiguous() else x.numel() // n
    for extent, stride in zip(x.shape, x.stride(), strict=True):
        if rows == 1:  # the dimensions that are left are normalized
            break
        rows //= extent
        offsets |= stride * itemsize if extent != 1 else 0
    return offsets & 15 == 0


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def add_to(targets: Sequence[Tensor | None], gradients: Sequence[Any]) -> None:
    """Add the gradients of weights, a backward's results from the third on, to these; None: that one is not added."""
    for target, gradient in zip(targets, gradients[2:], strict=False):
        if target is not None:
            target.add_(gradient)


def savable(tensor: Tensor | None) -> Tensor | None:
    """Return `tensor`, or a copy of an inference tensor, which autograd refuses to save."""
    return tensor if tensor is None or not tensor.is_inference() else tensor.clone()


def is_batched(tensor: Tensor) -> bool:
    """Whether `tensor` is a wrapper made by torch.func, such as vmap's, or by autograd.grad(is_grads_batched=True)."""
    return _is_legacy_batchedtensor(tensor) or _is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether `tensor` has a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def has_own_operations(tensor: Tensor) -> bool:
    """Whether the class of `tensor` defines `__torch_dispatch__`, as DTensor and FakeTensor do."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def has_no_memory(tensor: Tensor) -> bool:
    """Whether `tensor` has elements but its storage was freed, as FSDP frees parameters between uses. PyTorch's own
    operations would read address 0: a segmentation fault."""
    if tensor.is_meta or has_own_operations(tensor):
        return False
    try:
        while _is_functorch_wrapped_tensor(tensor):  # the wrapped tensor has the memory
            tensor = _get_unwrapped(tensor)
        # numel last: it is a tensor while torch.jit.trace records, which warns where one is compared.
        is_freed = tensor.untyped_storage().nbytes() == 0 and not tensor._is_zerotensor()
        return is_freed and tensor.numel() != 0
    except (RuntimeError, NotImplementedError):  # tensors without a storage have their memory elsewhere
        return False


def check_memory(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor, named by its keyword, whose memory was freed. Under Dynamo none exists yet."""
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
    """Whether `tensor` is a DTensor, by the name of its class: no import, and Dynamo can trace the comparison."""
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, Tensor)


def dtensor_class() -> Any:
    """Return DTensor; None where it was not imported, or has other private attributes than known calls read."""
    cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return cls if cls is not None and _has_parts(cls) else None


@functools.cache
def _has_parts(cls: type) -> bool:
    return hasattr(cls, "_local_tensor") and hasattr(cls, "_spec")


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor. Wait for it where it is the result of a collective that may still run, as
    any operation on it would: those of sequence parallelism are."""
    local = tensor._local_tensor
    if type(local) is Tensor:
        return local
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    cls = getattr(collectives, "AsyncCollectiveTensor", None)
    is_running = type(local) is cls and hasattr(cls, "trigger_wait") and not local.requires_grad
    return local.trigger_wait() if is_running else local


def splits_rows(tensor: Any, dims: int) -> bool:
    """Whether `tensor`, a DTensor or DTensorSpec, is sharded in its last `dims` dimensions, so that a process has only
    a part of each row."""
    for placement in getattr(tensor, "placements", ()):
        # Every kind of shard has `dim`, but is_shard() is False for some.
        dim = getattr(placement, "dim", None)
        if dim is not None and dim % tensor.ndim >= tensor.ndim - dims:
            return True
    return False


def shards_of(tensor: Any) -> dict[int, int]:
    """Count the shards of each sharded dimension of a DTensor, which several mesh dimensions may shard."""
    shards: dict[int, int] = {}
    for i, placement in enumerate(getattr(tensor, "placements", ())):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shards[dim] = shards.get(dim, 1) * tensor.device_mesh.size(i)
    return shards


def _waited(tensor: Tensor) -> Tensor:
    """Wait for the result of a collective that may still be running (AsyncCollectiveTensor)."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None or not isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Wait.apply(tensor)
    return tensor.wait()


class _Wait(torch.autograd.Function):
    """Wait for a collective without the copy that any operation on the tensor would make."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.wait().detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient
