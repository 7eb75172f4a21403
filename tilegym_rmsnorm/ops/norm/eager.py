# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call on a backend and record its gradient.

The backward runs on the backend of the forward. Under create_graph PyTorch's operations run it, which are
differentiable again. Hooks or `tensor.data = ...` may have changed saved tensors since the forward, so a backward that
is not known checks all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.call.arithmetic import compute_dtype
from tilegym_rmsnorm.call.spec import Call, dtype_of
from tilegym_rmsnorm.call.tensors import add_to, is_plain, savable
from tilegym_rmsnorm.call.watched import is_traced, is_watched
from tilegym_rmsnorm.ops.norm import checks, operations, passes
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
from tilegym_rmsnorm.routes import choose, main_grad
from tilegym_rmsnorm.routes.autograd import RecordedFunction, Recording, apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls, run_and_remember


def bind(tensors: ForwardTensors, call: Call, is_kept: bool) -> Callable[[ForwardTensors], Any]:
    """Return a function of plain tensors like these, which computes y, or with a residual y and residual_out, and
    records the call where autograd would record PyTorch's operations. It holds no tensor.

    is_kept: It runs other calls too. The backward of a call by itself mostly runs once, and is not worth keeping.
    """
    x, weight, bias, residual = tensors
    run, returned = passes.bind_forward(tensors, call), passes.returned_of(tensors)
    if not is_recorded(*tensors):
        if residual is None:  # an itemgetter of one takes longer
            return lambda tensors: run(tensors)[0]
        return lambda tensors: returned(run(tensors))
    call = call._replace(dtype=call.spec.residual_dtype or x.dtype)
    dtypes, bias_shape = tuple(map(dtype_of, (x, residual, weight, bias))), () if bias is None else bias.shape
    backwards = KnownCalls() if is_kept else None
    gradients = functools.partial(_gradients_of, call, dtypes, bias_shape, backwards)
    if residual is None:
        needs = x.requires_grad, False, *[each is not None and each.requires_grad for each in (weight, bias)]
        recorded = run, gradients, needs, passes.saves_copies(x, weight)
        if main_grad.IN_USE and main_grad.adds(weight):

            def run_and_add_one(tensors: ForwardTensors) -> Any:
                x, weight, bias, _ = tensors
                owned = functools.partial(gradients, owner=weight)
                return _record((run, owned, *recorded[2:]), x, weight, bias)

            return run_and_add_one

        def run_and_record_one(tensors: ForwardTensors) -> Any:
            x, weight, bias, _ = tensors
            return _record(recorded, x, weight, bias)

        return run_and_record_one

    def run_recorded(tensors: tuple[Any, ...]) -> Outputs:
        x, residual, weight, bias = tensors
        return run((x, weight, bias, residual))

    recording_of = functools.partial(
        passes.recording,
        run_recorded,
        tensors,
        call.spec.alpha,
        returned=returned,
        without_gradient=passes.sum_without_gradient,
        backward=call.backward,
    )
    return _recorder(_record_sum, recording_of, gradients, weight)


def bind_with_input(tensors: ForwardTensors, call: Call, is_kept: bool) -> Callable[[ForwardTensors], Any]:
    """As `bind`, without a residual and recorded in any case: return y and x. The backward adds the gradient of that x
    to dx where it computes dx, as it adds that of a sum. Autograd makes a view of the returned x."""
    x, weight, bias, _ = tensors
    run = passes.bind_forward(tensors, call)
    call, dtypes = call._replace(dtype=x.dtype), tuple(map(dtype_of, (x, None, weight, bias)))
    backwards, bias_shape = KnownCalls() if is_kept else None, () if bias is None else bias.shape
    gradients = functools.partial(_gradients_of, call, dtypes, bias_shape, backwards)

    def run_with_input(tensors: tuple[Any, ...]) -> Outputs:
        x, _, weight, bias = tensors
        y, rstd, _ = run((x, weight, bias, None))
        return y, rstd, x

    recording_of = functools.partial(
        passes.recording, run_with_input, tensors, 1.0, returned=itemgetter(0, 2)
    )
    return _recorder(_record_with_input, recording_of, gradients, weight)


def _recorder(
    record: Any, recording_of: Callable[..., Recording], gradients: Callable[..., Any], weight: Any
) -> Callable[[ForwardTensors], Any]:
    """Return a function that records a call; where weight adds to its main_grad, in a recording that holds it."""
    recording = recording_of(gradients=gradients)

    def run_and_record(tensors: ForwardTensors) -> Any:
        x, weight, bias, residual = tensors
        return record(recording, x, residual, weight, bias)

    def run_and_add(tensors: ForwardTensors) -> Any:
        x, weight, bias, residual = tensors
        owned = recording_of(gradients=functools.partial(gradients, owner=weight))
        return record(owned, x, residual, weight, bias)

    return run_and_add if main_grad.IN_USE and main_grad.adds(weight) else run_and_record


class RMSNormFunction(RecordedFunction):
    """Norm without a residual. Saves x, weight and rstd; the backward does not need y.

    Small calls are bound by the host, so this says in few calls of Python what a `Recording` would say. It gets the
    function that runs the call, that of its gradients, which of them are needed, and whether inference tensors are
    copied: guards hold all of that for known calls."""

    @staticmethod
    def forward(ctx, recorded, x, weight, bias):
        run, ctx.gradients, ctx.needs, is_copied = recorded
        y, rstd, _ = run((x, weight, bias, None))
        if is_copied:
            x, weight = savable(x), savable(weight)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, _, dw, db = ctx.gradients((x, dy, weight, rstd, None), ctx.needs)
        return None, dx, dw, db


class AddRMSNormFunction(RecordedFunction):
    """Norm of the sum alpha * x + residual, and the sum. Saves the sum, weight and rstd: neither x nor residual."""


class RMSNormWithInputFunction(RecordedFunction):
    """Norm without a residual, and x. Saves x, weight and rstd."""


_record, _record_sum, _record_with_input = map(
    apply_of, (RMSNormFunction, AddRMSNormFunction, RMSNormWithInputFunction)
)


def _gradients_of(
    call: Call,
    dtypes: tuple[torch.dtype | None, ...],
    bias_shape: tuple[int, ...],
    backwards: KnownCalls | None,
    tensors: Any,
    needs: tuple[bool, ...],
    owner: Any = None,
) -> WantedGradients:
    """Compute the gradients of x, residual, weight and bias that are needed, of a backward like an earlier one without
    checks. call, dtypes, bias_shape: of the forward. tensors: as for `gradients`. owner: the weight whose main_grad dw
    is added to."""
    if owner is not None and needs[2] and (target := main_grad.target_of(owner)) is not None:
        dtypes = *dtypes[:2], target.dtype, dtypes[3]
        tensors = (*tensors, target)
        dx, d_residual, _, db = _gradients_of(call, dtypes, bias_shape, backwards, tensors, needs)
        return dx, d_residual, main_grad.gradient_of(owner), db
    described = None
    if backwards is not None and not torch.is_grad_enabled() and not is_traced():
        described = passes.backward_call(tensors, needs, call.backend)
        if (known := backwards.find(described)) is not None:
            return known(tensors)
    alpha, wanted = wanted_of(needs, call.spec.alpha, dtypes)
    if alpha != call.spec.alpha:
        call = call._replace(spec=call.spec._replace(alpha=alpha))
    return gradients(tensors, call, wanted, needs, bias_shape if needs[3] else (), backwards, described)


def gradients(
    tensors: Any,
    call: Call,
    wanted: Wanted,
    needs: tuple[bool, ...],
    bias_shape: tuple[int, ...],
    backwards: KnownCalls | None,
    described: Any,
) -> WantedGradients:
    """Compute the gradients that autograd asks for. tensors: x, dy, weight, rstd, d_residual_out, and a float32 tensor
    to add dw to, if any. described: the call for `backwards`.

    Raises ValueError or TypeError where saved tensors differ from those of the forward, and BackendUnavailableError
    where the backend that was asked for by name cannot run them.
    """
    is_usual = wanted.dx is not None and not torch.is_grad_enabled() and not is_watched()
    saved, target = tensors[:5], tensors[5:]
    if is_usual and _are_as_saved(saved, call):
        route, plain = choose.Route(choose.KERNELS, call), tensors
    else:
        checked = checks.checked_saved(saved, call, wanted)
        route = choose.route_of(checked, call.backend, wanted, is_by_autograd=True)
        plain = *checked.tensors, *target
    if route.name == choose.KERNELS:

        def bind_gradients(_: bool) -> Callable[[BackwardTensors], WantedGradients]:
            run = passes.bind_backward(plain, route.call, wanted)
            if needs[0] and not (needs[1] or needs[3]):  # they are what autograd asks for
                return run
            return lambda tensors: as_needed(needs, run(tensors), bias_shape)

        return run_and_remember(backwards, described, tensors, plain, route.call.backward, bind_gradients)
    if wanted.dx is not None:
        compute = passes.call_backward if route.name == choose.OP else operations.gradients_of_saved
        found = _on_rows(compute, plain[:5], route.call, wanted)
        add_to(target, found)
    else:
        _, dy, weight, rstd, _ = plain
        if route.name == choose.OP:
            dims = len(bias_shape) - (call.spec.heads > 0)
            found = passes.call_backward((dy, dy, weight, rstd, None), dims, route.call, wanted)
        else:
            found = None, None, None, operations.db_by_operations(dy, bias_shape, call.spec, wanted)
    return as_needed(needs, found, bias_shape)


def _are_as_saved(tensors: BackwardTensors, call: Call) -> bool:
    """Whether these are plain tensors with dtypes and sizes as the forward of `call` left them, so that its backend
    takes them without more checks. dy may be any tensor. Hooks may replace saved tensors, and `tensor.data = ...` may
    change them: autograd does not notice, since the version that it compares stays."""
    x, dy, weight, rstd, d_residual_out = tensors
    spec, dtype = call.spec, call.dtype
    assert dtype is not None
    for rows, own in ((x, dtype), (dy, spec.y_dtype or dtype), (d_residual_out, dtype)):
        if rows is not None and not (is_plain(rows) and rows.dtype is own and rows.shape == x.shape):
            return False
    if not (is_plain(rstd) and rstd.dtype is compute_dtype(dtype) and rstd.is_contiguous()):
        return False
    if weight is not None and not (
        is_plain(weight)
        and (weight.dtype is dtype or weight.dtype in KERNEL_DTYPES)
        and weight.numel() == spec.n * (spec.heads or 1)
    ):
        return False
    devices = {each.get_device() for each in tensors if each is not None}
    return len(devices) == 1 and rstd.numel() * spec.n == x.numel()


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
