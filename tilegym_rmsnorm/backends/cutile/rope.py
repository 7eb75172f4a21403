# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Bind calls of `qk_norm_rope` to the kernels of kernels/rope.py: one launch for q and k, and behind a backward with
gradients of weights one that sums these (two, where the weights of q and k have not as many elements).

None where these kernels do not take a call: for its heads (`is_taken`), or for extents, strides or tiles that kernels
do not count in.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.forms import LARGEST_STRIDE, begins_as_packed, fits_kernels
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans.rope import (
    BackwardRope,
    ForwardRope,
    RopeProblem,
    RopeTiles,
    constants_of,
    is_taken,
    tile_of_heads,
    tiles_of,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import sum_of
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine, machine_of
from tilegym_rmsnorm.ops.rope.spec import (
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)

logger = logging.getLogger("tilegym_rmsnorm")


def bind_forward(
    spec: RopeSpec, tensors: RopeTensors, machine: Machine | None = None
) -> Callable[[RopeTensors], RopeOutputs] | None:
    """Bind a forward as contract.py says. machine: where kernels run, None for that of q's device."""
    q, k, q_weight, k_weight, cos, sin, _ = tensors
    machine = machine or machine_of(q.device)
    problem = problem_of(machine, spec, tensors)
    if problem is None:
        return None
    variant, launch = _launch(machine, ForwardRope, problem)
    walks = _walks_of(machine, variant, tensors[:4])
    if walks is None:
        return None
    (q_blocks, _), (k_blocks, _) = walks
    grid = (q_blocks + k_blocks,)
    empty_q, empty_k = _bind_empty(machine, q), _bind_empty(machine, k)
    numbers = _rows_of_batch(q, cos), 1.0 / spec.n, spec.eps, spec.offset

    def run(tensors: RopeTensors) -> RopeOutputs:
        q, k, q_weight, k_weight, cos, sin, positions = tensors
        q_out, k_out = empty_q(), empty_k()
        # as _present, in half its time
        of_q = (q_out, q) if q_weight is None else (q_out, q, q_weight)
        of_k = () if k is None else (k_out, k) if k_weight is None else (k_out, k, k_weight)
        launch(grid, (of_q, of_k, q_blocks, cos, sin, () if positions is None else (positions,), *numbers))
        return q_out, k_out

    return run


def bind_backward(
    spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted, machine: Machine | None = None
) -> Callable[[RopeBackwardTensors], RopeGradients] | None:
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, _ = tensors
    machine = machine or machine_of(q.device)
    problem = problem_of(machine, spec, tensors[2:], dq_out, dk_out)
    if problem is None:
        return None
    variant, launch = _launch(machine, BackwardRope, problem)
    walks = _walks_of(machine, variant, tensors[2:6])
    if walks is None:
        return None
    (q_blocks, q_rows), (k_blocks, k_rows) = walks
    sums = (q_weight, wanted.dq_weight), (k_weight, wanted.dk_weight)
    empty_q, empty_k = _bind_empty(machine, q), _bind_empty(machine, k)
    empty_q_sum = _bind_sum_and_partials(machine, q_rows, *sums[0])
    empty_k_sum = _bind_sum_and_partials(machine, k_rows, *sums[1])
    launch_sums = _bind_sums(machine, variant, sums)
    grid = (q_blocks + k_blocks,)
    numbers = _rows_of_batch(q, cos), 1.0 / spec.n, spec.eps, spec.offset

    def run(tensors: RopeBackwardTensors) -> RopeGradients:
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions = tensors
        dq, dk = empty_q(), empty_k()
        (dq_weight, q_partial), (dk_weight, k_partial) = empty_q_sum(), empty_k_sum()
        of_q = _present(dq, dq_out, q, q_weight, q_partial)
        of_k = _present(dk, dk_out, k, k_weight, k_partial)
        launch(grid, (of_q, of_k, q_blocks, cos, sin, _present(positions), *numbers))
        launch_sums(((dq_weight, q_partial), (dk_weight, k_partial)))
        return dq, dk, dq_weight, dk_weight

    return run


def problem_of(
    machine: Machine, spec: RopeSpec, tensors: RopeTensors, *dys: Tensor | None
) -> RopeProblem | None:
    """Return the problem of a call; None where no kernel takes it."""
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    rows = [each for each in (q, k, *dys) if each is not None]
    arrays = (*rows, cos, sin)
    if max(cos.shape) > LARGEST_STRIDE or not all(map(fits_kernels, arrays)):
        return None
    heads = tile_of_heads(spec.n, q.shape[2])
    problem = RopeProblem(
        n=spec.n,
        rotary_dim=spec.rotary_dim,
        interleaved=spec.interleaved,
        heads=heads,
        k_heads=heads if k is None else tile_of_heads(spec.n, k.shape[2]),
        itemsize=max(each.itemsize for each in rows),
        is_scattered=not all(map(begins_as_packed, arrays)),
        has_one_step=q.shape[1] == 1,
        has_full_tables=cos.shape[1] == spec.rotary_dim,
        has_positions=positions is not None,
        per_head=_is_per_head(q_weight) or _is_per_head(k_weight),
        casting=spec.casting,
        rounding=spec.rope_rounding,
        architecture=machine.facts.architecture,
    )
    return problem if is_taken(problem) else None


@functools.cache
def _launch(machine: Machine, kind: type[RopeTiles], problem: RopeProblem) -> tuple[RopeTiles, Launch]:
    """Return the settings of a kernel and its launch; logged at level DEBUG."""
    variant = tiles_of(kind, problem)
    logger.debug("qk_norm_rope of %d columns: %s, reasoned (plans/rope.py)", problem.n, variant)
    return variant, _bound(machine, variant, constants_of(problem, variant))


@functools.cache
def _sum(machine: Machine, variant: Variant, columns: int) -> tuple[int, Launch]:
    """The blocks that sum so many columns of the partial rows that a variant leaves, and their launch."""
    architecture = machine.facts.architecture
    step = sum_of(variant, columns, architecture)
    constants = step.constants(columns) | {"DEPENDENT": architecture >= 90}
    return step.grid(0, columns, 0, 0)[0], _bound(machine, step, constants)


def _bound(machine: Machine, variant: Variant, constants: dict[str, Any]) -> Launch:
    kernel = KERNELS[variant.kernel]
    names = inspect.signature(kernel).parameters
    return machine.bind(kernel, variant, tuple(constants[name] for name in names if name.isupper()))


def _walks_of(
    machine: Machine, variant: RopeTiles, tensors: Sequence[Tensor | None]
) -> tuple[tuple[int, int], ...] | None:
    """`RopeTiles.walks_of` for q, k and their weights."""
    q, k, *weights = tensors
    assert q is not None
    leads = _lead_of(q), None if k is None else _lead_of(k)
    return variant.walks_of(leads, sms_of(machine), [_is_per_head(each) for each in weights])


def _lead_of(rows: Tensor) -> tuple[int, int, int]:
    return rows.size(0), rows.size(1), rows.size(2)


def sms_of(machine: Machine) -> int:
    """Count the SMs that kernels may fill."""
    return settings.sms_left(machine.facts.sm_count, settings.kernel_limits()[1])


def _is_per_head(weight: Tensor | None) -> bool:
    return weight is not None and weight.ndim == 2


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple([each for each in tensors if each is not None])


def _rows_of_batch(q: Tensor, table: Tensor) -> int:
    """Return how many rows of a table each batch has of its own: T, or 0 where all have the same."""
    length = q.shape[1]
    return 0 if table.shape[0] == length else length


def _bind_empty(machine: Machine, rows: Tensor | None) -> Callable[[], Any]:
    if rows is None:
        return lambda: None
    shape, dtype = tuple(rows.shape), rows.dtype
    return lambda: machine.empty(shape, dtype)


def _bind_sum_and_partials(
    machine: Machine, p: int, weight: Tensor | None, dtype: torch.dtype | None
) -> Callable[[], tuple[Any, Any]]:
    """Return a function that allocates the gradient of a weight and its P partial rows, None of one not wanted."""
    if weight is None or dtype is None:
        return lambda: (None, None)
    shape = tuple(weight.shape)
    return lambda: (machine.empty(shape, dtype), machine.empty((p, *shape), torch.float32))


def _bind_sums(
    machine: Machine, variant: Variant, weights: Iterable[tuple[Tensor | None, torch.dtype | None]]
) -> Callable[[Iterable[tuple[Tensor | None, Tensor | None]]], None]:
    """Return a function that sums the partial rows of gradients that are wanted: of as many columns in one launch."""
    columns = [weight.numel() for weight, dtype in weights if weight is not None and dtype is not None]
    steps = [_sum(machine, variant, each) for each in columns]
    is_joint = len(columns) == 2 and columns[0] == columns[1]

    def run(sums: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
        flat = [
            (total.view(-1), partial.flatten(1))
            for total, partial in sums
            if total is not None and partial is not None
        ]
        if is_joint:
            blocks, launch = steps[0]
            launch((blocks, 2), (*flat[0], flat[1]))
            return
        for (blocks, launch), arrays in zip(steps, flat, strict=True):
            launch((blocks,), (*arrays, ()))

    return run
