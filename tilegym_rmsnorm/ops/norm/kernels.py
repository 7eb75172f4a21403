# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run a checked call on a backend: arrange its tensors as rows, call the backend's function, give results their shapes.

Nothing is checked or recorded here. Calls on small tensors are bound by the host, so `bind_forward` and `bind_backward`
decide all that shapes, strides and dtypes decide: known calls (known_calls.py) run without them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.contract import bound
from tilegym_rmsnorm.backends.layout import View, in_shape_of, view_of_vector, viewed, views_of
from tilegym_rmsnorm.call.arithmetic import compute_dtype
from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted
from tilegym_rmsnorm.routes.calls import unseen

RunForward = Callable[[ForwardTensors], Outputs]
RunBackward = Callable[[BackwardTensors], Gradients]


def run_forward(tensors: ForwardTensors, call: Call) -> Outputs:
    """Compute y, rstd (M,), and residual_out, None without a residual. y and residual_out have x's shape."""
    if tensors[0].numel() == 0:
        return _outputs_of_no_rows(tensors[0], call.spec)
    given = viewed(tensors, _views_of_forward(tensors, call.spec))
    return _shaped_outputs(tensors[0], bound(call.forward, call.spec, given)(given))


def bind_forward(tensors: ForwardTensors, call: Call) -> RunForward:
    """Return `run_forward` for any tensors with the metadata of these. It holds none of them."""
    views = _views_of_forward(tensors, call.spec)
    run = bound(call.forward, call.spec, viewed(tensors, views))
    if not any(views):
        return run
    of_x, *of_others = views
    if any(of_others):
        return lambda tensors: _shaped_outputs(tensors[0], run(viewed(tensors, views)))

    def run_viewed(tensors: ForwardTensors) -> Outputs:
        x, weight, bias, residual = tensors
        return _shaped_outputs(x, run((of_x(x), weight, bias, residual)))

    return run_viewed


def run_backward(tensors: BackwardTensors, call: Call, wanted: Wanted) -> Gradients:
    """Compute dx, d_residual, dw and db from x, dy, weight, rstd and d_residual_out. dx and d_residual have x's shape,
    dw has weight's, db is (N,) or (H, N). rstd is (M,), contiguous."""
    if tensors[0].numel() == 0:
        return _gradients_of_no_rows(tensors[0], tensors[2], call.spec.n, wanted)
    given = viewed(tensors, _views_of_backward(tensors, call.spec))
    return _shaped_gradients(tensors, bound(call.backward, call.spec, given, wanted)(given))


def bind_backward(tensors: BackwardTensors, call: Call, wanted: Wanted) -> RunBackward:
    """Return `run_backward` for any tensors with the metadata of these. It holds none of them."""
    views = _views_of_backward(tensors, call.spec)
    run = bound(call.backward, call.spec, viewed(tensors, views), wanted)
    if not any(views):
        return run
    return lambda tensors: _shaped_gradients(tensors, run(viewed(tensors, views)))


def _views_of_forward(tensors: ForwardTensors, spec: Spec) -> tuple[View, ...]:
    x, weight, bias, residual = tensors
    n, heads = spec.n, spec.heads
    of_x, of_residual = views_of(n, heads, (x, residual))
    return of_x, view_of_vector(weight, n, heads), view_of_vector(bias, n, heads), of_residual


def _shaped_outputs(x: Tensor, outputs: Outputs) -> Outputs:
    y, rstd, residual_out = outputs
    if y.shape != x.shape:
        y = in_shape_of(x, y)
        residual_out = None if residual_out is None else in_shape_of(x, residual_out)
    return y, rstd, residual_out


def _views_of_backward(tensors: BackwardTensors, spec: Spec) -> tuple[View, ...]:
    x, dy, weight, _, d_residual_out = tensors
    of_x, of_dy, of_d = views_of(spec.n, spec.heads, (x, dy, d_residual_out))
    return of_x, of_dy, view_of_vector(weight, spec.n, spec.heads), None, of_d


def _shaped_gradients(tensors: BackwardTensors, gradients: Gradients) -> Gradients:
    x, weight = tensors[0], tensors[2]
    dx, d_residual, dw, db = gradients
    if dx.shape != x.shape:
        dx = dx.view_as(x)  # view(x.shape) takes 2 us more, to unpack the shape
        d_residual = None if d_residual is None else d_residual.view_as(x)
    if dw is not None and weight.ndim != 1:
        dw = dw.view_as(weight)
    return dx, d_residual, dw, db


def forward(checked: Checked, call: Call) -> Outputs:
    """Call `run_forward` for a call by itself, which autograd does not record."""
    with unseen(call.forward):
        return run_forward(checked.tensors, call)


def backward(checked: Checked, call: Call, wanted: Wanted) -> Gradients:
    """Call `run_backward` on any rstd of M elements. db has weight's shape, without a weight that of a row."""
    weight = checked.tensors[2]
    with unseen(call.backward):
        dx, d_residual, dw, db = run_backward(with_flat_rstd(checked.tensors), call, wanted)
    shape = checked.shape if weight is None else weight.shape
    return dx, d_residual, dw, None if db is None else db.view(shape)


def with_flat_rstd(tensors: BackwardTensors) -> BackwardTensors:
    x, dy, weight, rstd, d_residual_out = tensors
    if rstd.ndim != 1 or not rstd.is_contiguous():
        rstd = rstd.view(-1) if rstd.is_contiguous() else rstd.reshape(-1).contiguous()
    return x, dy, weight, rstd, d_residual_out


def _outputs_of_no_rows(x: Tensor, spec: Spec) -> Outputs:
    """Allocate the results where x has no elements: no kernel need run."""
    rstd = x.new_empty(0, dtype=compute_dtype(spec.residual_dtype or x.dtype))
    residual_out = None if spec.residual_dtype is None else _empty(x, spec.residual_dtype)
    return _empty(x, spec.y_dtype or x.dtype), rstd, residual_out


def _gradients_of_no_rows(x: Tensor, weight: Tensor | None, n: int, wanted: Wanted) -> Gradients:
    dx, d_residual = (None if dtype is None else _empty(x, dtype) for dtype in (wanted.dx, wanted.d_residual))
    dw = None if wanted.dw is None else torch.zeros_like(weight, dtype=wanted.dw)
    db = None
    if wanted.db is not None:
        db = x.new_zeros((n,) if weight is None else weight.shape, dtype=wanted.db)
    return dx, d_residual, dw, db


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
