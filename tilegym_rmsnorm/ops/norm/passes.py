# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe, bind and record the forward and the backward of a norm, and call its library ops: what routes share.

`bind_forward` and `bind_backward` decide all that shapes, strides and dtypes decide, since calls on small tensors are
bound by the host. They return functions that hold no tensor, so that known calls (routes/known_calls.py) run those
alone. Nothing is checked here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import compute_dtype
from tilegym_rmsnorm.call.layout import arranged, in_shape_of, view_of_vector, views_of
from tilegym_rmsnorm.call.spec import Call, Checked, dtype_of
from tilegym_rmsnorm.call.tensors import savable
from tilegym_rmsnorm.ops.norm import operations
from tilegym_rmsnorm.ops.norm.spec import (
    D_RESIDUAL,
    DB,
    DW,
    DX,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
    WantedGradients,
    shape_of_rstd,
)
from tilegym_rmsnorm.routes.autograd import Recording
from tilegym_rmsnorm.routes.known_calls import call_of, shared
from tilegym_rmsnorm.routes.main_grad import IN_USE, is_marked
from tilegym_rmsnorm.routes.sharding_rules import register_sharding

KNOWN = shared()  # calls of `rms_norm`
# The arguments of `rms_norm` that are neither tensors nor the backend: its numbers. The forward op takes them in this
# order too, the first as a count of dimensions.
NUMBERS = "normalized_shape", "eps", "offset", "casting", "residual_alpha", "residual_dtype", "out_dtype"
_SEQUENCES = (torch.Size, list)


def norm_call(tensors: ForwardTensors, numbers: tuple[Any, ...], backend: Any) -> Any:
    """Describe a call of `rms_norm` for known calls; None where it cannot be known. numbers: NUMBERS."""
    shape, eps, offset, _, alpha, _, _ = numbers
    # A number of another type may equal one of these as a key, but must raise an error.
    if type(offset) is not float or type(alpha) is not float or not (type(eps) is float or eps is None):
        return None
    if type(shape) is not int:
        if type(shape) in _SEQUENCES:
            shape = tuple(shape)
            numbers = shape, *numbers[1:]
        elif type(shape) is not tuple:
            return None
        for size in shape:
            if type(size) is not int:
                return None
    return forward_call(tensors, numbers, backend)


def forward_call(tensors: ForwardTensors, numbers: tuple[Any, ...], backend: Any) -> Any:
    """Describe a forward. numbers: all arguments that are no tensors; the backend may be left out."""
    x, weight, bias, residual = tensors
    parts = weight is None, bias is None, residual is None, len(IN_USE) and is_marked(weight)
    return call_of((x,) if residual is None else (x, residual), (weight, bias), parts, numbers, backend)


def backward_call(tensors: Any, others: tuple[Any, ...], backend: Any) -> Any:
    x, dy, weight, rstd, d_residual_out = tensors[:5]
    rows = (x, dy) if d_residual_out is None else (x, dy, d_residual_out)
    vectors = (rstd, weight) if len(tensors) == 5 else (rstd, weight, tensors[5])
    return call_of(rows, vectors, (weight is None, d_residual_out is None, len(tensors)), others, backend)


def bind_forward(tensors: ForwardTensors, call: Call) -> Callable[[ForwardTensors], Outputs]:
    """Return a function of tensors like these that computes y, rstd (M,), and residual_out, None without a residual. y
    and residual_out have x's shape."""
    x, weight, bias, residual = tensors
    spec: Spec = call.spec
    if x.numel() == 0:
        return lambda tensors: _outputs_of_no_rows(tensors[0], spec)
    of_x, of_residual = views_of(spec.n, spec.heads, (x, residual))
    of_vectors = [view_of_vector(each, spec.n, spec.heads) for each in (weight, bias)]
    return arranged(call.forward, spec, tensors, [of_x, *of_vectors, of_residual], _shaped_outputs)


def bind_backward(tensors: Any, call: Call, wanted: Wanted) -> Callable[[BackwardTensors], Gradients]:
    """Return a function of tensors like these that computes dx, d_residual, dw and db. dx and d_residual have x's
    shape, dw has weight's, db is (N,) or (H, N). rstd has M elements."""
    x, dy, weight, rstd, d_residual_out, *target = tensors
    spec: Spec = call.spec
    if x.numel() == 0:
        return lambda tensors: _gradients_of_no_rows(tensors[0], tensors[2], spec.n, wanted)
    of_x, of_dy, of_d = views_of(spec.n, spec.heads, (x, dy, d_residual_out))
    of_rstd = None if rstd.ndim == 1 and rstd.is_contiguous() else _flat
    views = [of_x, of_dy, view_of_vector(weight, spec.n, spec.heads), of_rstd, of_d]
    views += [view_of_vector(each, spec.n, spec.heads) for each in target]
    has_shapes = of_x is None and (weight is None or weight.ndim == 1)
    return arranged(call.backward, spec, tensors, views, None if has_shapes else _shaped_gradients, wanted)


def returned_of(tensors: ForwardTensors) -> Callable[[Outputs], Any]:
    """Return a function that returns what `rms_norm` does, of y, rstd and residual_out."""
    return itemgetter(0) if tensors[3] is None else itemgetter(0, 2)


def _shaped_outputs(tensors: ForwardTensors, outputs: Outputs) -> Outputs:
    x, (y, rstd, residual_out) = tensors[0], outputs
    if y.shape != x.shape:
        y = in_shape_of(x, y)
        residual_out = None if residual_out is None else in_shape_of(x, residual_out)
    return y, rstd, residual_out


def _shaped_gradients(tensors: BackwardTensors, gradients: Gradients) -> Gradients:
    x, weight = tensors[0], tensors[2]
    dx, d_residual, dw, db = gradients
    if dx.shape != x.shape:
        dx = dx.view_as(x)  # view(x.shape) takes 2 us more, to unpack the shape
        d_residual = None if d_residual is None else d_residual.view_as(x)
    if dw is not None and weight is not None and weight.ndim != 1:
        dw = dw.view_as(weight)
    return dx, d_residual, dw, db


def _flat(rstd: Tensor) -> Tensor:
    return rstd.view(-1) if rstd.is_contiguous() else rstd.reshape(-1).contiguous()


def _outputs_of_no_rows(x: Tensor, spec: Spec) -> Outputs:
    """Allocate the results where x has no elements: no kernel need run."""
    rstd = x.new_empty(0, dtype=compute_dtype(spec.residual_dtype or x.dtype))
    residual_out = None if spec.residual_dtype is None else _empty(x, spec.residual_dtype)
    return _empty(x, spec.y_dtype or x.dtype), rstd, residual_out


def _gradients_of_no_rows(x: Tensor, weight: Tensor | None, n: int, wanted: Wanted) -> Gradients:
    dx, d_residual = (None if dtype is None else _empty(x, dtype) for dtype in (wanted.dx, wanted.d_residual))
    dw = None if wanted.dw is None or weight is None else torch.zeros_like(weight, dtype=wanted.dw)
    db = None
    if wanted.db is not None:
        db = x.new_zeros((n,) if weight is None else weight.shape, dtype=wanted.db)
    return dx, d_residual, dw, db  # type: ignore[return-value]


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def arguments_of_forward(checked: Checked, backend: str | None) -> tuple[Any, ...]:
    """Return the arguments of the forward op for a call that passed all checks."""
    (x, weight, bias, residual), spec = checked.tensors, checked.spec
    dtypes = spec.residual_dtype, spec.y_dtype
    return x, residual, weight, bias, len(checked.shape), *spec[1:5], *dtypes, backend, spec.reproducible


def call_backward(
    tensors: BackwardTensors, dims: int, call: Call, wanted: Wanted, needs_dx: bool = True
) -> WantedGradients:
    """Call the backward op on x, dy, weight, rstd of the op's shape, d_residual_out. needs_dx: whether the op returns
    dx, which kernels write in any case."""
    x, dy, weight, rstd, d_residual_out = tensors
    register_sharding(tensors)
    if wanted.dx is None:
        # db alone. Of a plain sum Inductor would make a kernel that adds in another order than eager calls. dy is
        # passed as x too, or the graph would keep x for the op.
        rstd = rstd.reshape(shape_of_rstd(dy, dims)).to(compute_dtype(dy.dtype))
        x = dy
    bits = DX * (needs_dx and wanted.dx is not None) + D_RESIDUAL * (wanted.d_residual is not None)
    bits += DW * (wanted.dw is not None) + DB * (wanted.db is not None)
    numbers = bits, dims, call.spec.offset, call.spec.casting, call.spec.alpha
    backward = torch.ops.tilegym_rmsnorm.rms_norm_backward.default
    options = *numbers, *wanted, call.backend, call.spec.reproducible
    dx, dw, db, d_residual = backward(dy, x, weight, rstd, d_residual_out, *options)
    return dx if bits & DX else None, d_residual, dw, db


def recording(
    run: Callable[[tuple[Any, ...]], Outputs],
    tensors: ForwardTensors,
    alpha: float,
    gradients: Callable[[BackwardTensors, tuple[bool, ...]], WantedGradients],
    **more: Any,
) -> Recording:
    """Describe how forwards on tensors like these are recorded. They save weight, rstd and the normalized tensor: x, or
    residual_out. gradients: of x, residual, weight and bias, where they are needed. Autograd gets the tensors in that
    order, in which gradients of one tensor are added and hooks run; `run` gets them so too. more: fields of
    `Recording`."""
    x, weight, bias, residual = tensors
    if residual is not None:
        saved = _saved_of_sum
    else:
        saved = _copies_of_norm if saves_copies(x, weight) else _saved_of_norm
    dtypes = dtype_of(x), dtype_of(residual)
    return Recording(run, saved, functools.partial(_gradients_of_results, gradients, alpha, dtypes), **more)


def saves_copies(x: Tensor, weight: Tensor | None) -> bool:
    """Whether autograd refuses to save one of the inputs, so that a norm without a residual saves a copy."""
    return x.is_inference() or (weight is not None and weight.is_inference())


def _saved_of_norm(tensors: tuple[Any, ...], outputs: Outputs) -> tuple[Tensor | None, ...]:
    return tensors[0], tensors[2], outputs[1]


def _copies_of_norm(tensors: tuple[Any, ...], outputs: Outputs) -> tuple[Tensor | None, ...]:
    return savable(tensors[0]), savable(tensors[2]), outputs[1]


def _saved_of_sum(tensors: tuple[Any, ...], outputs: Outputs) -> tuple[Tensor | None, ...]:
    return outputs[2], savable(tensors[2]), outputs[1]  # x need not be savable


def _gradients_of_results(
    gradients: Callable[[BackwardTensors, tuple[bool, ...]], WantedGradients],
    alpha: float,
    dtypes: tuple[torch.dtype | None, ...],
    saved: Callable[[], tuple[Any, ...]],
    results: tuple[Any, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    dy, d_residual_out = results[0], results[-1] if len(results) > 1 else None
    if dy is None:
        dx, d_residual = operations.gradients_of_sum(d_residual_out, alpha, dtypes, needs)
        return dx, d_residual, None, None
    x, weight, rstd = saved()
    return gradients((x, dy, weight, rstd, d_residual_out), needs)


def sum_without_gradient(outputs: Outputs, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Return residual_out where neither x nor residual needs a gradient."""
    return () if outputs[2] is None or needs[0] or needs[1] else (outputs[2],)
