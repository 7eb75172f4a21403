# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Define a frozen dataclass for each kernel: its settings as fields, those that it uses and no others; the calls that
it serves; its grid, constants and temporary arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilegym_rmsnorm.backends.cutile.plans.partition import (
    Chunks,
    Registers,
    Split,
    Team,
    Unaligned,
    Walks,
    two_tiles,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    FEW_TILES,
    LARGEST_GRID,
    LARGEST_GRID_Y,
    shortest_walks,
)
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect

WEIGHT_LOADS = ("late", "early", "joint")


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
        expect(not self.heads or self.weight_load == "late", "weight_load of heads", "late", self.weight_load)


@dataclass(frozen=True, kw_only=True)
class ForwardRows(LoadsWeight):
    kernel = "forward_rows"
    serves = ("forward",)
    takes = frozenset({"residual", "bias", "heads"})

    rest: int = 0
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardTiles(LoadsWeight):
    """`rows` rows a block. heads: of (B, T, H, N) so many rows of T, each of so many heads. Several pieces only with a
    joint weight."""

    kernel = "forward_tiles"
    serves = ("forward",)
    row_sums = "tiles"
    takes = frozenset({"residual", "bias", "heads", "per_head"})

    rows: int = 1
    heads: int = 0

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.pieces == 1 or self.weight_load == "joint", "pieces", "1, or a joint weight", self.pieces)


@dataclass(frozen=True, kw_only=True)
class ForwardTeam(Team, LoadsWeight):
    kernel = "forward_team"
    serves = ("forward",)
    takes = frozenset({"residual", "bias"})

    packed: bool = False

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        expect(self.weight_load != "early", "weight_load", "late or joint", self.weight_load)


@dataclass(frozen=True, kw_only=True)
class ForwardReread(Chunks):
    kernel = "forward_reread"
    serves = ("forward",)
    takes = frozenset({"residual", "bias"})


@dataclass(frozen=True, kw_only=True)
class ForwardUnaligned(Unaligned):
    kernel = "forward_unaligned"
    serves = ("forward",)
    takes = frozenset({"residual", "bias"})

    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class ForwardUnalignedTeam(Team, Unaligned):
    kernel = "forward_unaligned_team"
    serves = ("forward",)
    takes = frozenset({"residual", "bias"})


@dataclass(frozen=True, kw_only=True)
class BackwardRows(Walks):
    """short: compile a way without the loop too, for as many blocks as rows."""

    kernel = "backward_rows"
    serves = ("backward", "dx")
    takes = frozenset({"residual", "bias", "heads"})

    rest: int = 0
    packed: bool = False
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardTiles(Walks):
    """`rows` rows a step. heads: of (B, T, H, N) so many rows of T, each of so many heads."""

    kernel = "backward_tiles"
    serves = ("backward", "dx")
    row_sums = "tiles"
    takes = frozenset({"residual", "bias", "heads", "per_head"})

    rows: int = 1
    heads: int = 0
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardPipelined(Walks):
    """packed: for rows that fill the registers even so (kernels/pipelined.py)."""

    kernel = "backward_pipelined"
    serves = ("backward", "dx")
    takes = frozenset({"residual", "bias"})
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
    takes = frozenset({"residual"})
    most_rows = LARGEST_GRID  # of a board, which is cleared some rows a block


@dataclass(frozen=True, kw_only=True)
class BackwardPipelinedTeam(BackwardTeam):
    """rstd_ahead: each row's rstd comes with the row before. packed: the row is added to dw before the team's sum
    (kernels/backward_team.py)."""

    kernel = "backward_pipelined_team"
    serves_dx_alone = False
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
class BackwardUnaligned(Unaligned):
    kernel = "backward_unaligned"
    serves = ("backward", "dx")
    takes = frozenset({"residual", "bias"})
    walks = True
    serves_dx_alone = True

    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class BackwardUnalignedTeam(Team, Unaligned):
    kernel = "backward_unaligned_team"
    serves = ("backward", "dx")
    takes = frozenset({"residual"})
    walks = True
    most_rows = LARGEST_GRID  # of a board


@dataclass(frozen=True, kw_only=True)
class BackwardSplit(Split):
    """A row of dx is held in one tile, or in two of which the second has `rest` columns."""

    kernel = "backward_split"
    serves = ("backward",)

    rest: int = 0

    @classmethod
    def fitted(cls, n: int, most_members: int, **settings: Any) -> Variant:
        """Hold a row in the tiles of `two_tiles` by default."""
        width, rest = two_tiles(n)
        return cls(**({} if "width" in settings else {"width": width, "rest": rest}), **settings)

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
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
    takes = frozenset({"residual"})
    goes_through_columns = True

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
    takes = frozenset({"residual"})


@dataclass(frozen=True, kw_only=True)
class BackwardStrips(Chunks):
    """Strips of `width` columns, in tiles of `rows` rows, behind BackwardMeans."""

    kernel = "backward_strips"
    serves = ("backward",)
    takes = frozenset({"residual"})
    most_rows = LARGEST_GRID  # BackwardMeans has a row a block

    rows: int = 1

    def check(self, n: int, itemsize: int, architecture: int) -> None:
        super().check(n, itemsize, architecture)
        strips = -(-n // self.width)
        expect(strips <= LARGEST_GRID_Y, "strips", f"at most {LARGEST_GRID_Y} in a grid", strips)

    def most_partial_rows(self, sm_count: int) -> int:
        return sm_count * self.occupancy

    def partial_rows(self, m: int, n: int, sm_count: int, shares: int = 1) -> int:
        """Count blocks that share the rows of a strip."""
        strips, tiles = -(-n // self.width), -(-m // self.rows)
        occupancy = 1 if strips == 1 and tiles <= FEW_TILES * sm_count else self.occupancy
        return shortest_walks(tiles, max(1, sm_count * occupancy // strips))

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (p, -(-n // self.width))


@dataclass(frozen=True, kw_only=True)
class BackwardMeans(Chunks):
    """c of every row, before BackwardStrips."""

    kernel = "backward_means"

    def temporaries(self, m: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"c": ((m,), "float32")}


@dataclass(frozen=True, kw_only=True)
class SumPartials(Variant):
    """The sum of dw_partial, and of db_partial, in tiles of `rows` rows and `width` columns."""

    kernel = "sum_partials"
    goes_through_columns = True

    rows: int = field()

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (-(-n // self.width),)


@dataclass(frozen=True, kw_only=True)
class ClearBoard(Variant):
    """Empties a board of teams (kernels/team.py), `rows` of its rows of `width` slots a block.

    A board has a multiple of them, so that the kernels on it are compiled once for any M.
    """

    kernel = "clear_board"
    goes_through_columns = True  # of a board, which has none of a row's

    rows: int = field()

    def constants(self, n: int) -> dict[str, Any]:
        return {"ROWS": self.rows, "SLOTS": self.width}

    def board_rows(self, m: int) -> int:
        """Count a board's rows, more than m: the last counts tickets."""
        return (m // self.rows + 1) * self.rows

    def temporaries(self, m: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"board": ((self.board_rows(m), self.width), "int32")}

    def grid(self, m: int, n: int, p: int, sm_count: int) -> tuple[int, ...]:
        return (self.board_rows(m) // self.rows,)


_CLASSES = [each for each in list(vars().values()) if isinstance(each, type) and issubclass(each, Variant)]
# Those that may be a plan's first kernel, by their names: every class above that serves an op.
BY_KERNEL: dict[str, type[Variant]] = {each.kernel: each for each in _CLASSES if each.serves}
