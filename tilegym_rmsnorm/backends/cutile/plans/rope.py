# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Choose the settings of the kernels of `qk_norm_rope` (kernels/rope.py): all by reasoning, for every architecture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.rules import MOST_HEADS, heads_of_form
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_TILES, MOST_ROWS, shortest_walks
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect, power_of_two

WIDEST_ROTATED_HEAD = 512
FEW_KINDS = 16  # cuda-tile compiles one kernel for all numbers of partial rows that are multiples of it
WIDE_HEAD = 128  # wider ones have other tiles
MOST_TILES = 4  # along half of what is rotated, or what is not

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

    @property
    def divisor(self) -> int:
        """The largest power of two up to 16 that divides each part of a row; 1 where rows begin anywhere (plan.py)."""
        return 1 if self.is_scattered else math.gcd(self.rotary_dim // 2, self.n - self.rotary_dim, 16)

    @property
    def has_tma(self) -> bool:
        """On Hopper alone: for sm_100 tileiras 13.4 lets some of these loops load over tiles that are still read
        (tests/machine_code/pipelines.py)."""
        return self.architecture == 90 and self.divisor >= 8


@dataclass(frozen=True, kw_only=True)
class RopeTiles(Variant):
    """A tile of q has `heads` heads of `rows` steps along T; one of k as many rows, of `k_heads` heads.

    Each row is `pieces` tiles of `width` columns of the first elements of pairs, as many of the second ones, and
    `rests` tiles of `rest` columns behind what is rotated.
    """

    walks = True

    pieces: int = field()
    latency: int = field()
    rows: int = field()
    heads: int = field()
    k_heads: int = field()
    rest: int = 0
    rests: int = 0
    tma: bool = False

    @property
    def lanes(self) -> int:
        return 2 * self.width * self.pieces + self.rests * self.rest

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

    def most_blocks(self, tiles: int, sm_count: int) -> int:
        """Blocks that may walk so many tiles at a time."""
        return sm_count * self.occupancy

    def walks_of(
        self, leads: Sequence[Lead | None], sm_count: int, per_head: Sequence[bool]
    ) -> tuple[tuple[int, int], ...] | None:
        """The blocks that walk the tiles of q, and the partial rows that a backward leaves; the same of k, 0 without k.

        q and k share the blocks in proportion to their tiles. leads: of q, and of k, None without k. per_head: whether
        q's weight is, and k's: then every tile of heads has blocks, and partial rows, of its own (plan.py). None where
        a number of 32 bits cannot count the tiles.
        """
        variants = self, self.of_k
        tiles = [
            0 if lead is None else variant.tiled_rows(lead) // self.rows_of_tile
            for lead, variant in zip(leads, variants, strict=True)
        ]
        if sum(tiles) * self.rows_of_tile > MOST_ROWS:
            return None
        blocks = self.most_blocks(sum(tiles), sm_count)
        step = FEW_KINDS if blocks > 4 * FEW_KINDS else 1
        of_q = max(step, round(blocks * tiles[0] / sum(tiles) / step) * step)
        walks = []
        for variant, lead, count, most, is_per_head in zip(
            variants, leads, tiles, (of_q, blocks - of_q), per_head, strict=True
        ):
            shares = variant.tiles_of_heads(lead[2]) if lead is not None and is_per_head else 1
            p = _blocks_of(count // shares, max(1, most // shares)) if count else 0
            walks.append((p * shares, p))
        return tuple(walks)


@dataclass(frozen=True, kw_only=True)
class ForwardRope(RopeTiles):
    kernel = "forward_rope"


@dataclass(frozen=True, kw_only=True)
class BackwardRope(RopeTiles):
    kernel = "backward_rope"

    def most_blocks(self, tiles: int, sm_count: int) -> int:
        """One an SM where partial rows would be a good part of all traffic (`Variant.partial_rows`)."""
        return sm_count if tiles <= FEW_TILES * sm_count else super().most_blocks(tiles, sm_count)


def _blocks_of(tiles: int, most: int) -> int:
    """Return how many blocks walk these tiles: as few as leave the longest walk as short as it can be. A multiple of
    FEW_KINDS, where so many are allowed and have a tile each."""
    if min(tiles, most) < FEW_KINDS:
        return shortest_walks(tiles, most)
    few = shortest_walks(tiles, most - most % FEW_KINDS)
    return min(tiles, -(-few // FEW_KINDS) * FEW_KINDS)


def is_taken(problem: RopeProblem) -> bool:
    """Whether the kernels take a problem: registers hold a head, and pairs side by side are loaded 16 bytes at a time.
    (One element at a time they take 1,300 bytes of stack a thread to take apart, and half a minute to compile.)"""
    return problem.n <= WIDEST_ROTATED_HEAD and (problem.divisor >= 8 or not problem.interleaved)


def tile_of_heads(n: int, heads: int) -> int:
    """Return how many heads a tile of H heads may have: a power of two."""
    return min(MOST_HEADS, heads_of_form(n, heads))


def reasoned_forward(problem: RopeProblem) -> ForwardRope:
    """The settings for any problem that `is_taken`."""
    heads = 4 if problem.n <= WIDE_HEAD else 2
    latency = 4 if problem.n <= 64 and problem.has_tma else 2
    # Of more without TMA, whose loads need registers for addresses, some spilled; gathers need most.
    elements = 4096 if problem.has_tma else 2048 if problem.divisor >= 8 else 1024
    return ForwardRope(occupancy=4, latency=latency, warps=4, **_settings(problem, elements, heads, 64))


def reasoned_backward(problem: RopeProblem) -> BackwardRope:
    """The same for a backward. Of more elements later architectures than Hopper spilled, and so did more blocks an SM
    wherever a tile takes more registers than halves by TMA beside one weight and rows of tables in order. Of float32 so
    many fill shared memory, and of some loops by TMA tileiras 13.4 then loads over tiles that are still read."""
    elements = 4096 if problem.architecture < 100 and problem.itemsize == 2 else 2048
    if problem.n > WIDE_HEAD:
        heads = 4 if problem.rotary_dim == problem.n else 2
        return BackwardRope(occupancy=1, latency=2, warps=8, **_settings(problem, 2 * elements, heads, 128))
    is_simple = problem.rotary_dim == problem.n and not (
        problem.interleaved or problem.has_positions or problem.per_head
    )
    occupancy = 2 if not problem.has_tma or problem.interleaved else 4 if is_simple else 3
    return BackwardRope(occupancy=occupancy, latency=2, warps=4, **_settings(problem, elements, 4, 64))


def _settings(problem: RopeProblem, elements: int, most_heads: int, widest: int) -> dict[str, Any]:
    """Settings of tiles that have at most so many elements, heads and columns, but one row at least."""
    width, pieces = cut(problem.rotary_dim // 2, widest)
    rest, rests = cut(problem.n - problem.rotary_dim, widest)
    count = max(1, power_of_two(elements // (2 * width * pieces + rests * rest) + 1) // 2)
    heads = min(count, problem.heads, most_heads)
    if problem.has_one_step:  # further ones of q would be empty
        heads = count = min(count, problem.heads)
    return {
        "width": width,
        "pieces": pieces,
        "rest": rest,
        "rests": rests,
        "rows": count // heads,
        "heads": heads,
        "k_heads": min(problem.k_heads, heads),
        "tma": problem.has_tma,
    }


def cut(columns: int, widest: int) -> tuple[int, int]:
    """Return the width and the number of tiles that hold so many columns: one if it is narrow, else as few lanes."""
    if columns <= widest:
        return (power_of_two(columns), 1) if columns else (0, 0)
    while columns > MOST_TILES * widest:
        widest *= 2
    counts = [(width, -(-columns // width)) for width in (widest, widest // 2)]
    return min((each for each in counts if each[1] <= MOST_TILES), key=lambda each: each[0] * each[1])


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
