# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The ways to cut rows of N elements into tiles that tuning tries (spaces.py). Neither torch nor cuda.tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS
from tilegym_rmsnorm.backends.cutile.plans.variant import power_of_two

Tile = dict[str, int]  # fields of a variant: its width, and others that depend on it
Tiles = Callable[[int], Iterator[Tile]]  # of rows of n elements


def _tiling(cut: Callable[..., Iterator[Tile]]) -> Callable[..., Tiles]:
    """Lets a function of n and of sizes be called with the sizes alone, for a function of n."""
    return lambda *sizes, **limits: lambda n: cut(n, *sizes, **limits)


def whole_rows(n: int) -> Iterator[Tile]:
    """A row as one tile, or, unless it is narrow, as two of which the first is full."""
    whole = power_of_two(n)
    yield {"width": whole}
    if whole >= 1024:
        width = whole // 2
        yield {"width": width, "rest": max(power_of_two(n - width), width // 8)}


def rows_of_tiles(n: int) -> Iterator[Tile]:
    """`whole_rows`, and a row as three to nine equal tiles of which the last is at least half full."""
    yield from whole_rows(n)
    for width in (512, 1024, 2048, 4096, 8192, 16384):
        pieces = -(-n // width)
        if 3 <= pieces <= 9 and pieces * width - n <= width // 2:
            yield {"width": width, "pieces": pieces}


@_tiling
def several_rows(n: int, *elements: int) -> Iterator[Tile]:
    """Several whole rows, of about so many elements together."""
    width = power_of_two(n)
    yield from ({"width": width, "rows": each // width} for each in elements if each >= width)


@_tiling
def equal(n: int, *widths: int, most: int = 9) -> Iterator[Tile]:
    """A row as two to `most` equal tiles, an eighth of their lanes empty at most."""
    for width in widths:
        pieces = -(-n // width)
        if 2 <= pieces <= most and 8 * n >= 7 * pieces * width:
            yield {"width": width, "pieces": pieces}


@_tiling
def chunks(n: int, *widths: int) -> Iterator[Tile]:
    """Parts of rows, one after the other."""
    yield from ({"width": width} for width in widths if width < n)


@_tiling
def parts(n: int, widths: tuple[int, ...], counts: tuple[int, ...], above: int = 0) -> Iterator[Tile]:
    """A row as so many tiles, of more than `above` columns together, in each of the fewest blocks that hold it, an
    eighth of their lanes empty at most."""
    for width, pieces in itertools.product(widths, counts):
        members = -(-n // (width * pieces))
        lanes = members * width * pieces
        is_full = 8 * n >= 7 * lanes and lanes - width < n
        if width * pieces > above and 2 <= members <= MOST_MEMBERS and is_full:
            yield {"width": width, "pieces": pieces, "members": members}


@_tiling
def pieces_of_rows(n: int, *elements: int) -> Iterator[Tile]:
    """Rows, of up to so many elements together, each as one tile or as equal ones of a half to an eighth of that."""
    whole = power_of_two(n)
    widths = [whole >> shift for shift in range(4) if whole >> shift >= 32]
    for width, each in itertools.product(widths, elements):
        pieces = -(-n // width)
        rows = max(1, power_of_two(each // (width * pieces) + 1) // 2)
        yield {"width": width, "pieces": pieces, "rows": rows}


def in_vectors(cut: Tiles) -> Tiles:
    """Cut the whole vectors of a row, of 2, 4 or 8 elements; its ends are no part of tiles (kernels/unaligned.py)."""
    return lambda n: ({**tile, "vector": each} for each in (2, 4, 8) for tile in cut(n // each * each))


@_tiling
def split(n: int, rows_of_x: Tiles, strips: tuple[tuple[int, int], ...], *slabs: int) -> Iterator[Tile]:
    """Whole rows or chunks of them for dx, with tiles of (rows, strip) and slabs for dw."""
    for tile, (rows, strip), slab in itertools.product(rows_of_x(n), strips, slabs):
        if slab >= rows:
            yield {**tile, "rows": rows, "strip": strip, "slab": slab}
