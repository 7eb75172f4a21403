# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ask PyTorch what surrounds a call: torch.compile, torch.export, make_fx, torch.func, dispatch modes.

A kernel is launched past PyTorch's dispatcher. In a call that PyTorch records or transforms (the call is *watched*) the
kernel would be missing from the graph, or from the gradient, without an error. `is_watched` asks for all cases, in
every call, so it must be cheap; the other functions tell them apart.

`is_watched` counts all dispatch modes: add one of PyTorch's that records calls to _TRACING_MODES alone. Add anything
else to `is_watched` and `why_not_here`; to `makes_graph` if a library op can replace the call, to `is_transformed` if
none can; and to `counts_without_grad` if its graph may be differentiated though grad is off now. `why_transformed`
(routes/choose.py) names transforms in which PyTorch's operations run whatever backend was named.

Functionalization replaces in-place operations by new tensors: AOTAutograd traces with it. The PreDispatch key is
included while make_fx or torch.export trace above autograd.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.overrides import has_torch_function_variadic

is_traced = torch.compiler.is_dynamo_compiling  # torch.compile or strict torch.export
is_compiled = torch.compiler.is_compiling  # in non-strict torch.export too

# Equal to is_in_torch_func in eager calls, and cheaper. Dynamo would leave a call of it in its graph.
are_transforms_active = torch._C._are_functorch_transforms_active
peek_interpreter, Interpreter = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.CInterpreter
is_traced_by_jit = torch._C._is_tracing
get_trace = torch._C._get_tracing_state  # None unless torch.jit.trace records; under Dynamo always
_set_trace = torch._C._set_tracing_state  # type: ignore[attr-defined]
count_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes see this call
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_get_dispatch_mode = torch._C._get_dispatch_mode
_PRE_DISPATCH, _FUNCTIONALIZE = torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.Functionalize

_is_translated = ContextVar("is_translated", default=False)

# PyTorch's dispatch modes that record operations or replace results. Other modes only observe, as FlopCounterMode.
_TRACING_MODES = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx records this call",
    torch._C._TorchDispatchModeKey.FAKE: "a FakeTensorMode is active",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "this call is functionalized",
}


def is_watched() -> bool:
    """Whether PyTorch records or transforms this call: tracing, torch.func, forward-mode differentiation, a dispatch
    mode."""
    return (
        is_traced()  # the first: Dynamo cannot trace the others
        or forward_ad._current_level >= 0
        or are_transforms_active()
        or count_modes() != 0
        or is_traced_by_jit()
        or _is_key_included(_PRE_DISPATCH)
        or (_is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE))
    )


def is_in_compiled_autograd() -> bool:
    """Whether compiled autograd runs or traces this backward. Nothing public says it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def is_profiled() -> bool:
    """Whether a profiler is on. An `ExecutionTraceObserver` alone is none."""
    return profiler._is_profiler_enabled or torch.autograd._profiler_enabled()


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, but right under torch.compile: before torch 2.13 Dynamo takes that for True."""
    return torch.compiler._is_exporting_flag


def is_translated() -> bool:
    """Whether this call becomes PyTorch's operations for another runtime, in `torch.onnx.export` or in `translated`.
    Nothing derives gradients of these operations, and Inductor does not compile them."""
    if is_traced() or not (count_modes() != 0 or is_traced_by_jit()):
        return False
    onnx = sys.modules.get("torch.onnx")  # importing it takes 0.2 s
    return _is_translated.get() or (onnx is not None and onnx.is_in_onnx_export())


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Make a block in which `is_translated` is True where a graph is made."""
    token = _is_translated.set(True)
    try:
        yield
    finally:
        _is_translated.reset(token)


def is_in_torch_func() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, runs the caller. Dynamo evaluates this form while it
    traces and leaves nothing in its graph."""
    if is_traced():
        return isinstance(peek_interpreter(), Interpreter)
    return are_transforms_active()


def is_transformed() -> bool:
    """Whether torch.jit.trace, torch.func or forward-mode differentiation is active: they cannot take a library op."""
    if is_in_torch_func() or forward_ad._current_level >= 0:
        return True
    return not is_traced() and is_traced_by_jit()  # Dynamo cannot trace the last


def makes_graph() -> bool:
    """Whether make_fx, torch.export or AOTAutograd make a graph of this call, or FakeTensorMode asks for shapes. False
    while Dynamo traces (`is_traced`)."""
    return not is_traced() and (
        is_exporting()
        or _is_key_included(_PRE_DISPATCH)
        or _is_key_included(_FUNCTIONALIZE)
        or (count_modes() != 0 and any(_get_dispatch_mode(key) is not None for key in _TRACING_MODES))
    )


def counts_without_grad() -> bool:
    """Whether operations may be differentiated though grad is off. torch.compile, torch.export, torch.jit.trace or a
    dispatch mode makes a graph that may run with grad, or forward-mode differentiation is active."""
    # is_compiled first: Dynamo cannot trace the others
    return is_compiled() or is_traced_by_jit() or count_modes() != 0 or forward_ad._current_level >= 0


def why_not_here() -> str | None:
    """Say in words why no kernel can run here, on any tensors; None if one can. Not for use while Dynamo traces."""
    if is_in_torch_func():
        return "torch.func transforms this call"
    if is_exporting():
        return "torch.export records this call"
    if is_traced_by_jit():
        return "torch.jit.trace records this call"
    if _is_key_included(_PRE_DISPATCH):
        return "make_fx records this call"
    # Functionalization excludes its key where it calls the kernel of an op.
    if _is_key_included(_FUNCTIONALIZE) and not _is_key_excluded(_FUNCTIONALIZE):
        return "this call is functionalized"
    if count_modes():
        for key, reason in _TRACING_MODES.items():
            if _get_dispatch_mode(key) is not None:
                return reason
    return None


def outside_of_trace(check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `check` while torch.jit.trace does not record, and return its result."""
    if (trace := get_trace()) is None:
        return check(*arguments, **options)
    _set_trace(None)
    try:
        return check(*arguments, **options)
    finally:
        _set_trace(trace)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that torch.compile calls it without tracing into it."""
    run: Any = torch._disable_dynamo(function)  # torch.compiler.disable would import Dynamo at once
    # Dynamo shows this message where it may not break the graph (fullgraph=True, strict export).
    run._torchdynamo_disable = True
    run._torchdynamo_disable_msg = (
        "a kernel of tilegym_rmsnorm was asked for by name and cannot run this call in a graph: its tensors, an eps "
        "that the graph computes, or a transform of torch.func or forward mode, are for PyTorch's own operations. "
        'To mend it: backend="torch". Or accumulate_main_grad marked its weight, and no graph adds to main_grad. '
        "To mend that: accumulate_main_grad(model, False), or compile without fullgraph=True"
    )
    return run


def has_torch_function(*tensors: Tensor | None) -> bool:
    """Whether a subclass or mode overrides calls by `__torch_function__`. False under Dynamo, which traces into it."""
    return not is_traced() and has_torch_function_variadic(*tensors)


def is_symbol(number: float | None) -> bool:
    """Whether a number is a symbol: known only when the traced graph runs, as the result of `item()`. A SymFloat whose
    value Dynamo knows is no symbol to this function: Dynamo guards on the value."""
    if isinstance(number, torch.SymFloat):
        return True
    if not is_traced() or not isinstance(number, (int, float)):  # of a wrong type: the checks say so
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    is_positive = number >= 0.0
    return guard_or_true(is_positive) and not guard_or_false(is_positive)
