# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The settings of the kernels of `qk_norm_rope` (kernels/rope.py), reasoned for every architecture.

A few numbers are chosen, `_Limits`. All else of a tile follows from them and the problem (`tiles_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.rules import MOST_HEADS, heads_of_form
from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    FEW_TILES,
    FIXED_SMS,
    LARGEST_GRID,
    MOST_ROWS,
    fixed_walks,
)
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect, power_of_two

WIDEST_ROTATED_HEAD = 512
HEADS_OF_TABLES = 8  # as which the rows of cos and sin of a step count, where q and k share the blocks
WIDE_HEAD = 128  # of wider ones a half has several tiles
WIDEST_OF_FOUR_WARPS = 256  # that spill none with as many blocks an SM
PARTS_BY_TMA = (128, 64), (256, 64)  # D and R: those of GLM-4.5 and Qwen3-Next
MOST_TILES = 4  # along half of what is rotated, or what is not
MOST_STEPS = 16  # of a tile along T

Lead = tuple[int, int, int]  # B, T and H


class RopeProblem(NamedTuple):
    """Numbers and names that decide the kernel of a call: neither B nor T, nor all of H."""

    n: int  # D
    rotary_dim: int  # R
    interleaved: bool
    heads: int  # that a tile of q may have, see `tile_of_heads`
    k_heads: int  # the same of k; without k as of q
    itemsize: int  # of the widest array of rows
    is_scattered: bool  # some row of an array begins elsewhere than a packed one
    has_one_step: bool  # T is 1
    has_full_tables: bool  # cos and sin have R columns, else R / 2
    has_positions: bool
    per_head: bool  # some weight is (H, D)
    casting: str
    rounding: str
    architecture: int
    is_batch_invariant: bool = False  # heads are added pair by pair

    @property
    def divisor(self) -> int:
        """The largest power of two up to 16 that divides each part of a row; 1 where rows begin anywhere (plan.py)."""
        return 1 if self.is_scattered else math.gcd(self.rotary_dim // 2, self.n - self.rotary_dim, 16)

    @property
    def is_whole(self) -> bool:
        """Whether all of a head is rotated."""
        return self.rotary_dim == self.n

    @property
    def has_tma(self) -> bool:
        """Whether TMA gains, on Hopper and not for one step, and tileiras 13.4 lets no loop load over tiles that are
        still read. It lets some for sm_100, for most parts of a head, and beside weights of heads that are wide or
        rotated in part (tests/machine_code/pipelines.py)."""
        is_sound = not (self.per_head and self.n > WIDE_HEAD)
        if not self.is_whole:
            is_sound = (self.n, self.rotary_dim) in PARTS_BY_TMA and not self.per_head
        return self.architecture == 90 and self.divisor >= 8 and not self.has_one_step and is_sound


@dataclass(frozen=True, kw_only=True)
class RopeTiles(Variant):
    """A tile of q has `heads` heads of `rows` steps along T; one of k `k_heads` heads of `k_rows` steps.

    Each row is `pieces` tiles of `width` columns of the first elements of pairs, as many of the second ones, and
    `rests` tiles of `rest` columns behind what is rotated.
    """

    walks = True

    pieces: int = field()
    latency: int = field()
    rows: int = field()
    heads: int = field()
    k_rows: int = field()
    k_heads: int = field()
    rest: int = 0
    rests: int = 0
    tma: bool = False

    @property
    def lanes(self) -> int:
        return 2 * self.width * self.pieces + self.rests * self.rest

    @property
    def of_k(self) -> RopeTiles:
        """Variant with k's tiles in the place of q's."""
        return dataclasses.replace(self, rows=self.k_rows, heads=self.k_heads)

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"N": n}

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        extents = self.k_rows, self.k_heads
        is_fit = (
            all(e > 0 and e == power_of_two(e) for e in extents) and math.prod(extents) <= self.rows_of_tile
        )
        expect(is_fit, "k_rows, k_heads", f"powers of two, at most {self.rows_of_tile} rows", extents)
        expect((self.rest > 0) == (self.rests > 0), "rests", "some exactly where there is a rest", self.rests)

    def most_blocks(self, tiles: int, sm_count: int) -> int:
        """Blocks that may walk so many tiles at a time."""
        return sm_count * self.occupancy

    def walks_of(
        self, leads: tuple[Lead, Lead | None], sm_count: int | None, per_head: Sequence[bool]
    ) -> tuple[tuple[int, int], ...] | None:
        """The blocks that walk the tiles of q, and the partial rows that a backward leaves; the same of k, 0 without k.

        q and k share the blocks by the work of their heads, whatever T is. Where every block has a tile, P is one of
        two numbers (`most_blocks`), and no multiple of 16, for which cuda-tile would compile another kernel.

        leads: of q, and of k, None without k. sm_count: None for walks that no GPU decides (`fixed_walks`). per_head:
        whether q's weight is, and k's: then every tile of heads has blocks, and partial rows, of its own (plan.py).
        None where a number of 32 bits cannot count the rows, or a launch the blocks.
        """
        variants = self, self.of_k
        rows = [
            0 if lead is None else variant.tiled_rows(lead)
            for lead, variant in zip(leads, variants, strict=True)
        ]
        if sum(rows) > MOST_ROWS:
            return None
        tiles = [count // variant.rows_of_tile for count, variant in zip(rows, variants, strict=True)]
        blocks = FIXED_SMS * self.occupancy if sm_count is None else self.most_blocks(sum(tiles), sm_count)
        of_q = blocks
        if (k := leads[1]) is not None:
            work = [
                variant.tiles_of_heads(count) * (variant.heads + HEADS_OF_TABLES)
                for variant, count in zip(variants, (leads[0][2], k[2]), strict=True)
            ]
            of_q = max(1, min(round(blocks * work[0] / sum(work)), blocks - 1))
        walks = []
        for variant, lead, count, most, is_per_head in zip(
            variants, leads, tiles, (of_q, max(1, blocks - of_q)), per_head, strict=True
        ):
            shares = variant.tiles_of_heads(lead[2]) if lead is not None and is_per_head else 1
            most = max(1, most // shares)
            if sm_count is None:
                p = fixed_walks(count // shares, most) if count else 0
            else:
                p = min(count // shares, most - (most % 16 == 0)) if count else 0
            walks.append((p * shares, p))
        return tuple(walks) if sum(count for count, _ in walks) <= LARGEST_GRID else None


@dataclass(frozen=True, kw_only=True)
class ForwardRope(RopeTiles):
    kernel = "forward_rope"


@dataclass(frozen=True, kw_only=True)
class BackwardRope(RopeTiles):
    kernel = "backward_rope"

    def most_blocks(self, tiles: int, sm_count: int) -> int:
        """One an SM where partial rows would be a good part of all traffic (`Variant.partial_rows`)."""
        return sm_count if tiles <= FEW_TILES * sm_count else super().most_blocks(tiles, sm_count)


def is_taken(problem: RopeProblem) -> bool:
    """Whether the kernels take a problem: registers hold a head, and pairs side by side are loaded 16 bytes at a time.
    (One element at a time they take 1,300 bytes of stack a thread to take apart, and half a minute to compile.)"""
    return problem.n <= WIDEST_ROTATED_HEAD and (problem.divisor >= 8 or not problem.interleaved)


def tile_of_heads(n: int, heads: int) -> int:
    """Return how many heads a tile of H heads may have: a power of two."""
    return min(MOST_HEADS, heads_of_form(n, heads))


class _Limits(NamedTuple):
    """Numbers of tiles that their shape leaves free. At most, powers of two: `elements` of a tile, which has one row at
    least, `heads` of it, and columns, `width`. The others are those of Variant."""

    elements: int
    heads: int
    occupancy: int
    latency: int = 2
    width: int = 64
    warps: int = 4


# The numbers below were measured on an H200: bench/NOTES.md, "Norm and rotation of q and k". test_compile_rope.py sees
# that none of its cases spills, by architecture.


def _forward_limits(problem: RopeProblem) -> _Limits:
    # Loads of 16 bytes without TMA need registers for addresses: with more elements some spilled.
    elements = 2048 if problem.interleaved or (problem.divisor >= 8 and not problem.has_tma) else 4096
    is_wide = problem.n > WIDE_HEAD
    # as Qwen3: D = 64 loses by it
    is_each = problem.rounding == "each" and not (problem.interleaved or problem.per_head)
    heads = 8 if problem.per_head and not is_wide else 4
    occupancy = 4 if problem.n <= WIDEST_OF_FOUR_WARPS else 3
    if is_wide and (problem.interleaved or not problem.is_whole):
        heads = 2
    elif is_each and problem.has_tma and problem.is_whole and 64 < problem.n <= WIDE_HEAD:
        heads, occupancy = 2, 3
    has_tiles_ahead = problem.has_tma and (problem.is_whole or is_wide)
    return _Limits(elements, heads, occupancy, latency=3 if has_tiles_ahead else 2)


def _backward_limits(problem: RopeProblem) -> _Limits:
    """Limits of the elements: sm_100 and sm_120 spill more than 2048, and so many of float32 fill shared memory, where
    tileiras 13.4 lets some loops by TMA load over tiles that are still read. Limits of the blocks an SM: registers."""
    elements = 4096 if problem.architecture < 100 and problem.itemsize == 2 else 2048
    is_wide, is_part = problem.n > WIDE_HEAD, not problem.is_whole
    is_narrow_enough = problem.n <= WIDEST_OF_FOUR_WARPS and (problem.has_tma or problem.has_one_step)
    if is_wide and not is_narrow_enough:
        return _Limits(2 * elements, heads=2 if is_part else 4, occupancy=1, width=128, warps=8)
    takes_registers = problem.interleaved or problem.per_head
    is_llama = problem.casting == "llama"  # which rounds what it adds to dw
    heads = 4
    if is_wide and is_part:
        heads = 2
    elif is_llama and not (takes_registers or is_wide or is_part):
        heads = 8
    occupancy = 4
    if takes_registers or not problem.has_tma or (is_wide and is_part and is_llama):
        occupancy = 2
    elif is_wide or is_part:
        occupancy = 3
    return _Limits(elements, heads, occupancy)


def tiles_of(kind: type[RopeTiles], problem: RopeProblem) -> RopeTiles:
    """Return the settings of a kernel for a problem that `is_taken`."""
    is_forward = kind is ForwardRope
    limits = _forward_limits(problem) if is_forward else _backward_limits(problem)
    width, pieces = cut(problem.rotary_dim // 2, limits.width)
    rest, rests = cut(problem.n - problem.rotary_dim, limits.width)
    count = _power_at_most(limits.elements // (2 * width * pieces + rests * rest))
    most_rows = 1
    if not problem.has_one_step:
        # Where a tile has few heads, it would have many rows of tables, and spill.
        of_tables = limits.elements // (4 if is_forward else 8)  # of cos
        most_rows = min(MOST_STEPS, _power_at_most(of_tables // (width * pieces)))
    most_heads = limits.heads * (2 if problem.has_one_step else 1)
    heads = min(count, problem.heads, most_heads)
    k_heads = min(problem.k_heads, heads)
    if problem.has_one_step:
        fewest = min(count, most_heads, _power_at_most(32 * limits.warps // (width * pieces)))
        heads, k_heads = _filled(heads, fewest), _filled(k_heads, fewest)
    return kind(
        width=width,
        pieces=pieces,
        rest=rest,
        rests=rests,
        rows=min(count // heads, most_rows),
        heads=heads,
        k_rows=min(count // heads * heads // k_heads, most_rows),
        k_heads=k_heads,
        warps=limits.warps,
        occupancy=limits.occupancy,
        latency=limits.latency,
        tma=problem.has_tma,
    )


def _filled(heads: int, fewest: int) -> int:
    """Return how many heads of one step a tile has, some past the last head where it takes that to give every thread a
    pair: of two heads of 64 columns, 32 pairs each, tileiras 13.4 makes up to 255 registers and 400 bytes of stack a
    thread, of four 40 to 59 registers: on an H200 the forward of 64 sequences, 8 heads and 2, goes from 6.3 to 1.9 us.
    One head is left as it is: it takes few."""
    return heads if heads == 1 else max(heads, fewest)


def _power_at_most(number: int) -> int:
    """Return the largest power of two up to a number, 1 for less."""
    return max(1, power_of_two(number + 1) // 2)


def cut(columns: int, widest: int) -> tuple[int, int]:
    """Return the width and the number of tiles that hold so many columns: one if it is narrow, else as few lanes."""
    if columns <= widest:
        return (power_of_two(columns), 1) if columns else (0, 0)
    while columns > MOST_TILES * widest:
        widest *= 2
    counts = [(width, -(-columns // width)) for width in (widest, widest // 2)]
    return min((each for each in counts if each[1] <= MOST_TILES), key=lambda each: each[0] * each[1])


class RopePlan(NamedTuple):
    """The one kernel of a forward, or of a backward before the sums of its partial rows."""

    problem: RopeProblem
    first: RopeTiles

    @property
    def steps(self) -> tuple[Variant, ...]:
        return (self.first,)

    def constants(self, step: Variant) -> dict[str, Any]:
        """Return compile-time arguments the kernel may take, by name."""
        problem = self.problem
        return step.constants(problem.n) | {
            "HALF": problem.rotary_dim // 2,
            "INTERLEAVED": problem.interleaved,
            "FULL_TABLES": problem.has_full_tables,
            "IN_ORDER": problem.is_batch_invariant,
            "ROUND_XHAT": problem.casting == "llama",
            "ROUND_N": problem.rounding != "end",
            "ROUND_EACH": problem.rounding == "each",
            "DIVISOR": problem.divisor,
            "DEPENDENT": problem.architecture >= 90,
        }
