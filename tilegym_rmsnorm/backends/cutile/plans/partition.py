# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Division of rows: into tiles and chunks of a block, over the blocks of a team, over blocks that walk the rows, and
into slabs and strips. The bases of the kernels' settings (variants.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_ROWS, MOST_ROWS, MOST_SLABS, shortest_walks
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect, power_of_two

MOST_MEMBERS = 16  # of a team: an eighth of the 132 SMs of an H100 (LAUNCHES_AT_ONCE of problem.py)
MOST_PIECES = 32  # each is code of its own; 32768 columns in tiles of 1024
LARGEST_SLAB = FEW_ROWS  # rows: one slab of few rows; warmup needs memory for 18 slabs


def two_tiles(n: int) -> tuple[int, int]:
    """n as one tile, or as two where that leaves at most three quarters of the lanes of one: 5120 = 4096 + 1024.

    The second is at least an eighth of the first: less saves nothing, and would be a kernel of its own.
    """
    whole = power_of_two(n)
    width = whole // 2
    if n < 2048 or n == whole:
        return whole, 0
    rest = max(power_of_two(n - width), width // 8)
    return (width, rest) if width + rest <= whole * 3 // 4 else (whole, 0)


@dataclass(frozen=True, kw_only=True)
class Registers(Variant):
    """A row, or a team's part of it, in registers: `pieces` equal tiles, and one of `rest` columns behind them.

    latency: cuda-tile's hint, 1 to 10, how far ahead loads are issued, paid in shared memory. packed: 2-byte elements
    stay so in registers while they are summed.
    """

    latency: int = field()
    pieces: int = 1

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant | None:
        """Fit one tile to the row without a width, or `two_tiles` if so asked; else as many pieces as it takes."""
        if settings.pop("two_tiles", False):
            width, rest = two_tiles(n)
            settings |= {"width": width, "rest": rest}
        elif "width" not in settings:
            settings["width"] = power_of_two(n)
        elif not settings.get("rest"):
            settings.setdefault("pieces", -(-n // settings["width"]))
        return cls(**settings)

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(1 <= self.pieces <= MOST_PIECES, "pieces", f"1 to {MOST_PIECES}", self.pieces)
        last = self.rest or self.width  # the last tile alone is bounds-checked
        before = self.lanes - last
        expect(before == 0 or before < n, "columns before the last tile", f"below {n}", before)
        if self.rows == 1 and (self.weight_load == "joint" or self.tma and self.kernel != "backward_tiles"):
            expect(last > 1, "rows by TMA or with a joint weight", "tiles of 2 columns or more", last)


@dataclass(frozen=True, kw_only=True)
class Team(Registers):
    """A row in the registers of `members` blocks, each with `pieces` tiles, which wait for each other's sums."""

    members: int = field()

    @classmethod
    def fitted(
        cls, n: int, most_members: int, most_lanes: float = math.inf, **settings: Any
    ) -> Variant | None:
        """Fit the fewest members that hold the row, with at most so many lanes an element and no empty tile."""
        part = settings["width"] * settings.setdefault("pieces", 1)
        lanes = part * settings.setdefault("members", -(-n // part))
        fits = (
            2 <= settings["members"] <= min(most_members, MOST_MEMBERS)
            and lanes <= n * most_lanes
            and lanes - settings["width"] < n
        )
        return cls(**settings) if fits else None

    @property
    def slots(self) -> int:
        """Elements of a row of a team's board (kernels/team.py), of which each member has one."""
        return power_of_two(self.members)

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"SLOTS": self.slots}

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(2 <= self.members <= MOST_MEMBERS, "members", f"2 to {MOST_MEMBERS}", self.members)


@dataclass(frozen=True, kw_only=True)
class Unaligned(Registers):
    """Some packed rows a step, read in vectors of `vector` elements wherever rows begin (kernels/unaligned.py).

    The tiles hold a row but for the two vectors at its ends, where it has ends.
    """

    vector: int = field()

    reads_packed = True

    @property
    def lanes(self) -> int:
        """Columns of the longest row that the tiles hold: its ends may be all of a vector but one."""
        return super().lanes + self.vector - 1

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant | None:
        """Default to as many pieces as all but the ends take."""
        inner = n // settings["vector"] * settings["vector"]
        settings.setdefault("pieces", -(-inner // settings["width"]))
        return cls(**settings)

    def has_ends(self, n: int) -> bool:
        """Whether vectors lie across the ends of rows of n elements."""
        return n % self.vector > 0

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"ENDS": self.has_ends(n)}

    def blocks(self, m: int, n: int, sm_count: int) -> int:
        """Count blocks or teams that walk m rows of n elements: as many of each shift, of as many as fit the SMs."""
        shifts = self.vector if self.has_ends(n) else 1
        steps = -(-m // (shifts * self.rows))
        return shifts * shortest_walks(steps, max(1, sm_count * self.occupancy // self.members // shifts))

    def most_partial_rows(self, sm_count: int) -> int:
        return max(self.vector, sm_count * self.occupancy // self.members) if self.walks else 1

    def partial_rows(self, m: int, n: int, sm_count: int, shares: int = 1) -> int:
        return self.blocks(m, n, sm_count) if self.walks else 1

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        """A forward walks rows where they have ends, whose weight it then loads once, and in teams."""
        if self.walks or self.has_ends(n) or self.members > 1:
            return ((p if self.walks else self.blocks(m, n, sm_count)) * self.members,)
        return (-(-m // self.rows),)

    @property
    def most_rows(self) -> int:
        """Multiple of 8 rows, so that the next part begins 16-byte aligned."""
        return super().most_rows // 8 * 8

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        Variant.check(self, n, itemsize, architecture)
        expect(1 <= self.pieces <= MOST_PIECES, "pieces", f"1 to {MOST_PIECES}", self.pieces)
        vectors = [each for each in (1, 2, 4, 8) if each <= min(n, self.width)]
        expect(self.vector in vectors, "vector", vectors, self.vector)


@dataclass(frozen=True, kw_only=True)
class Chunks(Variant):
    """A row that no registers hold, in chunks of `width` columns one after the other."""

    goes_through_columns = True

    latency: int = field()
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class Walks(Registers):
    """grid_percent: so many percent of the blocks that fit the SMs walk the rows."""

    walks = True
    serves_dx_alone = True

    grid_percent: int = 100


@dataclass(frozen=True, kw_only=True)
class Split(Variant):
    """Blocks for dx beside blocks for dw, which sum tiles of `rows` rows and `strip` columns down a slab of rows.

    slab: rows of x that share a row of dw_partial, a multiple of `rows`.
    """

    most_rows = MOST_ROWS

    latency: int = field()
    rows: int = field()
    strip: int = field()
    slab: int = field()

    rows_of_sum = 1  # `rows` are those of a strip

    @property
    def tile(self) -> int:
        return max(self.lanes, self.rows * self.strip)

    def constants(self, n: int) -> dict[str, Any]:
        return super().constants(n) | {"EVEN_STRIPS": n % self.strip == 0}

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        is_slab = 0 < self.slab <= LARGEST_SLAB and self.slab % self.rows == 0
        expect(is_slab, "slab", f"a multiple of {self.rows}, at most {LARGEST_SLAB}", self.slab)

    def slab_tiles(self, m: int, sm_count: int) -> int:
        """Row tiles in a slab: fewer than the settings' if that is all, more where P would pass MOST_SLABS per SM."""
        tiles = -(-m // self.rows)
        return max(min(self.slab // self.rows, tiles), -(-tiles // (MOST_SLABS * sm_count)))

    def most_partial_rows(self, sm_count: int) -> int:
        return MOST_SLABS * sm_count

    def partial_rows(self, m: int, n: int, sm_count: int, shares: int = 1) -> int:
        return -(-m // (self.rows * self.slab_tiles(m, sm_count)))

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (-(-n // self.strip) + self.slab_tiles(m, sm_count) * self.rows, p)
