# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Backend "cutile": a call by the launcher that serves it (lookup.py), which allocates and launches (launcher.py).

With TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import torch

from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.backends.cutile.forms import is_plain_backward
from tilegym_rmsnorm.backends.cutile.launcher import Backward as Backward
from tilegym_rmsnorm.backends.cutile.launcher import Forward as Forward
from tilegym_rmsnorm.backends.cutile.launcher import Launcher as Launcher
from tilegym_rmsnorm.backends.cutile.lookup import NAMES as NAMES
from tilegym_rmsnorm.backends.cutile.lookup import (
    _backward,
    _forward,
    backward_launcher,
    forward_launcher,
    ruled_out,
)
from tilegym_rmsnorm.backends.cutile.lookup import plan_for as plan_for
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.call.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted
from tilegym_rmsnorm.reference import sum_of_rows


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    x, weight, bias, residual = tensors
    if bias is not None or residual is not None or x.ndim != 2 or (spec.y_dtype or x.dtype) is not x.dtype:
        return _formed_forward(spec, tensors)
    m, n = x.size(0), spec.n
    weight_dtype = None if weight is None else weight.dtype
    run = _forward(x.device, n, x.dtype, weight_dtype, spec.casting, size_class(m, n), *ruled_out())
    y, rstd = run(x, weight, spec.eps, spec.offset)  # type: ignore[misc]  # every plain call is fused
    return y, rstd, None


@register_impl("rms_norm_backward", "cutile")
def rms_norm_backward(
    spec: Spec, tensors: BackwardTensors, wanted: Wanted, partials: str = "shared"
) -> Gradients:
    """partials: of Problem."""
    x, dy, weight, rstd, d_residual_out = tensors
    dtype, weight_dtype = x.dtype, None if weight is None else weight.dtype
    if not is_plain_backward(dtype, weight_dtype, spec.alpha, (x, dy, d_residual_out), wanted):
        return _formed_backward(spec, tensors, wanted)
    m, n, op = x.size(0), spec.n, "dx" if wanted.dw is None else "backward"
    size = size_class(m, n)
    run = _backward(op, x.device, n, dtype, weight_dtype, spec.casting, size, partials, *ruled_out())
    dx, dw = run(x, dy, weight, rstd, spec.offset)  # type: ignore[misc]  # as above
    return dx, None, dw, None


def _formed_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    """A call that is not plain: by kernels, or composed around a plain call."""
    run = forward_launcher(spec, tensors)
    return (
        around_kernels.forward(rms_norm_forward, spec, tensors) if run is None else run.formed(spec, tensors)
    )


def _formed_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    run = backward_launcher(spec, tensors, wanted)
    if run is None:
        return around_kernels.backward(rms_norm_backward, spec, tensors, wanted)
    if wanted.db is None or run.plan.problem.form.bias:
        return run.formed(spec, tensors, wanted)
    _, dy, weight, *_ = tensors
    shape = weight.shape if weight is not None and run.plan.problem.form.per_head else (spec.n,)
    db = sum_of_rows(dy, shape, torch.float32, wanted.db)  # first: it may copy dy
    return (*run.formed(spec, tensors, wanted._replace(db=None))[:3], db)
