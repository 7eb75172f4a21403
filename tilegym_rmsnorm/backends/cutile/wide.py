# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The rules of config.py for rows that the registers of one block do not hold: functions of numbers.

The numbers of a Config that have no name are its width, warps, blocks an SM and latency, and of two tiles the rest.
"""

from __future__ import annotations

from tilegym_rmsnorm.backends.cutile.kernel_config import Config, two_tiles
from tilegym_rmsnorm.backends.cutile.sizes import LARGEST_GRID_Y

WIDEST_SLABBED_ROW = 131072  # elements of which 32 rows of x and dy fit the L2 of an H100
STRIP = 2048  # columns
_TEAMS_BY_TMA = (
    "up to 16 bytes: 3264x20480 takes 147.5 us with 16 of them on an H100, by gathers 379.7 without"
)
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
    n: int, parts: tuple[tuple[int, int], ...], most_members: int, most_lanes: float = 9 / 8
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
    """Rows shared by as few blocks as hold them in registers with at most a ninth of their lanes empty, if any do.

    Of few rows by more: 1x65536 in 4.1 us, by slabs 16.9. 8192 columns with bounds checks spill, as more of float32 do.

    Large ones of 16 bits with dw by TMA, in parts of 3 * 2048 columns where those fit, or else of 4096. us, bfloat16,
    one H100 (cuda-tile 1.7.0, tileiras 13.4.92), beside a float32 weight in brackets:

                     gathered        3 * 2048        4096
        4096x18432   182.8           159.6                              H200: gathered 153.3, this 131.3
        3264x20480   379.7 (178.4)                   147.5 (144.7)
        2720x24576                   144.9 (144.8)   148.7 (145.7)
        2336x28672   199.6 (207.7)                   149.3 (147.6)
        2048x32768   159.7 (169.6)                   147.6 (147.2)      H200: 129.7 (143.3), this (121.8)
        1632x40960   160.0 (184.6)                   149.2 (146.3)
        1360x49152                   146.2 (146.6)   149.8 (146.6)
        1168x57344   160.0 (199.2)                   150.6 (147.2)

    Not without dw, where parts of 8192 take 240 bytes of stack beside a float32 weight; others were not tried.
    """
    reason = "a team of blocks a row, each with as much of it as its registers hold"
    if itemsize == 2 and size == "large" and has_dw:
        by_tma = fewest_members(n, ((2048, 3), (4096, 1)), most_members)
        # 20496 to 21840 and 24592 to 25472 columns would be gathered, by eleven blocks or in five tiles of 1024. This
        # was not timed.
        if by_tma := by_tma or fewest_members(n, ((4096, 1),), most_members, 6 / 5):
            width, pieces, members = by_tma
            return Config(
                "teams",
                width,
                warps=4,
                occupancy=2 if pieces == 3 else 3,
                latency=4,
                pieces=pieces,
                members=members,
                tma=True,
                reason=reason,
                spills=_TEAMS_BY_TMA,
            )
    spills = "up to 80 bytes beside a float32 weight, and up to 176 without dw beside any, neither timed"
    widest = ((8192, 1),) if itemsize == 2 and n % 8192 == 0 and size != "few" else ()
    found = fewest_members(n, (*widest, (2048, 3), (1024, 5), (4096, 1), (2048, 1)), most_members)
    if found is None:
        return None
    width, pieces, members = found
    part = width * pieces
    why = spills if itemsize == 2 and (part > 4096 or not has_dw) else ""
    # float32 1024x32768: 144 us with 3 blocks of 4096 columns an SM, 160 with 2
    occupancy = 4 if part <= 2048 else 3 if part == 4096 and itemsize == 4 else 2
    warps = 4
    if not has_dw and size == "few" and itemsize == 2 and part == 4096:
        # By 4 warps its loop takes 176 bytes of stack where there is no sum of dw. Not timed.
        warps, occupancy = 8, 1
    return Config(
        "teams", width, warps, occupancy, 2, pieces=pieces, members=members, reason=reason, spills=why
    )


def float32_pairs_config() -> Config:
    """float32 rows of 12289 to 16384 elements, with dw, of large calls, by two blocks. us by one block in one tile,
    which spills, and by this: 4096x14336 H100 284.5, 240.5, H200 218.3, 182.1; 4096x16368 310.3, 293.5 (by 88 % of the
    blocks 273.7), 238.6, 199.2."""
    reason = "a team of two blocks a row, which spills in one"
    return Config("teams", 8192, 8, 1, 4, members=2, tma=True, reason=reason)


def slabs_config(n: int, itemsize: int) -> Config:
    """Rows whose x, dy and sum of dw no block's registers hold, read again from the L2 of a Hopper GPU.

    For few rows that teams are not faster for, and for rows that no team holds, from 67600 elements on.
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
    spills = "not with a weight of x's dtype; a float32 weight takes 40 bytes of stack, and was not timed"
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
