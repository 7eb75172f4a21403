# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Add bias, residual and per-head weights around a kernel that has none of them, with PyTorch operations.

`kernel` is a forward or backward (ops/norm/spec.py) that takes only rows (M, N) and a weight (N,) or None: no bias,
residual or heads, but any dtypes of x, dy, weight and the results. Values between `kernel` and the operations here are
float32 (float64 beside float64), so that each result is rounded once, as by a kernel that does everything.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import joint_dtype, round_xhat
from tilegym_rmsnorm.call.layout import as_rows, in_shape_of
from tilegym_rmsnorm.ops.norm.reference import residual_sum, sum_of_rows
from tilegym_rmsnorm.ops.norm.spec import (
    BackwardFunction,
    ForwardFunction,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
    parts_of,
)
from tilegym_rmsnorm.reproducibility import DEVICE

_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[object, ...]] = set()


def _tell(op: str, x: Tensor, n: int, parts: tuple[str, ...]) -> None:
    """Log, once for each kind of call, the parts that make it slower than kernels alone."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    if x.ndim == 4:
        parts = (*parts, "rows in the order of heads")
    if (key := (op, x.dtype, n, parts)) not in _told:
        _told.add(key)
        what = ", ".join(parts)
        _log.debug("%s of %d %s columns: %s by PyTorch's operations around the kernels", op, n, x.dtype, what)


def _of_kernel(spec: Spec, **changes: Any) -> Spec:
    """Make the Spec of a call without residual and heads. `kernel` gets all other fields as they are."""
    return spec._replace(alpha=1.0, residual_dtype=None, heads=0, **changes)


@torch.no_grad()
def forward(kernel: ForwardFunction, spec: Spec, tensors: ForwardTensors) -> Outputs:
    """Run any forward of contract.py, around a `kernel` forward."""
    x, weight, bias, residual = tensors
    y_dtype = x.dtype if spec.y_dtype is None else spec.y_dtype
    residual_out = None
    if residual is not None:
        x = residual_out = residual_sum(x, residual, spec.alpha, spec.residual_dtype).contiguous()
    is_per_head = weight is not None and weight.ndim == 2
    _tell("rms_norm_forward", x, spec.n, parts_of(residual is not None, bias is not None, is_per_head))
    if bias is None and not is_per_head:
        y, rstd, _ = kernel(_of_kernel(spec, y_dtype=y_dtype), (as_rows(x, spec.n), weight, None, None))
        return in_shape_of(x, y), rstd, residual_out

    dtype = joint_dtype(x, weight, bias)
    # casting="llama" rounds xhat before the weight, and a per-head weight is applied here: so xhat is rounded here too.
    kernel_spec = _of_kernel(spec, casting="once" if is_per_head else spec.casting, y_dtype=dtype)
    kernel_weight = None if is_per_head else weight
    y, rstd, _ = kernel(kernel_spec, (as_rows(x, spec.n), kernel_weight, None, None))
    if weight is None:
        y = round_xhat(y, x.dtype, spec.casting)
    elif is_per_head:
        y = round_xhat(y, x.dtype, spec.casting).view(-1, *weight.shape) * (weight.to(dtype) + spec.offset)
    if bias is not None:
        y = y.view(-1, *bias.shape) + bias.to(dtype)
    return in_shape_of(x, y.to(y_dtype)), rstd, residual_out


def check_sums(spec: Spec, has_dw: bool, has_db: bool) -> None:
    """Raise ValueError under "device" for gradients that PyTorch's operations sum: dw of weights of heads, db."""
    if spec.reproducible & DEVICE and (has_dw or has_db):
        parts = " and ".join(parts_of(False, has_db, has_dw))
        raise ValueError(
            f'reproducible: expected at most "batch" for gradients of {parts} with {spec.n} columns, got "device": '
            "PyTorch's operations sum them, for so many columns or for want of a weight; freeze what need not learn, or"
            " call under torch.no_grad()"
        )


@torch.no_grad()
def backward(kernel: BackwardFunction, spec: Spec, tensors: Any, wanted: Wanted) -> Gradients:
    """Run any backward of contract.py, around a `kernel` backward."""
    x, dy, weight, rstd, d_residual_out, *target = tensors
    dtype = joint_dtype(x, weight, dy, d_residual_out)
    per_head = weight if weight is not None and weight.ndim == 2 else None
    check_sums(spec, per_head is not None and wanted.dw is not None, wanted.db is not None)
    needs_d = d_residual_out is not None or wanted.d_residual is not None or spec.alpha != 1.0
    _tell("rms_norm_backward", x, spec.n, parts_of(needs_d, wanted.db is not None, per_head is not None))
    dw = None
    rows, g = as_rows(x, spec.n), as_rows(dy, spec.n)
    db = None
    if wanted.db is not None:  # first: it may copy dy
        shape = (spec.n,) if weight is None else weight.shape
        db = sum_of_rows(g.view(-1, *shape), shape, dtype, wanted.db)
    if per_head is not None:
        dy_of_heads = g.reshape(-1, *per_head.shape).to(dtype)
        if wanted.dw is not None:
            xhat = round_xhat(rows.to(dtype) * rstd.to(dtype)[:, None], x.dtype, spec.casting)
            dw = (dy_of_heads * xhat.view_as(dy_of_heads)).sum(0).to(wanted.dw)
            for each in target:
                each.add_(dw)
        g = (dy_of_heads * (per_head.to(dtype) + spec.offset)).view(rows.shape)

    kernel_wanted = Wanted(dtype if needs_d else wanted.dx, dw=wanted.dw if per_head is None else None)
    kernel_weight, target = (weight, target) if per_head is None else (None, [])
    given = rows, g, kernel_weight, rstd, None, *target
    d, _, kernel_dw, _ = kernel(_of_kernel(spec), given, kernel_wanted)
    d, d_residual = d.view(x.shape), None
    if d_residual_out is not None:
        d = d.add_(d_residual_out)  # in place: contiguous, whatever d_residual_out is
    if wanted.d_residual is not None:
        d_residual = d.to(wanted.d_residual)
    dx = (d if spec.alpha == 1.0 else spec.alpha * d).to(wanted.dx)
    return dx, d_residual, kernel_dw if per_head is None else dw, db
