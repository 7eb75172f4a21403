# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Base of the settings of all kernels.

`Variant` is the base of the settings of every kernel (variants.py). It names its kernel, checks itself, yields the
kernel's compile-time constants, and says how many blocks share M rows. Widths and heights of tiles are in elements and
powers of two.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    FEW_TILES,
    FIXED_SMS,
    LARGEST_GRID,
    MOST_ROWS,
    fixed_walks,
    shortest_walks,
)

if TYPE_CHECKING:
    from tilegym_rmsnorm.backends.cutile.plans.problem import Problem

LARGEST_TILE = 2**16  # elements: the registers of an SM, each 4 bytes
SMALLEST_GRID_PERCENT = 50  # `tune` tries 68 and more
_TYPES = {"int": int, "bool": bool, "str": str}


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def expect(is_right: bool, what: str, expected: object, got: object) -> None:
    """Raise ValueError that says what was expected and what was given, unless it is right."""
    if not is_right:
        raise ValueError(f"{what}: expected {expected}, got {got!r}")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings that every kernel has: `width`, the columns of a tile; `warps` of a block; `occupancy`, the blocks an SM
    that the compiler leaves registers for. A kernel without a field by a name below counts as said here.
    """

    kernel: ClassVar[str]  # the function's name in kernels/
    serves: ClassVar[tuple[str, ...]] = ()  # the ops (problem.OPS) whose first kernel it may be
    # whether the grid's blocks, or teams, walk the rows; else each has a row or a tile
    walks: ClassVar[bool] = False
    # whether a block, or the grid, goes through a row's columns; else its tiles hold all of them
    goes_through_columns: ClassVar[bool] = False
    # whether a backward that needs no dw may take the settings of one that does: not of kernels that read x and dy once
    # more for dw, nor of teams by TMA, some of which take more than 200 bytes of stack without dw (their entries of dx
    # may be such)
    serves_dx_alone: ClassVar[bool] = False
    # whether rows must lie behind each other: others are copied (host/norm.py)
    reads_packed: ClassVar[bool] = False
    # how rows are added (`order`): each by itself, or as "tiles" of several
    row_sums: ClassVar[str] = "rows"
    # what of a Form its kernel takes: "residual", "bias", "heads", "per_head"
    takes: ClassVar[frozenset[str]] = frozenset()

    width: int
    warps: int
    occupancy: int

    # Write `= field()` for a field of such a name without a default, or the dataclass takes this attribute for it.
    rest, pieces, rows, heads, members, strip, latency, grid_percent = 0, 1, 1, 0, 1, 1, 1, 100
    tma, packed, weight_load = False, False, "late"

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant | None:
        """The variant for rows of n elements of settings that leave out what follows from n; None if none fits."""
        return cls(**settings)

    def order(self, vector: int) -> tuple[Any, ...]:
        """Return what decides in which order its kernel adds a row of which a thread loads `vector` neighbours, 16
        bytes, at a time (`sum_of_lanes`): variants of one order leave a row the same bits. Each has its own where a row
        is chunks, or begins between 16 bytes."""
        if self.goes_through_columns or self.reads_packed:
            return (self,)
        threads = 32 * self.warps
        if self.row_sums == "tiles" and self.width <= vector * threads:
            return "pairs", self.pieces, self.width

        def of_tile(width: int) -> tuple[int, int, int]:
            held = max(1, width * self.rows_of_sum // threads)  # elements of a thread
            neighbours = min(vector, held, width)
            return width, neighbours, min(width // neighbours, threads)

        tiles = (self.width, self.rest) if self.rest else (self.width,)
        return self.row_sums, self.members, self.pieces, *map(of_tile, tiles)

    def settings(self) -> dict[str, Any]:
        """The settings that are not at their defaults, as data has them."""
        own = [(each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self)]
        return {name: value for name, value, default in own if value != default}

    def __str__(self) -> str:
        told = [name if value is True else f"{name}={value}" for name, value in self.settings().items()]
        return " ".join([self.kernel, *told])

    @property
    def lanes(self) -> int:
        """Columns of all tiles of a row, or of a chunk or strip of it."""
        return self.width * self.pieces * self.members + self.rest

    @property
    def tile(self) -> int:
        """Elements of the tiles that a block holds together."""
        return self.lanes // self.members * self.rows_of_tile

    @property
    def rows_of_tile(self) -> int:
        """Rows that a block holds at a time: of (B, T, H, N) so many of T, and of each so many heads."""
        return self.rows * (self.heads or 1)

    @property
    def rows_of_sum(self) -> int:
        """Rows that a block adds at a time."""
        return self.rows_of_tile

    def tiles_of_heads(self, heads: int) -> int:
        return -(-heads // (self.heads or 1))

    def tiled_rows(self, lead: tuple[int, int, int]) -> int:
        """Rows of the tiles that cover leading dimensions (B, T, H), for a kernel that takes such tiles; else M."""
        if not self.heads:
            return math.prod(lead)
        return lead[0] * -(-lead[1] // self.rows) * self.tiles_of_heads(lead[2]) * self.rows_of_tile

    def serves_form(self, problem: Problem) -> bool:
        """Whether its kernel takes what the call has. By TMA rows must begin at multiples of 16 bytes in all arrays."""
        form = problem.form
        wanted = {name for name in ("residual", "bias", "heads", "per_head") if getattr(form, name)}
        has_tma = not self.uses_tma or (not form.is_scattered and (problem.is_aligned or not form.narrowest))
        return wanted <= self.takes and has_tma and bool(form.heads) >= bool(self.heads)

    @property
    def uses_tma(self) -> bool:
        """Whether arrays are loaded by TMA, for which rows must begin where packed ones do (host/norm.py)."""
        return self.tma

    def constants(self, n: int) -> dict[str, Any]:
        """Return compile-time arguments the kernel may take, by name: its settings, and what follows from them and N.
        EVEN: the tiles end where the row does. DIVISOR: the largest power of two up to 16 that divides N."""
        own = {each.name.upper(): getattr(self, each.name) for each in dataclasses.fields(self)}
        own["HEADS"] = self.heads
        return own | {"EVEN": self.lanes == n, "DIVISOR": math.gcd(n, 16)}

    @property
    def most_rows(self) -> int:
        """Rows that one launch takes."""
        return MOST_ROWS if self.walks else min(MOST_ROWS, LARGEST_GRID * self.rows_of_tile // self.members)

    def most_partial_rows(self, sm_count: int) -> int:
        """The largest P for any number of rows, or an upper bound."""
        return (
            max(1, sm_count * self.occupancy * self.grid_percent // 100 // self.members) if self.walks else 1
        )

    def partial_rows(self, m: int, n: int, sm_count: int, shares: int = 1) -> int:
        """P, the rows of dw_partial that m rows of x leave: one for each block, or team, that walks the rows; or one
        for as many blocks as there are shares, each of which walks as many of the rows' tiles.

        A few blocks per SM; one where few rows make the partial rows a good part of all traffic. No more than make the
        longest walk as short as it can be.
        """
        tiles, occupancy = -(-m // self.rows_of_tile), self.occupancy
        if self.members == 1 and tiles <= FEW_TILES * sm_count:
            occupancy = 1
        blocks = sm_count * occupancy * self.grid_percent // 100 // self.members
        return shortest_walks(max(1, tiles // shares), max(1, blocks // shares)) if self.walks else 1

    def fixed_partial_rows(self, m: int, n: int, shares: int = 1) -> int:
        """P that no GPU decides, such that rows behind the others change no row's walk (`fixed_walks`)."""
        tiles = -(-m // self.rows_of_tile) // shares
        return fixed_walks(tiles, self.partial_rows(MOST_ROWS, n, FIXED_SMS, shares))

    def temporaries(self, m: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return {name: (shape, dtype)} of arrays that it fills for later kernels, except dw_partial."""
        return {}

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        """The blocks of a launch for m rows of n elements that leave p partial rows of dw."""
        return ((p if self.walks else -(-m // self.rows_of_tile)) * self.members,)

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        """Raise ValueError unless the kernel can be compiled with these settings and covers every column of rows of n
        elements of `itemsize` bytes."""
        covers = self.goes_through_columns or self.lanes >= n
        expect(covers, "columns of all tiles", f"at least {n}", self.lanes)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            expect(type(value) is _TYPES[str(each.type)], each.name, each.type, value)
        extents = (self.width, self.rows, self.heads or 1, self.strip, self.rest or 1)
        expect(all(e > 0 and e == power_of_two(e) for e in extents), "extents", "powers of two", extents)
        expect(self.tile <= LARGEST_TILE, "a tile", f"at most {LARGEST_TILE} elements", self.tile)
        # cuda-tile refuses others up to tileiras 13.4
        expect(self.warps in (4, 8), "warps", "4 or 8", self.warps)
        # 8 for a backward with dw: each block leaves a row of dw_partial
        most, least = 8 if "backward" in self.serves else 32, SMALLEST_GRID_PERCENT
        expect(1 <= self.occupancy <= most, "occupancy", f"1 to {most}", self.occupancy)
        expect(1 <= self.latency <= 10, "latency", "1 to 10", self.latency)
        expect(least <= self.grid_percent <= 100, "grid_percent", f"{least} to 100", self.grid_percent)
        expect(not self.packed or itemsize == 2, "packed", "2-byte elements", self.packed)
        expect(architecture >= 90 or not self.tma, "TMA", f"none on sm_{architecture}", self.kernel)
