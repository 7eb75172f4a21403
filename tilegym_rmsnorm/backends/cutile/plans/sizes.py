# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What M, the number of rows, decides: the size class of a call, and how many blocks share its rows.

Pure functions of numbers, as rules.py's: neither torch nor cuda.tile is imported.
"""

from __future__ import annotations

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config

SIZES = ("few", "small", "large")
FEW_ROWS = 1024
SMALL = 4 * 2**20  # elements of x: 8 MB in bfloat16
FEW_TILES = 8  # row tiles per SM
# Of a config that `tune` takes: the largest ratio to the time of the rules', at any of the numbers of rows timed. Two
# timings in one process differ by 1 %. Few rows are 1 to 1024, and what is best for 8 is not for 512: backward of 8192
# bfloat16 columns on an H100 2.72 instead of 2.95 us, and 12.06 instead of 11.80.
MOST_LOSS = {"large": 1.01, "small": 1.01, "few": 1.03}
MOST_SLABS = 4  # per SM
LARGEST_GRID = 2**24 - 1  # blocks in one dimension of a launch, cuda-tile's limit
LARGEST_GRID_Y = 2**16 - 1  # in its second dimension, and its third: CUDA's
NO_END = 2**62  # more rows than any memory holds


def size_class(m: int, n: int) -> str:
    """Which of SIZES a call is: what pays for its time differs, so configs may. Nothing else about M chooses kernels.

    few: launches and waits; small: half-filled SMs too; large: bytes.
    """
    if m * n > SMALL:
        return "large"
    return "few" if m <= FEW_ROWS else "small"


def rows_of_class(size: str, n: int) -> range:
    """The numbers of rows M, from 1 on, of which size_class(M, n) is `size`; none if rows of n are too wide for it."""
    most = SMALL // n
    if size == "large":
        return range(most + 1, NO_END)
    return range(1, min(FEW_ROWS, most) + 1) if size == "few" else range(FEW_ROWS + 1, most + 1)


def partial_rows(m: int, n: int, config: Config, sm_count: int) -> int:
    """P: how many blocks, or teams of them, walk the rows of a backward, each leaving one row of dw_partial.

    A few per SM; one where few rows make the partial rows a good part of all traffic; of those the config's share. And
    no more than make the longest walk as short as it can be: 1024 tiles for 264 blocks are 4 each for 256.
    """
    if config.is_fused:
        return -(-m // (config.rows * slab_tiles(m, config, sm_count)))
    if config.members > 1:  # each block of a team writes its part of the row
        return _shortest_walks(m, most_partial_rows(config, sm_count))
    strips = -(-n // config.width) if config.kernel == "strips" else 1
    tiles = -(-m // config.rows)
    blocks_per_sm = 1 if strips == 1 and tiles <= FEW_TILES * sm_count else config.occupancy
    blocks = max(1, sm_count * blocks_per_sm * config.share // 100 // strips)
    return _shortest_walks(tiles, blocks)


def most_partial_rows(config: Config, sm_count: int) -> int:
    """The largest P of a config that is not fused, for any number of rows; of strips an upper bound."""
    return max(1, sm_count * config.occupancy * config.share // 100 // config.members)


def _shortest_walks(tiles: int, blocks: int) -> int:
    """Of at most so many blocks, as few as leave the longest walk as short as it can be."""
    return -(-tiles // -(-tiles // blocks))


def slab_tiles(m: int, config: Config, sm_count: int) -> int:
    """Row tiles in a slab of a fused backward: the config's, fewer if that is all, more where P would pass 4 per SM."""
    tiles = -(-m // config.rows)
    return max(min(config.slab // config.rows, tiles), -(-tiles // (MOST_SLABS * sm_count)))
