# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A variant of each kernel with each way to go through a row, for rows of 65 to 96 columns."""

from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardReread,
    BackwardRows,
    BackwardSplit,
    BackwardSplitReread,
    BackwardStrips,
    BackwardTeam,
    BackwardTiles,
    ForwardReread,
    ForwardRows,
    ForwardTeam,
    ForwardTiles,
)

FORWARDS = {
    "rows": ForwardRows(width=64, warps=4, occupancy=4, latency=4, rest=32),
    "rows, joint": ForwardRows(width=64, warps=4, occupancy=4, latency=4, rest=32, weight_load="joint"),
    "tiles": ForwardTiles(width=128, warps=4, occupancy=4, latency=4, rows=4),
    "tiles, early": ForwardTiles(width=128, warps=4, occupancy=4, latency=4, rows=4, weight_load="early"),
    "tiles, joint": ForwardTiles(
        width=32, warps=4, occupancy=4, latency=4, rows=4, pieces=3, weight_load="joint"
    ),
    "reread": ForwardReread(width=32, warps=4, occupancy=4, latency=4),
    "teams": ForwardTeam(width=32, warps=4, occupancy=1, latency=1, members=3),
    "teams, joint": ForwardTeam(width=32, warps=4, occupancy=1, latency=1, members=3, weight_load="joint"),
}
BACKWARDS = {
    "rows": BackwardRows(width=64, warps=4, occupancy=2, latency=4, rest=32),
    "rows, equal tiles": BackwardRows(width=32, warps=4, occupancy=1, latency=4, pieces=3),
    "rows by TMA": BackwardPipelined(width=32, warps=4, occupancy=1, latency=4, pieces=3),
    "tiles": BackwardTiles(width=32, warps=4, occupancy=2, latency=4, rows=4, pieces=3),
    "teams": BackwardTeam(width=32, warps=4, occupancy=1, latency=1, members=3),
    "teams by TMA": BackwardPipelinedTeam(
        width=32, warps=4, occupancy=1, latency=1, members=3, rstd_ahead=True
    ),
    "split": BackwardSplit(width=64, warps=4, occupancy=1, latency=1, rest=32, rows=4, strip=32, slab=8),
    "split, reread": BackwardSplitReread(
        width=32, warps=4, occupancy=1, latency=1, rows=4, strip=32, slab=8, gathers=True
    ),
    "split, reread, ahead": BackwardSplitReread(
        width=32, warps=4, occupancy=1, latency=3, rows=4, strip=32, slab=8
    ),
    "strips": BackwardStrips(width=32, warps=4, occupancy=2, latency=4, rows=4),
    "dx, reread": BackwardReread(width=32, warps=4, occupancy=2, latency=4),
}
KERNELS = [("forward", kernel) for kernel in FORWARDS] + [("backward", kernel) for kernel in BACKWARDS]
