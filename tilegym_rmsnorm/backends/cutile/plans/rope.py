# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Choose the settings of the kernels of `qk_norm_rope` (kernels/rope.py): all by reasoning, for every architecture."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.rules import MOST_HEADS, heads_of_form
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID, MOST_ROWS
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect, power_of_two

WIDEST_ROTATED_HEAD = 512
WEIGHT_LOADS = ("late", "early")
MOST_TILES_BEHIND = 3  # of what is not rotated, else one with lanes past the end

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
    casting: str
    rounding: str
    architecture: int

    @property
    def divisor(self) -> int:
        """The largest power of two up to 16 that divides each part of a row; 1 where rows begin anywhere (plan.py)."""
        return 1 if self.is_scattered else math.gcd(self.rotary_dim // 2, self.n - self.rotary_dim, 16)


@dataclass(frozen=True, kw_only=True)
class RopeTiles(Variant):
    """A tile of q has `heads` heads of `rows` steps along T; one of k as many rows, of `k_heads` heads.

    Each row is two tiles of `width` columns, of the first and of the second elements of pairs, and `rests` tiles of
    `rest` columns behind what is rotated.
    """

    latency: int = field()
    rows: int = field()
    heads: int = field()
    k_heads: int = field()
    rest: int = 0
    rests: int = 0

    @property
    def lanes(self) -> int:
        return 2 * self.width + self.rests * self.rest

    @property
    def of_k(self) -> RopeTiles:
        """The same with k's tiles in the place of q's."""
        return dataclasses.replace(self, rows=self.rows_of_tile // self.k_heads, heads=self.k_heads)

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"K_ROWS": self.of_k.rows, "N": n}

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        is_whole = self.k_heads > 0 and self.rows_of_tile % self.k_heads == 0
        expect(is_whole, "k_heads", f"a divisor of {self.rows_of_tile}", self.k_heads)
        expect((self.rest > 0) == (self.rests > 0), "rests", "some exactly where there is a rest", self.rests)


@dataclass(frozen=True, kw_only=True)
class ForwardRope(RopeTiles):
    """weight_load: weight and tables are loaded "early", along with x, or "late", where they are needed."""

    kernel = "forward_rope"

    weight_load: str = "late"

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"EARLY_WEIGHT": self.weight_load == "early"}

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.weight_load in WEIGHT_LOADS, "weight_load", WEIGHT_LOADS, self.weight_load)
        # tileiras 13.4 fails to compile others: of 128 columns of which 64 are rotated
        is_compiled = itemsize == 2 or self.rest == 0 or self.weight_load == "early"
        expect(is_compiled, "weight_load of float32 with a rest", "early", self.weight_load)

    def grid_of(self, q: Lead, k: Lead | None) -> tuple[int, ...] | None:
        """None where a launch, or a number of 32 bits, cannot count the tiles."""
        tiles = _tiles_of(self, q, k)
        return (sum(tiles),) if _are_countable(self, tiles) and sum(tiles) <= LARGEST_GRID else None


@dataclass(frozen=True, kw_only=True)
class BackwardRope(RopeTiles):
    kernel = "backward_rope"
    walks = True

    tma: bool = False

    def walks_of(
        self, q: Lead, k: Lead | None, sm_count: int, per_head: tuple[bool, bool]
    ) -> tuple[tuple[int, int], ...] | None:
        """The blocks that walk the tiles of q, and the partial rows that they leave; and the same of k, 0 without k.

        The SMs are shared in proportion to the tiles. per_head: whether q's weight is, and k's: then every tile of
        heads has partial rows of its own (plan.py). None where a number of 32 bits cannot count the tiles.
        """
        tiles = _tiles_of(self, q, k)
        if not _are_countable(self, tiles):
            return None
        of_q = max(1, round(sm_count * tiles[0] / sum(tiles)))
        walks = []
        for variant, lead, count, sms, is_per_head in zip(
            (self, self.of_k), (q, k), tiles, (of_q, max(1, sm_count - of_q)), per_head, strict=True
        ):
            shares = variant.tiles_of_heads(lead[2]) if lead is not None and is_per_head else 1
            p = variant.partial_rows(count * self.rows_of_tile, 0, sms, shares) if count else 0
            walks.append((p * shares, p))
        return tuple(walks)


def is_taken(problem: RopeProblem) -> bool:
    """Whether the kernels take a problem: registers hold a head, and pairs side by side are loaded 16 bytes at a time.
    (One element at a time they take 1,300 bytes of stack a thread to take apart, and half a minute to compile.)"""
    return problem.n <= WIDEST_ROTATED_HEAD and (problem.divisor >= 8 or not problem.interleaved)


def tile_of_heads(n: int, heads: int) -> int:
    """Return how many heads a tile of H heads may have: a power of two."""
    return min(MOST_HEADS, heads_of_form(n, heads))


def reasoned_forward(problem: RopeProblem) -> ForwardRope:
    """The settings for any problem that `is_taken`."""
    # Of more, float32 spilled before Hopper; and gathers, which need registers for addresses, everywhere.
    elements = 1024 if problem.divisor < 8 else 4096 if problem.n <= 256 else 2048
    return ForwardRope(occupancy=4, latency=2, weight_load="early", **_tiles(problem, elements))


def reasoned_backward(problem: RopeProblem) -> BackwardRope:
    """The same for a backward. Of more elements float32 spilled, and later than Hopper all.

    By TMA on Hopper alone: for sm_100 tileiras 13.4 lets some of these loops load over tiles that are still read
    (tests/machine_code/pipelines.py). All arrays come by it or none, as beside others it may do so too (launcher.py).
    """
    has_tma, is_later = problem.architecture == 90 and problem.divisor >= 8, problem.architecture >= 100
    elements = 4096
    if is_later or (problem.itemsize == 4 and problem.n > 128):
        elements //= 2
    if problem.n > 256 and is_later:
        elements //= 2
    return BackwardRope(occupancy=2, latency=2, tma=has_tma, **_tiles(problem, elements))


def _tiles(problem: RopeProblem, elements: int) -> dict[str, Any]:
    """Settings of tiles that have at most so many elements, but one row at least."""
    behind = problem.n - problem.rotary_dim
    width, rest, rests = power_of_two(problem.rotary_dim // 2), 0, 0
    if behind:
        dividing = behind & -behind
        rest = dividing if behind <= MOST_TILES_BEHIND * dividing else power_of_two(behind)
        rests = -(-behind // rest)
    count = max(1, power_of_two(elements // (2 * width + rests * rest) + 1) // 2)
    heads = min(count, problem.heads)
    if problem.has_one_step:  # further ones of q would be empty
        count = heads
    k_heads = min(count, problem.k_heads)
    settings: dict[str, Any] = {"width": width, "rest": rest, "rests": rests, "warps": 4}
    return settings | {"rows": count // heads, "heads": heads, "k_heads": k_heads}


def constants_of(problem: RopeProblem, variant: RopeTiles) -> dict[str, Any]:
    """By name what the kernel may take of compile-time arguments."""
    return variant.constants(problem.n) | {
        "HALF": problem.rotary_dim // 2,
        "INTERLEAVED": problem.interleaved,
        "FULL_TABLES": problem.has_full_tables,
        "ROUND_XHAT": problem.casting == "llama",
        "ROUND_EACH": problem.rounding == "each",
        "DIVISOR": problem.divisor,
        "DEPENDENT": problem.architecture >= 90,
    }


def _tiles_of(variant: RopeTiles, q: Lead, k: Lead | None) -> tuple[int, int]:
    of_k = 0 if k is None else variant.of_k.tiled_rows(k)
    return variant.tiled_rows(q) // variant.rows_of_tile, of_k // variant.rows_of_tile


def _are_countable(variant: RopeTiles, tiles: tuple[int, int]) -> bool:
    return sum(tiles) * variant.rows_of_tile <= MOST_ROWS
