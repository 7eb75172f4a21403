# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe the kernels of `qk_norm_rope` to the host (launcher.py): one launch for q and k, and behind a backward with
gradients of weights one that sums these (two, where the weights of q and k have not as many elements).

No kernel takes some calls: for their heads (`is_taken`), or for extents, strides or tiles that kernels do not count in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.host.launcher import (
    LARGEST_STRIDE,
    Description,
    Launcher,
    begins_as_packed,
    bind_empty,
    bind_sum,
    bound,
    fits_kernels,
    lead_of,
    logger,
    sms_of,
)
from tilegym_rmsnorm.backends.cutile.plans.rope import (
    BackwardRope,
    ForwardRope,
    RopePlan,
    RopeProblem,
    RopeTiles,
    is_taken,
    tile_of_heads,
    tiles_of,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import MOST_HEADS, sum_of
from tilegym_rmsnorm.backends.cutile.plans.sizes import MOST_ROWS
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine
from tilegym_rmsnorm.call.tensors import overlap
from tilegym_rmsnorm.ops.rope.spec import (
    OF_BACKWARD,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)
from tilegym_rmsnorm.reproducibility import DEVICE


def problem_of(machine: Machine, spec: RopeSpec, tensors: Any, *_: RopeWanted) -> RopeProblem | None:
    """Return the problem of a forward or a backward; None where no kernel takes it. Under a level neither B, T, H nor
    strides decide anything, and arrange_rope.py has arranged the call."""
    *dys, q, k, q_weight, k_weight, cos, sin, positions = tensors[:OF_BACKWARD]
    rows = [each for each in (q, k, *dys) if each is not None]
    arrays = (*rows, cos, sin)
    if max(cos.shape) > LARGEST_STRIDE or not all(map(fits_kernels, arrays)):
        _refuse_too_large(spec, q)
        return None
    # Under a level H decides as little as T and B: a rank of tensor parallelism has a part of the heads.
    of_q, of_k = (
        MOST_HEADS if spec.reproducible else tile_of_heads(spec.n, (q if each is None else each).shape[2])
        for each in (q, k)
    )
    problem = RopeProblem(
        n=spec.n,
        rotary_dim=spec.rotary_dim,
        interleaved=spec.interleaved,
        heads=of_q,
        k_heads=of_k,
        itemsize=max(each.itemsize for each in rows),
        is_scattered=not (spec.reproducible or all(map(begins_as_packed, arrays))),
        has_one_step=q.shape[1] == 1 and not spec.reproducible,
        has_full_tables=cos.shape[1] == spec.rotary_dim,
        has_positions=positions is not None,
        per_head=_is_per_head(q_weight) or _is_per_head(k_weight),
        casting=spec.casting,
        rounding=spec.rope_rounding,
        architecture=machine.facts.architecture,
        is_batch_invariant=spec.reproducible > 0,
    )
    # Under a level heads that fill no multiple of 16 bytes are composed: B and T would decide where they begin.
    is_whole = not spec.reproducible or all(each.itemsize * spec.n % 16 == 0 for each in rows)
    return problem if is_whole and is_taken(problem) else None


def _refuse_too_large(spec: RopeSpec, q: Tensor) -> None:
    """Raise ValueError under a level: the kernels of a norm, which take such calls, add a head in another order."""
    if spec.reproducible:
        raise ValueError(
            f"reproducible: expected q and k of at most {MOST_ROWS} heads in all, and strides and rows of cos below"
            f" {LARGEST_STRIDE + 1}, got q of {tuple(q.shape)}: split the batch"
        )


def _plan_of(kind: type[RopeTiles], _: Machine, problem: RopeProblem) -> RopePlan:
    plan = RopePlan(problem, tiles_of(kind, problem))
    logger.debug("qk_norm_rope of %d columns: %s, reasoned (plans/rope.py)", problem.n, plan.first)
    return plan


def sms_of_walks(machine: Machine, level: int) -> int | None:
    """Count the SMs whose number decides how many partial rows a backward leaves; None where no GPU decides that."""
    left = sms_of(machine, level)
    return None if level & DEVICE else left


def _walks_of(
    run: Launcher, spec: RopeSpec, tensors: Any, sms: int | None
) -> tuple[tuple[int, int], ...] | None:
    """`RopeTiles.walks_of` for q, k and their weights."""
    q, k, *weights = tensors[:4]
    leads = lead_of(q), None if k is None else lead_of(k)
    per_head = [_is_per_head(each) for each in weights]
    walks = run.plan.first.walks_of(leads, sms, per_head)
    if walks is None:
        _refuse_too_large(spec, q)
    return walks


def _bind_forward(
    run: Launcher, spec: RopeSpec, tensors: RopeTensors
) -> Callable[[RopeTensors], RopeOutputs] | None:
    q, k, _, _, cos, _, _ = tensors
    walks = _walks_of(run, spec, tensors, sms_of(run.machine, spec.reproducible))
    if walks is None:
        return None
    (q_blocks, _), (k_blocks, _) = walks
    [(launch, _)], grid = run.kernels, (q_blocks + k_blocks,)
    empty_q, empty_k = bind_empty(run.machine, q), bind_empty(run.machine, k)
    numbers = _rows_of_batch(q, cos), 1.0 / spec.n, spec.eps, spec.offset

    def run_forward(tensors: RopeTensors) -> RopeOutputs:
        q, k, q_weight, k_weight, cos, sin, positions = tensors
        q_out, k_out = empty_q(), empty_k()
        # as _present, in half its time
        of_q = (q_out, q) if q_weight is None else (q_out, q, q_weight)
        of_k = () if k is None else (k_out, k) if k_weight is None else (k_out, k, k_weight)
        launch(grid, (of_q, of_k, q_blocks, cos, sin, () if positions is None else (positions,), *numbers))
        return q_out, k_out

    return run_forward


def _bind_backward(
    run: Launcher, spec: RopeSpec, tensors: Any, wanted: RopeWanted
) -> Callable[[RopeBackwardTensors], RopeGradients] | None:
    q, k, q_weight, k_weight, cos, _, _ = tensors[2:OF_BACKWARD]
    targets = tensors[OF_BACKWARD:] or (None, None)
    walks = _walks_of(run, spec, tensors[2:], sms_of_walks(run.machine, spec.reproducible))
    if walks is None:
        return None
    (q_blocks, q_rows), (k_blocks, k_rows) = walks
    [(launch, _)], grid = run.kernels, (q_blocks + k_blocks,)
    empty_q, empty_k = bind_empty(run.machine, q), bind_empty(run.machine, k)
    empty_q_sum = _bind_sum(run, spec, q_rows, q_weight, wanted.dq_weight)
    empty_k_sum = _bind_sum(run, spec, k_rows, k_weight, wanted.dk_weight)
    of_sums = zip((q_weight, k_weight), wanted, targets, strict=True)
    sums = [
        (w.numel(), target is not None) for w, dtype, target in of_sums if w is not None and dtype is not None
    ]
    launches = [_sum_of(run, columns, adds) for columns, adds in sums]
    is_joint = len(sums) == 2 and sums[0][0] == sums[1][0]
    joint: Any = _sum_of(run, sums[0][0], sums[0][1] + 2 * sums[1][1]) if is_joint else None
    both_add = all(each is not None for each in targets)
    numbers = _rows_of_batch(q, cos), 1.0 / spec.n, spec.eps, spec.offset

    def run_backward(tensors: Any) -> RopeGradients:
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, *targets = tensors
        q_target, k_target = targets or (None, None)
        dq, dk = empty_q(), empty_k()
        (dq_weight, q_partial), (dk_weight, k_partial) = made = empty_q_sum(q_target), empty_k_sum(k_target)
        of_q = _present(dq, dq_out, q, q_weight, q_partial)
        of_k = _present(dk, dk_out, k, k_weight, k_partial)
        launch(grid, (of_q, of_k, q_blocks, cos, sin, _present(positions), *numbers))
        flat = [(total.view(-1), partial.flatten(1)) for total, partial in made if total is not None]
        if is_joint and not (both_add and overlap(dq_weight, dk_weight)):
            blocks, launch_sum = joint
            launch_sum((blocks, 2), (*flat[0], flat[1]))
        else:
            for (blocks, launch_sum), arrays in zip(launches, flat, strict=True):
                launch_sum((blocks,), (*arrays, ()))
        return dq, dk, dq_weight, dk_weight

    return run_backward


NAMES = ("q", "k", "q_blocks", "cos", "sin", "positions", "rows_of_batch", "inv_n", "eps", "offset")
FORWARD = Description(NAMES, problem_of, functools.partial(_plan_of, ForwardRope), _bind_forward)
BACKWARD = Description(NAMES, problem_of, functools.partial(_plan_of, BackwardRope), _bind_backward)


@functools.cache
def _sum_of(run: Launcher, columns: int, adds: int) -> tuple[int, Launch]:
    """Return the blocks that sum so many columns of the partial rows that a backward leaves, and their launch. adds: as
    ADDS of `sum_partials`."""
    architecture = run.machine.facts.architecture
    step = sum_of(run.plan.first, columns, architecture)
    constants = step.constants(columns) | {"DEPENDENT": architecture >= 90, "ADDS": int(adds)}
    launch, _ = bound(run.machine, step, constants, ("dw", "dw_partial", "db"))
    return step.grid(0, columns, 0, 0)[0], launch


def _bind_sum(
    run: Launcher, spec: RopeSpec, p: int, weight: Tensor | None, dtype: torch.dtype | None
) -> Callable[..., tuple[Any, Any]]:
    """Return `bind_sum` of a weight's gradient and its P partial rows; a function of None where it is not wanted. Under
    a level a frozen weight has partial rows, which nothing reads: dx comes from the kernel of a trained one."""
    if weight is None or (dtype is None and not spec.reproducible):
        return lambda target: (None, None)
    if dtype is None:
        empty, of_partials = run.machine.empty, (p, *weight.shape)
        return lambda target: (None, empty(of_partials, torch.float32))
    return bind_sum(run.machine, tuple(weight.shape), dtype, p)


def _is_per_head(weight: Tensor | None) -> bool:
    return weight is not None and weight.ndim == 2


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple([each for each in tensors if each is not None])


def _rows_of_batch(q: Tensor, table: Tensor) -> int:
    """Return how many rows of a table each batch has of its own: T, or 0 where all have the same."""
    length = q.shape[1]
    return 0 if table.shape[0] == length else length
