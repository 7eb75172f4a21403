# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which kernel runs a row of N elements, with which tile and compiler hints: pure functions of numbers.

Neither torch nor cuda.tile is imported, no tensor is seen; a CPU test sweeps them. What is compiled depends on N, the
element sizes of x and the weight, the architecture and three size classes of M; within a class M and the number of SMs
decide how many blocks are launched (sizes.py), so a new batch size compiles nothing (but for the classes of extents
that cuda-tile itself tells apart).

The rules for sm_90 are measurements (hopper.py, and the comments here: shape and us, or GB/s). Other architectures, and
rows that are not aligned (`_is_aligned`), get rules that follow the same reasons: thresholds in elements where
registers decide, which hold float32 whatever the dtype, and in bytes where the bytes in flight do. The tests compile a
sample of them for each architecture; they were not timed.

The numbers of a Config that have no name are its width, warps, blocks an SM and latency, and of two tiles the rest.
"""

from __future__ import annotations

from tilegym_rmsnorm.backends.cutile.plans import hopper
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two, two_tiles
from tilegym_rmsnorm.backends.cutile.plans.wide import (
    MOST_MEMBERS,
    NINE_TILES,
    WIDEST_SLABBED_ROW,
    backward_teams_config,
    chunks_config,
    float32_pairs_config,
    forward_teams_beside_float32,
    forward_teams_config,
    nine_tiles_config,
    slabs_config,
    strips_config,
)

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDEST_FORWARD_ROW = 32768  # elements that one block of 8 warps holds in registers, float32: 128 each thread
# Elements up to which few rows with dw take slabs, above which teams, by bytes of an element. us, H200, 1, 16, 64 and
# 2**22 / N rows, by slabs and by teams: bfloat16 28672 8.4, 7.8, 9.9, 15.5 and 4.5, 8.1, 12.2, 17.0; 40960 11.3, 10.0,
# 12.7, 16.9 and 4.5, 7.7, 13.0, 16.5; float32 16400 4.2, 4.7, 7.5, 19.6 and 4.8, 7.9, 11.9, 20.4; 18448 6.3, 6.9, 12.1,
# 25.5 and 5.1, 8.0, 12.3, 21.0. So at some numbers of rows slabs are faster above these widths and teams below
# them. H100: bfloat16 1, 16 and 96 rows of 40960 11.2, 10.0, 18.2 and 4.5, 8.2, 18.7; float32 1, 16 and 224 of 18448
# 6.3, 7.0, 28.7 and 4.8, 8.4, 24.6
WIDEST_FEW_BY_SLABS = {2: 32768, 4: 18432}
WIDEST_FUSED_ROW = 16384  # elements of x and dy: 128 registers, float32, in each thread of 8 warps


def forward_config(
    n: int, itemsize: int, architecture: int, size: str = "large", most_members: int = MOST_MEMBERS
) -> Config:
    """The forward kernel for rows of n elements of `itemsize` bytes, on sm_{architecture}.

    A block reads its row once and waits for it once, so what counts is how many blocks an SM holds: as many as fit. On
    Hopper x and the weight are mostly waited for together, and rows are cut into equal tiles: above 2048 columns at
    most a third of the lanes is empty. Narrow rows share a block, mostly 1024 to 4096 elements: with fewer, launching
    blocks costs more than their work.
    """
    _check(n, itemsize, architecture)
    width = power_of_two(n)
    has_tma = architecture >= 90
    if architecture == 90 and _is_aligned(n, itemsize):
        # Elements that one block holds as fast as a team would. H100, 4096x32768: bfloat16 181.7 and 181.2 us, float32
        # 370.0 and 357.7. Few rows of up to 32768 keep one block.
        held = WIDEST_FORWARD_ROW if size == "few" else 16384 if itemsize == 4 else 24576
        if n > held and (config := forward_teams_config(n, itemsize, most_members)) is not None:
            return config
    if n > WIDEST_FORWARD_ROW:
        reason = "no registers hold the row: it is read twice, the second time from L2"
        if architecture == 90 and itemsize == 2:
            return Config("chunks", 16384, 8, 1, 3, tma=True, reason=reason)
        return Config("chunks", 4096, 8, 2, 4, tma=has_tma, reason=reason)
    if architecture == 90 and _is_aligned(n, itemsize):
        if size == "few":
            table = hopper.FORWARD_FEW_HALF if itemsize == 2 else hopper.FORWARD_FEW_FLOAT
        else:
            table = hopper.FORWARD_HALF if itemsize == 2 else hopper.FORWARD_FLOAT
        return _from_table(n, itemsize, table)
    if n <= 512:
        rows = min(256, max(2048, 64 * min(width, 64)) // width)
        # With 8 blocks tileiras keeps to 32 registers a thread: sm_100 and later spill then, and where N is no multiple
        # of 16 others did, before kernels knew what divides it.
        occupancy = 8 if architecture < 100 and n % 16 == 0 else 4
        return Config("tiles", width, 4, occupancy, 4, rows=rows, reason="2048 elements a block")
    if n <= 1024:
        return Config("rows", width, 4, 8, 2, reason="a row a block: nothing to wait for but the row")
    width, rest = two_tiles(n)
    if n <= 8192:
        occupancy = 4 if n % 16 == 0 else 2
        return Config("rows", width, 8, occupancy, 4, rest, reason="4 blocks of 8 warps fill an SM")
    if width == 32768:
        width, rest = 16384, 16384
    return Config(
        "rows", width, 8, 1, 4, rest, reason="64 and more elements a thread leave room for one block"
    )


def backward_config(
    n: int,
    itemsize: int,
    architecture: int,
    size: str = "large",
    has_dw: bool = True,
    most_members: int = MOST_MEMBERS,
) -> Config:
    """The kernel that computes dx and the partial rows of dw, for rows of n elements on sm_{architecture}.

    The fused kernels and strips are for calls that need dw (has_dw): without it blocks for dw would have nothing to do,
    and rows that neither registers nor a team hold take "chunks". A team has at most so many members (most_members); on
    sm_90 teams hold rows of more than 16384 elements (dx alone of 16 bits: of more than 18432; few rows with dw: of
    more than WIDEST_FEW_BY_SLABS), and float32 ones of more than 12288 in large calls with dw.

    A block keeps weight and its sum of dw, in float32, for the whole row in registers: 8 warps as soon as that is 16
    elements a thread. It waits for x and dy at every step, so loads are issued ahead (latency), and tiles of 4096
    elements or more keep enough bytes in flight.
    """
    _check(n, itemsize, architecture)
    if has_dw and size == "few" and n <= WIDEST_FUSED_ROW:
        return _few_rows_config(n, itemsize)
    if architecture == 90 and _is_aligned(n, itemsize) and 16384 < n <= WIDEST_SLABBED_ROW:
        if n <= NINE_TILES and itemsize == 2 and not has_dw:
            return nine_tiles_config()
        by_slabs = has_dw and size == "few" and n <= WIDEST_FEW_BY_SLABS[itemsize]
        if not by_slabs and (config := backward_teams_config(n, itemsize, size, has_dw, most_members)):
            return config
        if has_dw:
            return slabs_config(n, itemsize)
    if architecture == 90 and _is_aligned(n, itemsize) and 12288 < n <= 16384 and most_members > 1:
        if itemsize == 4 and has_dw and size == "large":
            return float32_pairs_config()
    if n > widest_backward_row(n, itemsize, architecture):
        return strips_config(n, architecture) if has_dw else chunks_config(itemsize, architecture)
    if architecture == 90 and _is_aligned(n, itemsize):
        table = hopper.BACKWARD_HALF if itemsize == 2 else hopper.BACKWARD_FLOAT
        return _from_table(n, itemsize, table)
    width, rest = two_tiles(n)
    row_bytes = n * itemsize
    if row_bytes <= 2048:
        rows = min(256, max(1, 8192 // (width * itemsize)))
        reason = "8 KB of x a step; two blocks hide each other's waits"
        return Config("tiles", width, 4, 2, 4, rows=rows, tma=architecture >= 90, reason=reason)
    if row_bytes <= 4096:
        return Config("rows", width, 4, 2, 4, rest, reason="at most 16 elements a thread")
    if row_bytes <= 8192:
        return Config("rows", width, 8, 2, 4, rest, reason="at most 16 elements a thread, two blocks an SM")
    if width == 16384:
        # As one tile it spills on sm_100 and later.
        width, rest = 8192, 8192
    return Config("rows", width, 8, 1, 4, rest, reason="one block has all registers of an SM")


def beside_float32_config(
    op: str, n: int, itemsize: int, architecture: int, size: str, most_members: int = MOST_MEMBERS
) -> Config | None:
    """What serves rows of 2-byte elements beside a float32 weight; None: what serves them beside one of x's dtype.

    op: of selector.RULES. Measured on sm_90 alone, where tiles that suit a weight of 2 bytes took up to 1.5 times as
    long beside one of 4 (H200, 2048x32768: 103.6 us instead of 70.0). Of backwards large ones with dw.
    """
    if itemsize != 2 or architecture != 90 or not _is_aligned(n, itemsize):
        return None
    if op == "forward" and n > WIDEST_FORWARD_ROW:
        return forward_teams_beside_float32(n, most_members)
    if op == "forward":
        table: tuple[hopper.Same | hopper.Rule, ...]
        table = hopper.FORWARD_FEW_BESIDE_FLOAT if size == "few" else hopper.FORWARD_BESIDE_FLOAT
    else:
        table = hopper.BACKWARD_BESIDE_FLOAT if op == "backward" and size == "large" else ()
    rule = next((rule for rule in table if n <= rule.up_to), None)
    return _config_of(rule, n, itemsize) if isinstance(rule, hopper.Rule) else None


def _few_rows_config(n: int, itemsize: int) -> Config:
    """Few rows: narrow strips of dw, since every strip is a block, and tall tiles, since a strip's block goes down all
    rows of its slab. More than one slab, and so a sum after it, have x of at most 512 columns (from 257 rows on), which
    has few strips, and float32 of more than 12288 (from 129 rows on).

    Microseconds, H100, bfloat16, at 1024 rows and up to 4 Mi elements, with backward_rows or backward_tiles and by
    this: 256 columns 5.8, 4.2; 1024 7.5, 6.1; 2048 10.3, 8.2; 4096 14.2, 12.0; 8192 14.4, 11.8; 16x4096 3.9, 2.3. Of
    this kernel's configs, by `tune`: up to 512 columns tiles of 128 rows for 2-byte elements (128x256 1.76, of 64 rows
    2.08), of 64 for float32; 1024 8 warps and one slab 6.10 (4 warps, slabs of 256 rows: 6.35); float32 336x12288 22.3
    (64 x 64 at latency 1: 29.5), 256x16384 by 16 x 256 24.6 (28.6 by 64 x 64).
    """
    width, rest = two_tiles(n)
    reason = "few rows: dx by rows and dw by columns in one launch"
    if n <= 512:
        rows = 128 if itemsize == 2 else 64
        return Config("fused", width, 4, 1, 1, rest, rows=rows, strip=16, slab=256, reason=reason)
    if n <= 2048:
        return Config("fused", width, 8, 1, 1, rest, rows=64, strip=16, slab=1024, reason=reason)
    if n <= 4096:
        return Config("fused", width, 8, 1, 1, rest, rows=128, strip=32, slab=1024, reason=reason)
    if n > 12288 and itemsize == 4:
        return Config("fused", width, 8, 1, 1, rest, rows=16, strip=256, slab=128, reason=reason)
    if n > 8192 and itemsize == 4:
        return Config("fused", width, 8, 1, 2, rest, rows=32, strip=64, slab=1024, reason=reason)
    return Config("fused", width, 8, 1, 1, rest, rows=64, strip=64, slab=1024, reason=reason)


def widest_backward_row(n: int, itemsize: int, architecture: int) -> int:
    """Elements of the widest row of n's kind of which a block's registers hold x, dy, weight and the sum of dw.

    On sm_90 a kernel that spills a little is kept (`spills` of hopper.Rule says why), elsewhere none may spill.
    Unaligned rows need registers for addresses.
    """
    if not _is_aligned(n, itemsize):
        return 8192
    return 16384 if itemsize == 2 or architecture == 90 else 12288


def sum_config(first: Config, n: int, architecture: int) -> Config:
    """The kernel that adds the partial rows that the first kernel of a backward leaves.

    Narrow strips, so that even 1024 columns are 64 blocks. Each step of them waits for memory, so where several blocks
    an SM leave more than 128 partial rows a step takes 256; us, whole backward, H200: one step instead of two (P = 256)
    8192x2560 39.1 -> 38.3, 2048x2560 13.8 -> 12.9, two instead of three (261) 16384x2880 78.0 -> 77.2; where P is 128,
    4096x16384, 116.4 -> 117.0. With room for four blocks the taller tile spilled where N is no multiple of 16, before
    kernels knew what divides it; not timed with four since.

    Teams of many members and slabs leave fewer partial rows of more than 16384 columns, which fill little of such a
    tile. H100 (cuda-tile 1.7.0, tileiras 13.4.92), teams: 16x65536 (16 partial rows) 12.98 -> 9.44, 2048x65536 (33)
    309.8 -> 307.0, float32 128x32768 (43) 27.31 -> 26.53; with 66 and more nothing. Slabs: 128x32768 (2) 19.58 ->
    17.24, float32 64x18432 (2) 11.44 -> 10.04, 512x131072 (8) 592.7 -> 584.6; more than 8 were not timed, nor
    slabs of 16384 columns and fewer.

    All timed on sm_90 alone.
    """
    rows, width, occupancy = _sum_tile_on_hopper(first, n) if architecture == 90 else (128, 16, 4)
    return Config("sum", width, 4, occupancy, 4, rows=rows, reason="1.1 to 5.1 us after the first kernel")


def _sum_tile_on_hopper(first: Config, n: int) -> tuple[int, int, int]:
    """Rows, columns, and blocks an SM that the compiler leaves room for."""
    if first.kernel in ("rows", "tiles") and first.occupancy > 1:
        return 256, 16, 2
    if n > WIDEST_FUSED_ROW and first.is_fused:
        return 4, 512, 4
    # P is at most SMs * occupancy / members: on 132 SMs 49 of these; others, timed from 66 on, gained nothing
    if n > WIDEST_FUSED_ROW and 3 * first.members >= 8 * first.occupancy:
        return 32, 128, 2
    return 128, 16, 4


def row_partials_config(n: int, itemsize: int, architecture: int, most_members: int = MOST_MEMBERS) -> Config:
    """The config of the plan P = M, one float32 temporary row per row of x: 14 bytes a bf16 element instead of 6.

    Its two kernels (three for wide rows) are the easiest to understand. `bench/run.sh --p-rows` measures it; against
    few rows, whose own kernel is backward_split, that compares more than shared temporary rows.
    """
    is_wide = n > WIDEST_FUSED_ROW  # dx alone has no registers left there for a row's terms of dw
    config = backward_config(n, itemsize, architecture, has_dw=is_wide, most_members=most_members)
    if config.kernel == "tiles":
        width, rest = two_tiles(n)
        return Config("rows", width, config.warps, config.occupancy, config.latency, rest, reason="P = M")
    return strips_config(n, architecture) if config.kernel == "chunks" or config.is_fused else config


def uses_dependent_launch(architecture: int) -> bool:
    """Programmatic dependent launch came with Hopper: the next kernel's blocks start while the last of this one run."""
    return architecture >= 90


def _from_table(n: int, itemsize: int, table: tuple[hopper.Rule, ...]) -> Config:
    return _config_of(next(rule for rule in table if n <= rule.up_to), n, itemsize)


def _config_of(rule: hopper.Rule, n: int, itemsize: int) -> Config:
    width, rest = two_tiles(n) if rule.split else (rule.piece or power_of_two(n), rule.rest)
    return Config(
        rule.kernel,
        width,
        rule.warps,
        rule.occupancy,
        rule.latency,
        rest,
        rule.rows,
        tma=rule.tma,
        short=rule.short,
        early_weight=rule.early_weight,
        together=rule.together,
        pieces=-(-n // rule.piece) if rule.piece and not rule.rest else 1,
        packed=rule.packed,
        reason=f"measured: the rule for up to {rule.up_to} elements of {itemsize} bytes",
        spills=rule.spills,
    )


def _is_aligned(n: int, itemsize: int) -> bool:
    """Whether every row of a contiguous array begins at a multiple of 16 bytes, so that it can be read 16 at a time.

    Where N is no multiple of 16, bounds checks take registers, and rows of more than 12288 elements left none: those
    count as not aligned. (Not tried since kernels know what divides N.)
    """
    return n * itemsize % 16 == 0 and (n % 16 == 0 or n <= 12288)


def _check(n: int, itemsize: int, architecture: int) -> None:
    if n < 1 or itemsize not in (2, 4) or architecture not in ARCHITECTURES:
        expected = f"n >= 1, itemsize 2 or 4, architecture one of {ARCHITECTURES}"
        raise ValueError(f"expected {expected}, got {n}, {itemsize}, {architecture}")
