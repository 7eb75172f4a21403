# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The rules of config.py for rows that the registers of one block do not hold: functions of numbers.

The numbers of a Config that have no name are its width, warps, blocks an SM and latency, and of two tiles the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilegym_rmsnorm.backends.cutile.kernel_config import Config, two_tiles
from tilegym_rmsnorm.backends.cutile.sizes import LARGEST_GRID_Y

WIDEST_SLABBED_ROW = 131072  # elements of which 32 rows of x and dy fit the L2 of an H100
STRIP = 2048  # columns
_TEAMS_OF_HALF = (
    "up to 24 bytes of float16 without dw, 16 with: 3264x20480 takes 120.2 us with them on an H200, by gathers 131.4, "
    "and with dw 147.5 on an H100, by gathers 379.7 without"
)
_TEAMS_OF_FLOAT = "24 to 48 bytes: 1920x17408 takes 105.0 us so on an H200, in parts of 4096 without 109.0"
NINE_TILES = 18432  # columns, of 2048 a tile: three blocks hold them with a sum of dw, or one without
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

    By TMA, in parts of 4096 columns, of 8192 where no sum of dw takes registers or the row is too wide for 16 blocks of
    fewer, or of three tiles of 2048. us of large calls on an H100 and an H200 (cuda-tile 1.7.0, tileiras 13.4.92):

                                          gathered         by TMA
        bfloat16            4096x18432    182.8, 153.3     159.6, 131.3    3 * 2048
                            3264x20480    194.1, 175.4     147.7, 125.7    4096, as those below
                            2336x28672    199.5, 181.7     149.3, 124.6
                            1632x40960    206.2, 191.0     149.4, 129.5
        bfloat16, dx alone  3632x18448    205.9, 189.9     142.7, 118.5    8192, as those below
                            2720x24576    144.8, 115.1     139.7, 100.2
                            1632x40960    150.8, 121.7     135.8, 102.5
        float32             1632x20480    144.3, 111.6     141.8, 104.1    4096, as those below
                            816x40960     147.6, 116.7     140.6, 105.6
        float32, dx alone   1632x20480    142.6, 110.5     138.2, 100.7
                            816x40960     145.5, 115.3     137.4, 102.4

    Gathered in the same tiles, those of float32, and of 18448 columns, in five of 1024. A float32 weight beside
    bfloat16 changes "by TMA" by 3 % at most.

    More than 65536 columns were held by slabs. By those and by parts of 8192, of 8 warps, which have an SM to
    themselves: bfloat16 512x131072 314.7, 259.4 -> 162.6, 146.7 us, beside a float32 weight 432.2, 391.0 -> 173.2,
    158.3, float32 256x131072 298.4, 219.5 -> 145.7, 116.3, and bfloat16 1x131072 33.7, 33.4 -> 5.5, 5.4.

    Of few rows (config.WIDEST_FEW_BY_SLABS says which) those of 16 bits with dw are gathered, H200, 1, 16, 64 and 96
    rows of 40960: 4.5, 7.7, 13.0 and 16.5 us, by TMA 5.4, 8.6, 13.3 and 15.7.
    """
    is_half, is_dx_of_half = itemsize == 2, itemsize == 2 and not has_dw
    is_few_half = is_half and has_dw and size == "few"
    parts = [(2048, 3), (4096, 1), (8192, 1)]
    if is_dx_of_half:
        parts = [(8192, 1)]
    elif is_few_half or n > NINE_TILES and not is_half:
        parts = [(4096, 1), (2048, 3), (8192, 1)]
    found = fewest_members(n, parts, most_members, most_lanes=3 / 2)
    if found is None:
        return None
    width, pieces, members = found
    is_gathered = is_few_half and width == 4096
    fills_an_sm = width == 8192 and not is_dx_of_half
    spills = _TEAMS_OF_HALF if is_half else _TEAMS_OF_FLOAT if width == 2048 and has_dw else ""
    return Config(
        "teams",
        width,
        warps=8 if fills_an_sm else 4,
        occupancy=1 if fills_an_sm else 3 if width == 4096 and is_half else 2,
        latency=2 if is_gathered else 4,
        pieces=pieces,
        members=members,
        tma=not is_gathered,
        reason="a team of blocks a row, each with as much of it as its registers hold",
        spills="" if fills_an_sm else spills,
    )


def nine_tiles_config() -> Config:
    """dx alone of 16385 to 18432 elements of 16 bits, by one block. us, bfloat16, by three blocks -> by this: 16400
    columns, one H100, 1, 16 and 240 rows 5.08 -> 3.99, 5.65 -> 4.57, 13.6 -> 10.7; 3840x17408 143.9 -> 142.4, H200
    118.3 -> 96.3; beside a float32 weight 4080x16400 163.1 -> 150.5 and 134.8 -> 100.3."""
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

    For few rows that teams are not faster for, and on a GPU, or a part of one, that does not hold a team's blocks.
    """
    reason = "too wide for registers: a slab of rows at a time, read again from L2"
    if itemsize == 4 and n <= 18432:
        width, rest = two_tiles(n)
        return Config("fused", width, 8, 1, 1, rest, rows=8, strip=1024, slab=32, reason=reason)
    if itemsize == 4:
        blocks, strip = (1, 1024) if n <= 49152 else (2, 512)
        spills = "8 bytes of stack at 131072 columns, not timed" if n > 49152 else ""
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
    spills = "not with a weight of x's dtype; a float32 weight takes 40 bytes of stack: 816x81920 388.9 us on an H100"
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
