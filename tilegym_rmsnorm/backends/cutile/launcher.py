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
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted

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
        self.reads_packed = any(step.reads_packed for step in plan.steps)
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

    def bind_launches(self, m: int, lead: tuple[int, int, int] | None = None) -> Callable[..., None]:
        """Return a function of a call's arguments that launches every kernel: in parts where one launch cannot take all
        rows, which never are of (B, T, H, N)."""
        if m > self.most_rows:
            return self._run_parts
        launches, temporaries, tiles_in_slab, _ = self.launches_for(m, lead)
        empty = self.machine.empty

        def run(arguments: tuple[Any, ...]) -> None:
            arguments += (tiles_in_slab,)
            if temporaries:
                arguments += tuple([empty(shape, dtype) for shape, dtype in temporaries])
            for launch, select_arguments, grid in launches:
                launch(grid, select_arguments(arguments))

        return run

    def _run_parts(self, arguments: tuple[Any, ...]) -> None:
        """Launch rows in parts; sum dw once, over the partial rows of all parts."""
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

    def reads_copy(self, rows: Tensor | None) -> bool:
        """Whether kernels read a copy of an array of rows; those of (B, T, H, N) are read where they are."""
        if rows is None or rows.ndim == 4:
            return False
        return _reads_copy(rows, self.tma) or self.reads_packed and not rows.is_contiguous()

    def bind_empty(self, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Return a function that allocates contiguous rows of x's shape."""
        empty, shape = self.machine.empty, tuple(x.shape)
        return lambda: empty(shape, dtype)


class Forward(Launcher):
    argument_names = ("y", "rstd", "x", "weight", "residual", "bias", "eps", "offset", "inv_n")

    def __call__(self, spec: Spec, tensors: ForwardTensors) -> Outputs:
        return self.bind(spec, tensors)(tensors)

    def bind(self, spec: Spec, tensors: ForwardTensors) -> Callable[[ForwardTensors], Outputs]:
        """Bind a call of the plan's form, as contract.py says."""
        x, _, _, residual = tensors
        m, empty, no_array = x.numel() // self.n, self.machine.empty, self.machine.no_array
        launch = self.bind_launches(m, lead_of(x))
        copies_x, copies_residual = map(self.reads_copy, (x, residual))
        empty_y = self.bind_empty(x, spec.y_dtype or x.dtype)
        empty_sum = None if residual is None else self.bind_empty(x, spec.residual_dtype)
        of_rstd, alpha, numbers = (m,), spec.alpha, (spec.eps, spec.offset, self.inv_n)

        def run(tensors: ForwardTensors) -> Outputs:
            x, weight, bias, residual = tensors
            if copies_x:
                x = _copied(x)
            y, rstd = empty_y(), empty(of_rstd, torch.float32)
            residual_out, added = None, ()
            if empty_sum is not None:
                residual_out = empty_sum()
                added = _copied(residual) if copies_residual else residual, residual_out, alpha
            weight = no_array if weight is None else weight
            launch((y, rstd, x, weight, added, () if bias is None else (bias,), *numbers))
            return y, rstd, residual_out

        return run


class Backward(Launcher):
    argument_names = (
        *("dx", "dw", "dw_partial", "dy", "x", "weight", "rstd"),
        *("d_residual_out", "d_residual", "db_partial", "db", "offset", "inv_n"),
    )

    def __call__(self, spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
        return self.bind(spec, tensors, wanted)(tensors)

    def bind(
        self, spec: Spec, tensors: BackwardTensors, wanted: Wanted
    ) -> Callable[[BackwardTensors], Gradients]:
        """Bind a call of the plan's form, as contract.py says."""
        x, dy, _, _, d_residual_out = tensors
        m, lead, no_array = x.numel() // self.n, lead_of(x), self.machine.no_array
        launch = self.bind_launches(m, lead)
        copies_x, copies_dy, copies_d = map(self.reads_copy, (x, dy, d_residual_out))
        empty_dx, empty_d_residual = self.bind_empty(x, wanted.dx), None
        if wanted.d_residual is not None:
            empty_d_residual = self.bind_empty(x, wanted.d_residual)
        empty_dw = empty_db = None
        if self.plan.problem.op == "backward":
            # of more rows than one launch takes each part has its own
            p = self.launches_for(m, lead).partial_rows if m <= self.most_rows else 1
            empty_dw = self._bind_sum_and_partials(p, wanted.dw)
            empty_db = None if wanted.db is None else self._bind_sum_and_partials(p, wanted.db)
        alpha, numbers = spec.alpha, (spec.offset, self.inv_n)
        per_head, n = self.plan.problem.form.per_head, self.n

        def run(tensors: BackwardTensors) -> Gradients:
            x, dy, weight, rstd, d_residual_out = tensors
            x, dy = _copied(x) if copies_x else x, _copied(dy) if copies_dy else dy
            dx, d_residual, out = empty_dx(), None, () if alpha == 1.0 else (alpha,)
            if empty_d_residual is not None:
                d_residual = empty_d_residual()
                out = d_residual, alpha
            dw, dw_partial, db, db_partial, sums = None, no_array, None, (), ()
            if empty_dw is not None:
                dw, dw_partial = empty_dw()
                if empty_db is not None:
                    db, partial = empty_db()
                    db_partial, sums = (partial,), (db, partial)
            added = ()
            if d_residual_out is not None:
                added = (_copied(d_residual_out) if copies_d else d_residual_out,)
            weight = no_array if weight is None else weight
            launch((dx, dw, dw_partial, dy, x, weight, rstd, added, out, db_partial, sums, *numbers))
            if per_head:
                dw, db = (None if each is None else each.view(-1, n) for each in (dw, db))
            return dx, d_residual, dw, db

        return run

    def _bind_sum_and_partials(self, p: int, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a function that allocates dw, or db, and the partial rows that it is the sum of: of one, it is that
        row."""
        empty, columns = self.machine.empty, self.plan.columns_of_dw

        def allocate() -> tuple[Tensor, Tensor]:
            total = empty((columns,), dtype)
            return total, total.view(1, columns) if p == 1 else empty((p, columns), torch.float32)

        return allocate


def lead_of(x: Tensor) -> tuple[int, int, int] | None:
    """B, T and H of (B, T, H, N)."""
    return (x.size(0), x.size(1), x.size(2)) if x.ndim == 4 else None


def _selector(places: list[int]) -> Selector:
    """Return a function that selects the values at these places, as a tuple."""
    if len(places) == 1:  # of which itemgetter would return the value itself
        return lambda values: (values[places[0]],)
    return operator.itemgetter(*places)


def _reads_copy(x: Tensor, tma: bool) -> bool:
    """Whether rows lie too far apart, or a kernel by TMA would not read them as it reads packed ones.

    Packed rows begin at multiples of 16 bytes or, by their length, do not. Rows that do not the compiler loads element
    by element, and beside an array by TMA it may load over tiles that are still read: float32 rows of 5120 columns and
    teams of 12288 where dy alone is such a view, rows of 5119 where x alone is aligned.
    """
    stride, itemsize = x.stride()[0], x.itemsize
    if stride > LARGEST_STRIDE:
        return True
    return tma and ((stride * itemsize | x.data_ptr()) & 15 == 0) != (x.shape[1] * itemsize & 15 == 0)


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
