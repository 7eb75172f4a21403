# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Say which calls of `qk_norm_rope` need every kernel that any B and T need, for `warm`.

Extents that vary are B, T, the rows of cos and sin or of position_ids, and P of q and of k. A call of one step has
tiles of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tilegym_rmsnorm.backends.cutile.host import rope
from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher, find, sms_of
from tilegym_rmsnorm.backends.cutile.host.warm import (
    SHORT,
    Calls,
    empty,
    first_of_each,
    kind_of,
    short_and_long,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES, NO_END
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.ops.rope.spec import RopeBackwardTensors, RopeSpec, RopeTensors, RopeWanted


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
        n, each = self.spec.n, (self.heads, self.k_heads)
        q, k = (empty((b, t, heads, n), self.dtype if heads else None, device) for heads in each)
        shapes = ((heads, n) if self.per_head else (n,) for heads in each)
        weights = (
            empty(shape, self.weight if heads else None, device)
            for shape, heads in zip(shapes, each, strict=True)
        )
        size = (self.positions or batches * t, self.columns)
        cos, sin = (torch.empty(size, dtype=self.table, device=device) for _ in range(2))
        positions = empty((batches, t), self.position_dtype if self.positions else None, device)
        assert q is not None
        return q, k, *weights, cos, sin, positions  # type: ignore[return-value]

    def backward(self, device: torch.device, lead: RopeLead) -> list[RopeBackwardTensors]:
        """Make tensors of its backward: the gradients have the shapes of q and k."""
        q, k, *others = self.forward(device, lead)
        return [(q, k, q, k, *others)]  # type: ignore[list-item]

    @property
    def wanted(self) -> RopeWanted:
        """All gradients, as autograd asks for them."""
        return RopeWanted(self.weight, self.weight if self.k_heads else None)

    def leads(self, device: torch.device) -> list[RopeLead]:
        """Return one call of each kind of arrays that any B and T have.

        The long one of B and T goes through all numbers until every SM has a tile: up to there P is about the number of
        tiles. Then it takes some beyond the few tiles that have one block an SM: P is of one kind for all of these
        (`RopeTiles.walks_of`).
        """
        found: list[RopeLead] = []
        for is_one_step, launcher in zip((True, False), self.launchers(device), strict=True):
            if launcher is not None:
                first, sms = launcher.plan.first, sms_of(launcher.machine, self.spec.reproducible)
                starts = (1, sms + 1), (FEW_TILES * sms * first.rows_of_tile + 1, 16)
                walked = short_and_long(SHORT, starts, NO_END, self.heads + self.k_heads, first.rows)
                leads = [RopeLead(*each, own) for each in walked for own in (False, True)]
                kinds = functools.partial(kinds_of_rope, self, launcher)
                found += first_of_each((lead for lead in leads if (lead.t == 1) == is_one_step), kinds)
        return sorted(found)

    def launchers(self, device: torch.device) -> list[Launcher | None]:
        """Return the launchers of backwards of one step, and of more; None where such calls are composed."""
        found, machine = [], machine_of(device)
        for lead in (RopeLead(2, 1, True), RopeLead(2, 2, True)):
            find(rope.FORWARD, machine, self.spec, self.forward(device, lead))
            [tensors] = self.backward(device, lead)
            found.append(find(rope.BACKWARD, machine, self.spec, tensors, self.wanted))
        return found

    def composed_of(self, device: torch.device) -> Iterator[Calls]:
        """Yield the calls of rms_norm that around_rope.py makes, of q and of k."""
        if None in self.launchers(device):
            of_all = Calls(self.spec.n, self.dtype, self.weight, self.spec.casting, y=torch.float32)
            for heads in {self.heads, self.k_heads} - {0}:
                yield of_all._replace(heads=heads, per_head=self.per_head)


def kinds_of_rope(calls: RopeCalls, launcher: Launcher, lead: RopeLead) -> tuple[Any, ...]:
    """Return the kinds of the extents, and of the one stride that is no multiple of a row's length: T, of positions,
    which may fill 16 bytes."""
    b, t, has_rows_of_batch = lead
    batches = b if has_rows_of_batch else 1
    kinds: list[Any] = [kind_of(b), kind_of(t)]
    is_aligned = t * calls.position_dtype.itemsize % 16 == 0
    kinds += [kind_of(batches), is_aligned] if calls.positions else [kind_of(batches * t)]
    if calls.weight is not None:
        leads = (b, t, calls.heads), (b, t, calls.k_heads) if calls.k_heads else None
        sms = rope.sms_of_walks(launcher.machine, calls.spec.reproducible)
        walks = launcher.plan.first.walks_of(leads, sms, (calls.per_head, calls.per_head))
        kinds += [kind_of(p) for _, p in walks]
    return tuple(kinds)
