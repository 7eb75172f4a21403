# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ask PyTorch what surrounds a call: torch.compile, torch.export, make_fx, torch.func, dispatch modes.

PyTorch's dispatcher is not asked before a kernel runs. A call that it records or transforms must not reach one: the
kernel would be missing in the graph, or in the gradient, without a word.

    is_watched          anything of all below: asked of every call, so as cheaply as can be
    is_traced           torch.compile or strict torch.export: Dynamo traces the caller
    is_in_torch_func    a transform of torch.func, such as vmap or grad
    is_transformed      that, torch.jit.trace, or forward-mode differentiation: no op may stand for the call
    makes_graph         make_fx, torch.export or AOTAutograd make a graph, or FakeTensorMode asks for shapes
    why_no_kernel       the one of these, in words, for which kernels cannot run; None if they can
    without_modes       a block that no dispatch mode sees into

Functionalization puts new tensors in the place of in-place operations: AOTAutograd traces with it. The PreDispatch key
is included while make_fx or export trace above autograd.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic
from torch.utils._python_dispatch import _disable_current_modes

is_traced = torch.compiler.is_dynamo_compiling
is_compiled = torch.compiler.is_compiling  # in non-strict torch.export too

# The same as is_in_torch_func in eager calls, which it costs less; Dynamo would leave it in its graph.
are_transforms_active = torch._C._are_functorch_transforms_active
_peek_interpreter, _Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter
is_traced_by_jit = torch._C._is_tracing
count_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes see this call
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_get_dispatch_mode = torch._C._get_dispatch_mode
_PRE_DISPATCH, _FUNCTIONALIZE = torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.Functionalize

# The modes of PyTorch's own that record or replace what is computed; others watch it.
_TRACING_MODES = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx records this call",
    torch._C._TorchDispatchModeKey.FAKE: "a FakeTensorMode is active",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "this call is functionalized",
}


def is_watched() -> bool:
    """Whether this call is inside anything that records, transforms, differentiates forward or watches what PyTorch
    computes."""
    return (
        is_traced()  # first: Dynamo cannot trace the others
        or forward_ad._current_level >= 0
        or are_transforms_active()
        or count_modes() != 0
        or is_traced_by_jit()
        or _is_key_included(_PRE_DISPATCH)
        or (_is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE))
    )


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, which Dynamo takes for True under torch.compile too before torch 2.13."""
    return torch.compiler._is_exporting_flag


def is_in_torch_func() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, runs the caller. Dynamo knows it too, and of this form
    nothing is left in its graph."""
    if is_traced():
        return isinstance(_peek_interpreter(), _Interpreter)
    return are_transforms_active()


def is_transformed() -> bool:
    """Whether torch.jit.trace, torch.func or forward-mode differentiation are at work: no op stands for a call then."""
    return is_traced_by_jit() or is_in_torch_func() or forward_ad._current_level >= 0


def makes_graph() -> bool:
    """Whether make_fx, torch.export or AOTAutograd make a graph of this call, or FakeTensorMode asks for shapes."""
    return (
        is_exporting()
        or _is_key_included(_PRE_DISPATCH)
        or _is_key_included(_FUNCTIONALIZE)
        or (count_modes() != 0 and any(_get_dispatch_mode(key) is not None for key in _TRACING_MODES))
    )


def counts_without_grad() -> bool:
    """Whether operations count though grad is off: a graph of them is made, which may run with grad, by torch.compile,
    torch.export, torch.jit.trace or a dispatch mode; or forward-mode differentiation goes through them."""
    # first: Dynamo cannot trace the others
    return is_compiled() or is_traced_by_jit() or count_modes() != 0 or forward_ad._current_level >= 0


def why_no_kernel() -> str | None:
    """Why no kernel can run in this place, whatever its tensors; None if one can. Not asked while Dynamo traces."""
    if is_in_torch_func():
        return "torch.func transforms this call"
    if is_exporting():
        return "torch.export records this call"
    if is_traced_by_jit():
        return "torch.jit.trace records this call"
    if _is_key_included(_PRE_DISPATCH):
        return "make_fx records this call"
    # An op's own kernel is called by functionalization, which excludes its key there.
    if _is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE):
        return "this call is functionalized"
    if count_modes():
        for key, reason in _TRACING_MODES.items():
            if _get_dispatch_mode(key) is not None:
                return reason
    return None


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside it no dispatch mode sees what is called. A mode that watches (FlopCounterMode, a logger, selective
    checkpointing) could keep, wrap or replace the memory that a kernel is about to fill."""
    return _disable_current_modes()


def has_torch_function(*tensors: Tensor | None) -> bool:
    """Whether a subclass or a mode takes calls by `__torch_function__`. Not while Dynamo traces, which sees into it."""
    return not is_traced() and has_torch_function_variadic(*tensors)


def is_symbol(number: float | None) -> bool:
    """Whether a number is known only when the graph that is made runs, as what `item()` gives there. Where Dynamo knows
    a symbol's value, it guards on it: that is a number."""
    if isinstance(number, torch.SymFloat):
        return True
    if number is None or not is_traced():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    is_positive = number >= 0.0
    return guard_or_true(is_positive) and not guard_or_false(is_positive)
