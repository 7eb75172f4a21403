# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Describe the kernels of `rms_norm` to the host (launcher.py): the problem of a call, its plan, and how it is bound.

No kernel takes some calls: by their form or width (`is_fused`, plans/rules.py), by their rows or strides (`_takes`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import reproducibility, settings
from tilegym_rmsnorm.backends.around_kernels import check_sums
from tilegym_rmsnorm.backends.cutile.host.launcher import (
    LARGEST_STRIDE,
    Description,
    Launcher,
    begins_as_packed,
    bind_empty,
    bind_sum,
    fits_kernels,
    launcher_of,
    lead_of,
    logger,
)
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, Sizes
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN, Form, Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import (
    WIDEST_BIAS_ROW,
    WIDEST_PER_HEAD_ROW,
    heads_of_form,
    is_fused,
)
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine, machine_of
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
from tilegym_rmsnorm.call.layout import packed
from tilegym_rmsnorm.ops.norm.reference import sum_of_rows
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ADDING = "backward that adds dw"  # in keys alone: its plan is a backward's
OF_ROWS = ("y", "dx", "dy", "x", "rstd")  # arrays with M rows


def form_of(
    rows: Iterable[Tensor | None],
    dtypes: Iterable[torch.dtype | None],
    residual: bool,
    bias: bool,
    per_head: bool,
    d_residual: bool = False,
) -> tuple[torch.dtype, Form]:
    """The widest dtype, and the form, of a call that reads these arrays of rows and writes rows of these dtypes.
    Registers hold what is widest; rows of the narrowest say where 16 bytes begin."""
    read = [each for each in rows if each is not None]
    x = read[0]
    found = [x.dtype, *(each.dtype for each in read[1:]), *(each for each in dtypes if each is not None)]
    widest, narrowest = max(found, key=lambda each: each.itemsize), min(each.itemsize for each in found)
    heads = 0 if x.ndim != 4 else x.shape[2] if per_head else heads_of_form(x.shape[3], x.shape[2])
    is_scattered = x.ndim == 4 and not all(map(begins_as_packed, read))
    narrowest = narrowest if narrowest < widest.itemsize else 0
    return widest, Form(residual, bias, heads, per_head, narrowest, is_scattered, d_residual)


def _forward_key(_: Machine, spec: Spec, tensors: ForwardTensors) -> tuple[Any, ...]:
    x, weight, bias, residual = tensors
    per_head = any(each is not None and each.ndim == 2 for each in (weight, bias))
    written = (spec.y_dtype, spec.residual_dtype)
    dtype, form = form_of((x, residual), written, residual is not None, bias is not None, per_head)
    n, weight_dtype = spec.n, None if weight is None else weight.dtype
    kind = size_class(x.numel() // n, n), spec.casting, form, policy_of(spec.reproducible)
    return "forward", n, dtype, weight_dtype, *kind


def _backward_key(_: Machine, spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> tuple[Any, ...]:
    x, dy, weight, _, d_residual_out, *target = tensors
    # Under a level the kernel of a trained weight sums db beside a frozen one too: so dx has the same bits.
    is_level, has_weight = spec.reproducible > 0, weight is not None
    has_dw = wanted.dw is not None or (is_level and has_weight and wanted.db is not None)
    n, op = spec.n, "dx" if not has_dw else ADDING if target else "backward"
    # db beside dw, from partial rows of the same kernel; alone it is a sum of PyTorch's
    is_beside_dw = wanted.db is not None and op != "dx" and n <= WIDEST_BIAS_ROW
    has_two = wanted.d_residual is not None  # dx and d_residual
    has_residual = d_residual_out is not None or has_two or spec.alpha != 1.0
    written = (wanted.dx, wanted.d_residual)
    per_head = weight is not None and weight.ndim == 2
    dtype, form = form_of((x, dy, d_residual_out), written, has_residual, is_beside_dw, per_head, has_two)
    weight_dtype = None if weight is None else weight.dtype
    kind = size_class(x.numel() // n, n), spec.casting, form, policy_of(spec.reproducible)
    return op, n, dtype, weight_dtype, *kind


def policy_of(level: int) -> Policy:
    return Policy(
        settings.teams(), settings.sm_margin_under(level), bool(level & BATCH), bool(level & DEVICE)
    )


def _plan_of(machine: Machine, key: tuple[Any, ...]) -> Plan | None:
    """Plan calls of a key; None where no kernel takes the form. Raise KeyError for a dtype that no kernel takes,
    ValueError for a margin that leaves no SM."""
    op, n, dtype, weight_dtype, size, casting, form, policy = key
    op, adds = ("backward", True) if op == ADDING else (op, False)
    weight = None if weight_dtype is None else NAMES[weight_dtype]
    problem = Problem(op, n, NAMES[dtype], weight, size, machine.facts, casting, policy, form=form)
    settings.sms_left(machine.facts.sm_count, policy.sm_margin)
    if not is_fused(problem):
        return None
    plan = plan_for(problem)
    return dataclasses.replace(plan, adds=True) if adds else plan


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem, by what ships and by the user's tables; logged at level DEBUG."""
    plan = select(problem, tables_of(problem.device.architecture, problem.device.target, user_folder()))
    op, n, dtype, weight, size, *_ = problem
    beside = "no weight" if weight is None else f"a {weight} weight"
    size += "" if problem.form == PLAIN else f", {problem.form}"
    logger.debug("%s of %d %s columns beside %s, %s: %s (%s)", op, n, dtype, beside, size, plan, plan.source)
    return plan


def backward_plan(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """Plan a plain backward of (m, n), x and weight of one dtype. KeyError for a dtype that no kernel takes."""
    level = reproducibility.flags()
    key = "backward", n, dtype, dtype, size_class(m, n), "once", PLAIN, policy_of(level)
    launcher = launcher_of(BACKWARD, machine_of(device), key)
    assert launcher is not None, "every plain call is fused"
    return launcher.plan


def _takes(run: Launcher, m: int, lead: tuple[int, int, int] | None, *rows: Tensor | None) -> bool:
    """Whether its launcher takes a call: plain forms alone in parts, heads with strides that kernels count in. A tile
    of heads is a block however many of its rows there are."""
    form = run.plan.problem.form
    tiled = m if lead is None else run.plan.first.tiled_rows(lead)
    if tiled > run.plan.most_rows and (form.residual or form.bias or form.heads):
        if run.plan.problem.policy.is_batch_invariant:
            raise ValueError(
                f"reproducible: expected at most {run.plan.most_rows} rows of such a call, got {m}"
            )
        return False
    return not form.heads or all(each is None or fits_kernels(each) for each in rows)


def _bind_forward(
    run: Launcher, spec: Spec, tensors: ForwardTensors
) -> Callable[[ForwardTensors], Outputs] | None:
    x, _, _, residual = tensors
    n = spec.n
    m, lead, machine = x.numel() // n, lead_of(x), run.machine
    if not _takes(run, m, lead, x, residual):
        return None
    launch, grid, _ = _bind_launches(run, m, lead)
    copies_x, copies_residual = _reads_copy(run, x), _reads_copy(run, residual)
    empty, empty_y, of_rstd = machine.empty, bind_empty(machine, x, spec.y_dtype), (m,)
    empty_sum = None if residual is None else bind_empty(machine, x, spec.residual_dtype)
    no_array, alpha, numbers = machine.no_array, spec.alpha, (1.0 / n, spec.eps, spec.offset)

    def run_forward(tensors: ForwardTensors) -> Outputs:
        x, weight, bias, residual = tensors
        if copies_x:
            x = packed(x)
        y, rstd = empty_y(), empty(of_rstd, torch.float32)
        residual_out, added = None, ()
        if empty_sum is not None:
            residual_out = empty_sum()
            added = packed(residual) if copies_residual else residual, residual_out, alpha
        weight = no_array if weight is None else weight
        launch(grid, (y, rstd, x, weight, added, () if bias is None else (bias,), *numbers))
        return y, rstd, residual_out

    return run_forward


def _bind_backward(
    run: Launcher, spec: Spec, tensors: BackwardTensors, wanted: Wanted
) -> Callable[[BackwardTensors], Gradients] | None:
    x, dy, weight, _, d_residual_out, *_ = tensors
    n, plan, machine = spec.n, run.plan, run.machine
    if wanted.db is not None and not plan.problem.form.bias:
        check_sums(spec, False, True)
        run_alone = _bind_backward(run, spec, tensors, wanted._replace(db=None))
        shape = weight.shape if weight is not None and weight.ndim == 2 else (n,)
        return run_alone and functools.partial(_run_and_sum, run_alone, shape, wanted.db)
    m, lead, no_array = x.numel() // n, lead_of(x), machine.no_array
    if not _takes(run, m, lead, x, dy, d_residual_out):
        return None
    has_dw = wanted.dw is not None
    launch, grid, sizes = _bind_launches(run, m, lead, has_dw or wanted.db is not None)
    copies_x, copies_dy = _reads_copy(run, x), _reads_copy(run, dy)
    copies_d = _reads_copy(run, d_residual_out)
    empty_dx, empty_d_residual, empty_dw, empty_db = bind_empty(machine, x, wanted.dx), None, None, None
    if wanted.d_residual is not None:
        empty_d_residual = bind_empty(machine, x, wanted.d_residual)
    if plan.problem.op == "backward":
        # of more rows than one launch takes each part has its own
        p, shape = sizes.partial_rows if sizes else 1, (plan.columns_of_dw,)
        p = 0 if p == 1 and not plan.adds else p
        assert weight is not None
        empty_dw = bind_sum(machine, shape, wanted.dw or weight.dtype, p)
        empty_db = None if wanted.db is None else bind_sum(machine, shape, wanted.db, p)
    alpha, numbers = spec.alpha, (1.0 / n, spec.offset, sizes.tiles_in_slab if sizes else 0)
    per_head = plan.problem.form.per_head

    def run_backward(tensors: BackwardTensors) -> Gradients:
        x, dy, weight, rstd, d_residual_out, *target = tensors
        x, dy = packed(x) if copies_x else x, packed(dy) if copies_dy else dy
        dx, d_residual, out = empty_dx(), None, () if alpha == 1.0 else (alpha,)
        if empty_d_residual is not None:
            d_residual = empty_d_residual()
            out = d_residual, alpha
        dw, dw_partial, db, db_partial, sums = None, no_array, None, (), ()
        if empty_dw is not None:
            dw, dw_partial = empty_dw(*target)
            if empty_db is not None:
                db, partial = empty_db()
                db_partial, sums = (partial,), (db, partial)
        added = ()
        if d_residual_out is not None:
            added = (packed(d_residual_out) if copies_d else d_residual_out,)
        weight = no_array if weight is None else weight
        launch(grid, (dx, dw_partial, dy, x, weight, rstd, added, out, db_partial, *numbers, dw, sums))
        dw = dw if has_dw else None
        if per_head:
            dw, db = (None if each is None else each.view(-1, n) for each in (dw, db))
        return dx, d_residual, dw, db

    return run_backward


def check_gradients_ahead(spec: Spec, tensors: ForwardTensors) -> None:
    """Raise ValueError in a forward for gradients that autograd will ask of a backward, and that `check_sums` refuses.
    db alone is no backend's (`Wanted.why_no_backend`)."""
    needs = [each is not None and each.requires_grad for each in tensors]
    has_weight, heads_fit = tensors[1] is not None, not spec.heads or spec.n <= WIDEST_PER_HEAD_ROW
    is_beside_dw = has_weight and heads_fit and spec.n <= WIDEST_BIAS_ROW
    is_alone = not (needs[0] or needs[1] or needs[3])
    check_sums(spec, needs[1] and not heads_fit, needs[2] and not is_beside_dw and not is_alone)


def _run_and_sum(run: Any, shape: tuple[int, ...], dtype: torch.dtype, tensors: BackwardTensors) -> Gradients:
    """Run a backward without db, which is a sum of PyTorch's."""
    db = sum_of_rows(tensors[1], shape, torch.float32, dtype)  # first: it may copy dy
    return (*run(tensors)[:3], db)


FORWARD = Description(
    ("y", "rstd", "x", "weight", "residual", "bias", "inv_n", "eps", "offset"),
    _forward_key,
    _plan_of,
    _bind_forward,
)
BACKWARD = Description(
    (
        *("dx", "dw_partial", "dy", "x", "weight", "rstd", "d_residual_out", "d_residual", "db_partial"),
        *("inv_n", "offset", "tiles_in_slab", "dw", "db"),
    ),
    _backward_key,
    _plan_of,
    _bind_backward,
)
# Launchers of plans of one's own: functions of a machine and a plan.
Forward = functools.partial(Launcher, FORWARD)
Backward = functools.partial(Launcher, BACKWARD)


def _bind_launches(
    run: Launcher, m: int, lead: tuple[int, int, int] | None, has_sum: bool = True
) -> tuple[Launch, tuple[int, ...], Sizes | None]:
    """`Launcher.launches_for`; in parts, without sizes, where one launch cannot take all rows, which never are of (B,
    T, H, N). has_sum: as for `Plan.sizes`; parts have one in any case."""
    if m > run.plan.most_rows:
        return functools.partial(_launch_parts, run), (), None
    return run.launches_for(m, lead, has_sum)


def _launch_parts(run: Launcher, _: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Launch rows in parts; sum dw once, over the partial rows of all parts."""
    plan, arrays = run.plan, dict(zip(run.description.names, arguments, strict=True))
    names = [name for name in OF_ROWS if name in arrays]
    parts = list(zip(*(arrays[name].split(plan.most_rows) for name in names), strict=True))
    sizes, has_sum = [plan.sizes(part[0].shape[0]) for part in parts], plan.problem.op == "backward"
    counts = [each.partial_rows for each in sizes]
    if has_sum:
        arrays["dw_partial"] = run.machine.empty((sum(counts), plan.problem.n), torch.float32)
        names.append("dw_partial")
        parts = [(*part, rows) for part, rows in zip(parts, arrays["dw_partial"].split(counts), strict=True)]
    for part, each in zip(parts, sizes, strict=True):
        own = dict(zip(names, part, strict=True)) | {"tiles_in_slab": each.tiles_in_slab}
        launch, grid = run.bind_launches(each._replace(grids=(*each.grids[:-1], None)) if has_sum else each)
        launch(grid, tuple(own.get(name, value) for name, value in arrays.items()))
    if has_sum:
        launch_sum, select_of_sum = run.kernels[-1]
        grid = plan.steps[-1].grid(0, plan.problem.n, sum(counts), 0)
        launch_sum(grid, select_of_sum(tuple(arrays.values())))


def _reads_copy(run: Launcher, rows: Tensor | None) -> bool:
    """Whether kernels read a copy of an array of rows: rows that lie too far apart, some that lie apart, and those that
    a kernel by TMA would not read as it reads packed ones. Rows of (B, T, H, N) are read where they are.

    Packed rows begin at multiples of 16 bytes or, by their length, do not. Rows that do not the compiler loads element
    by element, and beside an array by TMA it may load over tiles that are still read: float32 rows of 5120 columns and
    teams of 12288 where dy alone is such a view, rows of 5119 where x alone is aligned.
    """
    if rows is None or rows.ndim == 4:
        return False
    stride, itemsize = rows.stride()[0], rows.itemsize
    if stride > LARGEST_STRIDE or (run.reads_packed and not rows.is_contiguous()):
        return True
    if not run.uses_tma:
        return False
    return ((stride * itemsize | rows.data_ptr()) & 15 == 0) != (rows.shape[1] * itemsize & 15 == 0)
