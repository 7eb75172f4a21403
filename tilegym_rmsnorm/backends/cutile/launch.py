# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "cutile": a call by the launcher that serves it (lookup.py), which allocates and launches (launcher.py).

With TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tilegym_rmsnorm.backends import around_kernels, around_rope
from tilegym_rmsnorm.backends.contract import binding
from tilegym_rmsnorm.backends.cutile.launcher import Backward as Backward
from tilegym_rmsnorm.backends.cutile.launcher import Forward as Forward
from tilegym_rmsnorm.backends.cutile.launcher import Launcher as Launcher
from tilegym_rmsnorm.backends.cutile.lookup import NAMES as NAMES
from tilegym_rmsnorm.backends.cutile.lookup import backward_launcher, forward_launcher
from tilegym_rmsnorm.backends.cutile.lookup import plan_for as plan_for
from tilegym_rmsnorm.backends.cutile.rope import bind_backward, bind_forward
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.ops.norm.reference import sum_of_rows
from tilegym_rmsnorm.ops.norm.spec import (
    NORM_BACKWARD,
    NORM_FORWARD,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.ops.rope.spec import (
    ROPE_BACKWARD,
    ROPE_FORWARD,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)


@register_impl(NORM_FORWARD, "cutile")
@binding
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Callable[[ForwardTensors], Outputs]:
    run = forward_launcher(spec, tensors)
    if run is None:
        return functools.partial(around_kernels.forward, rms_norm_forward, spec)
    return run.bind(spec, tensors)


@register_impl(NORM_BACKWARD, "cutile")
@binding
def rms_norm_backward(
    spec: Spec, tensors: BackwardTensors, wanted: Wanted
) -> Callable[[BackwardTensors], Gradients]:
    run = backward_launcher(spec, tensors, wanted)
    if run is None:
        compose = functools.partial(around_kernels.backward, rms_norm_backward, spec)
        return lambda tensors: compose(tensors, wanted)
    if wanted.db is None or run.plan.problem.form.bias:
        return run.bind(spec, tensors, wanted)
    weight, db_dtype = tensors[2], wanted.db
    shape = weight.shape if weight is not None and run.plan.problem.form.per_head else (spec.n,)
    run_without_db = run.bind(spec, tensors, wanted._replace(db=None))

    def run_and_sum(tensors: BackwardTensors) -> Gradients:
        db = sum_of_rows(tensors[1], shape, torch.float32, db_dtype)  # first: it may copy dy
        return (*run_without_db(tensors)[:3], db)

    return run_and_sum


@register_impl(ROPE_FORWARD, "cutile")
@binding
def qk_norm_rope_forward(spec: RopeSpec, tensors: RopeTensors) -> Callable[[RopeTensors], RopeOutputs]:
    run = bind_forward(spec, tensors)
    return run or functools.partial(around_rope.forward, rms_norm_forward, spec)


@register_impl(ROPE_BACKWARD, "cutile")
@binding
def qk_norm_rope_backward(
    spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted
) -> Callable[[RopeBackwardTensors], RopeGradients]:
    run = bind_backward(spec, tensors, wanted)
    if run is not None:
        return run
    compose = functools.partial(around_rope.backward, rms_norm_backward, spec)
    return lambda tensors: compose(tensors, wanted)
