# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The rules of config.py for sm_90, as measured: which kernel runs a row of up to so many elements, and how.

One H100 80GB HBM3, driver 580.159, cuda-tile 1.7.0, tileiras 13.4.92, cold L2, CUDA graphs, of some 4000 kernels tried
(bench/NOTES.md). A rule's comment gives shape and GB/s of compulsory bytes. In the backward that is, unless it says
"with the sum of dw", the first kernel alone, from before its launch became dependent and its loop shorter (copy of that
run: 2991); bench/results has the whole of today. A rule without a figure takes over from its neighbours. _HALF are rows
of 2-byte elements, _FLOAT of 4-byte ones.
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
    short: bool = False
    tma: bool = False
    early_weight: bool = False
    packed: bool = False


# Up to how many elements: kernel, rows, warps, blocks an SM, latency
FORWARD_HALF = (
    Rule(64, "tiles", 64, 4, 4, 4),  # 524288x64: 2910, 131072x64: 2666
    Rule(128, "tiles", 32, 4, 4, 4),  # 524288x128: 2950, 131072x128: 2817
    Rule(256, "tiles", 16, 8, 4, 4),  # 524288x256: 2996, 131072x256: 2913, 4096x256: 1338
    Rule(512, "tiles", 8, 4, 4, 4),
    Rule(1024, "tiles", 4, 4, 8, 4),  # 32768x1024: 2885, 16384x1024: 2790, 4096x1024: 2402
    Rule(2048, "rows", 1, 8, 4, 4, early_weight=True),  # 16384x2048: 2935
    Rule(2944, "rows", 1, 4, 4, 4, split=True, early_weight=True),  # 8192x2560: 2832, 16384x2880: 2941
    Rule(3072, "rows", 1, 8, 3, 4, split=True, early_weight=True),  # 16384x3072: 2960
    Rule(3584, "rows", 1, 8, 2, 4, piece=512, early_weight=True),  # 16384x3584: 2951
    Rule(4096, "rows", 1, 8, 3, 4, split=True, early_weight=True),  # 16384x4096: 2973, 1024x4096: 2386
    Rule(5120, "rows", 1, 8, 2, 4, split=True, early_weight=True),  # 16384x5120: 2997
    Rule(6144, "rows", 1, 4, 3, 4, split=True, early_weight=True),  # 8192x6144: 2945
    Rule(7168, "rows", 1, 4, 3, 4, piece=1024, early_weight=True),  # 8192x7168: 2953
    Rule(8192, "rows", 1, 8, 2, 4, early_weight=True),  # 8192x8192: 2948
    # 8192x12288: 2995, 4096x16384: 2954, 4096x18432: 2949
    Rule(18432, "rows", 1, 8, 2, 4, piece=2048, early_weight=True, packed=True),
    Rule(24576, "rows", 1, 8, 1, 4, split=True),
    Rule(32768, "rows", 1, 8, 1, 4, packed=True),  # above 24576 few rows alone
)
FORWARD_FLOAT = (
    Rule(64, "tiles", 64, 4, 4, 4),
    Rule(128, "tiles", 32, 4, 4, 4),  # 131072x128: 2925
    Rule(256, "tiles", 16, 4, 4, 4),
    Rule(512, "tiles", 8, 4, 4, 4),
    Rule(1024, "tiles", 8, 8, 2, 4),  # 16384x1024: 2909, 4096x1024: 2743
    Rule(2048, "rows", 1, 8, 4, 4),
    Rule(4096, "rows", 1, 8, 4, 4, split=True),  # 8192x4096: 2959
    Rule(8192, "rows", 1, 8, 2, 4, early_weight=True),  # 8192x6144: 2987, 4096x8192: 2943
    # 8192x12288 267.3 us (without early_weight 272.9), 4096x16384 181.9 (183.6)
    Rule(16384, "rows", 1, 8, 1, 4, early_weight=True),
    Rule(32768, "rows", 1, 8, 1, 4, early_weight=True),  # above 16384 few rows alone
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
    Rule(4095, "rows", 1, 8, 2, 4, short=True),  # 16384x3584: 2830
    Rule(4096, "rows", 1, 8, 1, 6, short=True),  # 16384x4096: 2857
    Rule(4608, "rows", 1, 8, 1, 6, split=True, short=True),  # one tile of 8192 would waste most lanes
    Rule(5120, "rows", 1, 8, 1, 8),  # 13104x5120: 2919 with the sum of dw, in two tiles 2800
    Rule(6144, "rows", 1, 8, 1, 8, piece=2048),  # 10912x6144: 2939 with the sum of dw
    Rule(7168, "tiles", 2, 8, 1, 4, tma=True),  # 8192x7168: 2805
    Rule(8192, "rows", 1, 8, 1, 4, short=True),  # 8192x8192: 2784
    Rule(10240, "rows", 1, 8, 1, 8, split=True, short=True),
    Rule(12288, "tiles", 1, 8, 1, 2, piece=4096, tma=True),  # 5456x12288: 2896 with the sum of dw
    Rule(16384, "rows", 1, 8, 1, 4, short=True),  # 4096x16384: 2758
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
    Rule(16384, "rows", 1, 8, 1, 8),  # 2750, by teams 2905 (a table's)
)
# (op, itemsize, from N on): why a Hopper kernel that spills is kept
SPILLS = {
    ("forward", 4, 16385): "2048x32768 reaches 2868 GB/s with 40 bytes of stack, in two tiles 2824",
    ("backward", 4, 12289): "4096x16384 reaches 2754 GB/s, 92 % of the copy, with 56 bytes of stack",
}
