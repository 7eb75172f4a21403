# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What lies between the checked arguments of the ops and a backend: flattened rows, and the autograd function.

Small tensors are bound by what happens here on the host, so nothing is asked twice; microseconds named in comments are
those of torch 2.13 on a 2 GHz Xeon.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import gate, reference
from tilegym_rmsnorm.gate import count_modes, is_in_torch_func, is_plain, is_watched
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import Request, dispatch, is_reference
from tilegym_rmsnorm.resolve import resolved
from tilegym_rmsnorm.spec import Spec, Wanted
from tilegym_rmsnorm.validation import check_memory, check_saved

_unsafe_view = torch.ops.aten._unsafe_view.default
_FLOAT32, _FLOAT64 = torch.float32, torch.float64


class Call(NamedTuple):
    """A checked call, its tensors aside: what runs it, and the backend as it was asked for, a name or "auto"."""

    spec: Spec
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None  # None as long as nobody needs it
    backend: str


class RMSNormFunction(torch.autograd.Function):
    """Saves x, weight and rstd; y is never needed again. The gate has let x, weight and bias through.

    What is no tensor comes in one tuple: each argument of `apply` costs host time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call):  # type: ignore[override]
        y, rstd = run_forward(x, weight, bias, call)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = call
        if bias is not None:
            ctx.bias_dtype, ctx.bias_shape = bias.dtype, bias.shape
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx = dw = db = None
        if needs_dx or needs_dw:
            if torch.is_grad_enabled():  # in a backward only under create_graph
                dx, dw = _differentiable_backward(x, dy, weight, ctx.call)
            elif is_dynamo_compiling() and ctx.call.backend != "torch":
                dx, dw = _untraced_backward(
                    x, dy, weight, rstd, ctx.call, needs_dw, hasattr(ctx, "bias_dtype")
                )
            elif is_dynamo_compiling() or (not is_watched() and _fit(dy, x, weight, rstd, ctx.call.spec.n)):
                dx, dw = run_backward(x, dy, weight, rstd, ctx.call, needs_dw)
            else:
                dx, dw = _checked_backward(
                    x, dy, weight, rstd, ctx.call, needs_dw, hasattr(ctx, "bias_dtype")
                )
        if needs_db:
            check_memory(dy=dy)
            db = dy.reshape(-1, ctx.call.spec.n).sum(dim=0, dtype=compute_dtype(dy.dtype))
            db = db.to(ctx.bias_dtype).view(ctx.bias_shape)
        return dx, dw, db, None


# Function.apply in C++, without the Python around it, which asks for functorch and unwraps, as the gate has done: 2 us.
# Not for Dynamo, which before torch 2.13 does not know it.
record = super(torch.autograd.Function, RMSNormFunction).apply


def run_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """y of x's shape and rstd (M,), of tensors that the gate has let through."""
    spec, n = call.spec, call.spec.n
    if x.numel() == 0:
        return torch.empty_like(x), x.new_empty(0, dtype=compute_dtype(x.dtype))  # nothing to fill
    y, rstd, _ = call.forward(spec, (_as_rows(x, n), _as_vector(weight), _as_vector(bias), None))
    return (y if x.ndim == 2 and x.shape[1] == n else _in_shape_of(x, y)), rstd


def run_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, call: Call, needs_dw: bool
) -> tuple[Tensor, Tensor | None]:
    """dx of x's shape; dw of weight's, or None where it is not needed. The gate has let the tensors through; rstd is
    contiguous."""
    spec, n = call.spec, call.spec.n
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight) if needs_dw else None  # a sum of no rows
    wanted = Wanted(x.dtype, dw=weight.dtype if needs_dw and weight is not None else None)
    rows = _as_rows(x, n), _as_rows(dy, n)
    dx, _, dw, _ = call.backward(spec, (*rows, _as_vector(weight), rstd, None), wanted)
    if x.ndim != 2 or x.shape[1] != n:
        dx = dx.view_as(x)  # view(x.shape) takes 2 us more, to unpack the shape
    if dw is not None and weight.ndim != 1:
        dw = dw.view_as(weight)
    return dx, dw


def unseen(function: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """The block in which `run_forward` or `run_backward` may call this implementation: kernels where no active dispatch
    mode sees them, or puts other tensors in the place of theirs. The reference is PyTorch's operations, which modes may
    count, save or replace as they do any."""
    if is_dynamo_compiling() or count_modes() == 0 or is_reference(function):
        return contextlib.nullcontext()
    return gate.out_of_sight()


def _fit(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, n: int) -> bool:
    """Whether kernels can be given these as they are. dy may be any tensor. Hooks of saved tensors may put any other in
    the place of the rest, and `tensor.data = ...` may have changed them: the version that autograd compares stays."""
    if not (is_plain(dy) and is_plain(x) and is_plain(rstd)):
        return False
    dtype, index = x.dtype, x.get_device()  # -1 for a CPU; is_plain has left out other devices without memory
    if weight is not None and not (
        is_plain(weight)
        and (weight.dtype is dtype or weight.dtype is _FLOAT32)
        and weight.numel() == n
        and weight.get_device() == index
    ):
        return False
    return (
        dy.dtype is dtype
        and dy.shape == x.shape
        and dy.get_device() == index
        and rstd.dtype is (_FLOAT64 if dtype is _FLOAT64 else _FLOAT32)
        and rstd.numel() * n == x.numel()
        and rstd.get_device() == index
        and rstd.is_contiguous()
    )


def _checked_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    call: Call,
    needs_dw: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """`run_backward` of whatever `_fit` does not let through, after all checks: made plain, and dispatched anew.

    Raises ValueError or TypeError on what does not fit what the forward saved, and BackendUnavailableError where the
    backend that was asked for by name cannot run it.
    """
    spec = call.spec
    dy, x, weight, rstd = map(resolved, (dy, x, weight, rstd))
    # Batches of gradients, gradients with tangents, and those inside a transform of torch.func are the reference's for
    # every backend, as gradients of gradients are: autograd asks for them, not the caller of rms_norm.
    tensors = [t for t in (dy, x, weight, rstd) if t is not None]
    if is_in_torch_func() or any(gate.is_batched(t) or gate.has_tangent(t) for t in tensors):
        return _differentiable_backward(x, dy, weight, call)
    check_saved(x, weight, rstd, dy, spec.n)
    weight_dtype = None if weight is None else weight.dtype
    obstacle = gate.obstacle(dy=dy, x=x, weight=weight, rstd=rstd)
    request = Request(x.device, x.dtype, weight_dtype, spec.casting, has_bias, obstacle)
    backward = dispatch("rms_norm_backward", request, call.backend)
    if obstacle is not None:
        return _differentiable_backward(x, dy, weight, call)
    with unseen(backward):
        return run_backward(x, dy, weight, rstd.contiguous(), call._replace(backward=backward), needs_dw)


@torch._disable_dynamo  # torch.compiler.disable would import Dynamo here and now
def _untraced_backward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Compiled autograd traces this backward although its forward ran a kernel: kept out of its graph."""
    return _checked_backward(*arguments)


def _differentiable_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None]:
    """dx of x's shape and dtype, dw of weight's, by the reference; rstd is computed again, so that its dependence on x
    counts. Raises ValueError where the memory of one was freed."""
    n, eps, offset, casting = call.spec[:4]
    check_memory(x=x, weight=weight, dy=dy)
    rows, vector = x.reshape(-1, n), None if weight is None else weight.reshape(-1)
    rstd = reference.compute_rms_norm_rstd_torch(rows, eps)
    dx, dw = reference.rms_norm_backward_torch(
        rows, dy.reshape(-1, n), vector, rstd, offset=offset, casting=casting
    )
    return dx.view(x.shape), None if weight is None else dw.view(weight.shape)


def _in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """y, new and contiguous, in x's shape, and no view: autograd forbids in-place operations on views that a custom
    Function returns. No data is moved."""
    is_eager = not is_dynamo_compiling() and type(x) is Tensor and not is_in_torch_func()
    if is_eager and not count_modes():  # a mode may have kept y: selective checkpointing does
        return y.resize_as_(x)  # 1 us; _unsafe_view takes 3
    return _unsafe_view(y, x.shape)


def _as_rows(x: Tensor, n: int) -> Tensor:
    """x as (M, N) with last stride 1 and a row stride of at least N: a view where one exists, else a copy."""
    rows = x if x.ndim == 2 and x.shape[1] == n else x.reshape(-1, n)
    row_stride, stride = rows.stride()
    if stride == 1 and row_stride >= n:
        return rows
    # clone, since contiguous() returns tensors with a dimension of 1 as they are, whatever its stride
    return rows.clone(memory_format=torch.contiguous_format)


def _as_vector(vector: Tensor | None) -> Tensor | None:
    if vector is None:
        return None
    if vector.ndim != 1:
        vector = vector.reshape(-1)
    return vector if vector.stride(0) == 1 else vector.clone(memory_format=torch.contiguous_format)
