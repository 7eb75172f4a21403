# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiling ahead: calls of the few extents that together need every kernel that any extents need.

cuda-tile compiles a kernel anew for an extent that is 1, a multiple of 16, or neither. Of a norm the extents that vary
are M, or B and T of rows (B, T, H, N), and P, the rows of dw_partial. Which variant serves depends on the size class of
M besides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm import reproducibility
from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.launcher import Description, Launcher, find
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.rules import adds_heads_as_rows
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES, MOST_ROWS, SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Spec, Wanted
from tilegym_rmsnorm.reproducibility import DEVICE

EPS = 1e-6
PERIODS = 4  # times as many tiles of heads as blocks: `_leads_of_heads`
# Beside a long extent these make every kind of B * T for every kind of B and of T.
SHORT = (1, 2, 3, 4, 8, 16)

Lead = tuple[int, ...]  # (M,), or B, T and H


def warm(device: torch.device, calls: Any) -> None:
    """Launch every kernel of the forward and of the backward of such calls, on arrays that hold anything."""
    if isinstance(calls, Calls) and calls.spec.reproducible and calls.heads and not calls.per_head:
        # arrange.py makes rows of heads, of those that are added as such for sums under "device" alone
        rows = calls._replace(heads=0)
        if not adds_heads_as_rows(calls.n):
            calls = rows
        elif calls.spec.reproducible & DEVICE:
            warm(device, rows)
    forward, backward = (getattr(launch, name) for name in calls.spec.ops)
    for lead in calls.leads(device):
        forward(calls.spec, calls.forward(device, lead))
        for tensors, wanted in itertools.product(calls.backward(device, lead), _wanted_of(calls)):
            backward(calls.spec, tensors, wanted)
    for each in calls.composed_of(device):
        warm(device, each)


class Calls(NamedTuple):
    """Properties that calls share, whatever their number of rows: the dtypes of their tensors, None for absent ones."""

    n: int
    dtype: torch.dtype
    weight: torch.dtype | None
    casting: str = "once"
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    residual_out: torch.dtype | None = None
    alpha: float = 1.0
    y: torch.dtype | None = None  # None: x's
    heads: int = 0  # H of rows (B, T, H, N)
    per_head: bool = False  # weight and bias are (H, N)

    @property
    def spec(self) -> Spec:
        level = reproducibility.flags()
        numbers = 0.0, self.casting, self.alpha, self.y, self.residual_out
        return Spec(self.n, EPS, *numbers, reproducible=level)

    @property
    def wanted(self) -> Wanted:
        """All gradients, as autograd asks for them."""
        is_one = self.residual in (None, self.dtype) and self.alpha == 1.0
        return Wanted(self.dtype, None if is_one else self.residual, self.weight, self.bias)

    def forward(self, device: torch.device, lead: Lead) -> ForwardTensors:
        """Make uninitialized tensors of a call."""
        shape = (self.heads, self.n) if self.per_head else (self.n,)
        x = torch.empty((*lead, self.n), dtype=self.dtype, device=device)
        residual = empty((*lead, self.n), self.residual, device)
        weight, bias = (empty(shape, dtype, device) for dtype in (self.weight, self.bias))
        return x, weight, bias, residual

    def backward(self, device: torch.device, lead: Lead) -> list[BackwardTensors]:
        """Make tensors of its backwards: with a residual one whose sum is used, and one whose sum is not."""
        shape = (self.heads, self.n) if self.per_head else (self.n,)
        normalized = torch.empty((*lead, self.n), dtype=self.residual_out or self.dtype, device=device)
        dy = torch.empty((*lead, self.n), dtype=self.y or self.dtype, device=device)
        rstd = torch.empty((math.prod(lead),), dtype=torch.float32, device=device)
        of_all = normalized, dy, empty(shape, self.weight, device), rstd
        return [(*of_all, normalized), (*of_all, None)] if self.residual else [(*of_all, None)]

    def leads(self, device: torch.device) -> Iterator[Lead]:
        """Yield numbers of rows, or B, T and H, of each size class."""
        for size in SIZES:
            rows = rows_of_class(size, self.n)
            first: Lead = (rows.start,)
            if self.heads:
                first = 1, -(-rows.start // self.heads), self.heads
            if math.prod(first) not in rows:
                continue  # no number of rows is of this class
            launchers = _launchers(self, device, first)
            if self.heads:
                yield from _leads_of_heads(self, rows, launchers)
            else:
                numbers: set[int] = set()
                for plan in (each.plan for each in launchers):
                    partial_rows = functools.partial(_partial_rows, plan)
                    numbers |= set(
                        rows_to_warm(self.n, size, plan.first, plan.problem.sm_count, partial_rows)
                    )
                yield from ((m,) for m in sorted(numbers))

    def composed_of(self, _: torch.device) -> tuple[()]:
        """Return no other calls: `leads` knows the plain ones in composed calls."""
        return ()


def empty(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> Tensor | None:
    """Return an array that holds anything, None of no dtype."""
    return None if dtype is None else torch.empty(shape, dtype=dtype, device=device)


def _launchers(calls: Calls, device: torch.device, lead: Lead) -> list[Launcher]:
    """Return the launchers of the calls with so many rows, which run all others of their size class too; of a composed
    call those of the plain calls in it."""
    found, machine = [], machine_of(device)

    def note(kernels: Description, run: Any, compose: Any, *call: Any) -> None:
        def plain(*inner: Any) -> Any:
            note(kernels, run, compose, *inner)
            return run(*inner)

        launcher = find(kernels, machine, *call)
        if launcher is None:
            compose(plain, *call)
        else:
            found.append(launcher)

    forward = norm.FORWARD, launch.rms_norm_forward, around_kernels.forward
    note(*forward, calls.spec, calls.forward(device, lead))
    backward = norm.BACKWARD, launch.rms_norm_backward, around_kernels.backward
    for tensors, wanted in itertools.product(calls.backward(device, lead), _wanted_of(calls)):
        note(*backward, calls.spec, tensors, wanted)
    return found


def _wanted_of(calls: Any) -> list[Any]:
    """Return the gradients that backwards want: all, and under a level dx alone too, whose kernels a frozen weight has.
    Those of `qk_norm_rope` are the same beside a frozen weight."""
    if not isinstance(calls, Calls) or not calls.spec.reproducible or calls.weight is None:
        return [calls.wanted]
    return [calls.wanted, calls.wanted._replace(dw=None, db=None)]


def _partial_rows(plan: Plan, m: int, lead: tuple[int, int, int] | None = None) -> int:
    """P; 1 where no array has P rows."""
    if plan.problem.op != "backward":
        return 1
    if lead is None:
        return plan.first.partial_rows(m, plan.problem.n, plan.problem.sm_count)
    return plan.sizes(m, lead).partial_rows


def rows_to_warm(
    n: int, size: str, variant: Variant, sm_count: int, partial_rows: Callable[[int], int]
) -> list[int]:
    """Numbers of rows of one size class that have every pair of kinds of M and P that any number of it has.

    P is tiles / k rounded up, for the k that leaves at most B blocks, so it goes through the upper part of 1..B once
    while the tiles go from (k - 1) B to k B, and a smaller part for each larger k. From k = 16 on every P comes with
    every kind of M; so 18 times B tiles, from where the class begins, and from where B changes, have all there is.

    A split backward begins with the k of its slab, however few the blocks are. With 16 rows or more in a slab every P
    comes with every kind of M, and the first 18 slabs have every kind of P; a smaller one has a k below 16.
    """
    rows = rows_of_class(size, n)
    rows_of_tile = variant.rows
    tiles_in_slab = variant.slab // variant.rows if isinstance(variant, Split) else 0
    blocks = variant.most_partial_rows(sm_count)
    walked = []
    for start in (rows.start, max(rows.start, FEW_TILES * sm_count * rows_of_tile + 1)):
        end = start + 18 * max(blocks, tiles_in_slab) * rows_of_tile
        walked.append(range(start, min(end, rows.stop, MOST_ROWS + 1)))
    numbers = (m for each in walked for m in _one_of_each_kind(each, rows_of_tile, kind_of))
    return sorted(first_of_each(numbers, lambda m: (kind_of(m), kind_of(partial_rows(m)))))


def _leads_of_heads(calls: Calls, rows: range, launchers: list[Launcher]) -> list[Lead]:
    """(B, T, H) of one size class that have every kind of arrays that any B and T of it have.

    The long one of B and T goes through all numbers from where the class begins, and from where more blocks share the
    rows, until the tiles are several times as many as the blocks: P has gone through what it can be by then.
    """
    walked: list[tuple[int, int]] = []
    for launcher in dict.fromkeys(launchers):
        first, sm_count = launcher.plan.first, launcher.plan.problem.sm_count
        few = max(rows.start, FEW_TILES * sm_count * first.rows_of_tile + 1)
        starts = [(start, PERIODS * first.most_partial_rows(sm_count)) for start in (rows.start, few)]
        walked += short_and_long(SHORT[:3] + SHORT[-1:], starts, rows.stop, calls.heads, first.rows)
    kinds = functools.partial(_kinds_of, launchers, calls, functools.cache(_partial_rows))
    return sorted((*each, calls.heads) for each in first_of_each(walked, kinds))


def short_and_long(
    shorts: Iterable[int], starts: Iterable[tuple[int, int]], stop: int, heads: int, height: int
) -> Iterator[tuple[int, int]]:
    """Yield B and T, of which one is short, with numbers of rows below `stop`; of the T of a tile, of `height` steps,
    one for each power of two that may divide them: B * T may be a multiple of 16 where neither is.

    starts: from how many rows on the long one goes through all numbers, and how many: of B, or of tiles of T.
    """
    for start, most in starts:
        for short in shorts:
            low, end = (-(-each // (short * heads)) for each in (start, min(stop, MOST_ROWS)))
            yield from ((b, short) for b in range(low, min(low + most, end)))
            long = range(low, min(low + most * height, end))
            yield from (
                (short, t) for t in _one_of_each_kind(long, height, lambda t: (t == 1, math.gcd(t, 16)))
            )


def _one_of_each_kind(numbers: range, height: int, kind: Callable[[int], Any]) -> Iterator[int]:
    """Yield the smallest number of each kind in each tile. Any 17 that follow one another have all kinds."""
    for tile in range(numbers.start - (numbers.start - 1) % height, numbers.stop, height):
        yield from first_of_each(range(max(tile, numbers.start), min(tile + height, numbers.stop))[:17], kind)


def _kinds_of(
    launchers: list[Launcher], calls: Calls, partial_rows: Callable[..., int], lead: tuple[int, int]
) -> tuple[Any, ...]:
    """Return the kinds of extents and strides that kernels are compiled for. Strides are multiples of N, so only those
    of B are looked at."""
    (b, t), heads = lead, calls.heads
    m = b * t * heads
    found: list[Any] = [kind_of(m)]
    for launcher in launchers:
        if launcher.plan.problem.form.heads:
            # P follows from the tiles: the same for all T of one
            height = launcher.plan.first.rows
            tiled = b, -(-t // height) * height, heads
            found += [kind_of(b), kind_of(t), math.gcd(t * heads * calls.n, 8)]
            found.append(kind_of(partial_rows(launcher.plan, math.prod(tiled), tiled)))
        else:
            found.append(kind_of(partial_rows(launcher.plan, m)))
    return tuple(found)


def kind_of(extent: int) -> str:
    """Say which of the extents that cuda-tile compiles for this one is."""
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"


def first_of_each(values: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Return the first value of each kind."""
    found: dict[Any, Any] = {}
    for value in values:
        found.setdefault(kind(value), value)
    return list(found.values())
