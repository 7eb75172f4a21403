# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which kernel runs a row of N elements, with which tile and compiler hints: pure functions of numbers.

Neither torch nor cuda.tile is imported, no tensor is seen; a CPU test sweeps them. What is compiled depends on N, the
element size and the architecture only; M and the number of SMs decide how many blocks are launched (`partial_rows`),
so a new batch size compiles nothing (but for the classes of extents that cuda-tile itself tells apart).

The tables are measurements: one H100 80GB HBM3, driver 580.159, cuda-tile 1.7.0, tileiras 13.4.92, cold L2, CUDA
graphs, the first kernel of each op alone, of 2600 kernels tried. A rule's comment gives shape and GB/s of compulsory
bytes (copy of the same run: 2991); what it comes to with the dw kernel is in bench/results. Other architectures, and
rows that do not begin at multiples of 16 bytes, get rules that follow the same reasons: thresholds in elements where
registers decide, which hold float32 whatever the dtype, and in bytes where the bytes in flight do. The tests compile
them for each architecture; they were not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDEST_FORWARD_ROW = 32768  # elements that one block of 8 warps holds in registers, float32: 128 each thread
FEW_TILES = 8  # row tiles per SM
LARGEST_GRID = 2**24 - 1  # blocks in one dimension of a launch, cuda-tile's limit
# Elements of x, 8 MB in bfloat16, up to which launches and half-filled SMs count as much as bytes do. A config may
# differ on the two sides of it, and on nothing else that depends on M: batch sizes share compiled kernels.
SMALL = 4 * 2**20


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled. Extents are in elements."""

    kernel: str  # forward: "rows", "tiles", "chunks"; backward: "rows", "tiles", "strips"
    width: int  # columns of a tile, a power of two
    warps: int
    occupancy: int  # blocks per SM that the compiler leaves room for
    latency: int  # cuda-tile's hint 1..10: how far ahead loads are issued, paid in shared memory
    rest: int = 0  # "rows": columns of a second tile, 0 for none
    rows: int = 1  # rows of a tile
    tma: bool = False  # may tile loads and stores use TMA
    short: bool = False  # backward "rows": compile a way without the loop too, for as many blocks as rows
    reason: str = ""
    spills: str = ""  # why this config is kept although its kernel spills registers


class Rule(NamedTuple):
    up_to: int  # elements in a row
    kernel: str
    rows: int
    warps: int
    occupancy: int
    latency: int
    split: bool = False  # hold the row in two tiles
    short: bool = False


# rows of 2-byte elements
_HOPPER_BACKWARD_HALF = (
    Rule(64, "tiles", 128, 8, 1, 2),  # 524288x64: 2742
    Rule(128, "tiles", 32, 4, 1, 2),  # 524288x128: 2763, 131072x128: 2500
    Rule(256, "tiles", 16, 8, 1, 2),  # 524288x256: 2860, 131072x256: 2735
    Rule(512, "tiles", 8, 8, 1, 2),  # 131072x512: 2853
    Rule(1024, "tiles", 8, 8, 1, 2),  # 32768x1024: 2722, 4096x1024: 1973
    Rule(2048, "tiles", 4, 8, 1, 2),  # 16384x2048: 2765
    Rule(2560, "rows", 1, 8, 2, 6, split=True, short=True),  # 16384x2560: 2788
    Rule(3072, "rows", 1, 4, 2, 4),  # 16384x3072: 2818, 16384x2880: 2773
    Rule(4095, "rows", 1, 8, 2, 4, short=True),  # 16384x3584: 2830
    Rule(4096, "rows", 1, 8, 1, 6, short=True),  # 16384x4096: 2857 and 1024x4096: 1943 with the dw kernel
    Rule(6144, "rows", 1, 8, 1, 6, split=True, short=True),  # 16384x5120: 2810, 16384x6144: 2932
    Rule(7168, "tiles", 2, 8, 1, 4),  # 8192x7168: 2805
    Rule(8192, "rows", 1, 8, 1, 4, short=True),  # 8192x8192: 2784
    Rule(12288, "rows", 1, 8, 1, 8, split=True, short=True),  # 8192x12288: 2723
    Rule(16384, "rows", 1, 8, 1, 4, short=True),  # 4096x16384: 2758
    Rule(18432, "rows", 1, 8, 1, 4, split=True),  # 4096x18432: 2252
)
# rows of 4-byte elements; a rule without a figure takes over from its neighbours
_HOPPER_BACKWARD_FLOAT = (
    Rule(64, "tiles", 32, 4, 1, 2),
    Rule(128, "tiles", 16, 4, 1, 2),
    Rule(256, "tiles", 8, 4, 1, 2),  # 131072x256: 2902
    Rule(512, "tiles", 8, 8, 1, 2),
    Rule(1024, "tiles", 4, 8, 1, 2),  # 16384x1024: 2782
    Rule(2048, "tiles", 4, 8, 1, 2),
    Rule(2560, "rows", 1, 8, 2, 6, split=True),
    Rule(3072, "rows", 1, 8, 1, 4),
    Rule(4096, "rows", 1, 8, 1, 4),  # 8192x4096: 2825
    Rule(5120, "rows", 1, 8, 1, 8, split=True),  # 8192x5120: 2802
    Rule(6144, "rows", 1, 4, 1, 3, split=True),  # 8192x6144: 2911
    Rule(8192, "rows", 1, 8, 1, 4),  # 4096x8192: 2731
    Rule(12288, "rows", 1, 8, 1, 8, split=True),
    Rule(16384, "rows", 1, 8, 1, 8),  # 4096x16384: 2754
    Rule(18432, "rows", 1, 8, 1, 4, split=True),
)
# (itemsize, from N on): why a Hopper kernel that spills is kept
_SPILLS = {
    (2, 16385): "4096x18432 reaches 2252 GB/s with 104 bytes of stack; strips reach 1800 at 4096x32768",
    (4, 12289): "4096x16384 reaches 2754 GB/s, 92 % of the copy, with 56 bytes of stack",
}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def forward_config(n: int, itemsize: int, architecture: int) -> Config:
    """The forward kernel for rows of n elements of `itemsize` bytes, on sm_{architecture}.

    A block reads its row once and waits for it once, so what counts is how many blocks an SM holds: as many as fit.
    Narrow rows share a block, 2048 elements each, below which launching blocks costs more than their work.
    """
    _check(n, itemsize, architecture)
    width = power_of_two(n)
    has_tma = architecture >= 90
    if n > WIDEST_FORWARD_ROW:
        reason = "no registers hold the row: it is read twice, the second time from L2"
        return Config("chunks", 4096, 8, 2, 4, tma=has_tma, reason=reason)
    if n <= 512:
        # 524288x64 2755, 524288x128 2831, 524288x256 2934, 131072x512 2818; float32 131072x256 2812
        rows = min(256, max(2048, 64 * min(width, 64)) // width)
        # With 8 blocks tileiras keeps to 32 registers a thread; sm_100 and later, and unaligned rows, spill then.
        occupancy = 8 if architecture < 100 and _is_aligned(n, itemsize) else 4
        return Config("tiles", width, 4, occupancy, 4, rows=rows, tma=has_tma, reason="2048 elements a block")
    if n <= 1024:
        return Config("rows", width, 4, 8, 2, reason="32768x1024 2711, 4096x1024 1945 GB/s")
    # 2048: 2748, 3072: 2825, 4096: 2840, 5120: 2873, 6144: 2766, 7168: 2775, 8192: 2806 GB/s
    width, rest = _two_tiles(n)
    if n <= 8192:
        occupancy = 4 if _is_aligned(n, itemsize) else 2
        return Config("rows", width, 8, occupancy, 4, rest, reason="4 blocks of 8 warps fill an SM")
    if width == 32768:
        width, rest = 16384, 16384
    # 8192x12288: 2909 GB/s, 4096x16384 float32: 2883
    return Config(
        "rows", width, 8, 1, 4, rest, reason="64 and more elements a thread leave room for one block"
    )


def backward_config(n: int, itemsize: int, architecture: int) -> Config:
    """The kernel that computes dx and the partial rows of dw, for rows of n elements on sm_{architecture}.

    A block keeps weight and its sum of dw, in float32, for the whole row in registers: 8 warps as soon as that is 16
    elements a thread. It waits for x and dy at every step, so loads are issued ahead (latency), and tiles of 4096
    elements or more keep enough bytes in flight.
    """
    _check(n, itemsize, architecture)
    if n > widest_backward_row(n, itemsize, architecture):
        reason = (
            "too wide for registers: the mean of each row, then strips of columns; 10 bytes an element, not 6"
        )
        if architecture < 90:
            return Config("strips", 2048, 4, 2, 4, reason=reason)
        return Config("strips", 2048, 4, 3, 4, tma=True, reason=reason)  # 4096x32768: 3003
    if architecture == 90 and _is_aligned(n, itemsize):
        return _from_table(n, itemsize, _HOPPER_BACKWARD_HALF if itemsize == 2 else _HOPPER_BACKWARD_FLOAT)
    width, rest = _two_tiles(n)
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


def widest_backward_row(n: int, itemsize: int, architecture: int) -> int:
    """Elements of the widest row of n's kind of which a block's registers hold x, dy, weight and the sum of dw.

    Wider rows take 10 bytes of traffic an element instead of 6, so that a kernel that spills a little may still win:
    on sm_90 it was measured (see _SPILLS), elsewhere no kernel may spill. Unaligned rows need registers for addresses.
    """
    if not _is_aligned(n, itemsize):
        return 8192
    if architecture == 90:
        return 18432
    return 16384 if itemsize == 2 else 12288


def means_config(architecture: int) -> Config:
    """The kernel that reads wide rows for their mean, before the strips."""
    has_tma = architecture >= 90
    reason = "4096x32768: 2986 GB/s of x and dy"
    return Config("means", 4096 if has_tma else 2048, 4, 4, 4, tma=has_tma, reason=reason)


def sum_config() -> Config:
    """The kernel that adds the partial rows: narrow strips, so that even 1024 columns are 64 blocks."""
    return Config("sum", 16, 4, 4, 4, rows=128, reason="1.1 to 2 us after the dx kernel")


def partial_rows(m: int, n: int, config: Config, sm_count: int) -> int:
    """P: how many blocks walk the rows of a backward, each leaving one row of dw_partial.

    A few per SM; one where few rows make the partial rows a good part of all traffic (512x4096: 10.6 us with 128
    blocks, 11.2 with 256). And no more than make the longest walk as short as it can be: 1024 tiles for 264 blocks
    are 4 each for 256.
    """
    strips = -(-n // config.width) if config.kernel == "strips" else 1
    tiles = -(-m // config.rows)
    blocks_per_sm = 1 if strips == 1 and tiles <= FEW_TILES * sm_count else config.occupancy
    blocks = max(1, sm_count * blocks_per_sm // strips)
    return -(-tiles // -(-tiles // blocks))


def row_partials_config(n: int, itemsize: int, architecture: int) -> Config:
    """The config of the plan P = M, one float32 temporary row per row of x: 14 bytes a bf16 element instead of 6.

    The two kernels are easiest to understand by it; it is measured to show what sharing temporary rows gains.
    """
    config = backward_config(n, itemsize, architecture)
    if config.kernel == "tiles":
        width, rest = _two_tiles(n)
        return Config("rows", width, config.warps, config.occupancy, config.latency, rest, reason="P = M")
    return config


def uses_dependent_launch(architecture: int) -> bool:
    """Programmatic dependent launch came with Hopper: the next kernel's blocks start while the last of this one run."""
    return architecture >= 90


def _from_table(n: int, itemsize: int, table: tuple[Rule, ...]) -> Config:
    rule = next(rule for rule in table if n <= rule.up_to)
    width, rest = _two_tiles(n) if rule.split else (power_of_two(n), 0)
    return Config(
        rule.kernel,
        width,
        rule.warps,
        rule.occupancy,
        rule.latency,
        rest,
        rule.rows,
        tma=rule.kernel == "tiles",
        short=rule.short,
        reason=f"measured: the rule for up to {rule.up_to} elements of {itemsize} bytes",
        spills="; ".join(why for (size, first), why in _SPILLS.items() if size == itemsize and n >= first),
    )


def _two_tiles(n: int) -> tuple[int, int]:
    """n as one tile, or as two where that leaves at most three quarters of the lanes of one: 5120 = 4096 + 1024.

    The second is at least an eighth of the first: less saves nothing, and would be a kernel of its own.
    """
    whole = power_of_two(n)
    width = whole // 2
    if n < 2048 or n == whole:
        return whole, 0
    rest = max(power_of_two(n - width), width // 8)
    return (width, rest) if width + rest <= whole * 3 // 4 else (whole, 0)


def _is_aligned(n: int, itemsize: int) -> bool:
    """Whether every row of a contiguous array begins at a multiple of 16 bytes, so that it can be read 16 at a time."""
    return n * itemsize % 16 == 0


def _check(n: int, itemsize: int, architecture: int) -> None:
    if n < 1 or itemsize not in (2, 4) or architecture not in ARCHITECTURES:
        expected = f"n >= 1, itemsize 2 or 4, architecture one of {ARCHITECTURES}"
        raise ValueError(f"expected {expected}, got {n}, {itemsize}, {architecture}")
