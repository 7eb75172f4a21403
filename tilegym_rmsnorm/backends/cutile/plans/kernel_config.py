# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What a config is: how one kernel is compiled, as data. No torch, no cuda.tile."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled. Extents are in elements."""

    kernel: str  # one of limits.KERNELS, which says what serves which op; "chunks" of a backward: dx alone
    width: int  # columns of a tile, a power of two; "chunks", "fused_chunks": of a chunk of a row
    warps: int
    occupancy: int  # blocks per SM that the compiler leaves room for
    latency: int  # cuda-tile's hint 1..10: how far ahead loads are issued, paid in shared memory
    rest: int = 0  # "rows", "fused": columns of one more tile after those of `width`, 0 for none
    rows: int = 1  # rows of a tile; "fused", "fused_chunks": of a tile of dy * xhat
    strip: int = 0  # "fused", "fused_chunks": columns of a tile of dy * xhat
    slab: int = 0  # "fused", "fused_chunks": rows of x that share a row of dw_partial, a multiple of `rows`
    tma: bool = False  # loads and stores by TMA, of kernels of limits.WITH_TMA; "rows": by pipelined.py
    short: bool = False  # backward "rows": compile a way without the loop too, for as many blocks as rows
    early_weight: bool = False  # forward "rows", "tiles": load the weight along with x, tiles by gathers
    # forward "rows", "tiles", "teams": x and a weight of its dtype are awaited together, whatever the compiler thinks
    together: bool = False
    # "rows", "teams", "tiles" (forward: with `together`): tiles of `width` that a block holds of a row
    pieces: int = 1
    members: int = 1  # "teams": blocks that share a row
    # "rows", forward "teams": 2-byte elements stay so in registers while summed; backwards by TMA: see pipelined.py
    packed: bool = False
    share: int = (
        100  # backwards of limits.WALKS_ROWS: so many percent of the blocks that fit the SMs walk the rows
    )
    reason: str = ""
    spills: str = ""  # why this config is kept although its kernel spills registers

    @property
    def lanes(self) -> int:
        """Columns of all tiles of a row, or of a chunk or strip."""
        return self.width * self.pieces * self.members + self.rest

    @property
    def slots(self) -> int:
        """Elements of a row of a team's board (team.py), of which each member has one."""
        return power_of_two(self.members)

    @property
    def is_fused(self) -> bool:
        """Whether one launch has blocks for dx and blocks for dw (split.py)."""
        return self.slab > 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def two_tiles(n: int) -> tuple[int, int]:
    """n as one tile, or as two where that leaves at most three quarters of the lanes of one: 5120 = 4096 + 1024.

    The second is at least an eighth of the first: less saves nothing, and would be a kernel of its own.
    """
    whole = power_of_two(n)
    width = whole // 2
    if n < 2048 or n == whole:
        return whole, 0
    rest = max(power_of_two(n - width), width // 8)
    return (width, rest) if width + rest <= whole * 3 // 4 else (whole, 0)


def constants_of(function: Callable[..., None], config: Config, n: int, **switches: int) -> tuple[Any, ...]:
    """The compile-time arguments of a kernel for rows of n elements, in its order: those that the config stands for,
    by their names in capitals, and the switches of the call."""
    values = {
        "ROWS": config.rows,
        "WIDTH": config.width,
        "PIECES": config.pieces,
        "REST": config.rest,
        "EVEN": config.lanes == n,
        "LATENCY": config.latency,
        "TMA": config.tma,
        "PACKED": config.packed,
        "SHORT": config.short,
        "EARLY_WEIGHT": config.early_weight,
        "TOGETHER": config.together,
        "MEMBERS": config.members,
        "SLOTS": config.slots,
        # Three blocks an SM have no registers for it (4096x32768, H200: 249.8 -> 264.2 us), nor to keep the weight
        "AHEAD": config.tma and config.occupancy < 3,
        "STRIP": config.strip,
        "EVEN_STRIPS": config.strip > 0 and n % config.strip == 0,
        # not chunks issued ahead: float32 512x131072 584 us by tiles, 634 by gathers, on an H100
        "GATHERS": config.kernel == "fused" or config.latency == 1,
        "WHOLE_ROWS": config.kernel == "fused",
        "DIVISOR": math.gcd(n, 16),  # the largest power of two up to 16 that divides n
        **switches,
    }
    return tuple(values[name] for name in inspect.signature(function).parameters if name.isupper())
