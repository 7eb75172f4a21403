# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which kernel runs a row of N elements, with which tile and compiler hints: pure functions of numbers.

Neither torch nor cuda.tile is imported, no tensor is seen; a CPU test sweeps them. What is compiled depends on N, the
element size, the architecture and three size classes of M (`size_class`); within a class M and the number of SMs decide
how many blocks are launched (`partial_rows`), so a new batch size compiles nothing (but for the classes of extents that
cuda-tile itself tells apart).

The tables are measurements: one H100 80GB HBM3, driver 580.159, cuda-tile 1.7.0, tileiras 13.4.92, cold L2, CUDA
graphs, of some 4000 kernels tried (bench/NOTES.md). A rule's comment gives shape and GB/s of compulsory bytes, in the
backward of the first kernel alone (copy of the same run: 2991); the whole is in bench/results. Other architectures, and
rows that do not begin at multiples of 16 bytes, get rules that follow the same reasons: thresholds in elements where
registers decide, which hold float32 whatever the dtype, and in bytes where the bytes in flight do. The tests compile
them for each architecture; they were not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDEST_FORWARD_ROW = 32768  # elements that one block of 8 warps holds in registers, float32: 128 each thread
WIDEST_FUSED_ROW = 16384  # elements of x and dy: 128 registers, float32, in each thread of 8 warps
FEW_TILES = 8  # row tiles per SM
MOST_SLABS = 4  # per SM
FEW_ROWS = 1024
SMALL = 4 * 2**20  # elements of x: 8 MB in bfloat16
SIZES = ("few", "small", "large")
LARGEST_GRID = 2**24 - 1  # blocks in one dimension of a launch, cuda-tile's limit
NO_END = 2**62  # more rows than any memory holds


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled. Extents are in elements."""

    kernel: str  # forward: "rows", "tiles", "chunks"; backward: "rows", "tiles", "fused", "fused_chunks", "strips"
    width: int  # columns of a tile, a power of two
    warps: int
    occupancy: int  # blocks per SM that the compiler leaves room for
    latency: int  # cuda-tile's hint 1..10: how far ahead loads are issued, paid in shared memory
    rest: int = 0  # "rows", "fused": columns of a second tile, 0 for none
    rows: int = 1  # rows of a tile; "fused", "fused_chunks": of a tile of dy * xhat
    strip: int = 0  # "fused", "fused_chunks": columns of a tile of dy * xhat
    slab: int = 0  # "fused", "fused_chunks": rows of x that share a row of dw_partial, a multiple of `rows`
    tma: bool = False  # may tile loads and stores use TMA
    short: bool = False  # backward "rows": compile a way without the loop too, for as many blocks as rows
    early_weight: bool = False  # forward "rows": load the weight along with x
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
    tma: bool = False
    early_weight: bool = False


# forward and backward, rows of 2-byte and of 4-byte elements; a rule without a figure takes over from its neighbours
_HOPPER_FORWARD_HALF = (
    Rule(64, "tiles", 64, 4, 4, 4),  # 524288x64: 2910, 131072x64: 2666
    Rule(128, "tiles", 32, 4, 4, 4),  # 524288x128: 2950, 131072x128: 2817
    Rule(256, "tiles", 16, 8, 4, 4),  # 524288x256: 2996, 131072x256: 2913, 4096x256: 1338
    Rule(512, "tiles", 8, 4, 4, 4),
    Rule(1024, "tiles", 4, 4, 8, 4),  # 32768x1024: 2885, 16384x1024: 2790, 4096x1024: 2402
    Rule(2048, "rows", 1, 8, 4, 4, early_weight=True),  # 16384x2048: 2935
    Rule(2944, "rows", 1, 4, 4, 4, split=True, early_weight=True),  # 8192x2560: 2832, 16384x2880: 2941
    Rule(
        4096, "rows", 1, 8, 3, 4, split=True, early_weight=True
    ),  # 16384x3072: 2960, 16384x4096: 2973, 1024x4096: 2386
    Rule(5120, "rows", 1, 8, 2, 4, split=True, early_weight=True),  # 16384x5120: 2997
    Rule(6144, "rows", 1, 4, 3, 4, split=True, early_weight=True),  # 8192x6144: 2945
    Rule(8192, "rows", 1, 8, 2, 4, early_weight=True),  # 8192x8192: 2948
    Rule(16384, "rows", 1, 8, 2, 4),  # 8192x12288: 2974, 4096x16384: 2925
    Rule(24576, "rows", 1, 8, 1, 4, split=True),  # 4096x18432: 2907
    Rule(32768, "rows", 1, 8, 1, 4),  # 4096x32768: 2771
)
_HOPPER_FORWARD_FLOAT = (
    Rule(64, "tiles", 64, 4, 4, 4),
    Rule(128, "tiles", 32, 4, 4, 4),  # 131072x128: 2925
    Rule(256, "tiles", 16, 4, 4, 4),
    Rule(512, "tiles", 8, 4, 4, 4),
    Rule(1024, "tiles", 8, 8, 2, 4),  # 16384x1024: 2909, 4096x1024: 2743
    Rule(2048, "rows", 1, 8, 4, 4),
    Rule(4096, "rows", 1, 8, 4, 4, split=True),  # 8192x4096: 2959
    Rule(8192, "rows", 1, 8, 2, 4, early_weight=True),  # 8192x6144: 2987, 4096x8192: 2943
    Rule(16384, "rows", 1, 8, 1, 4),  # 4096x16384: 2964
    Rule(32768, "rows", 1, 8, 1, 4, early_weight=True),  # 2048x32768: 2868
)
_HOPPER_BACKWARD_HALF = (
    Rule(64, "tiles", 128, 8, 1, 2, tma=True),  # 524288x64: 2742
    Rule(128, "tiles", 16, 8, 3, 1),  # 524288x128: 2813 and 131072x128: 2430 with the dw kernel
    Rule(256, "tiles", 16, 8, 1, 2, tma=True),  # 524288x256: 2860, 131072x256: 2735
    Rule(512, "tiles", 8, 8, 1, 2, tma=True),  # 131072x512: 2853
    Rule(1024, "tiles", 8, 8, 1, 2, tma=True),  # 32768x1024: 2722, 4096x1024: 1973
    Rule(2048, "tiles", 4, 8, 1, 2, tma=True),  # 16384x2048: 2765
    Rule(2560, "rows", 1, 8, 2, 6, split=True, short=True),  # 16384x2560: 2788
    Rule(3072, "rows", 1, 4, 2, 4),  # 16384x3072: 2818, 16384x2880: 2773
    Rule(4095, "rows", 1, 8, 2, 4, short=True),  # 16384x3584: 2830
    Rule(4096, "rows", 1, 8, 1, 6, short=True),  # 16384x4096: 2857 and 1024x4096: 1943 with the dw kernel
    Rule(6144, "rows", 1, 8, 1, 6, split=True, short=True),  # 16384x5120: 2810, 16384x6144: 2932
    Rule(7168, "tiles", 2, 8, 1, 4, tma=True),  # 8192x7168: 2805
    Rule(8192, "rows", 1, 8, 1, 4, short=True),  # 8192x8192: 2784
    Rule(12288, "rows", 1, 8, 1, 8, split=True, short=True),  # 8192x12288: 2723
    Rule(16384, "rows", 1, 8, 1, 4, short=True),  # 4096x16384: 2758
    Rule(18432, "rows", 1, 8, 1, 4, split=True),  # 4096x18432: 2252
)
_HOPPER_BACKWARD_FLOAT = (
    Rule(64, "tiles", 32, 4, 1, 2, tma=True),
    Rule(128, "tiles", 16, 4, 1, 2, tma=True),
    Rule(256, "tiles", 8, 4, 1, 2, tma=True),  # 131072x256: 2902
    Rule(512, "tiles", 8, 8, 1, 2, tma=True),
    Rule(1024, "tiles", 4, 8, 1, 2, tma=True),  # 16384x1024: 2782
    Rule(2048, "tiles", 4, 8, 1, 2, tma=True),
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
# (op, itemsize, from N on): why a Hopper kernel that spills is kept
_SPILLS = {
    ("forward", 4, 16385): "2048x32768 reaches 2868 GB/s with 40 bytes of stack, in two tiles 2824",
    (
        "backward",
        2,
        16385,
    ): "4096x18432, which takes it where no dw is needed, reached 2252 GB/s with 104 bytes of stack",
    ("backward", 4, 12289): "4096x16384 reaches 2754 GB/s, 92 % of the copy, with 56 bytes of stack",
}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


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


def forward_config(n: int, itemsize: int, architecture: int, size: str = "large") -> Config:
    """The forward kernel for rows of n elements of `itemsize` bytes, on sm_{architecture}, whatever the size class.

    A block reads its row once and waits for it once, so what counts is how many blocks an SM holds: as many as fit.
    Narrow rows share a block, 2048 elements each, below which launching blocks costs more than their work.
    """
    _check(n, itemsize, architecture)
    width = power_of_two(n)
    has_tma = architecture >= 90
    if n > WIDEST_FORWARD_ROW:
        reason = "no registers hold the row: it is read twice, the second time from L2"
        if architecture == 90 and itemsize == 2:
            return Config("chunks", 16384, 8, 1, 3, tma=True, reason=reason)  # 2048x65536: 2298
        return Config("chunks", 4096, 8, 2, 4, tma=has_tma, reason=reason)
    if architecture == 90 and _is_aligned(n, itemsize):
        table = _HOPPER_FORWARD_HALF if itemsize == 2 else _HOPPER_FORWARD_FLOAT
        return _from_table("forward", n, itemsize, table)
    if n <= 512:
        rows = min(256, max(2048, 64 * min(width, 64)) // width)
        # With 8 blocks tileiras keeps to 32 registers a thread; sm_100 and later, and unaligned rows, spill then.
        occupancy = 8 if architecture < 100 and _is_aligned(n, itemsize) else 4
        return Config("tiles", width, 4, occupancy, 4, rows=rows, tma=has_tma, reason="2048 elements a block")
    if n <= 1024:
        return Config("rows", width, 4, 8, 2, reason="a row a block: nothing to wait for but the row")
    width, rest = _two_tiles(n)
    if n <= 8192:
        occupancy = 4 if _is_aligned(n, itemsize) else 2
        return Config("rows", width, 8, occupancy, 4, rest, reason="4 blocks of 8 warps fill an SM")
    if width == 32768:
        width, rest = 16384, 16384
    return Config(
        "rows", width, 8, 1, 4, rest, reason="64 and more elements a thread leave room for one block"
    )


def backward_config(
    n: int, itemsize: int, architecture: int, size: str = "large", has_dw: bool = True
) -> Config:
    """The kernel that computes dx and the partial rows of dw, for rows of n elements on sm_{architecture}.

    The fused kernels are for calls that need dw (has_dw): without it their blocks for dw would have nothing to do.

    A block keeps weight and its sum of dw, in float32, for the whole row in registers: 8 warps as soon as that is 16
    elements a thread. It waits for x and dy at every step, so loads are issued ahead (latency), and tiles of 4096
    elements or more keep enough bytes in flight.
    """
    _check(n, itemsize, architecture)
    if has_dw and size == "few" and n <= WIDEST_FUSED_ROW:
        return _few_rows_config(n)
    if has_dw and architecture == 90 and _is_aligned(n, itemsize) and n > 16384:
        return _wide_rows_config(n, itemsize)
    if n > widest_backward_row(n, itemsize, architecture):
        return _strips_config(architecture)
    if architecture == 90 and _is_aligned(n, itemsize):
        table = _HOPPER_BACKWARD_HALF if itemsize == 2 else _HOPPER_BACKWARD_FLOAT
        return _from_table("backward", n, itemsize, table)
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


def _few_rows_config(n: int) -> Config:
    """One launch for few rows (backward_fused.py): narrow strips, since every strip is a block, and tall tiles, since a
    strip's block goes down all rows of its slab. Only narrow x, which has few strips, takes more than one slab."""
    width, rest = _two_tiles(n)
    reason = "few rows: dx by rows and dw by columns in one launch"
    if (
        n <= 1024
    ):  # 128x1024: 2.1 us, with backward_tiles 5.8; 1024x1024: 6.2, not 7.5; 1024x256: 4.4, not 5.8
        return Config("fused", width, 4, 1, 1, rest, rows=64, strip=16, slab=256, reason=reason)
    if n <= 2048:  # 1024x2048: 8.1 us, with backward_tiles 10.3
        return Config("fused", width, 8, 1, 1, rest, rows=128, strip=16, slab=1024, reason=reason)
    if (
        n <= 4096
    ):  # 16x4096: 2.6 us, with backward_rows 3.9; 512x4096: 7.7, not 9.8; 1024x4096: 12.2, not 14.2
        return Config("fused", width, 8, 1, 1, rest, rows=128, strip=32, slab=1024, reason=reason)
    # 128x8192: 4.8 us, with backward_rows 8.2; 512x8192: 12.2, not 14.4; 256x16384: 17.5
    return Config("fused", width, 8, 1, 1, rest, rows=64, strip=64, slab=1024, reason=reason)


def _wide_rows_config(n: int, itemsize: int) -> Config:
    """Rows whose x, dy and sum of dw no block's registers hold, read again from the L2 of a Hopper GPU."""
    reason = "too wide for registers: a slab of rows at a time, read again from L2"
    if itemsize == 4 and n <= 18432:  # 4096x18432: 2646, with backward_rows 2602
        width, rest = _two_tiles(n)
        return Config("fused", width, 8, 1, 1, rest, rows=8, strip=1024, slab=32, reason=reason)
    if itemsize == 4:  # 2048x32768: 2367, 1024x65536: 1713 (with strips 1505)
        if n <= 49152:
            return Config("fused_chunks", 8192, 8, 1, 3, rows=8, strip=1024, slab=64, reason=reason)
        return Config("fused_chunks", 8192, 8, 2, 3, rows=8, strip=512, slab=64, reason=reason)
    if n <= 24576:  # 4096x18432: 2379, with backward_rows, which spills there, 2224
        return Config("fused_chunks", 4096, 8, 1, 1, rows=8, strip=512, slab=128, reason=reason)
    spills = "not with a weight of x's dtype; a float32 weight takes 40 bytes of stack, and was not timed"
    strip, slab = (
        (1024, 64) if n <= 49152 else (512, 32)
    )  # 4096x32768: 2310; 2048x65536: 1844, with strips 1781
    return Config("fused_chunks", 8192, 8, 2, 3, rows=8, strip=strip, slab=slab, reason=reason, spills=spills)


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


def _strips_config(architecture: int) -> Config:
    reason = (
        "too wide for registers: the mean of each row, then strips of columns; 10 bytes an element, not 6"
    )
    if architecture < 90:
        return Config("strips", 2048, 4, 2, 4, reason=reason)
    return Config("strips", 2048, 4, 3, 4, tma=True, reason=reason)  # 4096x32768: 3003 of those 10 bytes


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
    if config.slab:
        return -(-m // (config.rows * slab_tiles(m, config, sm_count)))
    strips = -(-n // config.width) if config.kernel == "strips" else 1
    tiles = -(-m // config.rows)
    blocks_per_sm = 1 if strips == 1 and tiles <= FEW_TILES * sm_count else config.occupancy
    blocks = max(1, sm_count * blocks_per_sm // strips)
    return -(-tiles // -(-tiles // blocks))


def slab_tiles(m: int, config: Config, sm_count: int) -> int:
    """Row tiles in a slab of a fused backward: the config's, fewer if that is all, more where P would pass 4 per SM."""
    tiles = -(-m // config.rows)
    return max(min(config.slab // config.rows, tiles), -(-tiles // (MOST_SLABS * sm_count)))


def row_partials_config(n: int, itemsize: int, architecture: int) -> Config:
    """The config of the plan P = M, one float32 temporary row per row of x: 14 bytes a bf16 element instead of 6.

    The two kernels are easiest to understand by it; it is measured to show what sharing temporary rows gains.
    """
    config = backward_config(n, itemsize, architecture, has_dw=False)
    if config.kernel == "tiles":
        width, rest = _two_tiles(n)
        return Config("rows", width, config.warps, config.occupancy, config.latency, rest, reason="P = M")
    return config


def uses_dependent_launch(architecture: int) -> bool:
    """Programmatic dependent launch came with Hopper: the next kernel's blocks start while the last of this one run."""
    return architecture >= 90


def _from_table(op: str, n: int, itemsize: int, table: tuple[Rule, ...]) -> Config:
    spills = [
        why for (op_, size, first), why in _SPILLS.items() if (op_, size) == (op, itemsize) and n >= first
    ]
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
        tma=rule.tma,
        short=rule.short,
        early_weight=rule.early_weight,
        reason=f"measured: the rule for up to {rule.up_to} elements of {itemsize} bytes",
        spills="; ".join(spills),
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
