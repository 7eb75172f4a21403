# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A variant of each kernel with each way to go through a row, for rows of 65 to 96 columns."""

from tilegym_rmsnorm.backends.cutile.plans import variants

FOUR, TWO = ({"warps": 4, "occupancy": number, "latency": 4} for number in (4, 2))
ONE = {"warps": 4, "occupancy": 1, "latency": 1}
OFFSETS = {**ONE, "latency": 2, "width": 32, "vector": 4}
SLABS = {**ONE, "rows": 4, "strip": 32, "slab": 8}
FORWARDS = {
    "rows": variants.ForwardRows(**FOUR, width=64, rest=32),
    "rows, joint": variants.ForwardRows(**FOUR, width=64, rest=32, weight_load="joint"),
    "tiles": variants.ForwardTiles(**FOUR, width=128, rows=4),
    "tiles, early": variants.ForwardTiles(**FOUR, width=128, rows=4, weight_load="early"),
    "tiles, joint": variants.ForwardTiles(**FOUR, width=32, rows=4, pieces=3, weight_load="joint"),
    "reread": variants.ForwardReread(**FOUR, width=32),
    "teams": variants.ForwardTeam(**ONE, width=32, members=3),
    "teams, joint": variants.ForwardTeam(**ONE, width=32, members=3, weight_load="joint"),
    "unaligned": variants.ForwardUnaligned(**OFFSETS, pieces=3, rows=2),
    "unaligned teams": variants.ForwardUnalignedTeam(**OFFSETS, members=3),
}
BACKWARDS = {
    "rows": variants.BackwardRows(**TWO, width=64, rest=32),
    "rows, equal tiles": variants.BackwardRows(**TWO | {"occupancy": 1}, width=32, pieces=3),
    "rows by TMA": variants.BackwardPipelined(**TWO | {"occupancy": 1}, width=32, pieces=3),
    "tiles": variants.BackwardTiles(**TWO, width=32, rows=4, pieces=3),
    "teams": variants.BackwardTeam(**ONE, width=32, members=3),
    "teams by TMA": variants.BackwardPipelinedTeam(**ONE, width=32, members=3, rstd_ahead=True),
    "split": variants.BackwardSplit(**SLABS, width=64, rest=32),
    "split, reread": variants.BackwardSplitReread(**SLABS, width=32, gathers=True),
    "split, reread, ahead": variants.BackwardSplitReread(**SLABS | {"latency": 3}, width=32),
    "strips": variants.BackwardStrips(**TWO, width=32, rows=4),
    "unaligned": variants.BackwardUnaligned(**OFFSETS, pieces=3, rows=2),
    "unaligned teams": variants.BackwardUnalignedTeam(**OFFSETS, members=3),
    "dx, reread": variants.BackwardReread(**TWO, width=32),
}
KERNELS = [("forward", kernel) for kernel in FORWARDS] + [("backward", kernel) for kernel in BACKWARDS]
