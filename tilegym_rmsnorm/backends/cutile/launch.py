# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Backend "cutile": allocates arrays and launches the kernels of a plan, nothing else.

`Forward` and `Backward` hold a plan whose kernels are bound to a device; a call allocates and launches. With
TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm import policy
from tilegym_rmsnorm.backends import composed
from tilegym_rmsnorm.backends.cutile.forms import LARGEST_STRIDE, fits_kernels, form_of
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN, Form, Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import WIDEST_BIAS_ROW, is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine, machine_of
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
from tilegym_rmsnorm.reference import sum_of_rows
from tilegym_rmsnorm.registry import register_impl
from tilegym_rmsnorm.spec import Gradients, Outputs, Spec, Tensors, Wanted

logger = logging.getLogger("tilegym_rmsnorm")

OF_ROWS = ("y", "dx", "dy", "x", "rstd")  # arrays with M rows
DTYPES = {"float32": torch.float32, "int32": torch.int32}
# From all that a call has, the arguments of one kernel
Selector = Callable[[tuple[Any, ...]], tuple[Any, ...]]
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(spec: Spec, tensors: Tensors) -> Outputs:
    """See spec.py."""
    x, weight, bias, residual = tensors
    if bias is not None or residual is not None or x.ndim != 2 or (spec.y_dtype or x.dtype) is not x.dtype:
        return _formed_forward(spec, tensors)
    m, n = x.size(0), spec.n
    weight_dtype = None if weight is None else weight.dtype
    run = _forward(x.device, n, x.dtype, weight_dtype, spec.casting, size_class(m, n), *_ruled_out())
    y, rstd = run(x, weight, spec.eps, spec.offset)
    return y, rstd, None


@register_impl("rms_norm_backward", "cutile")
def rms_norm_backward(spec: Spec, tensors: Tensors, wanted: Wanted, partials: str = "shared") -> Gradients:
    """See spec.py. partials: of Problem."""
    x, dy, weight, rstd, d_residual_out = tensors
    dtype, weight_dtype, n = x.dtype, None if weight is None else weight.dtype, spec.n
    to_dx, to_d_residual, to_dw, to_db = wanted
    op = "dx" if to_dw is None else "backward"
    if (
        d_residual_out is not None
        or to_d_residual is not None
        or to_db is not None
        or to_dx is not dtype
        or dy.dtype is not dtype
        or (to_dw is not weight_dtype and to_dw is not None)
        or spec.alpha != 1.0
        or x.ndim != 2
    ):
        return _formed_backward(spec, tensors, wanted)
    m = x.size(0)
    kind = size_class(m, n), partials, *_ruled_out()
    run = _backward(op, x.device, n, dtype, weight_dtype, spec.casting, *kind)
    dx, dw = run(x, dy, weight, rstd, spec.offset)
    return dx, None, dw, None


def _formed_forward(spec: Spec, tensors: Tensors) -> Outputs:
    """A call that is not plain: by kernels, or composed around a plain call."""
    run = forward_launcher(spec, tensors)
    return composed.forward(rms_norm_forward, spec, tensors) if run is None else run.formed(spec, tensors)


def forward_launcher(spec: Spec, tensors: Tensors) -> Forward | None:
    """What runs a call of any form; None where no kernel takes it."""
    x, weight, bias, residual = tensors
    n, m = spec.n, x.numel() // spec.n
    per_head = any(each is not None and each.ndim == 2 for each in (weight, bias))
    written = (spec.y_dtype, spec.residual_dtype)
    dtype, form = form_of((x, residual), written, residual is not None, bias is not None, per_head)
    weight_dtype = None if weight is None else weight.dtype
    run = _forward(x.device, n, dtype, weight_dtype, spec.casting, size_class(m, n), *_ruled_out(), form)
    return None if run is None or not _takes(run, m, x, residual) else run


def _formed_backward(spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
    run = backward_launcher(spec, tensors, wanted)
    if run is None:
        return composed.backward(rms_norm_backward, spec, tensors, wanted)
    if wanted.db is None or run.plan.problem.form.bias:
        return run.formed(spec, tensors, wanted)
    _, dy, weight, *_ = tensors
    gradients = run.formed(spec, tensors, wanted._replace(db=None))
    shape = weight.shape if run.plan.problem.form.per_head else (spec.n,)
    return (*gradients[:3], sum_of_rows(dy, shape, torch.float32, wanted.db))


def backward_launcher(spec: Spec, tensors: Tensors, wanted: Wanted) -> Backward | None:
    """What runs a call of any form; None where no kernel takes it."""
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
    kind = size_class(m, n), "shared", *_ruled_out(), form
    run = _backward(op, x.device, n, dtype, weight_dtype, spec.casting, *kind)
    return None if run is None or not _takes(run, m, x, dy, d_residual_out) else run


def _ruled_out() -> tuple[bool, int]:
    return policy.teams(), policy.get_sm_margin()


def _takes(run: Launcher, m: int, x: Tensor, *others: Tensor | None) -> bool:
    """Whether its launcher takes a call: plain forms alone in parts, heads with strides that kernels count in. A tile
    of heads is a block however many of its rows there are."""
    form, lead = run.plan.problem.form, _lead_of(x)
    tiled = m if lead is None else run.plan.first.tiled_rows(lead)
    if tiled > run.most_rows and (form.residual or form.bias or form.heads):
        return False
    return not form.heads or all(each is None or fits_kernels(each) for each in (x, *others))


@functools.cache
def _forward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    casting: str,
    size: str,
    teams: bool,
    sm_margin: int,
    form: Form = PLAIN,
) -> Forward | None:
    """None: no kernel takes the form."""
    machine, names = machine_of(device), _names(dtype, weight_dtype)
    problem = Problem(
        "forward", n, *names, size, machine.facts, casting, _policy(machine, teams, sm_margin), form=form
    )
    return Forward(machine, plan_for(problem)) if is_fused(problem) else None


@functools.cache
def _backward(
    op: str,
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    casting: str,
    size: str,
    partials: str,
    teams: bool,
    sm_margin: int,
    form: Form = PLAIN,
) -> Backward | None:
    """None: no kernel takes the form."""
    if partials not in ("shared", "own"):
        raise ValueError(f"partials: expected 'shared' or 'own', got {partials!r}")
    machine, names = machine_of(device), _names(dtype, weight_dtype)
    problem = Problem(
        op, n, *names, size, machine.facts, casting, _policy(machine, teams, sm_margin), partials, form
    )
    return Backward(machine, plan_for(problem)) if is_fused(problem) else None


def _policy(machine: Machine, teams: bool, sm_margin: int) -> Policy:
    """What a call's process rules out. ValueError for a margin that leaves no SM."""
    policy.sms_left(machine.facts.sm_count, sm_margin)
    return Policy(teams, sm_margin)


def _names(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> tuple[str, str | None]:
    """Of x's dtype and weight's, as a problem has them. KeyError for one that no kernel takes."""
    return NAMES[dtype], None if weight_dtype is None else NAMES[weight_dtype]


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem, by what ships and by the user's tables; logged at level DEBUG."""
    plan = select(problem, tables_of(problem.device.architecture, problem.device.target, user_folder()))
    op, n, dtype, weight, size, *_ = problem
    beside = "no weight" if weight is None else f"a {weight} weight"
    size += "" if problem.form == PLAIN else f", {problem.form}"
    logger.debug("%s of %d %s columns beside %s, %s: %s (%s)", op, n, dtype, beside, size, plan, plan.source)
    return plan


class Launches(NamedTuple):
    """What M decides of a call: its launches, each with what selects the kernel's arguments, and its grid; shapes and
    dtypes of the temporary arrays; the row tiles in a slab; P, the rows of dw_partial."""

    launches: tuple[tuple[Launch, Selector, tuple[int, ...]], ...]
    temporaries: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    tiles_in_slab: int
    partial_rows: int


class Launcher:
    """A plan whose kernels are bound to a device.

    argument_names: what `run` is given, by the names of the kernels' parameters. Behind these come tiles_in_slab and
    the temporary arrays. At which places a kernel's arguments are is found once: a call looks up no names.
    """

    argument_names: tuple[str, ...]

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine, self.plan, self.n = machine, plan, plan.problem.n
        self.inv_n, self.most_rows = 1.0 / self.n, plan.most_rows
        self.tma = any(step.uses_tma for step in plan.steps)
        # the M of a model's calls repeat
        self.launches_for = functools.lru_cache(maxsize=4096)(self._launches_for)
        # of dw_partial Backward says what it is
        self.temporaries = [name for name in plan.sizes(1).temporaries if name != "dw_partial"]
        names = (*self.argument_names, "tiles_in_slab", *self.temporaries)
        self.kernels: list[tuple[Launch, Selector]] = []
        for step in plan.steps:
            parameters, constants = inspect.signature(KERNELS[step.kernel]).parameters, plan.constants(step)
            # arrays and numbers, then compile-time arguments in capitals
            select_arguments = _selector([names.index(name) for name in parameters if not name.isupper()])
            values = tuple(constants[name] for name in parameters if name.isupper())
            self.kernels.append((machine.bind(KERNELS[step.kernel], step, values), select_arguments))

    def _launches_for(self, m: int, lead: tuple[int, int, int] | None = None) -> Launches:
        sizes = self.plan.sizes(m, lead)
        steps = zip(self.kernels, sizes.grids, strict=True)
        launches = tuple((*kernel, grid) for kernel, grid in steps if grid is not None)
        wanted = (sizes.temporaries[name] for name in self.temporaries)
        temporaries = tuple((shape, DTYPES[dtype]) for shape, dtype in wanted)
        return Launches(launches, temporaries, sizes.tiles_in_slab, sizes.partial_rows)

    def run(self, m: int, arguments: tuple[Any, ...], lead: tuple[int, int, int] | None = None) -> None:
        """Launches every kernel, in parts where one launch cannot take all rows; never of (B, T, H, N)."""
        if m > self.most_rows:
            self._run_parts(arguments)
            return
        launches, temporaries, tiles_in_slab, _ = self.launches_for(m, lead)
        arguments += (tiles_in_slab,)
        if temporaries:
            arguments += tuple([self.machine.empty(shape, dtype) for shape, dtype in temporaries])
        for launch, select_arguments, grid in launches:
            launch(grid, select_arguments(arguments))

    def _run_parts(self, arguments: tuple[Any, ...]) -> None:
        """All but the sum of dw in parts, whose partial rows lie behind each other."""
        arrays, machine = dict(zip(self.argument_names, arguments, strict=True)), self.machine
        names = [name for name in OF_ROWS if name in arrays]
        parts = list(zip(*(arrays[name].split(self.most_rows) for name in names), strict=True))
        counts = [self.launches_for(part[0].shape[0]).partial_rows for part in parts]
        has_sum = self.plan.problem.op == "backward"
        partials: Any = [arrays.get("dw_partial")] * len(parts)
        if has_sum:
            arrays["dw_partial"] = machine.empty((sum(counts), self.n), torch.float32)
            partials = arrays["dw_partial"].split(counts)
        launch_sum, select_of_sum = self.kernels[-1]
        for part, dw_partial in zip(parts, partials, strict=True):
            launches, temporaries, tiles_in_slab, _ = self.launches_for(part[0].shape[0])
            own = arrays | dict(zip(names, part, strict=True)) | {"dw_partial": dw_partial}
            made = (machine.empty(shape, dtype) for shape, dtype in temporaries)
            of_part = (*(own[name] for name in self.argument_names), tiles_in_slab, *made)
            for launch, select_arguments, grid in launches:
                if not (has_sum and launch is launch_sum):
                    launch(grid, select_arguments(of_part))
        if has_sum:
            grid = self.plan.steps[-1].grid(0, self.n, sum(counts), 0)
            launch_sum(grid, select_of_sum(tuple(arrays[name] for name in self.argument_names)))

    def as_read(self, *rows: Tensor | None) -> list[Any]:
        """Arrays of rows as the kernels read them; those of (B, T, H, N) are read where they are."""
        return [each if each is None or each.ndim == 4 else _as_read(each, self.tma) for each in rows]

    def empty_like(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """New rows, contiguous, of x's shape."""
        rows = self.machine.empty((x.numel() // self.n, self.n), dtype)
        return rows if x.ndim == 2 else rows.view(x.shape)


class Forward(Launcher):
    argument_names = ("y", "rstd", "x", "weight", "residual", "bias", "eps", "offset", "inv_n")

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        machine = self.machine
        x = _as_read(x, self.tma)
        m = x.size(0)
        y, rstd = machine.empty((m, self.n), x.dtype), machine.empty((m,), torch.float32)
        weight = machine.no_weight if weight is None else weight
        self.run(m, (y, rstd, x, weight, (), (), eps, offset, self.inv_n))
        return y, rstd

    def formed(self, spec: Spec, tensors: Tensors) -> Outputs:
        """Any call of the plan's form."""
        x, weight, bias, residual = tensors
        x, residual = self.as_read(x, residual)
        rstd = self.machine.empty((x.numel() // self.n,), torch.float32)
        y, residual_out, added = self.empty_like(x, spec.y_dtype or x.dtype), None, ()
        if residual is not None:
            residual_out = self.empty_like(x, spec.residual_dtype)
            added = residual, residual_out, spec.alpha
        weight, biases = self.machine.no_weight if weight is None else weight, () if bias is None else (bias,)
        arguments = y, rstd, x, weight, added, biases, spec.eps, spec.offset, self.inv_n
        self.run(rstd.size(0), arguments, _lead_of(x))
        return y, rstd, residual_out


class Backward(Launcher):
    argument_names = (
        *("dx", "dw", "dw_partial", "dy", "x", "weight", "rstd"),
        *("d_residual_out", "d_residual", "db_partial", "db", "offset", "inv_n"),
    )

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        machine, n = self.machine, self.n
        x, dy = _as_read(x, self.tma), _as_read(dy, self.tma)
        m, dw, dw_partial = x.size(0), None, machine.no_dw_partial
        dx = machine.empty((m, n), x.dtype)
        if self.plan.problem.op == "backward":
            dw = machine.empty((n,), weight.dtype)
            # of more rows than one launch takes each part has its own
            p = self.launches_for(m).partial_rows if m <= self.most_rows else 1
            # a partial row that is alone is dw
            dw_partial = dw.view(1, n) if p == 1 else machine.empty((p, n), torch.float32)
        weight = machine.no_weight if weight is None else weight
        self.run(m, (dx, dw, dw_partial, dy, x, weight, rstd, (), (), (), (), offset, self.inv_n))
        return dx, dw

    def formed(self, spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
        """Any call of the plan's form."""
        x, dy, weight, rstd, d_residual_out = tensors
        x, dy, d_residual_out = self.as_read(x, dy, d_residual_out)
        machine, m, lead = self.machine, rstd.size(0), _lead_of(x)
        dx, d_residual, out = self.empty_like(x, wanted.dx), None, ()
        if wanted.d_residual is not None:
            d_residual = self.empty_like(x, wanted.d_residual)
            out = d_residual, spec.alpha
        elif spec.alpha != 1.0:
            out = (spec.alpha,)
        dw, dw_partial, db, db_partial, sums = None, machine.no_dw_partial, None, (), ()
        if self.plan.problem.op == "backward":
            # of more rows than one launch takes each part has its own
            p = self.launches_for(m, lead).partial_rows if m <= self.most_rows else 1
            columns = self.plan.columns_of_dw
            dw, dw_partial = self._sum_and_partials(columns, p, wanted.dw)
            if wanted.db is not None:
                db, partial = self._sum_and_partials(columns, p, wanted.db)
                db_partial, sums = (partial,), (db, partial)
        of_residual = () if d_residual_out is None else (d_residual_out,), out
        arrays = dx, dw, dw_partial, dy, x, machine.no_weight if weight is None else weight, rstd
        self.run(m, (*arrays, *of_residual, db_partial, sums, spec.offset, self.inv_n), lead)
        if self.plan.problem.form.per_head:
            dw, db = (None if each is None else each.view(-1, self.n) for each in (dw, db))
        return dx, d_residual, dw, db

    def _sum_and_partials(self, columns: int, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dw, or db, and the partial rows that it is the sum of: of one, it is that row."""
        total = self.machine.empty((columns,), dtype)
        return total, total.view(1, columns) if p == 1 else self.machine.empty((p, columns), torch.float32)


def _lead_of(x: Tensor) -> tuple[int, int, int] | None:
    """B, T and H of (B, T, H, N)."""
    return (x.size(0), x.size(1), x.size(2)) if x.ndim == 4 else None


def _selector(places: list[int]) -> Selector:
    """What selects the values at these places, as a tuple."""
    if len(places) == 1:  # of which itemgetter would return the value itself
        return lambda values: (values[places[0]],)
    return operator.itemgetter(*places)


def _as_read(x: Tensor, tma: bool) -> Tensor:
    """x, or a copy where rows lie too far apart, or where a kernel by TMA would not read them as it reads packed ones.

    Packed rows begin at multiples of 16 bytes or, by their length, do not. Rows that do not the compiler loads element
    by element, and beside an array by TMA it may load over tiles that are still read: float32 rows of 5120 columns and
    teams of 12288 where dy alone is such a view, rows of 5119 where x alone is aligned.
    """
    stride, itemsize = x.stride()[0], x.itemsize
    if stride <= LARGEST_STRIDE:
        if not tma or ((stride * itemsize | x.data_ptr()) & 15 == 0) == (x.shape[1] * itemsize & 15 == 0):
            return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
