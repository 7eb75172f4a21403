# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call on a backend and record its gradient: two autograd.Functions, without a residual and with one.

The backward runs on the backend of the forward. Under create_graph PyTorch's operations run it, which are
differentiable again. Hooks or `tensor.data = ...` may have changed saved tensors since the forward: `_fit` compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call import arguments
from tilegym_rmsnorm.call.spec import (
    BackwardTensors,
    Call,
    ForwardTensors,
    Wanted,
    WantedGradients,
    as_needed,
    dtype_of,
    shape_of_rstd,
    wanted_of,
)
from tilegym_rmsnorm.call.tensors import has_own_operations, is_plain, savable
from tilegym_rmsnorm.call.watched import count_modes, is_traced, is_watched
from tilegym_rmsnorm.routes import choose, kernels, known_calls, op, operations
from tilegym_rmsnorm.routes.known_calls import KnownCalls

_is_in_inference_mode = torch.is_inference_mode_enabled  # in that mode enable_grad() records nothing
_FLOAT32, _FLOAT64 = torch.float32, torch.float64
_HALVES = (torch.float16, torch.bfloat16)


class Recorded:
    """Part of a recorded call that is not its tensors: what the forward and the backward of such calls need."""

    # backwards: None for a call that is not known: its backward mostly runs once, and is not worth binding.
    __slots__ = ("backwards", "bias_shape", "call", "dtypes", "run")

    def __init__(
        self, tensors: ForwardTensors, call: Call, run: kernels.RunForward, backwards: KnownCalls | None
    ) -> None:
        x, weight, bias, residual = tensors
        self.call, self.run, self.backwards = call, run, backwards
        self.dtypes = tuple(map(dtype_of, (x, residual, weight, bias)))
        self.bias_shape = () if bias is None else bias.shape


def run_or_record(tensors: ForwardTensors, call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call on plain tensors, and record it where autograd would record PyTorch's operations. Return y, or with a
    residual y and residual_out."""
    return _runner(tensors, call, functools.partial(kernels.run_forward, call=call))(tensors)


def bind(tensors: ForwardTensors, call: Call) -> Callable[[ForwardTensors], Any]:
    """Return `run_or_record` for any tensors with the metadata of these. It holds none of them."""
    return _runner(tensors, call, kernels.bind_forward(tensors, call), KnownCalls())


def _runner(
    tensors: ForwardTensors, call: Call, run: kernels.RunForward, backwards: KnownCalls | None = None
) -> Callable[[ForwardTensors], Any]:
    x, weight, _, residual = tensors
    is_recorded = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    if not is_recorded or _is_in_inference_mode():
        if residual is None:
            return lambda tensors: run(tensors)[0]
        return lambda tensors: run(tensors)[::2]
    recorded = Recorded(tensors, call, run, backwards)
    if residual is not None:

        def record_sum(tensors: ForwardTensors) -> Any:
            x, weight, bias, residual = tensors  # x need not be savable: the sum is saved
            return _record_add(x, residual, savable(weight), bias, recorded)

        return record_sum
    is_saved_as_copy = x.is_inference() or (weight is not None and weight.is_inference())
    if is_saved_as_copy:  # bound by the metadata of x, but run on the copy
        recorded.run = functools.partial(kernels.run_forward, call=call)

    def record(tensors: ForwardTensors) -> Any:
        x, weight, bias, _ = tensors
        if is_saved_as_copy:
            x, weight = savable(x), savable(weight)
        return _record(x, weight, bias, recorded)

    return record


class RMSNormFunction(torch.autograd.Function):
    """Norm without a residual. Saves x, weight and rstd; the backward does not need y.

    All but the tensors come in one object: each argument of `apply` costs host time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, recorded):
        y, rstd, _ = recorded.run((x, weight, bias, None))
        ctx.save_for_backward(x, weight, rstd)
        ctx.recorded = recorded
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        needs = needs_dx, False, needs_dw, needs_db
        dx, _, dw, db = _gradients_of(ctx.recorded, (x, dy, weight, rstd, None), needs)
        return dx, dw, db, None


class AddRMSNormFunction(torch.autograd.Function):
    """Norm of the sum alpha * x + residual, and the sum. Saves the sum, weight and rstd: neither x nor residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, recorded):
        y, rstd, residual_out = recorded.run((x, weight, bias, residual))
        ctx.set_materialize_grads(False)  # the gradient of an unused result is None, not a tensor of zeros
        ctx.save_for_backward(residual_out, weight, rstd)
        ctx.recorded = recorded
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, d_residual_out):
        needs, recorded = ctx.needs_input_grad[:4], ctx.recorded
        if dy is None:
            alpha = recorded.call.spec.alpha
            dx, d_residual = operations.gradients_of_sum(d_residual_out, alpha, recorded.dtypes, needs)
            return dx, d_residual, None, None, None
        residual_out, weight, rstd = ctx.saved_tensors
        if has_own_operations(residual_out) and count_modes():
            # Autograd detaches a tensor that is both saved and returned; a dispatch mode may replace the result.
            with kernels.unseen(recorded.call.backward):
                residual_out, weight, rstd = ctx.saved_tensors
        return *_gradients_of(recorded, (residual_out, dy, weight, rstd, d_residual_out), needs), None


# Function.apply in C++. The Python around it, which checks for functorch and unwraps, costs 2 us. Dynamo before torch
# 2.13 does not know this apply, and never traces it here.
_record = super(torch.autograd.Function, RMSNormFunction).apply
_record_add = super(torch.autograd.Function, AddRMSNormFunction).apply


def _gradients_of(recorded: Recorded, tensors: BackwardTensors, needs: tuple[bool, ...]) -> WantedGradients:
    """Compute the gradients of x, residual, weight and bias that are needed, of a backward like an earlier one without
    checks. tensors: as for `gradients`."""
    known_call, backwards = None, recorded.backwards
    if backwards is not None and not torch.is_grad_enabled() and not is_traced():
        known_call = known_calls.backward_call(tensors, needs, recorded.call.backend)
        if (known := backwards.find(known_call)) is not None:
            return known(tensors)
    spec, bias_shape = recorded.call.spec, recorded.bias_shape if needs[3] else ()
    alpha, wanted = wanted_of(needs, spec.alpha, recorded.dtypes)
    call = recorded.call if alpha == spec.alpha else recorded.call._replace(spec=spec._replace(alpha=alpha))
    result = as_needed(needs, gradients(tensors, call, wanted, bias_shape), bias_shape)
    if (
        known_call is not None
        and wanted.dx is not None
        and _fit(tensors, call)
        and known_calls.may_remember(tensors, tensors, call.backward)
    ):

        def bind_gradients() -> Callable[[BackwardTensors], WantedGradients]:
            run = kernels.bind_backward(tensors, call, wanted)
            return lambda tensors: as_needed(needs, run(tensors), bias_shape)

        recorded.backwards.remember(known_call, bind_gradients)
    return result


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
