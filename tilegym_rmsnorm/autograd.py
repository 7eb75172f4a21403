# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What lies between the checked arguments of the ops and a backend: flattened rows, and the autograd function.

Small tensors are bound by what happens here on the host, so nothing is asked twice; microseconds named in comments are
those of torch 2.13 on a 2 GHz Xeon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.validation import is_transformed

_unsafe_view = torch.ops.aten._unsafe_view.default
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack

# What the implementations and the autograd function need beside tensors: n, eps, offset, casting, forward, backward.
# A plain tuple: a NamedTuple takes 0.3 us to make.
Call = tuple[int, float, float, str, Callable[..., Any], Callable[..., Any] | None]


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """y of x's shape, recorded for autograd; the last n elements of x's dimensions are a row."""
    if is_transformed(x, weight, bias):
        return _transformable(x, weight, bias, call)
    if is_dynamo_compiling():  # it traces this, where before torch 2.13 it does not know _record
        return RMSNormFunction.apply(x, weight, bias, call)
    return record(x, weight, bias, call)


def record(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """`normalize` of tensors that nothing transforms, in eager mode."""
    # Function.apply without the Python around it, which asks for functorch too and takes 2 us for it.
    x = _unwrap_if_dead(x)
    if weight is not None:
        weight = _unwrap_if_dead(weight)
    if bias is not None:
        bias = _unwrap_if_dead(bias)
    return _record(x, weight, bias, call)


def _transformable(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """y by operations that torch.func transforms, forward mode differentiates and torch.export and torch.jit.trace
    record: none of these takes the Function below, or its gradients are lost. No backend but the reference is chosen
    there (`validation.are_plain`): this is it."""
    n, eps, offset, casting, *_ = call
    options = {"bias": _as_vector(bias), "offset": offset, "casting": casting}
    y, _ = reference.rms_norm_forward_torch(x.reshape(-1, n), _as_vector(weight), eps, **options)
    return y.reshape(x.shape)


class RMSNormFunction(torch.autograd.Function):
    """Saves x, weight and rstd; y is never needed again.

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
            if _is_derived_further(dy):
                dx, dw = _differentiable_backward(x, dy, weight, ctx.call)
            else:
                dx, dw = run_backward(x, dy, weight, rstd, ctx.call, needs_dw)
        if needs_db:
            db = dy.reshape(-1, ctx.call[0]).sum(dim=0, dtype=compute_dtype(dy.dtype))
            db = db.to(ctx.bias_dtype).view(ctx.bias_shape)
        return dx, dw, db, None


_record = super(torch.autograd.Function, RMSNormFunction).apply


def run_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """y of x's shape and rstd (M,)."""
    n, eps, offset, casting, forward, _ = call
    if x.numel() == 0:
        return torch.empty_like(x), x.new_empty(0, dtype=compute_dtype(x.dtype))  # nothing to fill
    y, rstd = forward(_as_rows(x, n), _as_vector(weight), _as_vector(bias), eps, offset, casting)
    return (y if x.ndim == 2 and x.shape[1] == n else _in_shape_of(x, y)), rstd


def run_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, call: Call, needs_dw: bool
) -> tuple[Tensor, Tensor | None]:
    """dx of x's shape; dw of weight's, or None where it is not needed."""
    n, _, offset, casting, _, backward = call
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight) if needs_dw else None  # a sum of no rows
    dx, dw = backward(_as_rows(x, n), _as_rows(dy, n), _as_vector(weight), rstd, offset, casting, needs_dw)
    if x.ndim != 2 or x.shape[1] != n:
        dx = dx.view_as(x)  # to unpack x.shape takes view 2 us
    if dw is not None and weight.ndim != 1:
        dw = dw.view_as(weight)
    return dx, dw


def _is_derived_further(dy: Tensor) -> bool:
    """Whether gradients are to be differentiated (create_graph, or a tangent), or are a batch (is_grads_batched)."""
    if torch.is_grad_enabled():
        return True
    if is_dynamo_compiling():  # which traces the reference alone, and knows none of the functions below
        return False
    return _is_legacy_batchedtensor(dy) or (forward_ad._current_level >= 0 and is_transformed(dy))


def _differentiable_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None]:
    """By the reference; rstd is computed again, so that its dependence on x counts."""
    n, eps, offset, casting, _, _ = call
    rows, vector = x.reshape(-1, n), None if weight is None else weight.reshape(-1)
    rstd = reference.compute_rms_norm_rstd_torch(rows, eps)
    dx, dw = reference.rms_norm_backward_torch(
        rows, dy.reshape(-1, n), vector, rstd, offset=offset, casting=casting
    )
    return dx.view(x.shape), None if weight is None else dw.view(weight.shape)


def _in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """y, new and contiguous, in x's shape and no view: in-place operations on a custom Function's output refuse one."""
    is_plain = not is_dynamo_compiling() and type(x) is Tensor and not _are_functorch_transforms_active()
    if is_plain and not _len_torch_dispatch_stack():  # a mode may have kept y: selective checkpointing does
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
