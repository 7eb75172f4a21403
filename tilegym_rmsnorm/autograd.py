# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What lies between the checked arguments of the ops and a backend: flattened rows, and the autograd functions.

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
from tilegym_rmsnorm.arguments import dtype_of
from tilegym_rmsnorm.gate import are_transforms_active, count_modes, is_in_torch_func, is_plain, is_watched
from tilegym_rmsnorm.layout import arranged, as_rows, as_vector
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import dispatch, is_reference, request_of
from tilegym_rmsnorm.resolve import resolved
from tilegym_rmsnorm.spec import D_RESIDUAL, DB, DW, DX, Gradients, Spec, Wanted, parts_of
from tilegym_rmsnorm.validation import check_memory, check_saved

_unsafe_view = torch.ops.aten._unsafe_view.default
_FLOAT32, _FLOAT64 = torch.float32, torch.float64
_HALVES = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """A checked call, its tensors aside: what runs it, and the backend as it was asked for, a name or "auto"."""

    spec: Spec
    forward: Callable[..., Any] | None  # None of a backward by itself
    backward: Callable[..., Any] | None  # None as long as nobody needs it
    backend: str
    heads: int = 0  # rows of weight and bias; 0 where all rows of x share one
    dtype: torch.dtype | None = None  # of what is normalized; None where spec.y_dtype is: y has the same then


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
        bias_dtype = ctx.bias_dtype if needs_db else None
        dx = dw = db = None
        if needs_dx or needs_dw:
            dw_dtype = weight.dtype if needs_dw else None
            wanted = Wanted(x.dtype, None, dw_dtype, bias_dtype)
            dx, _, dw, db = gradients((x, dy, weight, rstd, None), ctx.call, wanted)
        elif needs_db:
            db = _sum_of_rows(ctx, dy, weight, rstd)
        return dx, dw, None if db is None else db.view(ctx.bias_shape), None


class AddRMSNormFunction(torch.autograd.Function):
    """The norm of alpha * x + residual, and that sum. Saves the sum, weight and rstd: neither x nor residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, call):  # type: ignore[override]
        y, residual_out, rstd = run_add_forward(x, residual, weight, bias, call)
        ctx.set_materialize_grads(False)  # the gradient of a result that nobody uses is None, and no zeros
        ctx.save_for_backward(residual_out, weight, rstd)
        ctx.call, ctx.dtypes = call, (x.dtype, residual.dtype)
        if bias is not None:
            ctx.bias_dtype, ctx.bias_shape = bias.dtype, bias.shape
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, d_residual_out):  # type: ignore[override]
        if dy is None:
            alpha, needed = ctx.call.spec.alpha, ctx.needs_input_grad[:2]
            return *gradients_of_the_sum(d_residual_out, alpha, ctx.dtypes, needed), None, None, None
        needs_dx, needs_d_residual, needs_dw, needs_db, _ = ctx.needs_input_grad
        residual_out, weight, rstd = ctx.saved_tensors
        if gate.has_own_operations(residual_out) and count_modes():
            # Autograd detaches what is both saved and returned, where a mode may put another tensor in its place.
            with unseen(ctx.call.backward):
                residual_out, weight, rstd = ctx.saved_tensors
        bias_dtype = ctx.bias_dtype if needs_db else None
        dx = d_residual = dw = db = None
        if needs_dx or needs_d_residual or needs_dw:
            call, wanted = _call_for_sum(ctx)
            wanted = wanted._replace(dw=weight.dtype if needs_dw else None, db=bias_dtype)
            dx, d_residual, dw, db = gradients((residual_out, dy, weight, rstd, d_residual_out), call, wanted)
            if needs_d_residual and d_residual is None:
                d_residual = dx
        elif needs_db:
            db = _sum_of_rows(ctx, dy, weight, rstd)
        db = None if db is None else db.view(ctx.bias_shape)
        return dx if needs_dx else None, d_residual, dw, db, None


# Function.apply in C++, without the Python around it, which asks for functorch and unwraps, as the gate has done: 2 us.
# Not for Dynamo, which before torch 2.13 does not know it.
record = super(torch.autograd.Function, RMSNormFunction).apply
record_add = super(torch.autograd.Function, AddRMSNormFunction).apply


def run_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """y of x's shape and rstd (M,), of tensors that the gate has let through."""
    spec, n, heads = call.spec, call.spec.n, call.heads
    if x.numel() == 0:  # nothing to fill
        return _empty(x, spec.y_dtype or x.dtype), x.new_empty(0, dtype=compute_dtype(x.dtype))
    is_rows = not heads and x.ndim == 2 and x.shape[1] == n
    if is_rows or (not heads and x.is_contiguous()):
        rows = as_rows(x, n)
    else:
        rows = _arranged(n, heads, x)[0]
    bias = None if bias is None else as_vector(bias, n, heads)
    y, rstd, _ = call.forward(spec, (rows, as_vector(weight, n, heads), bias, None))
    return (y if is_rows else _in_shape_of(x, y)), rstd


def run_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """y and residual_out of x's shape, and rstd (M,), of tensors that the gate has let through."""
    spec, n, heads = call.spec, call.spec.n, call.heads
    if x.numel() == 0:
        rstd = x.new_empty(0, dtype=compute_dtype(spec.residual_dtype))
        return _empty(x, spec.y_dtype), _empty(x, spec.residual_dtype), rstd
    x_rows, residual_rows = _arranged(n, heads, x, residual)
    vectors = as_vector(weight, n, heads), as_vector(bias, n, heads)
    y, rstd, residual_out = call.forward(spec, (x_rows, *vectors, residual_rows))
    return _in_shape_of(x, y), _in_shape_of(x, residual_out), rstd


def savable(tensor: Tensor | None) -> Tensor | None:
    """`tensor`, or a copy of one made under torch.inference_mode, which autograd refuses to save."""
    return tensor if tensor is None or not tensor.is_inference() else tensor.clone()


def gradients(tensors: tuple[Any, ...], call: Call, wanted: Wanted) -> Gradients:
    """What a backward of autograd's gives for x, dy, weight, rstd and d_residual_out: of the shapes of their tensors
    but db, which is flat."""
    if torch.is_grad_enabled():  # in a backward only under create_graph
        return differentiable_backward(tensors, call, wanted)
    if is_dynamo_compiling():
        run = run_backward if call.backend == "torch" else _backward_by_op
        return run(tensors, call, wanted)
    if not is_watched() and _fit(tensors, call):
        return run_backward(tensors, call, wanted)
    if call.backend != "torch" and gate.is_recorded(*tensors):
        return _backward_by_op(tensors, call, wanted)
    return _checked_backward(tensors, call, wanted)


def run_backward(tensors: tuple[Any, ...], call: Call, wanted: Wanted) -> Gradients:
    """`gradients` by the call's backend. The gate has let the tensors through; rstd is contiguous."""
    x, dy, weight, rstd, d_residual_out = tensors
    n, heads = call.spec.n, call.heads
    if x.numel() == 0:
        return _gradients_of_no_rows(x, weight, n, wanted)
    is_rows = not heads and x.ndim == 2 and x.shape[1] == n
    if d_residual_out is None and (is_rows or (not heads and x.is_contiguous() and dy.is_contiguous())):
        rows, dy_rows, d_rows = as_rows(x, n), as_rows(dy, n), None
    else:
        rows, dy_rows, d_rows = _arranged(n, heads, x, dy, d_residual_out)
    given = rows, dy_rows, as_vector(weight, n, heads), rstd, d_rows
    dx, d_residual, dw, db = call.backward(call.spec, given, wanted)
    if not is_rows:
        dx = dx.view_as(x)  # view(x.shape) takes 2 us more, to unpack the shape
        d_residual = None if d_residual is None else d_residual.view_as(x)
    if dw is not None and weight.ndim != 1:
        dw = dw.view_as(weight)
    return dx, d_residual, dw, db


def unseen(function: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """The block in which `run_forward` or `run_backward` may call this implementation: kernels where no active dispatch
    mode sees them, or puts other tensors in the place of theirs. The reference is PyTorch's operations, which modes may
    count, save or replace as they do any."""
    if is_dynamo_compiling() or count_modes() == 0 or is_reference(function):
        return contextlib.nullcontext()
    return gate.out_of_sight()


def _arranged(n: int, heads: int, *tensors: Tensor | None) -> list[Any]:
    """The tensors of rows of one call, as spec.py has them."""
    if is_dynamo_compiling():  # by operations that it traces, for the reference alone
        shape = (-1, heads, n) if heads else (-1, n)
        return [None if tensor is None else tensor.reshape(shape) for tensor in tensors]
    if not heads and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return [None if tensor is None else as_rows(tensor, n) for tensor in tensors]
    return arranged(n, heads, tensors)


def _fit(tensors: tuple[Any, ...], call: Call) -> bool:
    """Whether kernels can be given these as they are. dy may be any tensor. Hooks of saved tensors may put any other in
    the place of the rest, and `tensor.data = ...` may have changed them: the version that autograd compares stays."""
    x, dy, weight, rstd, d_residual_out = tensors
    if not (is_plain(dy) and is_plain(x) and is_plain(rstd)):
        return False
    # index: -1 for a CPU; is_plain has left out other devices without memory
    n, dtype, index = call.spec.n, x.dtype, x.get_device()
    dy_dtype = dtype
    if call.dtype is not None:  # y has a dtype of its own
        if dtype is not call.dtype:
            return False
        dy_dtype = call.spec.y_dtype
    if weight is not None and not (
        is_plain(weight)
        and (weight.dtype is dtype or weight.dtype is _FLOAT32 or weight.dtype in _HALVES)
        and weight.numel() == (n * call.heads or n)
        and weight.get_device() == index
    ):
        return False
    if d_residual_out is not None and not (
        is_plain(d_residual_out)
        and d_residual_out.dtype is dtype
        and d_residual_out.shape == x.shape
        and d_residual_out.get_device() == index
    ):
        return False
    return (
        dy.dtype is dy_dtype
        and dy.shape == x.shape
        and dy.get_device() == index
        and rstd.dtype is (_FLOAT64 if dtype is _FLOAT64 else _FLOAT32)
        and rstd.numel() * n == x.numel()
        and rstd.get_device() == index
        and rstd.is_contiguous()
    )


def _checked_backward(tensors: tuple[Any, ...], call: Call, wanted: Wanted) -> Gradients:
    """`gradients` of whatever `_fit` does not let through, after all checks: made plain, and dispatched anew.

    Raises ValueError or TypeError on what does not fit what the forward saved, and BackendUnavailableError where the
    backend that was asked for by name cannot run it.
    """
    spec = call.spec
    tensors = x, dy, weight, rstd, d_residual_out = tuple(map(resolved, tensors))
    # Batches of gradients, gradients with tangents, and those inside a transform of torch.func are the reference's for
    # every backend, as gradients of gradients are: autograd asks for them, not the caller of rms_norm.
    if is_in_torch_func() or any(gate.is_batched(t) or gate.has_tangent(t) for t in tensors if t is not None):
        return differentiable_backward(tensors, call, wanted)
    check_saved(x, weight, rstd, dy, d_residual_out, spec.n, call.heads, call.dtype or dy.dtype)
    obstacle = gate.obstacle(dy=dy, x=x, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    dtypes = x.dtype, dtype_of(weight), dy.dtype, dtype_of(d_residual_out), *wanted
    parts = parts_of(spec.residual_dtype is not None, wanted.db is not None, call.heads > 0)
    request = request_of(x.device, spec.casting, obstacle, *dtypes, parts=parts)
    backward = dispatch("rms_norm_backward", request, call.backend)
    if obstacle is not None:
        return differentiable_backward(tensors, call, wanted)
    with unseen(backward):
        tensors = x, dy, weight, rstd.contiguous(), d_residual_out
        return run_backward(tensors, call._replace(backward=backward), wanted)


def _backward_by_op(tensors: tuple[Any, ...], call: Call, wanted: Wanted) -> Gradients:
    """`gradients` where a graph is made of the backward, by compiled autograd or make_fx, of a forward that ran before:
    the graph has the op of torch_ops.py, which is above this module."""
    x, dy, weight, rstd, d_residual_out = tensors
    spec, n, heads = call.spec, call.spec.n, call.heads
    shape = (-1, heads, n) if heads else (-1, n)
    rows, dy_rows = x.reshape(shape), dy.reshape(shape)
    d_rows = None if d_residual_out is None else d_residual_out.reshape(shape)
    vector = None if weight is None else weight.reshape(shape[1:])
    bits = DX + D_RESIDUAL * (wanted.d_residual is not None)
    bits += DW * (wanted.dw is not None) + DB * (wanted.db is not None)
    rstd, numbers = rstd.reshape(*rows.shape[:-1], 1), (bits, 1, spec.offset, spec.casting)
    ops, d_residual = torch.ops.tilegym_rmsnorm, None
    if spec.residual_dtype is None:
        of_vectors = wanted.dw, wanted.db, call.backend
        dx, dw, db = ops.rms_norm_backward.default(dy_rows, rows, vector, rstd, *numbers, *of_vectors)
    else:
        given = dy_rows, d_rows, rows, vector, rstd, *numbers, spec.alpha, *wanted, call.backend
        dx, d_residual, dw, db = ops.add_rms_norm_backward.default(*given)
    d_residual = None if d_residual is None else d_residual.view(x.shape)
    return dx.view(x.shape), d_residual, None if dw is None else dw.view(weight.shape), db


def differentiable_backward(tensors: tuple[Any, ...], call: Call, wanted: Wanted) -> Gradients:
    """`gradients` by the reference; rstd is computed again, so that its dependence on x counts. Raises ValueError where
    the memory of one was freed."""
    x, dy, weight, _, d_residual_out = tensors
    spec = call.spec
    check_memory(x=x, weight=weight, dy=dy, d_residual_out=d_residual_out)
    shape = (-1, call.heads, spec.n) if call.heads else (-1, spec.n)
    rows = x.reshape(shape)
    dx, d_residual, dw, db = reference.gradients_torch(
        rows,
        dy.reshape(shape),
        None if weight is None else weight.reshape(shape[1:]),
        reference.compute_rms_norm_rstd_torch(rows, spec.eps),
        None if d_residual_out is None else d_residual_out.reshape(shape),
        wanted,
        offset=spec.offset,
        casting=spec.casting,
        alpha=spec.alpha,
    )
    d_residual = None if d_residual is None else d_residual.view(x.shape)
    return dx.view(x.shape), d_residual, None if dw is None else dw.view(weight.shape), db


def _call_for_sum(ctx: Any) -> tuple[Call, Wanted]:
    """The call, and the dtypes of dx and d_residual: two arrays only where both are needed and differ."""
    call, (x_dtype, residual_dtype) = ctx.call, ctx.dtypes
    needs_dx, needs_d_residual, *_ = ctx.needs_input_grad
    if needs_dx and not needs_d_residual:
        return call, Wanted(x_dtype)
    if not needs_dx:
        # d_residual takes the place of dx, which it is where alpha is 1; beside dw alone nobody reads it
        call = call._replace(spec=call.spec._replace(alpha=1.0))
        return call, Wanted(residual_dtype if needs_d_residual else x_dtype)
    is_one_array = call.spec.alpha == 1.0 and x_dtype is residual_dtype
    return call, Wanted(x_dtype, None if is_one_array else residual_dtype)


def gradients_of_the_sum(
    d_residual_out: Tensor | None,
    alpha: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dx and d_residual where residual_out alone is used. dtypes: of x and residual."""
    if d_residual_out is None:
        return None, None
    check_memory(d_residual_out=d_residual_out)
    dx = d_residual = None
    if needed[0]:
        dx = d_residual_out
        if alpha != 1.0:
            dx = alpha * dx.to(compute_dtype(dx.dtype))
        dx = dx.to(dtypes[0])
    if needed[1]:
        d_residual = d_residual_out.to(dtypes[1])
    return dx, d_residual


def _gradients_of_no_rows(x: Tensor, weight: Tensor | None, n: int, wanted: Wanted) -> Gradients:
    dx, d_residual = (None if dtype is None else _empty(x, dtype) for dtype in (wanted.dx, wanted.d_residual))
    dw = None if wanted.dw is None else torch.zeros_like(weight, dtype=wanted.dw)
    db = None
    if wanted.db is not None:
        db = x.new_zeros((n,) if weight is None else weight.shape, dtype=wanted.db)
    return dx, d_residual, dw, db


def _sum_of_rows(ctx: Any, dy: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """db where nothing else is needed."""
    if is_dynamo_compiling() and ctx.call.backend != "torch" and not torch.is_grad_enabled():
        dims = len(ctx.bias_shape) - (ctx.call.heads > 0)
        return sum_of_rows_by_op(dy, weight, rstd, dims, ctx.bias_dtype)
    check_memory(dy=dy)
    return reference.sum_of_rows(dy, ctx.bias_shape, compute_dtype(dy.dtype), ctx.bias_dtype)


def sum_of_rows_by_op(
    dy: Tensor, weight: Tensor | None, rstd: Tensor, dims: int, dtype: torch.dtype
) -> Tensor:
    """db alone, in a graph: of a sum Inductor would make a kernel that adds in another order than eager calls do. The
    op reads dy, which is given for x too: else the graph would keep x for it."""
    rstd = rstd.reshape(*dy.shape[:-dims], *(1,) * dims).to(compute_dtype(dy.dtype))
    given = dy, dy, weight, rstd, DB, dims, 0.0, "once", None, dtype, None
    return torch.ops.tilegym_rmsnorm.rms_norm_backward.default(*given)[2]


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """y, new and contiguous, in x's shape, and no view: autograd forbids in-place operations on views that a custom
    Function returns. No data is moved."""
    is_eager = not is_dynamo_compiling() and type(x) is Tensor and not are_transforms_active()
    # A mode may have kept y, as selective checkpointing does.
    if is_eager and not count_modes() and not y._is_view():
        return y.resize_as_(x)  # 1 us; _unsafe_view takes 3
    return _unsafe_view(y, x.shape)
