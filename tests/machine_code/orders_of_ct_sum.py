# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Prints how many sums of rows have two orders in kernels whose rows ct.sum alone adds. A process of its own: cuda-tile
keeps a function of kernels as it was first compiled.

    python3 orders_of_ct_sum.py
"""

import tempfile
from pathlib import Path

import cuda.tile as ct
from compiling import code_of_call
from helpers import BF16
from orders import differing, sums_of_rows

from tilegym_rmsnorm.backends.cutile.kernels import tiles
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows, BackwardTiles

KERNELS = [
    ("backward", BackwardRows(width=4096, warps=4, occupancy=2, latency=4), 4096),
    ("dx", BackwardTiles(width=8192, warps=8, occupancy=1, latency=4, rows=2, tma=True), 7168),
]


def sum_of_lanes(tile, ORDER, AXIS=None):
    return ct.sum(tile, axis=AXIS, keepdims=AXIS is not None)


if __name__ == "__main__":
    tiles.sum_of_lanes = sum_of_lanes
    for op, variant, n in KERNELS:
        with tempfile.TemporaryDirectory() as folder:
            code = code_of_call(Path(folder), op, variant, n, BF16, BF16)[variant.kernel]
        print(len(differing(sums_of_rows(code))))
