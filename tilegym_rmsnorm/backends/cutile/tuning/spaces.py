# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The search space of tuning, as data. candidates.py cuts it down for a row of N elements.

Neither torch nor cuda.tile is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.tuning import tilings

ANY_WIDTH = 2**31
OF_A_WARP = 512  # bytes: 16 of each thread; a wider tile has a row in all warps


class Sweep(NamedTuple):
    """Variants of a class in these tiles, `tile_bytes` wide at most, and with every combination of `values` of other
    fields, for N in [narrowest, widest] and these size classes."""

    variant: type[variants.Variant]
    narrowest: int
    widest: int
    tiles: tilings.Tiles
    sizes: tuple[str, ...] = SIZES
    tile_bytes: int = ANY_WIDTH
    values: dict[str, tuple[Any, ...]] = {}

    def over(self, **values: Any) -> Sweep:
        """Add values, tuples or one each, to a copy."""
        own = {name: each if isinstance(each, tuple) else (each,) for name, each in values.items()}
        return self._replace(values=self.values | own)


BOTH = (False, True)
LOADS = ("late", "joint", "early")  # of the weight
FEW, LARGE, BUT_LARGE, BUT_FEW = ("few",), ("large",), ("few", "small"), ("small", "large")
TILES = (1024, 2048, 4096, 8192)  # elements
SEVERAL_ROWS, MORE_ROWS = tilings.several_rows(*TILES), tilings.several_rows(*TILES, 16384)
OF_WARPS = tilings.equal(128, 256, most=16)  # 4 or 8 elements a thread
PARTS = tilings.parts((512, *TILES, 16384), (1, 3, 5, 9))
BY_TMA = tilings.parts(TILES, (1, 2, 3, 4))  # each tile is a request
LARGE_BY_TMA = tilings.parts(TILES, (1, 2, 3, 4), above=8192)  # all registers of a block
UNALIGNED = tilings.in_vectors(tilings.pieces_of_rows(*TILES))
UNALIGNED_PARTS = tilings.in_vectors(PARTS)
FEW_STRIPS = ((32, 32), (64, 16), (128, 16), (128, 32), (32, 64), (64, 64))
WIDE_STRIPS = ((8, 512), (8, 1024), (16, 256), (16, 512))
SPLIT = tilings.split(tilings.whole_rows, FEW_STRIPS, 128, 256, 1024)
WIDE_SPLIT = tilings.split(tilings.whole_rows, WIDE_STRIPS, 32, 64, 128)
SPLIT_CHUNKS = tilings.split(tilings.chunks(4096, 8192), WIDE_STRIPS, 32, 64, 128)
LARGE_SPLIT_CHUNKS = tilings.split(tilings.chunks(4096, 8192), WIDE_STRIPS, 32, 64)

FORWARD = (
    *(  # Not early in large calls: 0.8 % faster to 7 % slower.
        Sweep(variants.ForwardTiles, 1, 2048, SEVERAL_ROWS, sizes).over(
            warps=(4, 8), occupancy=(2, 4, 8), latency=(2, 4), weight_load=loads
        )
        for sizes, loads in ((BUT_LARGE, LOADS), (LARGE, LOADS[:2]))
    ),
    *(
        Sweep(variants.ForwardTiles, 336, 4096, OF_WARPS, tile_bytes=OF_A_WARP).over(
            rows=(warps, 2 * warps), warps=warps, occupancy=(2, 4, 6, 8), latency=(2, 4), weight_load="joint"
        )
        for warps in (4, 8)
    ),
    Sweep(variants.ForwardRows, 512, 65536, tilings.rows_of_tiles).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4, 8), latency=(2, 4, 8), weight_load=LOADS, packed=BOTH
    ),
    Sweep(variants.ForwardTeam, 8193, ANY_WIDTH, PARTS).over(
        warps=(4, 8), occupancy=(2, 3, 4, 8), latency=(2, 4), weight_load=LOADS[:2], packed=BOTH
    ),
    Sweep(variants.ForwardUnaligned, 64, 16384, UNALIGNED).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4, 8), latency=(2, 4)
    ),
    Sweep(variants.ForwardUnalignedTeam, 8193, ANY_WIDTH, UNALIGNED_PARTS).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4), latency=(2, 4)
    ),
)
REREAD = Sweep(variants.ForwardReread, 8193, ANY_WIDTH, tilings.chunks(2048, 4096, 8192)).over(
    warps=(4, 8), occupancy=(1, 2, 4), latency=(2, 4, 8), tma=BOTH
)
WALKS = (
    Sweep(variants.BackwardTiles, 1, 8192, MORE_ROWS).over(
        warps=(4, 8), occupancy=(1, 2), latency=(2, 4, 6), tma=BOTH
    ),
    *(  # By two rows a warp they spill; by 8 warps twice an SM 641 columns do, and more.
        Sweep(variants.BackwardTiles, 336, widest, OF_WARPS, BUT_FEW, OF_A_WARP).over(
            rows=warps, warps=warps, occupancy=occupancy, latency=(2, 4), tma=BOTH
        )
        for warps, occupancy, widest in ((4, (1, 2), 1024), (8, 1, 1024), (8, 2, 640))
    ),
    Sweep(variants.BackwardTiles, 2560, 18432, tilings.equal(512, *TILES), LARGE).over(
        rows=(1, 2, 4), warps=(4, 8), occupancy=(1, 2), latency=(2, 4), tma=BOTH
    ),
    Sweep(variants.BackwardRows, 1024, 32768, tilings.rows_of_tiles).over(
        warps=(4, 8), occupancy=(1, 2), latency=(2, 4, 6, 8), packed=BOTH
    ),
    # From the narrowest row of three tiles of 1024 on. By all blocks it may be too slow to be among those whose other
    # shares are tried: `with_other_shares`.
    Sweep(variants.BackwardPipelined, 2688, 18432, tilings.equal(4096, 2048, 1024), LARGE).over(
        warps=(4, 8), occupancy=(1, 2), latency=4, packed=BOTH, grid_percent=(100, 84, 72)
    ),
    Sweep(variants.BackwardTeam, 12289, ANY_WIDTH, PARTS, LARGE).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4), latency=(2, 4)
    ),
    *(  # Three blocks an SM have no registers for rstd ahead (4096x32768, H200: 249.8 -> 264.2 us), nor for the weight.
        Sweep(variants.BackwardPipelinedTeam, 8193, ANY_WIDTH, BY_TMA, LARGE).over(
            warps=warps, occupancy=occupancy, latency=4, rstd_ahead=occupancy < 3
        )
        for warps, occupancy in ((4, 2), (4, 3), (8, 1), (8, 2))
    ),
    # From two parts of 12288 columns on, an eighth empty.
    Sweep(variants.BackwardPipelinedTeam, 21504, ANY_WIDTH, LARGE_BY_TMA, LARGE).over(
        warps=8, occupancy=1, latency=4, rstd_ahead=True, packed=True
    ),
    Sweep(variants.BackwardTeam, 16385, ANY_WIDTH, PARTS, FEW).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4), latency=2
    ),
    Sweep(variants.BackwardUnaligned, 64, 16384, UNALIGNED).over(
        warps=(4, 8), occupancy=(1, 2, 3, 4), latency=(2, 4)
    ),
    Sweep(variants.BackwardUnalignedTeam, 8193, ANY_WIDTH, UNALIGNED_PARTS).over(
        warps=(4, 8), occupancy=(1, 2, 3), latency=(2, 4)
    ),
)
SWEEPS = {
    "forward": (*FORWARD, REREAD),
    "backward": (
        *WALKS,
        Sweep(variants.BackwardSplit, 1, 24576, SPLIT, FEW).over(
            warps=(4, 8), occupancy=(1, 2), latency=(1, 2)
        ),
        Sweep(variants.BackwardSplit, 12289, 24576, WIDE_SPLIT, FEW).over(warps=8, occupancy=1, latency=1),
        *(  # Where chunks are issued ahead gathers are slower: float32 512x131072 584 us, 634 by gathers (H100).
            Sweep(variants.BackwardSplitReread, narrowest, ANY_WIDTH, tiles, sizes).over(
                warps=(4, 8), occupancy=(1, 2), latency=latency, gathers=latency == 1
            )
            for narrowest, tiles, sizes in ((12289, SPLIT_CHUNKS, FEW), (65537, LARGE_SPLIT_CHUNKS, LARGE))
            for latency in (1, 3)
        ),
        Sweep(variants.BackwardStrips, 8193, ANY_WIDTH, tilings.chunks(1024, 2048, 4096)).over(
            rows=(1, 2, 4), warps=(4, 8), occupancy=(2, 3, 4), latency=(2, 4), tma=BOTH
        ),
    ),
    # Without dw registers are left for more blocks an SM, and rows may be read twice.
    "dx": (
        *(
            each if issubclass(each.variant, variants.Team) else each.over(occupancy=(1, 2, 3, 4))
            for each in WALKS
        ),
        REREAD._replace(variant=variants.BackwardReread),
    ),
}
