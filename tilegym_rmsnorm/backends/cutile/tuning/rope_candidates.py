# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The choices that tuning tries for heads of N elements that are rotated (plans/rope.py).

Neither torch nor cuda.tile is imported; a CPU test sweeps it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rope import (
    KERNEL_OF_OP,
    RopeChoice,
    RopeTiles,
    entry_problem,
    reasoned,
    tiles_of,
)
from tilegym_rmsnorm.backends.cutile.tuning.candidates import doublings, fits_registers

ELEMENTS = (2048, 4096, 8192)
HEADS = (2, 4, 8)
WIDTHS = (64, 128)
BLOCKS = ((4, 2), (4, 3), (4, 4), (8, 1), (8, 2))  # warps and blocks an SM
LATENCIES = (2, 3, 4)


def rope_by_rules(bucket: Bucket, architecture: int) -> RopeChoice:
    """Return the choice that serves a bucket where no entry does."""
    return reasoned(bucket.op, entry_problem(bucket.n, bucket.dtype, architecture))


def rope_candidates(
    bucket: Bucket, architecture: int, most: int, known: Iterable[RopeChoice] = ()
) -> list[RopeChoice]:
    """List choices to try for a bucket: the reasoned one, `known` ones, and others that registers may hold, `most` in
    all: of each number of elements by each number of blocks the most alike, then of all. No two give the same tiles."""
    problem, itemsize = entry_problem(bucket.n, bucket.dtype, architecture), ITEMSIZE[bucket.dtype]
    default = rope_by_rules(bucket, architecture)
    possible = [
        each
        for each in _combinations(bucket.op)
        if fits_registers(tiles_of(problem, each), bucket.op, itemsize)
    ]
    alike = sorted(possible, key=lambda each: _distance(each, default))
    kinds = {(each.elements, each.warps, each.occupancy): each for each in reversed(alike)}
    first = sorted(kinds.values(), key=alike.index)
    by_tiles: dict[RopeTiles, RopeChoice] = {}
    for each in (default, *known, *first, *alike):
        by_tiles.setdefault(tiles_of(problem, each), each)
    return list(by_tiles.values())[:most]


def _combinations(op: str) -> Iterator[RopeChoice]:
    swept = itertools.product(ELEMENTS, HEADS, WIDTHS, BLOCKS, LATENCIES)
    for elements, heads, width, (warps, occupancy), latency in swept:
        tiles = {"elements": elements, "heads": heads, "width": width}
        yield RopeChoice(kernel=KERNEL_OF_OP[op], warps=warps, occupancy=occupancy, latency=latency, **tiles)


def _distance(choice: RopeChoice, other: RopeChoice) -> float:
    """How many doublings apart their numbers are, all together."""
    pairs = zip(choice.settings().values(), other.settings().values(), strict=True)
    return sum(doublings(a, b) for a, b in pairs)
