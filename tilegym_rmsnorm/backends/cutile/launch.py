# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Backend "cutile": allocates arrays and launches the kernels of a plan, nothing else.

`Forward` and `Backward` hold a plan whose kernels are bound to a device; a call allocates and launches. With
TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import policy
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, Sizes
from tilegym_rmsnorm.backends.cutile.plans.problem import Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine, machine_of
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
from tilegym_rmsnorm.registry import register_impl
from tilegym_rmsnorm.spec import Spec, Tensors

LARGEST_ROW_STRIDE = 2**31 - 1  # kernels see strides as int32
OF_ROWS = ("y", "dx", "dy", "x", "rstd")  # arrays with M rows
DTYPES = {"float32": torch.float32, "int32": torch.int32}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """See spec.py. `unusable` has refused a bias."""
    x, weight, _ = tensors
    m, n = x.shape
    weight_dtype = None if weight is None else weight.dtype
    run = _forward(x.device, n, x.dtype, weight_dtype, spec.casting, size_class(m, n), policy.teams())
    return run(x, weight, spec.eps, spec.offset)


@register_impl("rms_norm_backward", "cutile")
def rms_norm_backward(
    spec: Spec, tensors: Tensors, needs_dw: bool, partials: str = "shared"
) -> tuple[Tensor, Tensor | None]:
    """See spec.py. partials: of Problem."""
    x, dy, weight, rstd = tensors
    m, n = x.shape
    op, weight_dtype = "dx", None if weight is None else weight.dtype
    if needs_dw and weight is not None:
        op = "backward"
    kind = size_class(m, n), partials, policy.teams()
    run = _backward(op, x.device, n, x.dtype, weight_dtype, spec.casting, *kind)
    return run(x, dy, weight, rstd, spec.offset)


@functools.cache
def _forward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    casting: str,
    size: str,
    teams: bool,
) -> Forward:
    machine, names = machine_of(device), (NAMES[dtype], NAMES.get(weight_dtype))
    problem = Problem("forward", n, *names, size, machine.facts, casting, Policy(teams))
    return Forward(machine, plan_for(problem))


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
) -> Backward:
    if partials not in ("shared", "own"):
        raise ValueError(f"partials: expected 'shared' or 'own', got {partials!r}")
    machine, names = machine_of(device), (NAMES[dtype], NAMES.get(weight_dtype))
    problem = Problem(op, n, *names, size, machine.facts, casting, Policy(teams), partials)
    return Backward(machine, plan_for(problem))


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem, by what ships and by the user's tables."""
    return select(problem, tables_of(problem.device.architecture, problem.device.target, user_folder()))


class Launcher:
    """A plan whose kernels are bound to a device."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine, self.plan, self.n = machine, plan, plan.problem.n
        self.inv_n, self.most_rows = 1.0 / self.n, plan.most_rows
        self.tma = any(step.uses_tma for step in plan.steps)
        self.sizes = functools.lru_cache(plan.sizes)  # the M of a model's calls repeat
        self.launches = []
        for step in plan.steps:
            parameters, constants = inspect.signature(KERNELS[step.kernel]).parameters, plan.constants(step)
            # the kernel's arguments by their names: arrays and numbers, then compile-time ones in capitals
            of_call = _picker([name for name in parameters if not name.isupper()])
            values = tuple(constants[name] for name in parameters if name.isupper())
            self.launches.append((machine.bind(KERNELS[step.kernel], step, values), of_call))

    def run(self, m: int, arrays: dict[str, Any]) -> None:
        """Launches everything, on arrays and numbers by the names of the kernels' parameters; more are added."""
        arrays["inv_n"] = self.inv_n
        if m > self.most_rows:
            self._run_parts(arrays)
            return
        sizes = self.sizes(m)
        if sizes.temporaries:
            arrays |= self._temporaries(sizes)
        if sizes.tiles_in_slab:
            arrays["tiles_in_slab"] = sizes.tiles_in_slab
        for (launch, of_call), grid in zip(self.launches, sizes.grids, strict=True):
            if grid is not None:
                launch(grid, of_call(arrays))

    def _temporaries(self, sizes: Sizes, but: str = "") -> dict[str, Tensor]:
        empty, wanted = self.machine.empty, sizes.temporaries.items()
        return {name: empty(shape, DTYPES[dtype]) for name, (shape, dtype) in wanted if name != but}

    def _run_parts(self, arrays: dict[str, Any]) -> None:
        """More rows than one launch takes: the partial rows of each part lie behind those of the one before."""
        names = [name for name in OF_ROWS if name in arrays]
        parts = list(zip(*(arrays[name].split(self.most_rows) for name in names), strict=True))
        has_sum = "dw" in arrays
        before = self.launches[:-1] if has_sum else self.launches
        of_parts = [self.sizes(part[0].shape[0]) for part in parts]
        counts = [sizes.partial_rows for sizes in of_parts]
        dw_partial = arrays.get("dw_partial")
        if has_sum:
            dw_partial = self.machine.empty((sum(counts), self.n), torch.float32)
        sums = dw_partial.split(counts) if has_sum else [dw_partial] * len(parts)
        for part, sizes, part_sums in zip(parts, of_parts, sums, strict=True):
            own = arrays | dict(zip(names, part, strict=True))
            own |= self._temporaries(sizes, but="dw_partial")
            own |= {"dw_partial": part_sums, "tiles_in_slab": sizes.tiles_in_slab}
            for (launch, of_call), grid in zip(before, sizes.grids, strict=False):
                launch(grid, of_call(own))
        if has_sum:
            launch, of_call = self.launches[-1]
            grid = self.plan.steps[-1].grid(0, self.n, sum(counts), 0)
            launch(grid, of_call(arrays | {"dw_partial": dw_partial}))


class Forward(Launcher):
    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        machine = self.machine
        x = _as_read(x, self.tma)
        m = x.shape[0]
        y, rstd = machine.empty((m, self.n), x.dtype), machine.empty((m,), torch.float32)
        weight = machine.no_weight if weight is None else weight
        arrays = {"y": y, "rstd": rstd, "x": x, "weight": weight, "eps": eps, "offset": offset}
        self.run(m, arrays)
        return y, rstd


class Backward(Launcher):
    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        machine, n = self.machine, self.n
        x, dy = _as_read(x, self.tma), _as_read(dy, self.tma)
        m, dx = x.shape[0], machine.empty((x.shape[0], n), x.dtype)
        arrays = {"dx": dx, "dy": dy, "x": x, "rstd": rstd, "offset": offset}
        arrays["weight"] = machine.no_weight if weight is None else weight
        if self.plan.problem.op == "dx":
            arrays["dw_partial"] = machine.no_dw_partial
        else:
            dw = arrays["dw"] = machine.empty((n,), weight.dtype)
            arrays["dw_partial"] = dw.view(1, n)  # where P is 1: the one partial row is dw
        self.run(m, arrays)
        return dx, arrays.get("dw")


def _picker(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What picks the values of these names, as a tuple."""
    if len(names) == 1:  # of which itemgetter would return the value itself
        return lambda arrays: (arrays[names[0]],)
    return operator.itemgetter(*names)


def _as_read(x: Tensor, tma: bool) -> Tensor:
    """x, or a copy where rows lie too far apart, or where a kernel by TMA would not read them as it reads packed ones.

    Packed rows begin at multiples of 16 bytes or, by their length, do not. Rows that do not the compiler loads element
    by element, and beside an array by TMA it may load over tiles that are still read: float32 rows of 5120 columns and
    teams of 12288 where dy alone is such a view, rows of 5119 where x alone is aligned.
    """
    stride, itemsize = x.stride()[0], x.itemsize
    if stride <= LARGEST_ROW_STRIDE:
        if not tma or ((stride * itemsize | x.data_ptr()) & 15 == 0) == (x.shape[1] * itemsize & 15 == 0):
            return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
