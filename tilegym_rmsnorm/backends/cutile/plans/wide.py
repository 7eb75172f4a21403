# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The rules of rules.py for rows that the registers of one block do not hold: functions of numbers.

The numbers of a Config that have no name are its width, warps, blocks an SM and latency, and of two tiles the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, two_tiles
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID_Y

WIDEST_SLABBED_ROW = 131072  # elements of which 32 rows of x and dy fit the L2 of an H100
STRIP = 2048  # columns
_TEAMS_BY_TMA = "up to 32 bytes: 3264x20480 takes 147.7 us on an H100 with 16, gathered, without, 194.1"
_TEAMS_OF_PAIRS = (
    "up to 16 bytes, 56 beside a float32 weight casting as llama: 816x81904 takes 155.5 us on an H100 with 16, in one "
    "tile of 8192 a block, without, 163.1"
)
NINE_TILES = 18432  # columns, of 2048 a tile: without a sum of dw one block's registers hold them
MOST_MEMBERS = 16  # of a team: an eighth of the 132 SMs of an H100 (machine.py says why)


def forward_teams_config(n: int, itemsize: int, most_members: int) -> Config | None:
    """Rows of a forward shared by blocks of which an SM holds several, if any parts hold them with few lanes empty.

    How large the parts are, and how many fit an SM, matters little: 2048x65536 181.4 to 183.6 us by 4 to 16 members,
    float32 358.0 to 361.3.
    """
    is_float = itemsize == 4
    parts = ((4096, 1), (1024, 3), (2048, 1)) if is_float else ((8192, 1), (2048, 3), (1024, 5), (4096, 1))
    reason = "a team of blocks a row, each with so little of it that an SM holds several"
    if found := fewest_members(n, parts, most_members):
        width, pieces, members = found
        packed = not is_float
        return Config("teams", width, 4, 2, 4, pieces=pieces, members=members, packed=packed, reason=reason)
    if is_float and (found := fewest_members(n, ((8192, 1),), most_members)):
        return Config("teams", 8192, 8, 2, 4, members=found[2], reason=reason)
    return None


def forward_teams_beside_float32(n: int, most_members: int) -> Config | None:
    """The same for x of 2 bytes beside a float32 weight, in tiles narrow enough that a thread gets of it what it needs
    (hopper.FORWARD_BESIDE_FLOAT). 1024x65536, beside a weight of x's dtype in brackets: H200 105.4 -> 89.2 us (70.4),
    H100 122.3 -> 105.1 (93.3); 128x65536: H200 18.6 -> 14.6 (13.8).

    Few widths have such teams: those up to 512 below a multiple of 4096, beyond 65536 of 8192.
    """
    found = fewest_members(n, ((512, 8), (512, 16)), most_members)
    if found is None:
        return None
    width, pieces, members = found
    reason = "a team of blocks a row, in tiles that suit a float32 weight"
    return Config("teams", width, 4, 2, 4, pieces=pieces, members=members, packed=True, reason=reason)


def fewest_members(
    n: int, parts: Sequence[tuple[int, int]], most_members: int, most_lanes: float = 9 / 8
) -> tuple[int, int, int] | None:
    """The first of these parts (columns of a tile, tiles) of which so few hold a row in at most so many lanes an
    element, and how many that are."""
    for width, pieces in parts:
        part = width * pieces
        members = -(-n // part)
        lanes = members * part
        if members <= min(most_members, MOST_MEMBERS) and lanes <= n * most_lanes and lanes - width < n:
            return width, pieces, members
    return None


def backward_teams_config(n: int, itemsize: int, size: str, has_dw: bool, most_members: int) -> Config | None:
    """Rows shared by blocks whose registers hold them, if a team of few enough does.

    In the first of these parts of which at most 16 hold the row, none with a tile without columns. All come by TMA but
    the few rows' parts of 4096, which are gathered:

        16 bits with dw, large calls    above 65536 columns two tiles of 8192, packed; three of 2048; 4096; 8192
                         few rows       4096; three of 2048; 8192 (config.WIDEST_FEW_BY_SLABS: from which width on)
        dx alone of 16 bits             8192
        float32                         4096; 8192

    us of large calls, H100 and H200 (cuda-tile 1.7.0, tileiras 13.4.92), by gathers -> by these:

                                          by gathers of
        bfloat16            4096x18432    3 * 2048    182.8, 153.3 -> 159.6, 131.3
                            3264x20480    4096        194.1, 175.4 -> 147.7, 125.7
                            2336x28672    4096        199.5, 181.7 -> 149.3, 124.6
                            1632x40960    4096        206.2, 191.0 -> 149.4, 129.5
        bfloat16, dx alone  3632x18448    4096        205.9, 189.9 -> 142.7, 118.5
                            2720x24576    8192        144.8, 115.1 -> 139.7, 100.2
                            1632x40960    8192        150.8, 121.7 -> 135.8, 102.5
        float32             1168x28672    4096        143.5, 108.0 -> 141.1, 105.8
                            816x40960     5 * 1024    147.6, 116.7 -> 140.6, 105.6
                            576x57344     4096        143.4, 111.6 -> 139.3, 106.9
        float32, dx alone   1808x18448    4096        137.3, 104.0 -> 139.7, 102.6
                            816x40960     5 * 1024    145.5, 115.3 -> 137.4, 102.4
                            576x57344     4096        138.8, 107.1 -> 136.2, 103.8

    float32 rows of 16385 to 18432 columns would be faster in three tiles of 2048 by TMA on an H200 (dx alone 2032x16400
    99.4 us, by this 108.4), and slower on an H100 (142.9, 136.9).

    Above 65536 columns, by 8192 gathered, by 8192 by TMA (8 warps) and by two packed tiles of it, where those fit:

        bfloat16            816x81920     163.2, 137.8    158.9, 141.9    151.1, 122.6
                            512x131072    172.6, 144.4    162.9, 146.9    157.2, 127.3
        float16             816x81920     161.8, 136.3    172.8, 159.6    166.1, 140.7
                            512x131072    170.8, 143.4    177.1, 161.9    160.8, 138.4
        beside float32      816x81920     199.5, 166.0    168.8, 153.1    154.0, 132.4
        (bfloat16)          512x131072    194.8, 166.9    173.1, 158.1    159.3, 135.1

    Rules know the bytes of an element, not the dtype, and a float32 weight only where beside_float32_config has them.
    So one tile of 8192, by TMA, serves 736x90112 in 157.6, 141.7 (bfloat16; gathered 161.1, 136.4), 171.0, 157.0
    (float16; 159.7, 134.7), 167.0, 151.6 (bfloat16 beside float32; 199.3, 166.3) and 182.0, 170.0 (float16 beside
    float32; 190.9, 161.2). On an H100 64 to 128 rows take up to 17 % longer by two tiles than by one.
    """
    if itemsize == 4:
        parts = [(4096, 1), (8192, 1)]
    elif not has_dw:
        parts = [(8192, 1)]
    elif size == "few":
        parts = [(4096, 1), (2048, 3), (8192, 1)]
    else:
        parts = [(2048, 3), (4096, 1), (8192, 1)]
        if n > MOST_MEMBERS * 4096:
            parts = [(8192, 2), *parts]
    found = fewest_members(n, parts, most_members, most_lanes=4 / 3)  # 18448 columns in parts of 8192
    if found is None:
        return None
    width, pieces, members = found
    is_gathered = itemsize == 2 and has_dw and size == "few" and width == 4096
    is_pairs = pieces == 2
    fills_an_sm = width == 8192 and (has_dw or itemsize == 4)
    spills = _TEAMS_OF_PAIRS if is_pairs else _TEAMS_BY_TMA
    return Config(
        "teams",
        width,
        warps=8 if fills_an_sm else 4,
        occupancy=1 if fills_an_sm else 3 if width == 4096 and itemsize == 2 else 2,
        latency=2 if is_gathered else 4,
        pieces=pieces,
        members=members,
        tma=not is_gathered,
        packed=is_pairs,
        reason="a team of blocks a row, each with as much of it as its registers hold",
        spills="" if is_gathered or itemsize == 4 else spills,
    )


def nine_tiles_config() -> Config:
    """dx alone of 16385 to 18432 elements of 16 bits, by one block.

    us, H100 and H200, by three blocks of three tiles of 2048, by TMA -> by this: bfloat16 3840x17408 142.3 -> 142.6,
    117.3 -> 96.2; float16 4080x16400 154.3 -> 147.9, 126.7 -> 99.9. By three of 8192: 224x16400 13.0 -> 10.3, 11.9 ->
    8.2; beside a float32 weight 4080x16400 163.1 -> 150.5, 134.8 -> 100.3.
    """
    reason = "dx alone needs no registers for a sum: nine tiles fit one block"
    return Config("rows", 2048, 8, 1, 4, pieces=9, tma=True, reason=reason)


def float32_pairs_config() -> Config:
    """float32 rows of 12289 to 16384 elements, with dw, of large calls, by two blocks. us by one block in one tile,
    which spills, and by this: 4096x14336 H100 284.5, 240.5, H200 218.3, 182.1; 4096x16368 310.3, 293.5 (by 88 % of the
    blocks 273.7), 238.6, 199.2."""
    reason = "a team of two blocks a row, which spills in one"
    return Config("teams", 8192, 8, 1, 4, members=2, tma=True, reason=reason)


def slabs_config(n: int, itemsize: int) -> Config:
    """Rows whose x, dy and sum of dw no block's registers hold, read again from the L2 of a Hopper GPU.

    For few rows of up to config.WIDEST_FEW_BY_SLABS elements, and on a GPU, or a part of one, that does not hold a
    team's blocks.
    """
    reason = "too wide for registers: a slab of rows at a time, read again from L2"
    if itemsize == 4 and n <= 18432:
        width, rest = two_tiles(n)
        return Config("fused", width, 8, 1, 1, rest, rows=8, strip=1024, slab=32, reason=reason)
    if itemsize == 4:
        blocks, strip = (1, 1024) if n <= 49152 else (2, 512)
        spills = (
            "8 bytes at 131072 columns: 256x131072 298.4 us on an H100; no other kernel of slabs was tried"
            if n > 49152
            else ""
        )
        return Config(
            "fused_chunks",
            8192,
            warps=8,
            occupancy=blocks,
            latency=3,
            rows=8,
            strip=strip,
            slab=64,
            reason=reason,
            spills=spills,
        )
    if n <= 24576:
        return Config("fused_chunks", 4096, 8, 1, 1, rows=8, strip=512, slab=128, reason=reason)
    spills = (
        "40 bytes beside a float32 weight: 816x81920 388.9 us on an H100; no other kernel of slabs was tried"
    )
    strip, slab = (1024, 64) if n <= 49152 else (512, 32)
    return Config("fused_chunks", 8192, 8, 2, 3, rows=8, strip=strip, slab=slab, reason=reason, spills=spills)


def strips_config(n: int, architecture: int) -> Config:
    """Raises ValueError for rows of more strips than a launch has blocks in its second dimension."""
    if n > STRIP * LARGEST_GRID_Y:
        raise ValueError(
            f"a backward with dw: expected rows of at most {STRIP * LARGEST_GRID_Y} elements, got {n}: "
            'use backend="torch"'
        )
    reason = "too wide for registers: the mean of each row, then strips of columns; two passes over memory"
    if architecture < 90:
        return Config("strips", STRIP, 4, 2, 4, reason=reason)
    return Config("strips", STRIP, 4, 3, 4, tma=True, reason=reason)  # 4096x32768: 3003 of those 10 bytes


def chunks_config(itemsize: int, architecture: int) -> Config:
    # an H200, us: 4096x32768 270, 2048x65536 323, in float32 about 514 (best of 70: 496) and 633; by two passes an H100
    # took 509 for both, in float32 904
    reason = "dx alone, of rows too wide for registers: read twice, the second time from L2"
    return Config("chunks", 4096, 4, 2, 4 if itemsize == 2 else 3, tma=architecture >= 90, reason=reason)


def means_config(architecture: int) -> Config:
    """The kernel that reads wide rows for their mean, before the strips."""
    has_tma = architecture >= 90
    reason = "4096x32768: 2986 GB/s of x and dy"
    return Config("means", 4096 if has_tma else 2048, 4, 4, 4, tma=has_tma, reason=reason)


def clear_config() -> Config:
    """The kernel that empties the board of a launch by teams, so many of its rows a block.

    A board has a multiple of them, so that the kernels on it are compiled once for any M.
    """
    return Config("clear", 1, 4, 4, 1, rows=16, reason="64 KB of slots for 4096 rows")
