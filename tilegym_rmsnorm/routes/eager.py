# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call on a backend and record its gradient: two autograd.Functions, without a residual and with one.

The backward runs on the backend of the forward. Under create_graph PyTorch's operations run it, which are
differentiable again. Hooks or `tensor.data = ...` may have changed saved tensors since the forward: `_fit` compares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilegym_rmsnorm.call import arguments
from tilegym_rmsnorm.call.spec import (
    BackwardTensors,
    Call,
    Wanted,
    WantedGradients,
    as_needed,
    dtype_of,
    shape_of_rstd,
    wanted_of,
)
from tilegym_rmsnorm.call.tensors import has_own_operations, is_plain, savable
from tilegym_rmsnorm.call.watched import count_modes, is_watched
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
        wanted = Wanted(
            x.dtype if needs_dx or needs_dw else None,
            None,
            weight.dtype if needs_dw else None,
            ctx.bias_dtype if needs_db else None,
        )
        bias_shape = ctx.bias_shape if needs_db else ()
        dx, _, dw, db = gradients((x, dy, weight, rstd, None), ctx.call, wanted, bias_shape)
        return dx, dw, None if db is None else db.view(bias_shape), None


class AddRMSNormFunction(torch.autograd.Function):
    """Norm of the sum alpha * x + residual, and the sum. Saves the sum, weight and rstd: neither x nor residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, call):
        y, rstd, residual_out = kernels.run_forward(x, weight, bias, residual, call)
        ctx.set_materialize_grads(False)  # the gradient of an unused result is None, not a tensor of zeros
        ctx.save_for_backward(residual_out, weight, rstd)
        ctx.call, ctx.dtypes = call, (x.dtype, residual.dtype, dtype_of(weight), dtype_of(bias))
        if bias is not None:
            ctx.bias_shape = bias.shape
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, d_residual_out):
        needs, spec = ctx.needs_input_grad[:4], ctx.call.spec
        if dy is None:
            dx, d_residual = operations.gradients_of_sum(d_residual_out, spec.alpha, ctx.dtypes, needs)
            return dx, d_residual, None, None, None
        residual_out, weight, rstd = ctx.saved_tensors
        if has_own_operations(residual_out) and count_modes():
            # Autograd detaches a tensor that is both saved and returned; a dispatch mode may replace the result.
            with kernels.unseen(ctx.call.backward):
                residual_out, weight, rstd = ctx.saved_tensors
        alpha, wanted = wanted_of(needs, spec.alpha, ctx.dtypes)
        call = ctx.call if alpha == spec.alpha else ctx.call._replace(spec=spec._replace(alpha=alpha))
        tensors = residual_out, dy, weight, rstd, d_residual_out
        bias_shape = ctx.bias_shape if needs[3] else ()
        return *as_needed(needs, gradients(tensors, call, wanted, bias_shape), bias_shape), None


# Function.apply in C++. The Python around it, which checks for functorch and unwraps, costs 2 us. Dynamo before torch
# 2.13 does not know this apply, and never traces it here.
_record = super(torch.autograd.Function, RMSNormFunction).apply
_record_add = super(torch.autograd.Function, AddRMSNormFunction).apply


def gradients(
    tensors: BackwardTensors, call: Call, wanted: Wanted, bias_shape: tuple[int, ...] = ()
) -> WantedGradients:
    """Compute the gradients that autograd asks for. tensors: x, dy, weight, rstd, d_residual_out. Each gradient has the
    shape of its tensor, but db may be flat. bias_shape is needed where db alone is wanted.

    Raises ValueError or TypeError where saved tensors differ from those of the forward, and BackendUnavailableError
    where the backend that was asked for by name cannot run them.
    """
    if wanted.dx is not None and not torch.is_grad_enabled() and not is_watched() and _fit(tensors, call):
        return kernels.run_backward(tensors, call, wanted)
    checked = arguments.checked_saved(tensors, call, wanted)
    route = choose.route_of(checked, call.backend, wanted, is_by_autograd=True)
    if route.name == choose.KERNELS:
        return kernels.backward(checked, route.call, wanted)
    if wanted.dx is not None:
        run = op.call_backward if route.name == choose.OP else operations.gradients_of_saved
        return _on_rows(run, checked.tensors, route.call, wanted)
    _, dy, weight, rstd, _ = checked.tensors
    if route.name == choose.OPERATIONS:
        return None, None, None, operations.db_by_operations(dy, bias_shape, wanted)
    dims = len(bias_shape) - (call.spec.heads > 0)
    return op.call_backward((dy, dy, weight, rstd, None), dims, route.call, wanted)


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


def _on_rows(
    run: Callable[..., WantedGradients], tensors: BackwardTensors, call: Call, wanted: Wanted
) -> WantedGradients:
    """Flatten the tensors to rows for `run`, and give its gradients their shapes. db stays (N,) or (H, N)."""
    x, dy, weight, rstd, d_residual_out = tensors
    shape = (-1, call.spec.heads, call.spec.n) if call.spec.heads else (-1, call.spec.n)
    rows = x.reshape(shape)
    given = (
        rows,
        dy.reshape(shape),
        None if weight is None else weight.reshape(shape[1:]),
        rstd.reshape(shape_of_rstd(rows, 1)),
        None if d_residual_out is None else d_residual_out.reshape(shape),
    )
    dx, d_residual, dw, db = run(given, 1, call, wanted)
    dx, d_residual = (None if each is None else each.view(x.shape) for each in (dx, d_residual))
    return dx, d_residual, None if dw is None or weight is None else dw.view(weight.shape), db
