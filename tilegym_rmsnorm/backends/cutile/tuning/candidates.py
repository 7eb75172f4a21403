# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The variants that tuning tries for a row of N elements: how the search space of spaces.py is cut down.

Neither torch nor cuda.tile is imported; a CPU test sweeps it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS, Split, Unaligned, Walks
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    FLOAT32,
    ITEMSIZE,
    PLAIN,
    SAME,
    Bucket,
    Device,
    Form,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.select import choose
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, power_of_two
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of
from tilegym_rmsnorm.backends.cutile.tuning.spaces import SWEEPS

MOST = 60  # of a bucket, unless asked for otherwise
REGISTERS_OF_SM = 65536
REGISTERS_OF_THREAD = 255
OTHER_REGISTERS = 24  # addresses, counters, the sums of a row
SPILLED = 1.15  # a kernel that spills a little may still be the fastest, see `spills` of records.py
SHARES = (100, 96, 92, 88, 84, 80, 76, 72, 68)  # percent of the blocks that fit; one step of 4 was worth 2 %
COMPARED = ("warps", "occupancy", "latency", "tma", "short", "members", "packed", "grid_percent")
WITHOUT_TMA = {"backward_pipelined": "backward_rows", "backward_pipelined_team": "backward_team"}


def by_rules(bucket: Bucket, architecture: int, most_members: int = MOST_MEMBERS) -> Variant:
    """Return the variant that serves a bucket where no entry does."""
    facts = Device(architecture, 1, most_members)  # how many SMs there are chooses nothing
    return choose(bucket.problem(facts), tables_of(architecture, None, None)).first


def candidates(
    bucket: Bucket,
    architecture: int,
    most: int = MOST,
    most_members: int = MOST_MEMBERS,
    known: Iterable[Variant] = (),
) -> list[Variant]:
    """List variants to try for a bucket: that of the rules, those of `known` that are possible, and others, the most
    alike first, `most` in all. `known` won somewhere: whether registers hold them is not estimated again.

    Keep the most alike variant of each of `_kinds`, while they are no more than `most`.
    """
    default, itemsize = by_rules(bucket, architecture, most_members), ITEMSIZE[bucket.dtype]
    most_rows = rows_of_class(bucket.size, bucket.n)[-1]
    same = _with_slab_up_to(most_rows, default)

    def possible(variants: Iterable[Variant]) -> list[Variant]:
        each_once = dict.fromkeys(_with_slab_up_to(most_rows, variant) for variant in variants)
        each_once.pop(same, None)
        has_room = (each for each in each_once if each.members <= most_members)
        return [each for each in has_room if _is_possible(each, bucket, architecture)]

    won = dict.fromkeys(possible(known)[: most - 1])
    ranks = {
        each: distance(each, same)
        for each in possible(_combinations(bucket))
        if each not in won
        and fits_registers(each, bucket.op, itemsize, bucket.weight, form_named(bucket.form))
    }
    alike = sorted(ranks, key=ranks.__getitem__)
    first = set({kind: each for each in reversed(alike) for kind in _kinds(each)}.values())
    chosen = sorted(alike, key=lambda each: (each not in first, ranks[each]))[: most - 1 - len(won)]
    return [default, *won, *sorted(chosen, key=ranks.__getitem__)]


def _kinds(variant: Variant) -> Iterator[tuple[object, ...]]:
    """Yield groups whose most alike variant is tried: every kernel with every number of warps and of blocks an SM and
    every share of them, with and without TMA, in one tile a row and in several; backwards with every latency; pipelined
    rows in tiles of every width by every share, packed and not; packed teams and rows that a warp holds in tiles of
    every width; unaligned rows in tiles of every width by every vector; and with every `weight_load`, but for early of
    large calls by tiles."""
    kernel, blocks, has_pieces = _kernel(variant), (variant.warps, variant.occupancy), variant.pieces > 1
    yield "blocks", kernel, blocks
    yield "weight", kernel, variant.warps, variant.weight_load
    if "forward" not in variant.serves:
        yield "latency", kernel, variant.latency
    if isinstance(variant, Unaligned):
        yield "vectors", kernel, variant.width, variant.vector
    else:
        yield "share", kernel, blocks, variant.tma, has_pieces, variant.grid_percent
    if variant.kernel == "backward_pipelined":
        yield "pipelined", variant.width, variant.packed, variant.grid_percent
    if variant.kernel == "backward_pipelined_team" and variant.packed:
        yield "packed team", variant.width
    if variant.kernel in ("forward_tiles", "backward_tiles") and has_pieces and variant.width <= 256:
        yield "rows of warps", variant.width, variant.warps


def with_other_shares(variant: Variant, bucket: Bucket) -> list[Variant]:
    """List variants by fewer of the blocks that fit, or by more, which mostly takes no compilation.

    H100, bfloat16: 8192x8192 by 131 blocks 139.3 us, by 114 of them 137.8; 4096x16384 by pipelined.py by 128 blocks
    155.6, by 98, 94 and 86 of them 144.2, 141.3, 145.4.
    """
    if bucket.size != "large" or not isinstance(variant, Walks):
        return []
    return [replace(variant, grid_percent=share) for share in SHARES if share != variant.grid_percent]


def fits_registers(variant: Variant, op: str, itemsize: int, weight: str = SAME, form: Form = PLAIN) -> bool:
    """Whether the float32 tiles that a thread keeps, and the bytes of those that it loads, find room in registers.

    The forward keeps x, packed in its own dtype, and loads weight with it unless that comes late, tile by tile; the
    backward keeps weight and, if it is needed, the sum of dw, and loads x and dy; a block of a split backward has
    either rows, without a sum, or the sum of a strip, without weight. A residual is loaded with x, and added before
    that is float32; d_residual_out is loaded with x and dy, and d_residual is stored before it is multiplied into dx;
    the sum of db is as large as that of dw. Kernels of unaligned.py load weight first, once for all rows of a tile. A
    thread without work, of a tile smaller than its block, is not worth a try either.
    """
    threads = 32 * variant.warps
    elements = variant.tile / threads
    if op == "forward":
        of_weight = 1 if weight == FLOAT32 else itemsize / 4
        if isinstance(variant, Unaligned):
            of_weight /= variant.rows
        elif variant.weight_load == "late":
            of_weight = 0
        of_rows = max(itemsize / 4 if variant.packed else 1, itemsize / 2 if form.residual else 0)
        kept = of_rows + of_weight
    else:
        kept = (1 if isinstance(variant, Split) or op == "dx" else 2) + itemsize / 2
        kept += (itemsize / 4 if form.residual else 0) + (1 if form.bias else 0)
    room = min(REGISTERS_OF_THREAD, REGISTERS_OF_SM / (threads * variant.occupancy))
    return elements >= 1 and elements * kept + OTHER_REGISTERS <= room * SPILLED


def distance(variant: Variant, other: Variant) -> float:
    """Sum the differences: doublings of a tile's elements and of other numbers, and 1 for what else differs.

    When the weight comes makes no difference: all three ways are tried with whatever is near.
    """
    tiles = [(each.pieces > 1, each.rest > 0) for each in (variant, other)]
    total = float(tiles[0] != tiles[1]) + _doublings(variant.tile, other.tile)
    total += float(_kernel(variant) != _kernel(other))
    are_split = isinstance(variant, Split) and isinstance(other, Split)
    for name in (*COMPARED, "strip", "slab") if are_split else COMPARED:
        a, b = (getattr(each, name, False) for each in (variant, other))
        total += _doublings(a, b) if type(a) is int else float(a != b)
    return total


def _kernel(variant: Variant) -> str:
    """A pipelined kernel is the one without TMA, by TMA."""
    return WITHOUT_TMA.get(variant.kernel, variant.kernel)


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


def _combinations(bucket: Bucket) -> Iterator[Variant]:
    itemsize = ITEMSIZE[bucket.dtype]
    vectors = {None, *_vectors(bucket.n, itemsize)}
    for sweep in SWEEPS[bucket.op]:
        if not sweep.narrowest <= bucket.n <= sweep.widest or bucket.size not in sweep.sizes:
            continue
        values = dict(sweep.values)
        if bucket.size == "large":
            values.pop("short", None)  # more rows than blocks: that way is not taken
        if bucket.n <= 4096:
            values.pop("packed", None)  # registers are not what such rows lack
        tiles = [t for t in sweep.tiles(bucket.n) if t["width"] * itemsize <= sweep.tile_bytes]
        tiles = [t for t in tiles if t.get("vector") in vectors]
        for tile, *chosen in itertools.product(tiles, *values.values()):
            yield sweep.variant(**tile, **dict(zip(values, chosen, strict=True)))


def _vectors(n: int, itemsize: int) -> set[int]:
    """Return how many elements the vectors that are tried have: 16 bytes of them, so that rows have ends, or as many as
    divide n. None where rows are aligned, which need no such kernel."""
    most = 16 // itemsize
    dividing = math.gcd(n, most)
    return {most, dividing} - {1} if dividing < most else set()


def _with_slab_up_to(rows: int, variant: Variant) -> Variant:
    """The variant with the smallest slab that is the same to so many rows as its own."""
    if not isinstance(variant, Split):
        return variant
    return replace(variant, slab=min(variant.slab, max(variant.rows, power_of_two(rows))))


def _is_possible(variant: Variant, bucket: Bucket, architecture: int) -> bool:
    try:
        variant.check(bucket.n, ITEMSIZE[bucket.dtype], architecture)
    except ValueError:
        return False
    takes_form = variant.serves_form(bucket.problem(Device(architecture, 1, MOST_MEMBERS)))
    return bucket.op in variant.serves and takes_form
