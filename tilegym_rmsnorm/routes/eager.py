# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call on a backend and record its gradient: two autograd.Functions, without a residual and with one.

The backward runs on the backend of the forward. Under create_graph PyTorch's operations run it, which are
differentiable again. Hooks or `tensor.data = ...` may have changed saved tensors since the forward: `_fit` compares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.registry import backward_of
from tilegym_rmsnorm.call.arguments import Checked
from tilegym_rmsnorm.call.spec import BackwardTensors, Call, Gradients, Wanted, arrays_of_d
from tilegym_rmsnorm.call.tensors import has_own_operations, is_plain, resolved, savable
from tilegym_rmsnorm.call.validation import check_saved
from tilegym_rmsnorm.call.watched import count_modes, is_traced, is_watched
from tilegym_rmsnorm.routes import choose, kernels, op, operations

_is_in_inference_mode = torch.is_inference_mode_enabled  # in that mode enable_grad() records nothing
_FLOAT32, _FLOAT64 = torch.float32, torch.float64
_HALVES = (torch.float16, torch.bfloat16)


def run_or_record(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a call on plain tensors, and record it where autograd would record PyTorch's operations. Return y, or with a
    residual y and residual_out; None where the call must be recorded but has no backward."""
    is_recorded = (
        torch.is_grad_enabled()
        and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
        )
        and not _is_in_inference_mode()
    )
    if not is_recorded:
        y, _, residual_out = kernels.run_forward(x, weight, bias, residual, call)
        return y if residual is None else (y, residual_out)
    if call.backward is None:
        return None
    if residual is not None:  # x need not be savable: the sum is saved
        return _record_add(x, residual, savable(weight), bias, call)
    if x.is_inference() or (weight is not None and weight.is_inference()):
        x, weight = savable(x), savable(weight)
    return _record(x, weight, bias, call)


class RMSNormFunction(torch.autograd.Function):
    """Norm without a residual. Saves x, weight and rstd; the backward does not need y.

    All but the tensors come in one tuple: each argument of `apply` costs host time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        y, rstd, _ = kernels.run_forward(x, weight, bias, None, call)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = call
        if bias is not None:
            ctx.bias_dtype, ctx.bias_shape = bias.dtype, bias.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        bias_dtype = ctx.bias_dtype if needs_db else None
        dx = dw = db = None
        if needs_dx or needs_dw:
            wanted = Wanted(x.dtype, None, weight.dtype if needs_dw else None, bias_dtype)
            dx, _, dw, db = gradients((x, dy, weight, rstd, None), ctx.call, wanted)
        elif needs_db:
            db = _db_of_call(ctx, dy, weight, rstd)
        return dx, dw, None if db is None else db.view(ctx.bias_shape), None


class AddRMSNormFunction(torch.autograd.Function):
    """Norm of the sum alpha * x + residual, and the sum. Saves the sum, weight and rstd: neither x nor residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, call):
        y, rstd, residual_out = kernels.run_forward(x, weight, bias, residual, call)
        ctx.set_materialize_grads(False)  # the gradient of an unused result is None, not a tensor of zeros
        ctx.save_for_backward(residual_out, weight, rstd)
        ctx.call, ctx.dtypes = call, (x.dtype, residual.dtype)
        if bias is not None:
            ctx.bias_dtype, ctx.bias_shape = bias.dtype, bias.shape
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, d_residual_out):
        needs_dx, needs_d_residual, needs_dw, needs_db, _ = ctx.needs_input_grad
        needs, spec = (needs_dx, needs_d_residual), ctx.call.spec
        if dy is None:
            return (
                *operations.gradients_of_sum(d_residual_out, spec.alpha, ctx.dtypes, needs),
                None,
                None,
                None,
            )
        residual_out, weight, rstd = ctx.saved_tensors
        if has_own_operations(residual_out) and count_modes():
            # Autograd detaches a tensor that is both saved and returned; a dispatch mode may replace the result.
            with kernels.unseen(ctx.call.backward):
                residual_out, weight, rstd = ctx.saved_tensors
        bias_dtype = ctx.bias_dtype if needs_db else None
        dx = d_residual = dw = db = None
        if needs_dx or needs_d_residual or needs_dw:
            alpha, wanted = arrays_of_d(needs, spec.alpha, ctx.dtypes)
            call = ctx.call if alpha == spec.alpha else ctx.call._replace(spec=spec._replace(alpha=alpha))
            wanted = wanted._replace(dw=weight.dtype if needs_dw else None, db=bias_dtype)
            dx, d_residual, dw, db = gradients((residual_out, dy, weight, rstd, d_residual_out), call, wanted)
            if needs_d_residual and d_residual is None:
                d_residual = dx
        elif needs_db:
            db = _db_of_call(ctx, dy, weight, rstd)
        db = None if db is None else db.view(ctx.bias_shape)
        return dx if needs_dx else None, d_residual, dw, db, None


# Function.apply in C++. The Python around it, which checks for functorch and unwraps, costs 2 us. Dynamo before torch
# 2.13 does not know this apply, and never traces it here.
_record = super(torch.autograd.Function, RMSNormFunction).apply
_record_add = super(torch.autograd.Function, AddRMSNormFunction).apply


def gradients(tensors: BackwardTensors, call: Call, wanted: Wanted) -> Gradients:
    """Compute the gradients that autograd asks for. tensors: x, dy, weight, rstd, d_residual_out. Each gradient has the
    shape of its tensor, but db is flat.

    Raises ValueError or TypeError where saved tensors differ from those of the forward, and BackendUnavailableError
    where the backend that was asked for by name cannot run them.
    """
    if torch.is_grad_enabled():  # in a backward only under create_graph
        return operations.gradients_on_rows(tensors, call.spec, wanted)
    if not is_watched() and _fit(tensors, call):
        return kernels.run_backward(tensors, call, wanted)
    if not is_traced():
        tensors = tuple(map(resolved, tensors))
    x, dy, weight, rstd, d_residual_out = tensors
    names, given = ("dy", "x", "weight", "rstd", "d_residual_out"), (dy, x, weight, rstd, d_residual_out)
    # Hooks may have put any tensor there, so that none is known to be plain. Nor is a mode shown an op: the forward had
    # none.
    route = choose.route_of(Checked(names, given, x.shape[-1:], call.spec, are_plain=False), call.backend)
    if route.name == choose.OP:
        return op.call_backward_on_rows(tensors, call, wanted)
    if is_traced() or choose.has_transform(*tensors):
        return operations.gradients_on_rows(tensors, call.spec, wanted, keeps_rstd=is_traced())
    check_saved(x, weight, rstd, dy, d_residual_out, call)
    function = backward_of(call.spec, tensors, wanted, route.backend, route.reason)
    if route.name == choose.OPERATIONS:
        return operations.gradients_on_rows(tensors, call.spec, wanted)
    with kernels.unseen(function):
        tensors = x, dy, weight, rstd.contiguous(), d_residual_out
        return kernels.run_backward(tensors, call._replace(backward=function), wanted)


def _fit(tensors: BackwardTensors, call: Call) -> bool:
    """Whether kernels can take these tensors unchanged. dy may be any tensor. Hooks may replace saved tensors, and
    `tensor.data = ...` may change them: autograd does not notice, since the version that it compares stays."""
    x, dy, weight, rstd, d_residual_out = tensors
    if not (is_plain(dy) and is_plain(x) and is_plain(rstd)):
        return False
    # index: -1 for a CPU. Other devices with -1, such as meta, have no memory: is_plain was False.
    spec, dtype, index = call.spec, x.dtype, x.get_device()
    n = spec.n
    if weight is not None and not (
        is_plain(weight)
        and (weight.dtype is dtype or weight.dtype is _FLOAT32 or weight.dtype in _HALVES)
        and weight.numel() == (n * spec.heads or n)
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
        dtype is call.dtype
        and dy.dtype is (spec.y_dtype or dtype)
        and dy.shape == x.shape
        and dy.get_device() == index
        and rstd.dtype is (_FLOAT64 if dtype is _FLOAT64 else _FLOAT32)
        and rstd.numel() * n == x.numel()
        and rstd.get_device() == index
        and rstd.is_contiguous()
    )


def _db_of_call(ctx: Any, dy: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """Compute db where no other gradient is needed."""
    spec = ctx.call.spec
    if is_traced() and ctx.call.backend != "torch" and not torch.is_grad_enabled():
        return op.call_for_db(dy, weight, rstd, len(ctx.bias_shape) - (spec.heads > 0), ctx.bias_dtype)
    return operations.db_by_operations(dy, ctx.bias_shape, ctx.bias_dtype)
