# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""A plan: which kernels run a problem, in order, with which compile-time constants, for any number of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans import rules
from tilegym_rmsnorm.backends.cutile.plans.partition import Split, Team
from tilegym_rmsnorm.backends.cutile.plans.problem import Problem
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardStrips, SumPartials


class Sizes(NamedTuple):
    """The part of a plan that depends on M: the grid of each step, None where it is not launched; P, the rows of
    dw_partial; the row tiles in a slab; by name the shapes and dtypes of the temporary arrays, which kernels fill."""

    grids: tuple[tuple[int, ...] | None, ...]
    partial_rows: int
    tiles_in_slab: int
    temporaries: dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Plan:
    """first: the variant of the kernel that does the work. steps: all variants in the order of their launches.

    source: what chose it, for people. spills: why it is kept although its kernel spills registers. adds: dw is added to
    what dw holds, so that the sum runs for one partial row too.
    """

    problem: Problem
    first: Variant
    steps: tuple[Variant, ...]
    source: str = ""
    spills: str = ""
    adds: bool = False

    def __str__(self) -> str:
        return ", then ".join(map(str, self.steps))

    def constants(self, step: Variant) -> dict[str, Any]:
        """Return compile-time arguments that a step's kernel may take, by name."""
        problem = self.problem
        constants = step.constants(problem.n) | {
            "HAS_WEIGHT": problem.weight is not None,
            "HAS_DW": problem.op == "backward",
            "ADDS": int(self.adds),
            "PER_HEAD": problem.form.per_head,
            "ROUND_XHAT": problem.casting == "llama",
            "IN_ORDER": problem.policy.is_batch_invariant,
            # Programmatic dependent launch came with Hopper: the next kernel's blocks start while the last of this run.
            "DEPENDENT": problem.device.architecture >= 90,
        }
        if problem.form.is_scattered and step is self.first:
            # Rows that begin anywhere are gathered: loads of tiles would take each element alone, behind a branch.
            constants["DIVISOR"] = 1
        return constants

    @functools.cached_property
    def most_rows(self) -> int:
        """Rows that one launch of each step takes."""
        if self.has_own_partials:
            return min(self.first.most_rows, LARGEST_GRID // self.first.members)
        return self.first.most_rows

    @property
    def has_own_partials(self) -> bool:
        return self.problem.partials == "own" and self.problem.op == "backward"

    @property
    def columns_of_dw(self) -> int:
        return self.problem.n * (self.problem.form.heads if self.problem.form.per_head else 1)

    def sizes(self, m: int, lead: tuple[int, int, int] | None = None, has_sum: bool = True) -> Sizes:
        """lead: B, T and H, where the arrays of rows are (B, T, H, N). With per-head weights every tile of heads has
        P blocks of its own, which write their heads of the P rows. has_sum: somebody wants the sum of partial rows."""
        n, sm_count, first = self.problem.n, self.problem.sm_count, self.first
        m = m if lead is None else first.tiled_rows(lead)
        shares = first.tiles_of_heads(self.problem.form.heads) if self.problem.form.per_head else 1
        if self.has_own_partials:
            p = m
        elif self.problem.policy.is_device_invariant and self.problem.op == "backward":
            p = first.fixed_partial_rows(m, n, shares)
        else:
            p = first.partial_rows(max(1, m), n, sm_count, shares)
        temporaries: dict[str, tuple[tuple[int, ...], str]] = {}
        grids: list[tuple[int, ...] | None] = []
        for step in self.steps:
            temporaries |= step.temporaries(m)
            grids.append(self._grid(step, m, p, shares))
        if self.problem.op == "backward":
            is_dw = p == 1 and not self.adds  # the one partial row
            if is_dw or not has_sum:
                grids[-1] = None
            if not is_dw:
                temporaries["dw_partial"] = (p, self.columns_of_dw), "float32"
        tiles_in_slab = first.slab_tiles(m, sm_count) if isinstance(first, Split) else 0
        return Sizes(tuple(grids), p, tiles_in_slab, temporaries)

    def _grid(self, step: Variant, m: int, p: int, shares: int) -> tuple[int, ...]:
        problem = self.problem
        if isinstance(step, SumPartials):
            grid = step.grid(m, self.columns_of_dw, p, problem.sm_count)
            return (*grid, 2) if problem.form.bias else grid
        grid = step.grid(m, problem.n, p, problem.sm_count)
        return (grid[0] * shares, *grid[1:]) if step.walks else grid


def plan_of(problem: Problem, first: Variant, source: str = "", spills: str = "") -> Plan:
    """The plan whose first kernel is given: with what must run before and after it."""
    architecture = problem.device.architecture
    before: tuple[Variant, ...] = ()
    if isinstance(first, Team):
        before = (rules.clear(first),)
    elif isinstance(first, BackwardStrips):
        before = (rules.means(problem),)
    after = (rules.sum_of(first, problem.n, architecture),) if problem.op == "backward" else ()
    return Plan(problem, first, (*before, first, *after), source, spills)
