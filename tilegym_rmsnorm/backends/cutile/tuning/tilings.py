# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The ways to cut rows of N elements into tiles that tuning tries (spaces.py). Neither torch nor cuda.tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import power_of_two
from tilegym_rmsnorm.backends.cutile.plans.wide import MOST_MEMBERS

Tile = dict[str, int]  # width, pieces, rest and rows of a Config
Tiles = Callable[[int], Iterator[Tile]]  # of rows of n elements


def whole_rows(n: int) -> Iterator[Tile]:
    """A row as one tile, or, unless it is narrow, as two of which the first is full."""
    whole = power_of_two(n)
    yield {"width": whole}
    if whole < 1024:
        return
    width = whole // 2
    yield {"width": width, "rest": max(power_of_two(n - width), width // 8)}


def rows_of_tiles(n: int) -> Iterator[Tile]:
    """`whole_rows`, and a row as three to nine equal tiles of which the last is at least half full."""
    yield from whole_rows(n)
    for width in (512, 1024, 2048, 4096, 8192, 16384):
        pieces = -(-n // width)
        if 3 <= pieces <= 9 and pieces * width - n <= width // 2:
            yield {"width": width, "pieces": pieces}


def tiles_of(*elements: int) -> Tiles:
    """Several whole rows, of about so many elements together."""

    def tiles(n: int) -> Iterator[Tile]:
        width = power_of_two(n)
        yield from ({"width": width, "rows": each // width} for each in elements if each >= width)

    return tiles


def rows_of_warps(warps: int, rows_each: tuple[int, ...] = (1, 2)) -> Tiles:
    """So many rows a warp, as 2 to 16 tiles of 4 or 8 elements a thread, an eighth of their lanes empty at most."""

    def tiles(n: int) -> Iterator[Tile]:
        for width, rows in itertools.product((128, 256), rows_each):
            pieces = -(-n // width)
            if 2 <= pieces <= 16 and 8 * n >= 7 * pieces * width:
                yield {"width": width, "pieces": pieces, "rows": rows * warps}

    return tiles


def rows_of_equal_tiles(n: int) -> Iterator[Tile]:
    """One to four rows as two to nine equal tiles each, an eighth of their lanes empty at most."""
    for width, rows in itertools.product((512, 1024, 2048, 4096, 8192), (1, 2, 4)):
        pieces = -(-n // width)
        if 2 <= pieces <= 9 and 8 * n >= 7 * pieces * width:
            yield {"width": width, "pieces": pieces, "rows": rows}


def rows_of_few_equal_tiles(n: int) -> Iterator[Tile]:
    """One row as two to nine tiles of 1024 columns or more, an eighth of their lanes empty at most."""
    for width in (4096, 2048, 1024):
        pieces = -(-n // width)
        if 2 <= pieces <= 9 and 8 * n >= 7 * pieces * width:
            yield {"width": width, "pieces": pieces}


def strips_of(widths: tuple[int, ...], rows: tuple[int, ...] = (1,)) -> Tiles:
    """Parts of rows."""

    def tiles(n: int) -> Iterator[Tile]:
        yield from ({"width": width, "rows": each} for width in widths for each in rows if width < n)

    return tiles


def parts_of_rows(n: int) -> Iterator[Tile]:
    """A row as 1, 3, 5 or 9 tiles in each of the fewest blocks that hold it."""
    yield from _parts(n, (512, 1024, 2048, 4096, 8192, 16384), (1, 3, 5, 9))


def parts_of_rows_by_tma(n: int) -> Iterator[Tile]:
    """A row as 1 to 4 tiles of 1024 columns or more, each a request, in each of the fewest blocks that hold it."""
    yield from _parts(n, (1024, 2048, 4096, 8192), (1, 2, 3, 4))


def large_parts_by_tma(n: int) -> Iterator[Tile]:
    """The parts by TMA that take all registers of a block: of more than 8192 columns."""
    yield from (tile for tile in parts_of_rows_by_tma(n) if tile["width"] * tile["pieces"] > 8192)


def _parts(n: int, widths: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Tile]:
    """Parts of rows of which an eighth of the lanes is empty at most."""
    for width, pieces in itertools.product(widths, counts):
        members = -(-n // (width * pieces))
        lanes = members * width * pieces
        if 2 <= members <= MOST_MEMBERS and 8 * n >= 7 * lanes and lanes - width < n:
            yield {"width": width, "pieces": pieces, "members": members}


def fused(rows_of_x: Tiles, strips: tuple[tuple[int, int], ...], slabs: tuple[int, ...]) -> Tiles:
    """Whole rows or chunks of them for dx, with tiles of (rows, strip) and slabs for dw."""

    def tiles(n: int) -> Iterator[Tile]:
        for tile, (rows, strip), slab in itertools.product(rows_of_x(n), strips, slabs):
            if slab >= rows:
                yield {**tile, "rows": rows, "strip": strip, "slab": slab}

    return tiles
