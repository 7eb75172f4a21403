# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiling ahead for `qk_norm_rope`, as warm.py does for `rms_norm`.

The extents that vary are B, T, the rows of cos and sin or of position_ids, and P of q and of k. A call of one step has
tiles of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.plans.rope import BackwardRope, RopeProblem, RopeTiles, tiles_of
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES
from tilegym_rmsnorm.backends.cutile.rope import problem_of, sms_of
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.backends.cutile.warm import Calls, empty, kind_of, warm
from tilegym_rmsnorm.ops.rope.spec import RopeBackwardTensors, RopeSpec, RopeTensors, RopeWanted

# Beside a long extent these make every kind of B * T for every kind of B and of T.
SHORT = (1, 2, 3, 4, 8, 16)


class RopeLead(NamedTuple):
    """Extents that vary between calls, and whether tables do."""

    b: int
    t: int
    has_rows_of_batch: bool  # each batch has rows of cos and sin, or positions, of its own


class RopeCalls(NamedTuple):
    """Properties that calls share, whatever their numbers of sequences and tokens."""

    spec: RopeSpec
    dtype: torch.dtype
    weight: torch.dtype | None  # None: no weights
    heads: int
    k_heads: int  # 0 without k
    per_head: bool
    table: torch.dtype
    columns: int  # of cos and sin
    positions: int  # rows of cos and sin that position_ids choose from, 0 without position_ids
    position_dtype: torch.dtype

    def forward(self, device: torch.device, lead: RopeLead) -> RopeTensors:
        """Make uninitialized tensors of a call."""
        b, t, has_rows_of_batch = lead
        batches = b if has_rows_of_batch else 1
        q, k = (self._rows(heads, lead, device) for heads in (self.heads, self.k_heads))
        weights = (self._weight(heads, device) for heads in (self.heads, self.k_heads))
        size = (self.positions or batches * t, self.columns)
        cos, sin = (torch.empty(size, dtype=self.table, device=device) for _ in range(2))
        positions = empty((batches, t), self.position_dtype if self.positions else None, device)
        assert q is not None
        return q, k, *weights, cos, sin, positions  # type: ignore[return-value]

    def backward(self, device: torch.device, lead: RopeLead) -> RopeBackwardTensors:
        """Make tensors of its backward: the gradients have the shapes of q and k."""
        q, k, *others = self.forward(device, lead)
        return q, k, q, k, *others  # type: ignore[return-value]

    @property
    def wanted(self) -> RopeWanted:
        """All gradients, as autograd asks for them."""
        return RopeWanted(self.weight, self.weight if self.k_heads else None)

    def _rows(self, heads: int, lead: RopeLead, device: torch.device) -> Tensor | None:
        return empty((lead.b, lead.t, heads, self.spec.n), self.dtype if heads else None, device)

    def _weight(self, heads: int, device: torch.device) -> Tensor | None:
        shape = (heads, self.spec.n) if self.per_head else (self.spec.n,)
        return empty(shape, self.weight if heads else None, device)


def warm_rope(device: torch.device, calls: RopeCalls) -> None:
    """Launch every kernel of the forward and of the backward of such calls, on arrays that hold anything."""
    for lead in leads_to_warm(device, calls):
        launch.qk_norm_rope_forward(calls.spec, calls.forward(device, lead))
        launch.qk_norm_rope_backward(calls.spec, calls.backward(device, lead), calls.wanted)
    if None in _problems(device, calls):
        for each in _composed(calls):
            warm(device, each)


def leads_to_warm(device: torch.device, calls: RopeCalls) -> list[RopeLead]:
    """Return one call of each kind of arrays that any B and T have."""
    sms = sms_of(machine_of(device))
    kinds: dict[tuple[Any, ...], RopeLead] = {}
    for is_one_step, problem in zip((True, False), _problems(device, calls), strict=True):
        if problem is None:
            continue
        variant = tiles_of(BackwardRope, problem)
        for b, t in _short_and_long(calls, variant, sms):
            if (t == 1) != is_one_step:
                continue
            for lead in (RopeLead(b, t, False), RopeLead(b, t, True)):
                kinds.setdefault((is_one_step, _kinds_of(calls, variant, sms, lead)), lead)
    return sorted(kinds.values())


def _problems(device: torch.device, calls: RopeCalls) -> list[RopeProblem | None]:
    """Return the problem of calls of one step, and of more; None where such calls are composed."""
    found = []
    for t in (1, 2):
        dq, dk, *tensors = calls.backward(device, RopeLead(2, t, True))
        found.append(problem_of(machine_of(device), calls.spec, tensors, dq, dk))  # type: ignore[arg-type]
    return found


def _short_and_long(calls: RopeCalls, variant: RopeTiles, sms: int) -> Iterator[tuple[int, int]]:
    """B and T, of which one is short. The other goes through all numbers until every SM has a tile: up to there P is
    about the number of tiles. Then it takes some beyond the few tiles that have one block an SM: P is of one kind for
    all of these (`RopeTiles.walks_of`). Of the T of one tile it takes one for each power of two that may divide them:
    B * T may be a multiple of 16 where neither is."""
    heads, height = calls.heads + calls.k_heads, variant.rows
    for short in SHORT:
        few = FEW_TILES * sms * variant.rows_of_tile // (short * heads) + 1
        for b in (*range(1, sms + 2), *range(few, few + 16)):
            yield b, short
        for first in (*range(0, (sms + 1) * height, height), *range(few, few + 16, height)):
            smallest = {math.gcd(t, 16): t for t in range(first + height, first, -1)}
            yield from ((short, t) for t in smallest.values())


def _kinds_of(calls: RopeCalls, variant: RopeTiles, sms: int, lead: RopeLead) -> tuple[Any, ...]:
    """Return the kinds of the extents, and of the one stride that is no multiple of a row's length: T, of positions,
    which may fill 16 bytes."""
    b, t, has_rows_of_batch = lead
    batches = b if has_rows_of_batch else 1
    kinds: list[Any] = [kind_of(b), kind_of(t)]
    is_aligned = t * calls.position_dtype.itemsize % 16 == 0
    kinds += [kind_of(batches), is_aligned] if calls.positions else [kind_of(batches * t)]
    if calls.weight is not None:
        leads = (b, t, calls.heads), (b, t, calls.k_heads) if calls.k_heads else None
        walks = variant.walks_of(leads, sms, (calls.per_head, calls.per_head))
        assert walks is not None
        kinds += [kind_of(p) for _, p in walks]
    return tuple(kinds)


def _composed(calls: RopeCalls) -> Iterator[Calls]:
    """Describe the calls of rms_norm that around_rope.py makes, of q and of k."""
    of_all = Calls(calls.spec.n, calls.dtype, calls.weight, calls.spec.casting, y=torch.float32)
    for heads in {calls.heads, calls.k_heads} - {0}:
        yield of_all._replace(heads=heads, per_head=calls.per_head)
