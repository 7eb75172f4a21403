# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The configs that tuning tries for a row of N elements: how the search space of spaces.py is cut down.

Neither torch nor cuda.tile is imported; a CPU test sweeps it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.limits import BACKWARDS, WALKS_ROWS, check_config, largest_tile
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, ITEMSIZE, SAME, Bucket
from tilegym_rmsnorm.backends.cutile.plans.select import config_of_rules
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.wide import MOST_MEMBERS
from tilegym_rmsnorm.backends.cutile.tuning.spaces import SWEEPS

MOST = 60  # of a bucket, unless asked for otherwise
REGISTERS_OF_SM = 65536
REGISTERS_OF_THREAD = 255
OTHER_REGISTERS = 24  # addresses, counters, the sums of a row
SPILLED = 1.15  # a kernel that spills a little may still be the fastest, see `spills` of hopper.Rule
REASON = "tried"
TILE_AND_WEIGHT = ("width", "pieces", "rest", "rows", "early_weight", "together")
SHARES = (100, 96, 92, 88, 84, 80, 76, 72, 68)  # percent of the blocks that fit; one step of 4 was worth 2 %


def candidates(
    bucket: Bucket,
    itemsize: int,
    architecture: int,
    most: int = MOST,
    most_members: int = MOST_MEMBERS,
    known: Iterable[Config] = (),
) -> list[Config]:
    """What is tried for a bucket: the config of the rules, those of `known` that are possible, and others, the most
    alike first, `most` in all. `known` won somewhere: whether registers hold them is not estimated again.

    Of every kernel with every number of warps and of blocks an SM and every share of them, with and without TMA, in one
    tile a row and in several, of backwards with every latency, of pipelined.py in tiles of every width by every
    share, packed and not, of packed teams and of rows that a warp holds in tiles of every width, and with the weight
    loaded late, early (not large calls by tiles) and together with x, there is the most alike, as long as they are so
    few.
    """
    default = config_of_rules(bucket, architecture, most_members)
    most_rows = rows_of_class(bucket.size, bucket.n)[-1]
    others = {
        config: None  # a set would not keep the order of those that are equally alike
        for config in (_with_slab_up_to(most_rows, each) for each in _combinations(bucket))
        if config.members <= most_members
        and _is_possible(config, bucket, architecture)
        and fits_registers(config, bucket.op, itemsize, bucket.weight)
    }
    same = _with_slab_up_to(most_rows, dataclasses.replace(default, reason=REASON, spills=""))
    others.pop(same, None)
    won = [
        config
        for config in dict.fromkeys(
            _with_slab_up_to(most_rows, dataclasses.replace(each, reason=REASON, spills="")) for each in known
        )
        if config != same and config.members <= most_members and _is_possible(config, bucket, architecture)
    ][: most - 1]
    for config in won:
        others.pop(config, None)
    ranks = {config: distance(config, same) for config in others}
    alike = sorted(ranks, key=ranks.__getitem__)
    first = {
        config
        for kind in (
            lambda c: (c.kernel, c.warps, c.occupancy),
            lambda c: (c.kernel, c.warps, c.early_weight, c.together),
            lambda c: bucket.op in BACKWARDS and (c.kernel, c.latency),
            lambda c: (c.kernel, c.warps, c.occupancy, c.tma, c.pieces > 1, c.share),
            lambda c: c.kernel == "rows" and c.tma and (c.width, c.packed, c.share),
            lambda c: c.kernel == "teams" and c.tma and c.packed and c.width,
            lambda c: c.kernel == "tiles" and c.pieces > 1 and c.width <= 256 and (c.width, c.warps),
        )
        for config in {kind(each): each for each in reversed(alike)}.values()
    }
    room = most - 1 - len(won)
    chosen = sorted(alike, key=lambda config: (config not in first, ranks[config]))[:room]
    return [default, *won, *sorted(chosen, key=ranks.__getitem__)]


def with_other_shares(config: Config, bucket: Bucket) -> list[Config]:
    """The same kernel by fewer of the blocks that fit, or by more, which mostly takes no compilation.

    H100, bfloat16: 8192x8192 by 131 blocks 139.3 us, by 114 of them 137.8; 4096x16384 by pipelined.py by 128 blocks
    155.6, by 98, 94 and 86 of them 144.2, 141.3, 145.4.
    """
    if bucket.op not in BACKWARDS or bucket.size != "large" or config.kernel not in WALKS_ROWS:
        return []
    others = [share for share in SHARES if share != config.share]
    return [dataclasses.replace(config, share=share, reason=REASON, spills="") for share in others]


def fits_registers(config: Config, op: str, itemsize: int, weight: str = SAME) -> bool:
    """Whether the float32 tiles that a thread keeps, and the bytes of those that it awaits, find room in registers.

    The forward keeps x, packed in its own dtype, and awaits weight with it unless that comes late, tile by tile; the
    backward keeps weight and, if it is needed, the sum of dw, and awaits x and dy; a block of a fused backward has
    either rows, without a sum, or the sum of a strip, without weight. A thread without work, of a tile smaller than its
    block, is not worth a try either.
    """
    threads = 32 * config.warps
    elements = largest_tile(config) / threads
    if op == "forward":
        awaits_weight = config.early_weight or config.together
        of_weight = 1 if weight == FLOAT32 else itemsize / 4
        kept = (itemsize / 4 if config.packed else 1) + (of_weight if awaits_weight else 0)
    else:
        kept = (1 if config.is_fused or op == "dx" else 2) + itemsize / 2
    room = min(REGISTERS_OF_THREAD, REGISTERS_OF_SM / (threads * config.occupancy))
    return elements >= 1 and elements * kept + OTHER_REGISTERS <= room * SPILLED


def distance(config: Config, other: Config) -> float:
    """How unlike two configs are: doublings of a tile's elements and of other numbers, and 1 for what else differs.

    When the weight comes makes no difference: all three ways are tried with whatever is near.
    """
    tiles = [(each.pieces > 1, each.rest > 0) for each in (config, other)]
    total = float(tiles[0] != tiles[1]) + _doublings(largest_tile(config), largest_tile(other))
    for field in dataclasses.fields(Config):
        if field.name in ("strip", "slab") and not (config.is_fused and other.is_fused):
            continue  # the kernels differ already
        if field.name not in TILE_AND_WEIGHT and field.name not in ("reason", "spills"):
            a, b = getattr(config, field.name), getattr(other, field.name)
            total += _doublings(a, b) if type(a) is int else float(a != b)
    return total


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


def _combinations(bucket: Bucket) -> Iterator[Config]:
    for sweep in SWEEPS[bucket.op]:
        if not sweep.narrowest <= bucket.n <= sweep.widest or bucket.size not in sweep.sizes:
            continue
        values = dict(sweep.values)
        if bucket.size == "large":
            values.pop("short", None)  # more rows than blocks: that way is not taken
        if bucket.n <= 4096:
            values.pop("packed", None)  # registers are not what such rows lack
        tiles = [t for t in sweep.tiles(bucket.n) if t["width"] * ITEMSIZE[bucket.dtype] <= sweep.tile_bytes]
        for tile, *chosen in itertools.product(tiles, *values.values()):
            yield Config(sweep.kernel, **tile, **dict(zip(values, chosen, strict=True)), reason=REASON)


def _with_slab_up_to(rows: int, config: Config) -> Config:
    """The config with the smallest slab that is the same to so many rows as its own."""
    return dataclasses.replace(config, slab=min(config.slab, max(config.rows, power_of_two(rows))))


def _is_possible(config: Config, bucket: Bucket, architecture: int) -> bool:
    try:
        check_config(config, bucket, architecture)
    except ValueError:
        return False
    return True
