# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find the plan of a call's problem, bind its kernels to a device, allocate and launch: for any op, by its Description.

A plan is made, and its kernels are bound, once for all calls that are alike.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine

logger = logging.getLogger("tilegym_rmsnorm")

LARGEST_STRIDE = 2**31 - 1  # kernels see strides as int32
# From all that a call has, the arguments of one kernel
Selector = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Description:
    """One direction of an op, as the host needs to know it. A call is a spec, tensors, and of a backward `wanted`.

    names: what a bound call gives its kernels, by the names of their parameters; behind these come temporary arrays.
    key_of: given a machine and a call, all that decides the plan; None where no kernel takes the call.
    plan_of: given a machine and a key, the plan, which has `steps` and the `constants` of a step; None where no kernel
        takes such calls.
    bind: given a launcher and a call, the function of its tensors (`binding` in contract.py), or None.
    """

    names: tuple[str, ...]
    key_of: Callable[..., Any]
    plan_of: Callable[[Machine, Any], Any]
    bind: Callable[..., Callable[[Any], Any] | None]


class Launcher:
    """A plan whose kernels are bound to a device. The places of a kernel's arguments are found once: a call looks up no
    names."""

    def __init__(self, description: Description, machine: Machine, plan: Any) -> None:
        self.description, self.machine, self.plan = description, machine, plan
        self.uses_tma = any(step.uses_tma for step in plan.steps)
        self.reads_packed = any(step.reads_packed for step in plan.steps)
        self.temporaries = [name for step in plan.steps for name in step.temporaries(1)]
        names = [*description.names, *self.temporaries]
        self.kernels = [bound(machine, step, plan.constants(step), names) for step in plan.steps]
        # the extents of a model's calls repeat
        self.launches_for = functools.lru_cache(maxsize=4096)(self._launches_for)

    def __call__(self, spec: Any, tensors: Any, *wanted: Any) -> Any:
        run = self.bind(spec, tensors, *wanted)
        assert run is not None
        return run(tensors)

    def bind(self, spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any] | None:
        return self.description.bind(self, spec, tensors, *wanted)

    def _launches_for(self, *extents: Any) -> tuple[Launch, tuple[int, ...], Any]:
        """Return `bind_launches` of the plan's sizes for these extents, and the sizes."""
        sizes = self.plan.sizes(*extents)
        return *self.bind_launches(sizes), sizes

    def bind_launches(self, sizes: Any) -> tuple[Launch, tuple[int, ...]]:
        """Return a function that launches each kernel whose grid is not None, given a call's arguments behind a grid:
        the one that comes with it, which costs a lone kernel nothing."""
        launches = [
            (launch, select, grid)
            for (launch, select), grid in zip(self.kernels, sizes.grids, strict=True)
            if grid is not None
        ]
        wanted = (sizes.temporaries[name] for name in self.temporaries)
        made, empty = [(shape, getattr(torch, dtype)) for shape, dtype in wanted], self.machine.empty
        if len(launches) == 1 and launches[0][1] is None and not made:
            [(launch, _, grid)] = launches
            return launch, grid

        def launch_all(_: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            if made:
                arguments += tuple([empty(shape, dtype) for shape, dtype in made])
            for launch, select, grid in launches:
                launch(grid, arguments if select is None else select(arguments))

        return launch_all, ()


def find(
    description: Description, machine: Machine, spec: Any, tensors: Any, *wanted: Any
) -> Launcher | None:
    """Return the launcher of a call, one for all calls of its key; None where no kernel takes it."""
    key = description.key_of(machine, spec, tensors, *wanted)
    return None if key is None else launcher_of(description, machine, key)


def bind(
    description: Description, machine: Machine, spec: Any, tensors: Any, *wanted: Any
) -> Callable[[Any], Any] | None:
    """Bind a call as contract.py says; None where no kernel takes it."""
    launcher = find(description, machine, spec, tensors, *wanted)
    return None if launcher is None else launcher.bind(spec, tensors, *wanted)


@functools.cache
def launcher_of(description: Description, machine: Machine, key: Any) -> Launcher | None:
    plan = description.plan_of(machine, key)
    return None if plan is None else Launcher(description, machine, plan)


def bound(
    machine: Machine, step: Variant, constants: dict[str, Any], names: Sequence[str]
) -> tuple[Launch, Selector | None]:
    """Bind a variant's kernel to a device, and to the constants that its parameters in capitals name. Return a function
    that selects the others from values of these names too, None where the kernel takes all of them in their order."""
    kernel = KERNELS[step.kernel]
    parameters = inspect.signature(kernel).parameters
    launch = machine.bind(kernel, step, tuple(constants[name] for name in parameters if name.isupper()))
    places = [names.index(name) for name in parameters if not name.isupper()]
    first, end = places[0], places[-1] + 1
    if places != list(range(first, end)):
        return launch, operator.itemgetter(*places)
    return launch, None if len(places) == len(names) else operator.itemgetter(slice(first, end))


def bind_empty(machine: Machine, rows: Tensor | None, dtype: torch.dtype | None = None) -> Callable[[], Any]:
    """Return a function that allocates contiguous rows of this shape, and dtype unless another is given; None of
    None."""
    if rows is None:
        return lambda: None
    shape, dtype = tuple(rows.shape), dtype or rows.dtype
    return lambda: machine.empty(shape, dtype)


def bind_sum(
    machine: Machine, shape: tuple[int, ...], dtype: torch.dtype, partial_rows: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that allocates the gradient of a weight, and the partial rows that it is the sum of. 0: the one
    partial row is the gradient itself. It takes what the sum is added to in the gradient's place, if anything."""
    empty, of_partials = machine.empty, (partial_rows, *shape)

    def allocate(target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = empty(shape, dtype) if target is None else target.view(shape)
        return total, empty(of_partials, torch.float32) if partial_rows else total.view(1, -1)

    return allocate


def sms_of(machine: Machine, level: int) -> int:
    """Count the SMs that kernels may fill. ValueError for a margin that leaves none, or that the level refuses."""
    return settings.sms_left(machine.facts.sm_count, settings.sm_margin_under(level))


def lead_of(rows: Tensor) -> tuple[int, int, int] | None:
    """Return B, T and H of (B, T, H, N)."""
    return (rows.size(0), rows.size(1), rows.size(2)) if rows.ndim == 4 else None


def fits_kernels(rows: Tensor) -> bool:
    """Whether kernels can count in the strides of an array of rows."""
    return all(stride <= LARGEST_STRIDE for stride in rows.stride())


def begins_as_packed(rows: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes if packed rows do, and only then."""
    offsets = rows.data_ptr()
    for stride, extent in zip(rows.stride()[:-1], rows.shape[:-1], strict=True):
        if extent > 1:
            offsets |= stride * rows.itemsize
    return (offsets & 15 == 0) == (rows.shape[-1] * rows.itemsize & 15 == 0)
