# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The rules of rules.py for sm_90, as measured: which kernel runs a row of up to so many elements, and how.

The forward: one H200, or one H100 where a comment says so; the backward: one H100 80GB HBM3, of some 2500 and 4000
kernels tried, and one H200 where a comment names it; driver 580.159, cuda-tile 1.7.0, tileiras 13.4.92, cold L2, CUDA
graphs (bench/NOTES.md). A rule's comment gives shapes. A figure without an arrow, of backwards, is GB/s of compulsory
bytes, and unless it says "with the sum of dw" of the first kernel alone, from before its launch became dependent and
its loop shorter (copy of that run: 2991); with one it is microseconds by what was there before and by this, of whole
calls, in the forward by the rule without `together` where the comment does not say by what. bench/results has the whole
of today. A rule without a figure takes over from its neighbours. _HALF are rows of 2-byte elements, _FLOAT of 4-byte
ones.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    up_to: int  # elements in a row
    kernel: str
    rows: int
    warps: int
    occupancy: int
    latency: int
    split: bool = False  # hold the row in two tiles
    piece: int = 0  # hold the row in equal tiles of so many columns
    rest: int = 0  # hold it in a tile of `piece` columns and one of so many
    short: bool = False
    tma: bool = False
    early_weight: bool = False
    together: bool = False
    packed: bool = False
    spills: str = ""  # why a kernel that spills registers is kept


# Up to how many elements: kernel, rows, warps, blocks an SM, latency
_NARROWEST = Rule(32, "tiles", 64, 4, 4, 4, together=True)  # as many rows as before `together`
# Above 24576 few rows, and others on a GPU too small for a team. Before in one tile: one H100, float16 16x32768 4.55 ->
# 4.01, 2x32768 4.39 -> 3.62, 128x32768 8.36 -> 8.35, bfloat16 4.77 -> 4.36, 4.60 -> 4.03, but 8.36 -> 8.69
_WIDEST_HALF = Rule(32768, "rows", 1, 8, 1, 4, piece=4096, together=True, packed=True)
_BY_TWO = (
    "8 bytes where the last tile is cut off; 32 beside a float32 weight, with which 4096x24576 takes 143.9 us on an "
    "H200, in two tiles 197.6"
)
FORWARD_HALF = (
    _NARROWEST,
    Rule(64, "tiles", 32, 4, 4, 4, together=True),  # 524288x64: 34.0 -> 33.5
    Rule(128, "tiles", 16, 4, 8, 4, together=True),  # 524288x128: 66.2 -> 65.0, 4096x128: 2.32 -> 1.97
    Rule(256, "tiles", 8, 4, 4, 4, together=True),  # float16 524288x256: 141.7 -> 128.0
    Rule(512, "tiles", 8, 4, 4, 4, together=True),  # 131072x512: 66.1 -> 65.8, 262144x320: 102.2 -> 99.2
    Rule(1023, "tiles", 4, 4, 8, 4, together=True),  # 131072x768: 100.3 -> 100.4, 1040x768: 2.51 -> 2.35
    # by 2 rows in one tile each -> this, H200: float16 32768x1024 34.4 -> 33.6, 4096x1024 6.99 -> 5.15, bfloat16 33.1
    # -> 33.6, 5.45 -> 5.20; H100: 47.5 -> 46.2, 8.20 -> 6.66, bfloat16 46.2 -> 46.2, 6.94 -> 6.67
    Rule(1024, "tiles", 4, 4, 8, 2, piece=128, together=True),
    # 65536x1280: 115.9 -> 82.6, x1536: 121.1 -> 95.9
    Rule(1536, "rows", 1, 4, 6, 4, piece=512, together=True),
    Rule(2048, "rows", 1, 4, 4, 4, early_weight=True),  # float16 16384x2048: 38.2 -> 33.1
    Rule(2560, "rows", 1, 4, 6, 4, piece=512, together=True),  # 32768x2304: 74.5 -> 72.2
    # 32768x2688: 87.9 -> 83.7, x3840: 142.0 -> 119.3
    Rule(4096, "rows", 1, 4, 3, 4, piece=1024, together=True),
    Rule(5120, "rows", 1, 4, 6, 4, piece=1024, together=True),  # 16384x4608: 80.1 -> 72.4
    # 16384x5376: 91.4 -> 84.8, 768x5376: 6.46 -> 5.44
    Rule(6144, "rows", 1, 4, 6, 4, piece=1024, together=True, packed=True),
    # 16384x6656: 104.9 -> 104.6, 624x6656: 6.91 -> 5.46
    Rule(7168, "rows", 1, 4, 3, 4, piece=1024, together=True, packed=True),
    # 8192x9216: 76.1 -> 73.3, 448x9216: 7.51 -> 5.77
    Rule(9216, "rows", 1, 8, 4, 4, piece=1024, together=True, packed=True),
    Rule(10240, "rows", 1, 8, 3, 4, piece=2048, together=True),  # 8192x10240: 83.0 -> 80.5
    Rule(14336, "rows", 1, 8, 3, 4, piece=2048, together=True, packed=True),  # 8192x14336: 119.7 -> 113.8
    # one H100, of 2048 rows and more, packed with an early weight -> this: 4096x14848: 82.2 -> 82.0, 2048x17408:
    # 49.6 -> 49.4. Beside a float32 weight 140 registers where nine tiles are cut off: then one block an SM, not two
    Rule(18432, "rows", 1, 8, 2, 4, piece=2048, together=True),
    # 4096x20480: 98.1 -> 82.8
    Rule(24576, "rows", 1, 8, 2, 4, piece=4096, together=True, packed=True, spills=_BY_TWO),
    _WIDEST_HALF,
)
_EIGHT_TILES = (
    "56 bytes where the last tile is cut off, else 40: 136x30720 takes 17.2 us on an H100, in one tile with 176 bytes "
    "19.8; 128x32768 14.2 and 14.3"
)
FORWARD_FLOAT = (
    _NARROWEST,
    Rule(64, "tiles", 16, 4, 2, 2, together=True),  # 524288x64: 66.4 -> 64.8
    Rule(128, "tiles", 8, 4, 2, 2, together=True),  # 262144x128: 66.2 -> 64.6
    Rule(256, "tiles", 4, 4, 4, 4),  # 131072x256: 66.3 -> 65.2
    Rule(511, "tiles", 4, 4, 4, 4, together=True),  # 131072x320: 82.1 -> 81.2
    Rule(512, "tiles", 2, 4, 4, 4, together=True),  # 131072x512: 131.3 -> 128.6
    Rule(1023, "tiles", 2, 4, 4, 4, together=True),  # 65536x768: 98.3 -> 96.6
    Rule(1024, "rows", 1, 4, 2, 4, early_weight=True),  # 32768x1024: 66.2 -> 64.6
    Rule(1536, "rows", 1, 4, 3, 4, piece=512, together=True),  # 32768x1280: 83.1 -> 80.5
    Rule(2048, "rows", 1, 8, 3, 4, piece=1024, together=True),  # 32768x1792: 112.6 -> 112.1
    Rule(2560, "rows", 1, 8, 3, 4, piece=512, together=True),  # 16384x2304: 73.3 -> 72.6
    # 16384x2688: 85.5 -> 84.4, x3840: 122.4 -> 120.5
    Rule(4096, "rows", 1, 8, 4, 4, split=True, together=True),
    # 8192x4608: 83.3 -> 72.3, x5376: 93.4 -> 84.8
    Rule(6144, "rows", 1, 8, 3, 4, piece=2048, together=True),
    Rule(8192, "rows", 1, 4, 3, 4, piece=2048, together=True),  # 8192x6656: 106.6 -> 105.2
    # 400x10240: 11.9 -> 10.0, 288x14336: 11.8 -> 9.9
    Rule(14336, "rows", 1, 8, 2, 4, piece=2048, together=True),
    Rule(16384, "rows", 1, 8, 1, 4, piece=4096, early_weight=True),  # 4096x16384: 132.8 -> 131.0
    # above 16384 few rows, and others on a GPU too small for a team
    # by an early weight -> this, H200: 227x18432 11.79 -> 11.53, 16x22528 4.13 -> 4.01, 157x26624 13.07 -> 13.05; H100:
    # 14.54 -> 14.33, 4.28 -> 4.23, 15.63 -> 15.60; in one tile 19.2, of 186x22528 18.4, by this 14.6
    Rule(28672, "rows", 1, 8, 1, 4, piece=4096, together=True),
    # one H100, in one tile -> this: 16x30720: 6.52 -> 5.59, 2x32768: 5.35 -> 5.17
    Rule(32768, "rows", 1, 8, 1, 4, piece=4096, early_weight=True, spills=_EIGHT_TILES),
)
# Of few rows, up to 2048 elements: 1024 of them a block. One H200, bfloat16 and float32, by the rule before `together`
# and by 8 warps, x64: 1024 rows 1.86 -> 1.55, 1.85 -> 1.59, 16 rows 1.55 -> 1.37, 1.49 -> 1.38; x2048: 3.47 -> 3.37,
# 5.58 -> 5.21, 1.56 -> 1.49, 1.65 -> 1.66. In the lines below one H100, unless they say otherwise, by the rule of after
# that (8 warps up to 1024 elements, above 2048 the one of more rows) and by this one, which the H200 likes as well.
_FEW = (_NARROWEST, *(Rule(n, "tiles", 1024 // n, 8, 4, 4, together=True) for n in (64, 128)))
FORWARD_FEW_HALF = (
    *_FEW,
    Rule(256, "tiles", 4, 4, 4, 4, together=True),  # 1024x256: 1.77 -> 1.60, 16x256: 1.27 -> 1.19
    Rule(512, "tiles", 2, 4, 4, 4, together=True),  # 1024x512: 2.21 -> 2.00
    Rule(1024, "tiles", 1, 4, 4, 4, together=True),  # float16 128x1024: 1.73 -> 1.52
    Rule(2048, "tiles", 1, 8, 4, 4, together=True),
    *(rule for rule in FORWARD_HALF if rule.up_to == 2560),
    Rule(3072, "rows", 1, 4, 3, 4, piece=1024, together=True),
    # 12x5120: 1.78 -> 1.72, 816x5120: 6.80 -> 6.86
    Rule(5120, "rows", 1, 8, 4, 4, piece=1024, together=True),
    Rule(6144, "rows", 1, 8, 4, 4, piece=1024, together=True, packed=True),  # float16 672x6144: 7.09 -> 6.75
    Rule(7168, "rows", 1, 8, 3, 4, piece=1024, together=True, packed=True),  # 576x7168: 7.15 -> 6.88
    *(rule for rule in FORWARD_HALF if 7168 < rule.up_to < 32768),
    _WIDEST_HALF,
)
FORWARD_FEW_FLOAT = (
    *_FEW,
    Rule(256, "tiles", 4, 8, 4, 4, together=True),  # H200: 1024 rows 2.34 -> 1.87
    Rule(512, "tiles", 2, 8, 4, 4, together=True),
    Rule(1024, "tiles", 1, 4, 4, 4, together=True),  # H200: 3.36 -> 3.23, 128x1024: 1.72 -> 1.64
    Rule(2048, "tiles", 1, 4, 4, 4, together=True),
    Rule(3072, "rows", 1, 4, 6, 4, piece=512, together=True),  # 1024x2304: 7.11 -> 5.95, x2688: 7.72 -> 6.49
    *(rule for rule in FORWARD_FLOAT if 3072 < rule.up_to < 16384),
    # 256x16384: 14.7 -> 14.2, 4x16384: 3.30 -> 3.08
    Rule(16384, "rows", 1, 8, 1, 4, piece=2048, together=True),
    *(rule for rule in FORWARD_FLOAT if rule.up_to > 16384),
)


class Same(NamedTuple):
    """Rows of up to so many elements take what they take beside a weight of x's dtype."""

    up_to: int


# Rows of 2-byte elements beside a float32 weight. They come before a table's entries of a weight of x's dtype. In
# forwards by rows and by teams a tile is 128 columns a warp: each thread has four elements, 16 bytes of the weight, and
# loads what it multiplies by; in wider tiles the weight goes through shared memory (tests/kernels/test_weights.py). us,
# bfloat16, by the rule beside a weight of x's dtype (backwards: by the table's entry) -> by this, in brackets what
# comes before the arrow beside such a weight. Not timed: forwards of widths between those and of float16, size class
# "small".
_CUT_OFF = "8 or 16 bytes where the last tile is cut off, which was not timed"
FORWARD_BESIDE_FLOAT = (
    Same(1024),
    # 32768x2048: H200 73.9 -> 65.4 (65.5), H100 95.6 -> 90.5 (90.4); 16384x4096: 75.1 -> 64.9 (65.1), 97.0 -> 90.4
    # (90.5)
    Rule(4096, "rows", 1, 4, 4, 4, piece=512, early_weight=True, packed=True),
    # 8192x7168: H200 69.5 -> 56.8 (57.2); 10922x6144: H100 92.0 -> 90.2 (90.5)
    Rule(8192, "rows", 1, 8, 4, 4, piece=1024, early_weight=True, packed=True),
    # 4096x12288: H200 61.8 -> 49.6 (49.7); 5461x12288: H100 97.9 -> 90.7 (90.6)
    Rule(12288, "rows", 1, 8, 3, 4, piece=1024, early_weight=True, packed=True, spills=_CUT_OFF),
    # 4096x16384: H200 84.4 -> 66.9 (66.9), H100 98.1 -> 90.5 (90.6); 3276x20480: 101.5 -> 67.0 (67.3), 117.7 -> 91.3
    # (91.2)
    Rule(20480, "rows", 1, 8, 2, 4, piece=1024, early_weight=True, packed=True, spills=_CUT_OFF),
    # 2048x24576: H200 73.9 -> 64.2 (51.7); 2730x24576: H100 111.0 -> 96.5 (91.6); 2048x32768: 103.6 -> 80.0 (70.0),
    # 119.6 -> 93.1 (92.9)
    Rule(32768, "rows", 1, 8, 1, 4, piece=1024, early_weight=True, packed=True, spills=_CUT_OFF),
)
FORWARD_FEW_BESIDE_FLOAT = (
    Same(512),
    # 1024x1024: H200 3.71 -> 2.46 (2.48), H100 4.01 -> 2.80 (2.77); 16x1024: H100 2.04 -> 1.55 (1.53)
    Rule(1024, "tiles", 2, 4, 8, 2, piece=512, together=True),
    # 1024x2048: H200 4.52 -> 3.44 (3.36), H100 5.14 -> 4.15 (4.05); 128x4096: H100 2.29 -> 2.33 (2.28)
    Rule(4096, "rows", 1, 4, 4, 4, piece=512, early_weight=True, packed=True),
    Same(8192),  # has tiles of 1024: 128x7168 2.64 (2.69) on an H200
    # 256x16384: H100 9.09 -> 7.93 (7.29), 16x16384: 3.72 -> 2.88 (2.73); 128x12288: H200 4.32 -> 3.90 (3.67)
    Rule(16384, "rows", 1, 8, 2, 4, piece=1024, together=True, packed=True),
    # 128x20480: H200 6.74 -> 5.48 (5.11)
    Rule(24576, "rows", 1, 8, 1, 4, piece=1024, together=True, packed=True),
    Same(32768),
)
_BY_TILES = (
    "16 bytes, float16 8 or, casting as llama, 32: 8192x7168 takes 124.6 us on an H100, in tiles of 2048 by TMA, "
    "without stack, 130.9"
)
BACKWARD_BESIDE_FLOAT = (
    Same(4095),
    # H100 16384x4096: 149.5 -> 139.2 (136.7), not timed on an H200; both have entries of other configs, 137.8 and 100.5
    Rule(4096, "rows", 1, 8, 2, 4, piece=2048, tma=True),
    Same(6144),
    # 8192x7168: H200 151.5 -> 100.3 (86.8), H100 the same config, 124.6 (124.3)
    Rule(7168, "tiles", 2, 8, 1, 4, tma=True, spills=_BY_TILES),
    # in tiles of 2048 by TMA -> this, 8192x8192: H200 113.2 -> 102.8 (99.4), H100 143.6 -> 136.8 (137.8); H100
    # 9024x7424: 146.7 -> 137.0, 8208x8176: 144.1 -> 139.5, float16 143.9 -> 142.8
    Rule(8192, "rows", 1, 8, 1, 6, piece=4096, rest=4096),
    Same(14336),
    # in tiles of 2048 by TMA, packed -> this, H100, 4368x15360: 155.5 -> 154.6, 4096x16368: 160.2 -> 158.3;
    # 4096x16384: H200 in one tile 143.3, in packed tiles of 2048 107.8, by this 103.3
    Rule(16384, "rows", 1, 8, 1, 4, piece=4096, tma=True, packed=True),
)
_SEVEN_BY_TMA = "24 bytes beside a float32 weight: 4096x14336 takes 91.4 us so on an H200, without 91.7"
_EIGHT_BY_TMA = (
    "16 bytes where the last tile is cut off: 4096x15360 takes 99.5 us on an H200, by gathers without 112.8"
)
BACKWARD_HALF = (
    Rule(64, "tiles", 128, 8, 1, 2, tma=True),  # 524288x64: 2742
    Rule(128, "tiles", 16, 8, 3, 1),  # 524288x128: 2813, 131072x128: 2430, with the sum of dw
    Rule(256, "tiles", 16, 8, 1, 2, tma=True),  # 524288x256: 2860, 131072x256: 2735
    Rule(512, "tiles", 8, 8, 1, 2, tma=True),  # 131072x512: 2853
    Rule(1024, "tiles", 8, 8, 1, 2, tma=True),  # 32768x1024: 2722, 4096x1024: 1973
    Rule(2048, "tiles", 4, 8, 1, 2, tma=True),  # 16384x2048: 2765
    Rule(2560, "rows", 1, 8, 2, 6, split=True, short=True),  # 16384x2560: 2788
    Rule(3072, "rows", 1, 4, 2, 6, piece=1024),  # 16384x2880: 2837 with the sum of dw
    # us with the sum of dw, in one tile of 4096, gathered -> this, H100: 20160x3328 142.9 -> 139.3, 17472x3840 139.0 ->
    # 136.8, 16448x4080 139.7 -> 137.9; beside a float32 weight 170.5 -> 137.3, 162.0 -> 138.3, 161.0 -> 142.0, and H200
    # 16384x3584 124.3 -> 92.1
    Rule(4095, "rows", 1, 8, 2, 4, piece=2048, tma=True),
    Rule(4096, "rows", 1, 8, 1, 6, short=True),  # 16384x4096: 2857
    # us with the sum of dw, in two tiles of 4096 and 512, gathered -> this, H100: 14560x4608 148.2 -> 141.1, H200 121.0
    # -> 103.2, beside a float32 weight H100 148.4 -> 140.9. In one tile of 8192, gathered -> this: 13136x5104 H100
    # 138.3 -> 147.6, H200 119.4 -> 101.2; beside a float32 weight H100 16384x5120 260.5 -> 179.0. dx alone by these two
    # rules and gathered, H100: 17472x3840 134.5, 142.2, 14560x4608 141.3, 135.3; H200: 100.0, 95.6, 100.2, 119.4
    Rule(5120, "rows", 1, 4, 2, 4, piece=1024, tma=True),
    Rule(6144, "rows", 1, 8, 1, 8, piece=2048),  # 10912x6144: 2939 with the sum of dw
    # us with the sum of dw, by two rows a block by TMA up to 7168 columns, above by this at latency 4 -> by this: H200
    # 10080x6656 118.6 -> 103.2, 9360x7168 112.4 -> 100.9, 8208x8176 113.7 -> 100.8; the H100 mostly loses: 139.6 ->
    # 140.3, 144.2 -> 146.5, 144.2 -> 148.6. dx alone, H200 116.2 -> 99.7, 111.0 -> 97.2, 108.3 -> 96.8, 64x6656 4.58 ->
    # 3.30, H100 140.7 -> 140.5, 139.5 -> 142.0, 139.6 -> 143.9, 4.73 -> 3.51
    Rule(8192, "rows", 1, 8, 1, 6),
    # us with the sum of dw, by tiles of 8192 and 2048, gathered -> this: 4096x9216 H100 87.5 -> 82.2, H200 74.6 ->
    # 65.6, 4096x10240 125.3 -> 89.9, 112.3 -> 68.6
    Rule(10240, "rows", 1, 8, 1, 4, piece=2048, tma=True),
    Rule(12288, "tiles", 1, 8, 1, 2, piece=4096, tma=True),  # 5456x12288: 2896 with the sum of dw
    # us, bfloat16, by gathers of tiles of 4096 -> this, H200: 4096x14336 109.3 -> 91.6, 4096x15360 112.8 -> 99.5; H100:
    # 130.7 -> 133.4, 137.1 -> 146.1 (by 72 % of the blocks 126.0, 136.4); one tile of 16384, cut off: 160.3, 166.8
    Rule(14336, "rows", 1, 8, 1, 4, piece=2048, tma=True, spills=_SEVEN_BY_TMA),
    Rule(16383, "rows", 1, 8, 1, 4, piece=2048, tma=True, spills=_EIGHT_BY_TMA),
    Rule(16384, "rows", 1, 8, 1, 4, short=True),  # 4096x16384: 2758
)
_ONE_ROW = (
    "4096x16384 reaches 2754 GB/s, 92 % of the copy, with 56 bytes of stack on an H100; 112 bytes where the last tile "
    "is cut off: 4096x16368 310.3 us there, in tiles of 2048, with 80 bytes, 307.3"
)
BACKWARD_FLOAT = (
    Rule(64, "tiles", 32, 4, 1, 2, tma=True),
    Rule(128, "tiles", 16, 4, 1, 2, tma=True),
    Rule(256, "tiles", 8, 4, 1, 2, tma=True),  # 131072x256: 2902
    Rule(512, "tiles", 8, 8, 1, 2, tma=True),
    Rule(1024, "tiles", 4, 8, 1, 2, tma=True),  # 16384x1024: 2782
    # From here on with the sum of dw, of as many rows as have 64 Mi elements.
    Rule(2048, "tiles", 1, 8, 1, 4, tma=True),  # 3014
    Rule(2560, "rows", 1, 4, 1, 6, split=True),  # 2954
    Rule(3072, "tiles", 1, 8, 1, 4, tma=True),  # 3021, 2880: 3021
    Rule(4096, "tiles", 1, 8, 1, 6),  # 2959, 3584: 2923
    Rule(4608, "rows", 1, 8, 1, 8, split=True),
    Rule(5120, "tiles", 1, 8, 1, 6, tma=True),  # 2974
    Rule(6144, "tiles", 1, 4, 1, 4, piece=1024, tma=True),  # 2944
    Rule(8192, "rows", 1, 8, 1, 4),  # 2835, 7168: 2910
    Rule(12288, "rows", 1, 8, 1, 4, piece=2048),  # 2921
    # from here on dx alone, and large calls with dw on a GPU too small for a team (wide.py); us with dw, by one tile of
    # 16384, cut off -> this: 4096x14336 H100 284.5 -> 256.7, H200 218.3 -> 182.2; 4096x12304 243.9 -> 229.9, 194.3 ->
    # 154.8
    Rule(14336, "rows", 1, 8, 1, 4, piece=2048),
    Rule(16384, "rows", 1, 8, 1, 8, spills=_ONE_ROW),
)
