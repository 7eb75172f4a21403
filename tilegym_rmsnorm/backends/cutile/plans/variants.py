# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The settings of each kernel: a frozen dataclass per kernel, with the fields that this kernel uses and no others.

Such an instance is called a variant. It names its kernel, checks itself, yields the kernel's compile-time constants,
and says how many blocks share M rows. Widths and heights of tiles are in elements and powers of two.
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
    LARGEST_GRID_Y,
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
    walks: ClassVar[bool] = (
        False  # whether the grid's blocks, or teams, walk the rows; else each has a row or a tile
    )

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
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            expect(type(value) is _TYPES[str(each.type)], each.name, each.type, value)
        extents = (self.width, self.rows, self.strip, self.rest or 1)
        expect(all(e > 0 and e == power_of_two(e) for e in extents), "extents", "powers of two", extents)
        expect(self.tile <= LARGEST_TILE, "a tile", f"at most {LARGEST_TILE} elements", self.tile)
        expect(
            self.warps in (4, 8), "warps", "4 or 8", self.warps
        )  # cuda-tile refuses others up to tileiras 13.4
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
        expect(self.lanes >= n, "columns of all tiles", f"at least {n}", self.lanes)
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


# The forward's kernels.


@dataclass(frozen=True, kw_only=True)
class ForwardRows(LoadsWeight):
    kernel = "forward_rows"
    serves = ("forward",)

    rest: int = 0
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardTiles(LoadsWeight):
    """`rows` rows a block. Several pieces only with a joint weight."""

    kernel = "forward_tiles"
    serves = ("forward",)

    rows: int = 1

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.pieces == 1 or self.weight_load == "joint", "pieces", "1, or a joint weight", self.pieces)


@dataclass(frozen=True, kw_only=True)
class ForwardTeam(Team, LoadsWeight):
    kernel = "forward_team"
    serves = ("forward",)

    packed: bool = False

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.weight_load != "early", "weight_load", "late or joint", self.weight_load)


@dataclass(frozen=True, kw_only=True)
class ForwardReread(Chunks):
    kernel = "forward_reread"
    serves = ("forward",)


# The backward's first kernels, which compute dx and P partial rows of dw.


@dataclass(frozen=True, kw_only=True)
class BackwardRows(Walks):
    """short: compile a way without the loop too, for as many blocks as rows."""

    kernel = "backward_rows"
    serves = ("backward", "dx")

    rest: int = 0
    packed: bool = False
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardTiles(Walks):
    """`rows` rows a step."""

    kernel = "backward_tiles"
    serves = ("backward", "dx")

    rows: int = 1
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardPipelined(Walks):
    """packed: for rows that fill the registers even so (kernels/pipelined.py)."""

    kernel = "backward_pipelined"
    serves = ("backward", "dx")
    tma = True

    packed: bool = False

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        # By 4 warps some rows of 7168 to 10240 columns load over x that is still read; such teams were not looked at
        expect(self.warps == 8 or not self.packed, "packed rows by TMA", "8 warps", self.warps)


@dataclass(frozen=True, kw_only=True)
class BackwardTeam(Team, Walks):
    """Teams walk the rows. Each of a team's blocks writes its part of the team's row of dw_partial."""

    kernel = "backward_team"
    serves = ("backward", "dx")
    most_rows = LARGEST_GRID  # of a board, which is cleared some rows a block


@dataclass(frozen=True, kw_only=True)
class BackwardPipelinedTeam(BackwardTeam):
    """rstd_ahead: each row's rstd comes with the row before. packed: the row is added to dw before the team's sum
    (kernels/backward_team.py)."""

    kernel = "backward_pipelined_team"
    tma = True

    rstd_ahead: bool = False
    packed: bool = False

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        is_packable = self.warps == 8 and self.occupancy == 1 and self.rstd_ahead
        expect(
            is_packable or not self.packed, "packed teams", "8 warps, one block an SM, rstd_ahead", str(self)
        )


@dataclass(frozen=True, kw_only=True)
class BackwardSplit(Split):
    """A row of dx is held in one tile, or in two of which the second has `rest` columns."""

    kernel = "backward_split"
    serves = ("backward",)

    rest: int = 0

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant:
        """Without a width the tiles of `two_tiles` hold a row."""
        width, rest = two_tiles(n)
        return cls(**({} if "width" in settings else {"width": width, "rest": rest}), **settings)

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.lanes >= n, "columns of all tiles", f"at least {n}", self.lanes)
        expect(not self.rest or self.width < n, "columns before the last tile", f"below {n}", self.width)

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        if p == 1:  # blocks for rows past M would have nothing to do
            return (-(-n // self.strip) + m, 1)
        return super().grid(m, n, p, sm_count)


@dataclass(frozen=True, kw_only=True)
class BackwardSplitReread(Split):
    """A row of dx is read twice, in chunks of `width` columns. gathers: strips are loaded by gathers, which do not
    wait for each other, in place of tiles, which are faster where chunks are issued ahead (kernels/split.py)."""

    kernel = "backward_split_reread"
    serves = ("backward",)

    gathers: bool = False

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        # By such a product, of int32, a block finds its place. Taller slabs (slab_tiles) are of more rows of such a
        # width than any memory holds.
        strips = -(-n // self.strip)
        product = strips * (strips + self.slab)
        expect(product < 2**31, "strips * (strips + slab)", "below 2**31", product)


@dataclass(frozen=True, kw_only=True)
class BackwardReread(Chunks):
    """dx alone."""

    kernel = "backward_reread"
    serves = ("dx",)


@dataclass(frozen=True, kw_only=True)
class BackwardStrips(Chunks):
    """Strips of `width` columns, in tiles of `rows` rows, behind BackwardMeans."""

    kernel = "backward_strips"
    serves = ("backward",)
    most_rows = LARGEST_GRID  # BackwardMeans has a row a block

    rows: int = 1

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        strips = -(-n // self.width)
        expect(strips <= LARGEST_GRID_Y, "strips", f"at most {LARGEST_GRID_Y} in a grid", strips)

    def most_partial_rows(self, sm_count: int) -> int:
        return sm_count * self.occupancy

    def partial_rows(self, m: int, n: int, sm_count: int) -> int:
        """How many blocks share the rows of a strip."""
        strips, tiles = -(-n // self.width), -(-m // self.rows)
        occupancy = 1 if strips == 1 and tiles <= FEW_TILES * sm_count else self.occupancy
        return shortest_walks(tiles, max(1, sm_count * occupancy // strips))

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (p, -(-n // self.width))


# What runs before and after them.


@dataclass(frozen=True, kw_only=True)
class BackwardMeans(Chunks):
    """c of every row, before BackwardStrips."""

    kernel = "backward_means"


@dataclass(frozen=True, kw_only=True)
class SumPartials(Variant):
    """The sum of dw_partial, in tiles of `rows` rows and `width` columns."""

    kernel = "sum_partials"

    rows: int = field()

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (-(-n // self.width),)


@dataclass(frozen=True, kw_only=True)
class ClearBoard(Variant):
    """Empties a board of teams (kernels/team.py), `rows` of its rows of `width` slots a block.

    A board has a multiple of them, so that the kernels on it are compiled once for any M.
    """

    kernel = "clear_board"

    rows: int = field()

    def constants(self, n: int) -> dict[str, Any]:
        return {"ROWS": self.rows, "SLOTS": self.width}

    def board_rows(self, m: int) -> int:
        """Of a board for m rows, which has more: the last counts tickets."""
        return (m // self.rows + 1) * self.rows

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (self.board_rows(m) // self.rows,)


FIRST = (
    *(ForwardRows, ForwardTiles, ForwardTeam, ForwardReread),
    *(BackwardRows, BackwardTiles, BackwardPipelined, BackwardTeam, BackwardPipelinedTeam),
    *(BackwardSplit, BackwardSplitReread, BackwardStrips, BackwardReread),
)
BY_KERNEL: dict[str, type[Variant]] = {variant.kernel: variant for variant in FIRST}
