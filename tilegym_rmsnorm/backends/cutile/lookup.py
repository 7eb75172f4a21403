# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Look up the launcher of a call: by the plan of its problem, made once for all calls that are alike.

None where no kernel takes the call: its form or width (`is_fused`, plans/rules.py), its rows or strides (`_takes`).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.forms import fits_kernels, form_of
from tilegym_rmsnorm.backends.cutile.launcher import Backward, Forward, Launcher, lead_of
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN, Form, Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import WIDEST_BIAS_ROW, is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Spec, Wanted

logger = logging.getLogger("tilegym_rmsnorm")

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def forward_launcher(spec: Spec, tensors: ForwardTensors) -> Forward | None:
    """Return the launcher for a call of any form; None where no kernel takes the call."""
    x, weight, bias, residual = tensors
    n, m = spec.n, x.numel() // spec.n
    per_head = any(each is not None and each.ndim == 2 for each in (weight, bias))
    written = (spec.y_dtype, spec.residual_dtype)
    dtype, form = form_of((x, residual), written, residual is not None, bias is not None, per_head)
    weight_dtype = None if weight is None else weight.dtype
    kind = size_class(m, n), *settings.kernel_limits(), form
    run = _launcher("forward", x.device, n, dtype, weight_dtype, spec.casting, *kind)
    return None if run is None or not _takes(run, m, x, residual) else run


def backward_launcher(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Backward | None:
    x, dy, weight, _, d_residual_out = tensors
    n, m, op = spec.n, x.numel() // spec.n, "dx" if wanted.dw is None else "backward"
    weight_dtype = None if weight is None else weight.dtype
    # db beside dw, from partial rows of the same kernel; alone it is a sum of PyTorch's
    is_beside_dw = wanted.db is not None and op == "backward" and n <= WIDEST_BIAS_ROW
    has_two = wanted.d_residual is not None  # dx and d_residual
    has_residual = d_residual_out is not None or has_two or spec.alpha != 1.0
    written = (wanted.dx, wanted.d_residual)
    per_head = weight is not None and weight.ndim == 2
    dtype, form = form_of((x, dy, d_residual_out), written, has_residual, is_beside_dw, per_head, has_two)
    kind = size_class(m, n), *settings.kernel_limits(), form
    run = _launcher(op, x.device, n, dtype, weight_dtype, spec.casting, *kind)
    return None if run is None or not _takes(run, m, x, dy, d_residual_out) else run


def backward_plan(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """Plan a plain backward of (m, n), x and weight of one dtype. KeyError for a dtype that no kernel takes."""
    of_rows = size_class(m, n), *settings.kernel_limits()
    run = _launcher("backward", device, n, dtype, dtype, "once", *of_rows)
    assert run is not None, "every plain call is fused"
    return run.plan


def _takes(run: Launcher, m: int, x: Tensor, *others: Tensor | None) -> bool:
    """Whether its launcher takes a call: plain forms alone in parts, heads with strides that kernels count in. A tile
    of heads is a block however many of its rows there are."""
    form, lead = run.plan.problem.form, lead_of(x)
    tiled = m if lead is None else run.plan.first.tiled_rows(lead)
    if tiled > run.most_rows and (form.residual or form.bias or form.heads):
        return False
    return not form.heads or all(each is None or fits_kernels(each) for each in (x, *others))


@functools.cache
def _launcher(
    op: str,
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    casting: str,
    size: str,
    teams: bool,
    sm_margin: int,
    form: Form = PLAIN,
) -> Any:
    """Return the launcher of a problem; None where no kernel takes the form. Raise KeyError for a dtype that no kernel
    takes, ValueError for a margin that leaves no SM."""
    machine, weight = machine_of(device), None if weight_dtype is None else NAMES[weight_dtype]
    numbers = op, n, NAMES[dtype], weight, size, machine.facts, casting
    settings.sms_left(machine.facts.sm_count, sm_margin)
    problem = Problem(*numbers, Policy(teams, sm_margin), form=form)
    if not is_fused(problem):
        return None
    return (Forward if op == "forward" else Backward)(machine, plan_for(problem))


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem, by what ships and by the user's tables; logged at level DEBUG."""
    plan = select(problem, tables_of(problem.device.architecture, problem.device.target, user_folder()))
    op, n, dtype, weight, size, *_ = problem
    beside = "no weight" if weight is None else f"a {weight} weight"
    size += "" if problem.form == PLAIN else f", {problem.form}"
    logger.debug("%s of %d %s columns beside %s, %s: %s (%s)", op, n, dtype, beside, size, plan, plan.source)
    return plan
