# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A variant of each kernel with each way to go through a row, for rows of 65 to 96 columns."""

from tilegym_rmsnorm.backends.cutile.plans import variants

FORWARDS = {
    "rows": variants.ForwardRows(width=64, warps=4, occupancy=4, latency=4, rest=32),
    "rows, joint": variants.ForwardRows(
        width=64, warps=4, occupancy=4, latency=4, rest=32, weight_load="joint"
    ),
    "tiles": variants.ForwardTiles(width=128, warps=4, occupancy=4, latency=4, rows=4),
    "tiles, early": variants.ForwardTiles(
        width=128, warps=4, occupancy=4, latency=4, rows=4, weight_load="early"
    ),
    "tiles, joint": variants.ForwardTiles(
        width=32, warps=4, occupancy=4, latency=4, rows=4, pieces=3, weight_load="joint"
    ),
    "reread": variants.ForwardReread(width=32, warps=4, occupancy=4, latency=4),
    "teams": variants.ForwardTeam(width=32, warps=4, occupancy=1, latency=1, members=3),
    "teams, joint": variants.ForwardTeam(
        width=32, warps=4, occupancy=1, latency=1, members=3, weight_load="joint"
    ),
    "unaligned": variants.ForwardUnaligned(
        width=32, warps=4, occupancy=1, latency=2, pieces=3, rows=2, vector=4
    ),
    "unaligned teams": variants.ForwardUnalignedTeam(
        width=32, warps=4, occupancy=1, latency=2, members=3, vector=4
    ),
}
BACKWARDS = {
    "rows": variants.BackwardRows(width=64, warps=4, occupancy=2, latency=4, rest=32),
    "rows, equal tiles": variants.BackwardRows(width=32, warps=4, occupancy=1, latency=4, pieces=3),
    "rows by TMA": variants.BackwardPipelined(width=32, warps=4, occupancy=1, latency=4, pieces=3),
    "tiles": variants.BackwardTiles(width=32, warps=4, occupancy=2, latency=4, rows=4, pieces=3),
    "teams": variants.BackwardTeam(width=32, warps=4, occupancy=1, latency=1, members=3),
    "teams by TMA": variants.BackwardPipelinedTeam(
        width=32, warps=4, occupancy=1, latency=1, members=3, rstd_ahead=True
    ),
    "split": variants.BackwardSplit(
        width=64, warps=4, occupancy=1, latency=1, rest=32, rows=4, strip=32, slab=8
    ),
    "split, reread": variants.BackwardSplitReread(
        width=32, warps=4, occupancy=1, latency=1, rows=4, strip=32, slab=8, gathers=True
    ),
    "split, reread, ahead": variants.BackwardSplitReread(
        width=32, warps=4, occupancy=1, latency=3, rows=4, strip=32, slab=8
    ),
    "strips": variants.BackwardStrips(width=32, warps=4, occupancy=2, latency=4, rows=4),
    "unaligned": variants.BackwardUnaligned(
        width=32, warps=4, occupancy=1, latency=2, pieces=3, rows=2, vector=4
    ),
    "unaligned teams": variants.BackwardUnalignedTeam(
        width=32, warps=4, occupancy=1, latency=2, members=3, vector=4
    ),
    "dx, reread": variants.BackwardReread(width=32, warps=4, occupancy=2, latency=4),
}
KERNELS = [("forward", kernel) for kernel in FORWARDS] + [("backward", kernel) for kernel in BACKWARDS]
