# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What may be handed to a kernel: the one gate in front of all of them, in the forward and in the backward.

A kernel reads and writes by address, and PyTorch's dispatcher is not asked: nobody waits, unwraps or records for it.
So a tensor must be *plain*: its values stand at its address, as its strides say, with no negation pending. Many tensors
are not: a DTensor, a gradient that is still being communicated, a tensor of zeros without memory, one that a tracer
records. And a call must not be one that PyTorch records or transforms: a kernel would be missing there without a word.

    of a tensor  is_plain            its memory can be read: asked of every tensor, so as cheaply as can be
                 is_batched, has_tangent, has_own_operations, has_no_memory     what else it may be
    of a call    is_watched          PyTorch records, transforms or watches it: asked of every call, as cheaply
                 is_in_torch_func, is_exporting, count_modes    parts of that, which Dynamo knows too
                 is_transformed      no op may stand for it
                 makes_graph         a graph is made of it, by something other than Dynamo
                 is_recorded         so, and an op may stand in that graph (graphs.py)
    of both      obstacle            why kernels cannot have these tensors in this call, in words; None if they can
    out_of_sight                     a block that no mode sees into

Where all tensors of a call are plain and nothing watches it, no more is asked, in arguments.py as in the backward
(autograd.py). Else resolve.py makes plain what can be made so, and `obstacle` is asked. What has an obstacle goes to
the reference under "auto", and is refused by a kernel asked for by name.

Tangents are those of forward-mode differentiation. A functional tensor, and functionalization, stand for in-place
operations by new tensors: AOTAutograd traces with them. The PreDispatch key is included while make_fx or export trace
above autograd.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

PLAIN_TYPES = (Tensor, Parameter)  # a subclass may answer for its properties with anything

# The same as is_in_torch_func in eager calls, which it costs less; Dynamo would leave it in its graph.
are_transforms_active = torch._C._are_functorch_transforms_active
_peek_interpreter, _Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter
_is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
_get_unwrapped = torch._C._functorch.get_unwrapped
_is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
_is_traced_by_jit = torch._C._is_tracing
count_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes see this call
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_get_dispatch_mode = torch._C._get_dispatch_mode
_PRE_DISPATCH, _FUNCTIONALIZE = torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.Functionalize
_NO_DISPATCH = Tensor.__torch_dispatch__  # what a subclass without a __torch_dispatch__ of its own has

# No view of freed memory is so far from the storage's start, and nearly all memory on 64 bits is beyond.
_TEBIBYTE = 2**40

# The modes of PyTorch's own that record or replace what is computed; others watch it.
_TRACING_MODES = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx records this call",
    torch._C._TorchDispatchModeKey.FAKE: "a FakeTensorMode is active",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "this call is functionalized",
}


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, which Dynamo takes for True under torch.compile too before torch 2.13."""
    return torch.compiler._is_exporting_flag


def is_in_torch_func() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, runs the caller. Dynamo knows it too, and of this form
    nothing is left in its graph."""
    if is_dynamo_compiling():
        return isinstance(_peek_interpreter(), _Interpreter)
    return are_transforms_active()


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may be given `tensor`. False too for tensors without elements, which no kernel needs.

    Only a tensor of exactly PLAIN_TYPES is asked, so that the answers are PyTorch's own. Those with nothing at an
    address of their own (zero, functional, wrapped by torch.func, freed by FSDP) say 0 or raise. Complex tensors and
    those with a tangent are plain too: their values are there, and `obstacle` refuses them.
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


def is_watched() -> bool:
    """Whether this call is inside anything that records, transforms, differentiates forward or watches what PyTorch
    computes."""
    return (
        forward_ad._current_level >= 0
        or are_transforms_active()
        or count_modes() != 0
        or _is_traced_by_jit()
        or is_dynamo_compiling()  # which has an error of its own for the next before torch 2.13
        or _is_key_included(_PRE_DISPATCH)
        or (_is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE))
    )


def obstacle(**tensors: Tensor | None) -> str | None:
    """Why kernels cannot be given these tensors here, which resolve.py has seen; None if they can. Under Dynamo always
    None: it traces the reference alone, which composite.py chooses the form of."""
    if is_dynamo_compiling():
        return None
    if (reason := _obstacle_of_call()) is not None:
        return reason
    for name, tensor in tensors.items():
        if tensor is not None and (reason := _obstacle_of(tensor)) is not None:
            return f"{name} {reason}"
    return None


def is_batched(tensor: Tensor) -> bool:
    """Whether `tensor` is a wrapper of torch.func's, as vmap's are, or of autograd.grad's is_grads_batched."""
    return _is_legacy_batchedtensor(tensor) or _is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether `tensor` has a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def has_own_operations(tensor: Tensor) -> bool:
    """Whether `tensor` is of a subclass that computes its operations itself, as DTensor and FakeTensor do."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def out_of_sight() -> contextlib.AbstractContextManager[Any]:
    """Inside it no dispatch mode sees what is called. A mode that watches (FlopCounterMode, a logger, selective
    checkpointing) could keep, wrap or replace the memory that a kernel is about to fill."""
    return _disable_current_modes() if count_modes() else contextlib.nullcontext()


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


def is_transformed() -> bool:
    """Whether torch.jit.trace, torch.func or forward-mode differentiation are at work: no op stands for a call then."""
    return _is_traced_by_jit() or is_in_torch_func() or forward_ad._current_level >= 0


def makes_graph() -> bool:
    """Whether make_fx, torch.export or AOTAutograd make a graph of this call, or FakeTensorMode asks for shapes."""
    return (
        is_exporting()
        or _is_key_included(_PRE_DISPATCH)
        or _is_key_included(_FUNCTIONALIZE)
        or (count_modes() != 0 and any(_get_dispatch_mode(key) is not None for key in _TRACING_MODES))
    )


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether a graph is made of this call by something other than Dynamo, torch.jit.trace and torch.func: make_fx,
    torch.export or AOTAutograd; or its results are to be shapes alone, by FakeTensorMode or fake tensors."""
    if is_transformed():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    are_standing = [isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in given]
    if not (makes_graph() or any(are_standing)):
        return False
    return not any(
        tensor.is_complex() or tensor.is_nested or (has_own_operations(tensor) and not stands)
        for tensor, stands in zip(given, are_standing, strict=True)
    )


def _is_functionalized() -> bool:
    """Not so in what functionalization itself calls, with the tensors that its own stand for: an op's kernel."""
    return _is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE)


def _obstacle_of_call() -> str | None:
    if is_in_torch_func():
        return "torch.func transforms this call"
    if is_exporting():
        return "torch.export records this call"
    if _is_traced_by_jit():
        return "torch.jit.trace records this call"
    if _is_key_included(_PRE_DISPATCH):
        return "make_fx records this call"
    if _is_functionalized():
        return "this call is functionalized"
    if count_modes():
        for key, reason in _TRACING_MODES.items():
            if _get_dispatch_mode(key) is not None:
                return reason
    return None


def _obstacle_of(tensor: Tensor) -> str | None:
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
