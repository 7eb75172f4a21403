# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiling ahead: calls of the few batch sizes that together need every kernel that any batch size needs.

cuda-tile compiles a kernel anew for an extent that is 1, a multiple of 16, or neither. The extents that vary are M, or
B and T of rows (B, T, H, N), and P, the rows of dw_partial; which variant serves depends on the size class of M
besides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.launch import Launcher
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES, MOST_ROWS, SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Spec, Wanted

EPS = 1e-6
PERIODS = 4  # times as many tiles of heads as blocks: `leads_to_warm`

Lead = tuple[int, ...]  # (M,), or B, T and H


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
        return Spec(self.n, EPS, 0.0, self.casting, self.alpha, self.y, self.residual_out)

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


def empty(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> Tensor | None:
    """Return an array that holds anything, None of no dtype."""
    return None if dtype is None else torch.empty(shape, dtype=dtype, device=device)


def warm(device: torch.device, calls: Calls) -> None:
    """Launch every kernel of the forward and of the backward of such calls, on arrays that hold anything."""
    for size in SIZES:
        rows = rows_of_class(size, calls.n)
        first: Lead = (rows.start,)
        if calls.heads:
            first = 1, -(-rows.start // calls.heads), calls.heads
        if math.prod(first) not in rows:
            continue  # no number of rows is of this class
        launchers = _launchers(calls, device, first)
        leads = leads_to_warm(calls, rows, launchers) if calls.heads else _numbers(calls.n, size, launchers)
        for lead in leads:
            launch.rms_norm_forward(calls.spec, calls.forward(device, lead))
            for tensors in calls.backward(device, lead):
                launch.rms_norm_backward(calls.spec, tensors, calls.wanted)


def _launchers(calls: Calls, device: torch.device, lead: Lead) -> list[Launcher]:
    """Return the launchers of the calls with so many rows, which run all others of their size class too."""
    forward = launch.forward_launcher, launch.rms_norm_forward, around_kernels.forward
    found = _that_run(*forward, calls.spec, calls.forward(device, lead))
    backward = launch.backward_launcher, launch.rms_norm_backward, around_kernels.backward
    for tensors in calls.backward(device, lead):
        found += _that_run(*backward, calls.spec, tensors, calls.wanted)
    return found


def _that_run(find: Callable[..., Any], run: Any, compose: Any, *call: Any) -> list[Launcher]:
    """The launcher of a call, or those of the plain calls that it is composed of."""
    if (launcher := find(*call)) is not None:
        return [launcher]
    found = []

    def plain(*inner: Any) -> Any:
        found.append(find(*inner))
        return run(*inner)

    compose(plain, *call)
    return found


def _numbers(n: int, size: str, launchers: list[Launcher]) -> list[Lead]:
    numbers: set[int] = set()
    for launcher in launchers:
        plan = launcher.plan

        def partial_rows(m: int, launcher: Launcher = launcher) -> int:
            return _partial_rows(launcher, m, None)

        numbers |= set(rows_to_warm(n, size, plan.first, plan.problem.sm_count, partial_rows))
    return [(m,) for m in sorted(numbers)]


def _partial_rows(launcher: Launcher, m: int, lead: tuple[int, int, int] | None) -> int:
    """P; 1 where no array has P rows."""
    plan = launcher.plan
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
    stop = min(rows.stop, MOST_ROWS + 1)
    kinds: dict[tuple[str, str], int] = {}
    for start in (rows.start, max(rows.start, FEW_TILES * sm_count * rows_of_tile + 1)):
        end = start + 18 * max(blocks, tiles_in_slab) * rows_of_tile
        for m in _one_of_each_kind(range(start, min(end, stop)), rows_of_tile):
            kinds.setdefault((kind_of(m), kind_of(partial_rows(m))), m)
    return sorted(kinds.values())


def _one_of_each_kind(rows: range, rows_of_tile: int) -> Iterator[int]:
    """Yield the smallest M of each kind for each number of row tiles."""
    low = rows.start
    while low < rows.stop:
        high = min(-(-low // rows_of_tile) * rows_of_tile, rows.stop - 1)
        multiple = -(-low // 16) * 16
        if multiple <= high:
            yield multiple
        if low != multiple:
            yield low
        elif low < high:
            yield low + 1
        if low == 1 < high:
            yield 2
        low = high + 1


def leads_to_warm(calls: Calls, rows: range, launchers: list[Launcher]) -> list[Lead]:
    """(B, T, H) of one size class that have every kind of arrays that any B and T of it have.

    Either of B and T is short while the other goes through all numbers from where the class begins, and from where more
    blocks share the rows, until the tiles are several times as many as the blocks: P has gone through what it can be by
    then.
    """
    kinds: dict[tuple[Any, ...], Lead] = {}
    partial_rows = functools.cache(_partial_rows)
    for launcher in set(launchers):
        first, sm_count = launcher.plan.first, launcher.plan.problem.sm_count
        for start in (rows.start, max(rows.start, FEW_TILES * sm_count * first.rows_of_tile + 1)):
            walked = range(start, min(rows.stop, MOST_ROWS))
            for b, t in _short_and_long(walked, first.most_partial_rows(sm_count), first.rows, calls.heads):
                key = _kinds_of(launchers, calls, b, t, partial_rows)
                kinds.setdefault(key, (b, t, calls.heads))
    return sorted(kinds.values())


def _short_and_long(rows: range, blocks: int, height: int, heads: int) -> Iterator[tuple[int, int]]:
    """B and T with B * T * H among these numbers; of each tile, of `height` rows of T, one of each kind. Short are one
    of each kind, and of two that are neither 1 nor a multiple of 16 the even and the odd one."""
    for short in (1, 2, 3, 16):
        low, stop = (-(-each // (short * heads)) for each in (rows.start, rows.stop))
        for b in range(low, min(low + PERIODS * blocks, stop)):
            yield b, short
        for tile in range(low, min(low + PERIODS * blocks * height, stop), height):
            seen = set()
            for t in range(tile, min(tile + min(height, 16), stop)):
                kind = kind_of(t), kind_of(short * t * heads), t % 8
                if kind not in seen:
                    seen.add(kind)
                    yield short, t


def _kinds_of(
    launchers: list[Launcher], calls: Calls, b: int, t: int, partial_rows: Callable[..., int]
) -> tuple[Any, ...]:
    """Return the kinds of extents and strides that kernels are compiled for. Strides are multiples of N, so only those
    of B are looked at."""
    heads, m = calls.heads, b * t * calls.heads
    found: list[Any] = [kind_of(m)]
    for launcher in launchers:
        if launcher.plan.problem.form.heads:
            # P follows from the tiles: the same for all T of one
            height = launcher.plan.first.rows
            lead = b, -(-t // height) * height, heads
            found += [kind_of(b), kind_of(t), math.gcd(t * heads * calls.n, 8)]
            found.append(kind_of(partial_rows(launcher, math.prod(lead), lead)))
        else:
            found.append(kind_of(partial_rows(launcher, m, None)))
    return tuple(found)


def kind_of(extent: int) -> str:
    """Say which of the extents that cuda-tile compiles for this one is."""
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"
