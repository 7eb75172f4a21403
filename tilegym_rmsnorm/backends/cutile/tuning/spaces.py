# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The search space of tuning, as data: what candidates.py cuts down for a row of N elements.

Neither torch nor cuda.tile is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.limits import WALKS_ROWS
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.tuning.tilings import (
    Tiles,
    fused,
    large_parts_by_tma,
    parts_of_rows,
    parts_of_rows_by_tma,
    rows_of_equal_tiles,
    rows_of_few_equal_tiles,
    rows_of_tiles,
    rows_of_warps,
    strips_of,
    tiles_of,
    whole_rows,
)

ANY_WIDTH = 2**31
OF_A_WARP = 512  # bytes: 16 of each thread; a wider tile has a row in all warps


class Sweep(NamedTuple):
    """Every combination of these tiles, `tile_bytes` wide at most, and of these values of Config's other fields, for N
    in [narrowest, widest] and these size classes."""

    kernel: str
    narrowest: int
    widest: int
    tiles: Tiles
    values: dict[str, tuple[Any, ...]]
    sizes: tuple[str, ...] = SIZES
    tile_bytes: int = ANY_WIDTH


BOTH = (False, True)
FEW_STRIPS = ((32, 32), (64, 16), (128, 16), (128, 32), (32, 64), (64, 64))
WIDE_STRIPS = ((8, 512), (8, 1024), (16, 256), (16, 512))
SWEEPS = {
    "forward": (
        Sweep(
            *("tiles", 1, 2048, tiles_of(1024, 2048, 4096, 8192)),
            {
                "warps": (4, 8),
                "occupancy": (2, 4, 8),
                "latency": (2, 4),
                "early_weight": BOTH,
                "together": BOTH,
            },
            ("few", "small"),
        ),
        Sweep(
            *("tiles", 1, 2048, tiles_of(1024, 2048, 4096, 8192)),
            # early_weight: 0.8 % faster to 7 % slower
            {"warps": (4, 8), "occupancy": (2, 4, 8), "latency": (2, 4), "together": BOTH},
            ("large",),
        ),
        *(
            Sweep(
                *("tiles", 336, 4096, rows_of_warps(warps)),
                {"warps": (warps,), "occupancy": (2, 4, 6, 8), "latency": (2, 4), "together": (True,)},
                tile_bytes=OF_A_WARP,
            )
            for warps in (4, 8)
        ),
        Sweep(
            *("rows", 512, 65536, rows_of_tiles),
            {
                "warps": (4, 8),
                "occupancy": (1, 2, 3, 4, 8),
                "latency": (2, 4, 8),
                "early_weight": BOTH,
                "together": BOTH,
                "packed": BOTH,
            },
        ),
        Sweep(
            *("teams", 8193, ANY_WIDTH, parts_of_rows),
            {
                "warps": (4, 8),
                "occupancy": (2, 3, 4, 8),
                "latency": (2, 4),
                "together": BOTH,
                "packed": BOTH,
            },
        ),
        Sweep(
            *("chunks", 8193, ANY_WIDTH, strips_of((2048, 4096, 8192))),
            {"warps": (4, 8), "occupancy": (1, 2, 4), "latency": (2, 4, 8), "tma": BOTH},
        ),
    ),
    "backward": (
        Sweep(
            *("tiles", 1, 8192, tiles_of(1024, 2048, 4096, 8192, 16384)),
            {"warps": (4, 8), "occupancy": (1, 2), "latency": (2, 4, 6), "tma": BOTH},
        ),
        *(
            Sweep(
                *("tiles", 336, widest, rows_of_warps(warps, rows_each=(1,))),  # by two more of them spill
                {"warps": (warps,), "occupancy": occupancy, "latency": (2, 4), "tma": BOTH},
                ("small", "large"),
                tile_bytes=OF_A_WARP,
            )
            # 641 columns and more spill by 8 warps twice an SM
            for warps, occupancy, widest in ((4, (1, 2), 1024), (8, (1,), 1024), (8, (2,), 640))
        ),
        Sweep(
            *("tiles", 2560, 18432, rows_of_equal_tiles),
            {"warps": (4, 8), "occupancy": (1, 2), "latency": (2, 4), "tma": BOTH},
            ("large",),
        ),
        Sweep(
            *("rows", 1024, 32768, rows_of_tiles),
            {
                "warps": (4, 8),
                "occupancy": (1, 2),
                "latency": (2, 4, 6, 8),
                "short": BOTH,
                "packed": BOTH,
            },
        ),
        Sweep(
            *("rows", 2688, 18432, rows_of_few_equal_tiles),  # the narrowest row of three tiles of 1024
            # By all blocks it may be too slow to be among those whose other shares are tried: `with_other_shares`.
            {
                "warps": (4, 8),
                "occupancy": (1, 2),
                "latency": (4,),
                "tma": (True,),
                "packed": BOTH,
                "share": (100, 84, 72),
            },
            ("large",),
        ),
        Sweep(
            *("teams", 12289, ANY_WIDTH, parts_of_rows),
            {"warps": (4, 8), "occupancy": (1, 2, 3, 4), "latency": (2, 4)},
            ("large",),
        ),
        Sweep(
            *("teams", 8193, ANY_WIDTH, parts_of_rows_by_tma),
            {"warps": (4,), "occupancy": (2, 3), "latency": (4,), "tma": (True,)},
            ("large",),
        ),
        Sweep(
            *("teams", 8193, ANY_WIDTH, parts_of_rows_by_tma),
            {"warps": (8,), "occupancy": (1, 2), "latency": (4,), "tma": (True,)},
            ("large",),
        ),
        Sweep(
            *("teams", 21504, ANY_WIDTH, large_parts_by_tma),  # two parts of 12288, an eighth empty
            {"warps": (8,), "occupancy": (1,), "latency": (4,), "tma": (True,), "packed": (True,)},
            ("large",),
        ),
        Sweep(
            *("teams", 16385, ANY_WIDTH, parts_of_rows),
            {"warps": (4, 8), "occupancy": (1, 2, 3, 4), "latency": (2,)},
            ("few",),
        ),
        Sweep(
            *("fused", 1, 24576, fused(whole_rows, FEW_STRIPS, (128, 256, 1024))),
            {"warps": (4, 8), "occupancy": (1, 2), "latency": (1, 2)},
            ("few",),
        ),
        Sweep(
            *("fused", 12289, 24576, fused(whole_rows, WIDE_STRIPS, (32, 64, 128))),
            {"warps": (8,), "occupancy": (1,), "latency": (1,)},
            ("few",),
        ),
        Sweep(
            *("fused_chunks", 12289, ANY_WIDTH, fused(strips_of((4096, 8192)), WIDE_STRIPS, (32, 64, 128))),
            {"warps": (4, 8), "occupancy": (1, 2), "latency": (1, 3)},
            ("few",),
        ),
        Sweep(
            *("fused_chunks", 65537, ANY_WIDTH, fused(strips_of((4096, 8192)), WIDE_STRIPS, (32, 64))),
            {"warps": (4, 8), "occupancy": (1, 2), "latency": (1, 3)},
            ("large",),
        ),
        Sweep(
            *("strips", 8193, ANY_WIDTH, strips_of((1024, 2048, 4096), rows=(1, 2, 4))),
            {"warps": (4, 8), "occupancy": (2, 3, 4), "latency": (2, 4), "tma": BOTH},
        ),
    ),
}
# Without dw: less the kernels that read x and dy once more for it, more blocks an SM, and rows that are read twice.
SWEEPS["dx"] = (
    *(
        each._replace(values=each.values | ({} if each.kernel == "teams" else {"occupancy": (1, 2, 3, 4)}))
        for each in SWEEPS["backward"]
        if each.kernel in WALKS_ROWS
    ),
    *(each for each in SWEEPS["forward"] if each.kernel == "chunks"),
)
