# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""`Forward` and `Backward` hold a plan whose kernels are bound to a device; a call allocates and launches."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.forms import LARGEST_STRIDE
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine
from tilegym_rmsnorm.call.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted

OF_ROWS = ("y", "dx", "dy", "x", "rstd")  # arrays with M rows
DTYPES = {"float32": torch.float32, "int32": torch.int32}
# From all that a call has, the arguments of one kernel
Selector = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Launches(NamedTuple):
    """The part of a call that depends on M: its launches, each with the selector of the kernel's arguments, and the
    grid; shapes and dtypes of the temporary arrays; the row tiles in a slab; P, the rows of dw_partial."""

    launches: tuple[tuple[Launch, Selector, tuple[int, ...]], ...]
    temporaries: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    tiles_in_slab: int
    partial_rows: int


class Launcher:
    """A plan whose kernels are bound to a device.

    argument_names: the arguments of `run`, by the names of the kernels' parameters. Behind these come tiles_in_slab and
    the temporary arrays. The places of a kernel's arguments are found once: a call looks up no names.
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
        weight = machine.no_array if weight is None else weight
        self.run(m, (y, rstd, x, weight, (), (), eps, offset, self.inv_n))
        return y, rstd

    def formed(self, spec: Spec, tensors: ForwardTensors) -> Outputs:
        """Any call of the plan's form."""
        x, weight, bias, residual = tensors
        x, residual = self.as_read(x, residual)
        rstd = self.machine.empty((x.numel() // self.n,), torch.float32)
        y, residual_out, added = self.empty_like(x, spec.y_dtype or x.dtype), None, ()
        if residual is not None:
            residual_out = self.empty_like(x, spec.residual_dtype)
            added = residual, residual_out, spec.alpha
        weight, biases = self.machine.no_array if weight is None else weight, () if bias is None else (bias,)
        arguments = y, rstd, x, weight, added, biases, spec.eps, spec.offset, self.inv_n
        self.run(rstd.size(0), arguments, lead_of(x))
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
        m, dw, dw_partial = x.size(0), None, machine.no_array
        dx = machine.empty((m, n), x.dtype)
        if self.plan.problem.op == "backward":
            dw = machine.empty((n,), weight.dtype)
            # of more rows than one launch takes each part has its own
            p = self.launches_for(m).partial_rows if m <= self.most_rows else 1
            # a partial row that is alone is dw
            dw_partial = dw.view(1, n) if p == 1 else machine.empty((p, n), torch.float32)
        weight = machine.no_array if weight is None else weight
        self.run(m, (dx, dw, dw_partial, dy, x, weight, rstd, (), (), (), (), offset, self.inv_n))
        return dx, dw

    def formed(self, spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
        """Any call of the plan's form."""
        x, dy, weight, rstd, d_residual_out = tensors
        x, dy, d_residual_out = self.as_read(x, dy, d_residual_out)
        machine, m, lead = self.machine, rstd.size(0), lead_of(x)
        dx, d_residual, out = self.empty_like(x, wanted.dx), None, ()
        if wanted.d_residual is not None:
            d_residual = self.empty_like(x, wanted.d_residual)
            out = d_residual, spec.alpha
        elif spec.alpha != 1.0:
            out = (spec.alpha,)
        dw, dw_partial, db, db_partial, sums = None, machine.no_array, None, (), ()
        if self.plan.problem.op == "backward":
            # of more rows than one launch takes each part has its own
            p = self.launches_for(m, lead).partial_rows if m <= self.most_rows else 1
            columns = self.plan.columns_of_dw
            dw, dw_partial = self._sum_and_partials(columns, p, wanted.dw)
            if wanted.db is not None:
                db, partial = self._sum_and_partials(columns, p, wanted.db)
                db_partial, sums = (partial,), (db, partial)
        of_residual = () if d_residual_out is None else (d_residual_out,), out
        arrays = dx, dw, dw_partial, dy, x, machine.no_array if weight is None else weight, rstd
        self.run(m, (*arrays, *of_residual, db_partial, sums, spec.offset, self.inv_n), lead)
        if self.plan.problem.form.per_head:
            dw, db = (None if each is None else each.view(-1, self.n) for each in (dw, db))
        return dx, d_residual, dw, db

    def _sum_and_partials(self, columns: int, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dw, or db, and the partial rows that it is the sum of: of one, it is that row."""
        total = self.machine.empty((columns,), dtype)
        return total, total.view(1, columns) if p == 1 else self.machine.empty((p, columns), torch.float32)


def lead_of(x: Tensor) -> tuple[int, int, int] | None:
    """B, T and H of (B, T, H, N)."""
    return (x.size(0), x.size(1), x.size(2)) if x.ndim == 4 else None


def _selector(places: list[int]) -> Selector:
    """Return a function that selects the values at these places, as a tuple."""
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
