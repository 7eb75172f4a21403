# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The shapes of `bench/run.sh --widths SEED`: widths that no default shape has, in four parts.

wide        rows of more than 16384 columns, with a residual and with a bias
drawn       multiples of 8, drawn by the seed, plain and with a residual
heads       head sizes, packed and as slices
unaligned   widths that are no multiple of 8, half of them odd, drawn by the seed, plain and with a residual

A width belongs to one part alone, so that a record says by its columns of which it is. float32 has the last alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from bench.block.families import FAMILIES, Section
from bench.measure.shapes import DEFAULT_SHAPES, DTYPES, GRID, Shape

PARTS = ("wide", "drawn", "heads", "unaligned")
WIDE = (16392, 20480, 24576, 28672, 32768, 53248, 65536)
WIDE_ODD = (16393, 20479, 24575, 28671, 32767, 53247, 65535)
HEAD_SIZES = (64, 72, 80, 96, 112, 128, 160, 192, 256)
HEAD_ROWS, CPU_HEAD_ROWS = (65536, 262144, 1048576), (48,)
NARROWEST, OCTAVES = 64, 9  # up to 32767 columns
COUNT = 30  # of each drawn part
SIZES, CPU_SIZES = (200e6, 20e6), (2e3,)  # bytes of x
PLAIN = ("forward", "backward")
RESIDUAL = ("residual_forward", "residual_backward")
BIAS = ("bias_forward", "bias_backward")
SLICES = ("qk_norm_forward", "qk_norm_backward")
OPS = (*PLAIN, *RESIDUAL, *BIAS, *SLICES)
KEPT_OUT = frozenset(
    cols for shapes in (DEFAULT_SHAPES, GRID, *(each.shapes for each in FAMILIES)) for _, cols in shapes
).union(WIDE, WIDE_ODD, HEAD_SIZES)


class Share(NamedTuple):
    """The NUMBER-th of COUNT shares of the widths."""

    number: int = 1
    count: int = 1


class Drawn(NamedTuple):
    """Widths that a seed draws: multiples of 8, other even ones, odd ones."""

    aligned: tuple[int, ...]
    even: tuple[int, ...]
    odd: tuple[int, ...]


def draw(seed: int) -> Drawn:
    """Draw an octave, each as likely as another, and a width in it. Of `random` only random() is used: Python promises
    the same numbers of no other method."""
    generator = random.Random(seed)
    taken = set(KEPT_OUT)

    def some(count: int, is_wanted: Callable[[int], bool]) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < count:
            narrowest = NARROWEST << int(OCTAVES * generator.random())
            width = narrowest + int(narrowest * generator.random())
            if is_wanted(width) and width not in taken:
                taken.add(width)
                found.append(width)
        return tuple(found)

    return Drawn(
        some(COUNT, lambda width: width % 8 == 0),
        some(COUNT // 2, lambda width: width % 2 == 0 and width % 8 != 0),
        some(COUNT // 2, lambda width: width % 2 == 1),
    )


def sections(
    seed: int, dtype: str, share: Share | None = None, is_quick: bool = False, has_gpu: bool = True
) -> list[Section]:
    """List the measurements. is_quick, or no GPU: the first width of each kind alone, without a GPU of few rows."""
    share, most = share or Share(), 1 if is_quick or not has_gpu else None

    def some(widths: tuple[int, ...]) -> tuple[int, ...]:
        return widths[share.number - 1 :: share.count][:most]

    def rows_of(*widths: int) -> tuple[Shape, ...]:
        sizes = SIZES if has_gpu else CPU_SIZES
        pairs = itertools.product(widths, sizes)
        return tuple((max(1, int(size) // (cols * DTYPES[dtype].itemsize)), cols) for cols, size in pairs)

    drawn = draw(seed)
    both = rows_of(*some(drawn.even), *some(drawn.odd))
    wide: tuple[Shape, ...] = ()
    heads: tuple[Shape, ...] = ()
    if dtype != "float32":
        both = rows_of(*some(drawn.aligned)) + both
        wide = rows_of(*some(WIDE), *some(WIDE_ODD))
        head_rows = HEAD_ROWS if has_gpu else CPU_HEAD_ROWS
        heads = tuple((rows, cols) for cols in some(HEAD_SIZES) for rows in head_rows)
    found = [
        Section(PLAIN, both + heads),
        Section(RESIDUAL, both + wide),
        Section(BIAS, wide),
        Section(SLICES, heads),
    ]
    return [section for section in found if section.shapes]


def part_of(cols: int) -> str:
    """The part to which a width belongs."""
    if cols in WIDE or cols in WIDE_ODD:
        return "wide"
    if cols in HEAD_SIZES:
        return "heads"
    return "unaligned" if cols % 8 else "drawn"
