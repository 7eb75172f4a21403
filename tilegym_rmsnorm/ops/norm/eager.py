# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call on a backend and record its gradient.

The backward runs on the backend of the forward. Under create_graph PyTorch's operations run it, which are
differentiable again. Hooks or `tensor.data = ...` may have changed saved tensors since the forward: `_fit` compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import Call, dtype_of
from tilegym_rmsnorm.call.tensors import is_plain
from tilegym_rmsnorm.call.watched import is_traced, is_watched
from tilegym_rmsnorm.ops.norm import checks, kernels, op, operations
from tilegym_rmsnorm.ops.norm.spec import (
    BackwardTensors,
    ForwardTensors,
    Outputs,
    Wanted,
    WantedGradients,
    as_needed,
    shape_of_rstd,
    wanted_of,
)
from tilegym_rmsnorm.routes import choose, known_calls
from tilegym_rmsnorm.routes.autograd import RecordedFunction, apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls

_is_in_inference_mode = torch.is_inference_mode_enabled  # in that mode enable_grad() records nothing
_FLOAT32, _FLOAT64 = torch.float32, torch.float64
_HALVES = (torch.float16, torch.bfloat16)


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
    x, weight, bias, residual = tensors
    returned = itemgetter(0) if residual is None else itemgetter(0, 2)
    if not is_recorded(*tensors) or _is_in_inference_mode():
        return lambda tensors: returned(run(tensors))
    dtypes, bias_shape = tuple(map(dtype_of, (x, residual, weight, bias))), () if bias is None else bias.shape
    gradients = functools.partial(_gradients_of, call, dtypes, bias_shape, backwards)

    def run_recorded(tensors: tuple[Any, ...]) -> Outputs:
        x, residual, weight, bias = tensors
        return run((x, weight, bias, residual))

    recording = op.recording(run_recorded, tensors, call.spec.alpha, gradients)
    recording.returned, recording.is_one = returned, residual is None
    record = _record
    if residual is not None:
        recording.without_gradient = op.sum_without_gradient
        recording.unseen = lambda: kernels.unseen(call.backward)
        record = _record_sum

    def run_and_record(tensors: ForwardTensors) -> Any:
        x, weight, bias, residual = tensors
        return record(recording, x, residual, weight, bias)

    return run_and_record


class RMSNormFunction(RecordedFunction):
    """Norm without a residual. Saves x, weight and rstd; the backward does not need y."""


class AddRMSNormFunction(RecordedFunction):
    """Norm of the sum alpha * x + residual, and the sum. Saves the sum, weight and rstd: neither x nor residual."""


_record, _record_sum = map(apply_of, (RMSNormFunction, AddRMSNormFunction))


def _gradients_of(
    call: Call,
    dtypes: tuple[torch.dtype | None, ...],
    bias_shape: tuple[int, ...],
    backwards: KnownCalls | None,
    tensors: BackwardTensors,
    needs: tuple[bool, ...],
) -> WantedGradients:
    """Compute the gradients of x, residual, weight and bias that are needed, of a backward like an earlier one without
    checks. call, dtypes, bias_shape: of the forward. backwards: None where the forward is not known: then its backward
    mostly runs once, and is not worth binding. tensors: as for `gradients`."""
    known_call = None
    if backwards is not None and not torch.is_grad_enabled() and not is_traced():
        known_call = known_calls.backward_call(tensors, needs, call.backend)
        if (known := backwards.find(known_call)) is not None:
            return known(tensors)
    bias_shape = bias_shape if needs[3] else ()
    alpha, wanted = wanted_of(needs, call.spec.alpha, dtypes)
    if alpha != call.spec.alpha:
        call = call._replace(spec=call.spec._replace(alpha=alpha))
    result = as_needed(needs, gradients(tensors, call, wanted, bias_shape), bias_shape)
    if (
        backwards is not None
        and known_call is not None
        and wanted.dx is not None
        and _fit(tensors, call)
        and known_calls.may_remember(tensors, tensors, call.backward)
    ):

        def bind_gradients() -> Callable[[BackwardTensors], WantedGradients]:
            run = kernels.bind_backward(tensors, call, wanted)
            return lambda tensors: as_needed(needs, run(tensors), bias_shape)

        backwards.remember(known_call, bind_gradients)
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
    checked = checks.checked_saved(tensors, call, wanted)
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
