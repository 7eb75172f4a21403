# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What the settings of all kernels have in common, and how rows are divided: into tiles, pieces and chunks of a block,
over the blocks of a team, and over the blocks of a grid.

`Variant` is the base of the settings of every kernel (variants.py). It names its kernel, checks itself, yields the
kernel's compile-time constants, and says how many blocks share M rows. Widths and heights of tiles are in elements and
powers of two.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    FEW_ROWS,
    FEW_TILES,
    LARGEST_GRID,
    MOST_ROWS,
    MOST_SLABS,
    shortest_walks,
)

MOST_MEMBERS = 16  # of a team: an eighth of the 132 SMs of an H100 (runtime/machine.py says why)
MOST_PIECES = 32  # each is code of its own; 32768 columns in tiles of 1024
LARGEST_TILE = 2**16  # elements: the registers of an SM, each 4 bytes
LARGEST_SLAB = FEW_ROWS  # rows: one slab of few rows; warmup needs memory for 16 slabs
SMALLEST_GRID_PERCENT = 50  # `tune` tries 68 and more
WEIGHT_LOADS = ("late", "early", "joint")
_TYPES = {"int": int, "bool": bool, "str": str}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


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


def expect(is_right: bool, what: str, expected: object, got: object) -> None:
    """Raise ValueError that says what was expected and what was given, unless it is right."""
    if not is_right:
        raise ValueError(f"{what}: expected {expected}, got {got!r}")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What every kernel has: `width`, the columns of a tile; `warps` of a block; `occupancy`, the blocks an SM that the
    compiler leaves registers for. A kernel that has no field by a name below does without it, and counts as said here.
    """

    kernel: ClassVar[str]  # the function's name in kernels/
    serves: ClassVar[tuple[str, ...]] = ()  # the ops (problem.OPS) whose first kernel it may be
    # whether the grid's blocks, or teams, walk the rows; else each has a row or a tile
    walks: ClassVar[bool] = False
    # whether a block, or the grid, goes through a row's columns; else its tiles hold all of them
    goes_through_columns: ClassVar[bool] = False

    width: int
    warps: int
    occupancy: int

    # So a field of such a name that has no default says field(): else the dataclass would take this for one.
    rest, pieces, rows, members, strip, latency, grid_percent = 0, 1, 1, 1, 1, 1, 100
    tma, packed, weight_load = False, False, "late"

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant | None:
        """The variant for rows of n elements of settings that leave out what follows from n; None if none fits."""
        return cls(**settings)

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
        return self.lanes // self.members * self.rows

    @property
    def uses_tma(self) -> bool:
        """Whether arrays are loaded by TMA, for which rows must begin where packed ones do (launch.py)."""
        return self.tma

    def constants(self, n: int) -> dict[str, Any]:
        """By name what the kernel may take of compile-time arguments: its settings, and what follows from them and N.
        EVEN: the tiles end where the row does. DIVISOR: the largest power of two up to 16 that divides N."""
        own = {each.name.upper(): getattr(self, each.name) for each in dataclasses.fields(self)}
        return own | {"EVEN": self.lanes == n, "DIVISOR": math.gcd(n, 16)}

    @property
    def most_rows(self) -> int:
        """Rows that one launch takes."""
        return MOST_ROWS if self.walks else min(MOST_ROWS, LARGEST_GRID * self.rows // self.members)

    def most_partial_rows(self, sm_count: int) -> int:
        """The largest P for any number of rows, or an upper bound."""
        return (
            max(1, sm_count * self.occupancy * self.grid_percent // 100 // self.members) if self.walks else 1
        )

    def partial_rows(self, m: int, n: int, sm_count: int) -> int:
        """P, the rows of dw_partial that m rows of x leave: one for each block, or team, that walks the rows.

        A few blocks per SM; one where few rows make the partial rows a good part of all traffic. No more than make the
        longest walk as short as it can be.
        """
        tiles, occupancy = -(-m // self.rows), self.occupancy
        if self.members == 1 and tiles <= FEW_TILES * sm_count:
            occupancy = 1
        blocks = sm_count * occupancy * self.grid_percent // 100 // self.members
        return shortest_walks(tiles, max(1, blocks)) if self.walks else 1

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        """The blocks of a launch for m rows of n elements that leave p partial rows of dw."""
        return ((p if self.walks else -(-m // self.rows)) * self.members,)

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        """Raise ValueError unless the kernel can be compiled with these settings and covers every column of rows of n
        elements of `itemsize` bytes."""
        covers = self.goes_through_columns or self.lanes >= n
        expect(covers, "columns of all tiles", f"at least {n}", self.lanes)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            expect(type(value) is _TYPES[str(each.type)], each.name, each.type, value)
        extents = (self.width, self.rows, self.strip, self.rest or 1)
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
        """Without a width one tile holds the row, or those of `two_tiles` if so asked; else as many pieces as it
        takes."""
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
        """As few members as hold the row, with at most so many lanes an element, and no tile without columns."""
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
class Chunks(Variant):
    """A row that no registers hold, in chunks of `width` columns one after the other."""

    goes_through_columns = True

    latency: int = field()
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadsWeight(Registers):
    """When a forward loads the weight (kernels/forward.py): "late", where it is needed; "early", along with x; "joint",
    along with x by a fake dependency, which keeps the load above the reduction."""

    weight_load: str = "late"

    def constants(self, n: int) -> dict[str, Any]:
        loads = {"EARLY_WEIGHT": self.weight_load == "early", "JOINT_WEIGHT": self.weight_load == "joint"}
        return super().constants(n) | loads

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.weight_load in WEIGHT_LOADS, "weight_load", WEIGHT_LOADS, self.weight_load)


@dataclass(frozen=True, kw_only=True)
class Walks(Registers):
    """grid_percent: so many percent of the blocks that fit the SMs walk the rows."""

    walks = True

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

    def partial_rows(self, m: int, n: int, sm_count: int) -> int:
        return -(-m // (self.rows * self.slab_tiles(m, sm_count)))

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (-(-n // self.strip) + self.slab_tiles(m, sm_count) * self.rows, p)
