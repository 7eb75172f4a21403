# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Launch decisions of the Triton backend, as data: pure functions of the shape and the SM count.

Only the grid depends on M. All that is compiled in depends on N (the dw tile on the SM count besides), so that a new
batch size compiles nothing. Sizes are in elements, not bytes: what limits them is registers, where all is float32
whatever x's dtype. The measure is 16 elements per thread. It leaves the backward 32 to 128 registers per thread (x, dy,
weight and dw sums), so that 16 warps fit an SM, and gives each thread 32 bytes of a bfloat16 array to load at once.
Only rows that vector loads cannot take (N not a multiple of 8) need up to 200, and then half as many warps fit.

Registers and spills here and below are ptxas's, for sm_90 and from Triton 3.6 and 3.9 where nothing else is said. Of
these choices BACKWARD_REGISTERS alone was timed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ELEMENTS_PER_WARP = 512
WARPS_PER_SM = 16  # of the backward: 512 threads share 65536 registers, 128 each
# In the backward of rope the compiler is held to them. Left alone, Triton 3.7.1 gives some forms 139 to 160: half of
# the programs wait. At 128 those spill up to 16 bytes; float32 heads of 64 with positions spill 40, on sm_100 alone.
# On an H200, Triton 3.6.0, (2, 8192, 16+16, 64) with positions in bfloat16 goes from 125.7 to 90.1 us, seven other
# calls change by at most 1.2 %.
BACKWARD_REGISTERS = 65536 // (32 * WARPS_PER_SM)

# The forward has many small programs per SM to overlap; the backward has two of 8 warps that stay, since each of its
# programs costs a row of dw_partial.
FORWARD_TILE, FORWARD_MIN_WARPS = 2048, 4
BACKWARD_TILE, BACKWARD_MIN_WARPS = 4096, 8
MOST_ROWS = 128  # per tile: of narrow rows, more take up to 255 registers per thread, for their addresses

FORWARD_HELD = 16384  # widest row that is read once: up to 110 registers per thread
BACKWARD_HELD = 8192  # twice as wide, x, dy, weight and sums spill 184 to 224 bytes per thread
# Twice as wide, the sums alone spill 80 to 472 bytes per thread. What it spills itself is in test_triton_compile.py.
BACKWARD_REREAD = 16384
CHUNK = 4096  # per step over a row that is not held: 8 warps, or 16 of them where the sums for dw are
STRIP = 1024  # 2 KiB of a bfloat16 row in one burst, and 6 % padding at most

DW_TILE, DW_WARPS = 4096, 4  # eight 16-byte loads in flight per thread


@dataclass(frozen=True)
class ForwardConfig:
    """Tiles of (rows, width) elements, `tiles` of them to a row, held in registers or (rows is 1) visited twice."""

    is_held: bool
    rows: int
    width: int
    tiles: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles of (rows, width) elements, `tiles` of them to a row; dw_partial has `walks` rows.

    plan "held": a program reads whole rows once; "reread": one whole row at a time, read again (from cache) once c is
    known; "strips": first a kernel for c, then a program per walk and tile of the row.
    """

    plan: str
    walks: int
    rows: int
    width: int
    tiles: int
    num_warps: int
    num_stages: int  # 2: the next step's x and dy travel to shared memory (64 KiB at most) during this one
    dw_width: int  # of the tiles of DW_TILE elements that sum dw_partial


@dataclass(frozen=True)
class RopeForm:
    """Constants of a call of `qk_norm_rope`, for which its kernels are compiled. A head is held as two tiles of `half`
    columns, for both elements of the pairs, and `rests` tiles of `rest` columns."""

    D: int
    R: int
    is_interleaved: bool
    has_half_tables: bool
    rounds_xhat: bool
    rounds_n: bool
    rounds_each: bool
    # Not properties: what Triton has compiled it finds again by the fields.
    half: int
    rest: int
    rests: int

    @property
    def columns(self) -> int:
        return 2 * self.half + self.rests * self.rest


class RopeHeads(NamedTuple):
    """Heads of q, or of k."""

    H: int
    is_per_head: bool  # the weight


@dataclass(frozen=True)
class RopeTile:
    """Heads of q, or of k, that a program holds at once: `heads` of each of `tokens`."""

    tokens: int
    heads: int
    is_per_head: bool


@dataclass(frozen=True)
class RopeForwardConfig:
    form: RopeForm
    tiles: tuple[RopeTile, ...]  # of q, and of k if it is there
    num_warps: int


@dataclass(frozen=True)
class RopeBackwardConfig:
    """Programs walk over tiles, some of q and the others of k. dw_partial has a row for each walk: a program, or with a
    per-head weight as many as all heads take."""

    form: RopeForm
    tiles: tuple[RopeTile, ...]
    walks: tuple[int, ...]
    programs: tuple[int, ...]
    num_warps: int
    num_stages: int  # as in BackwardConfig
    dw_width: int


def forward_config(N: int) -> ForwardConfig:
    """Configure a forward of N columns, with a program per tile of rows, however many: on an H100 such grids reached
    2700 to 2930 GB/s in Triton (bfloat16, N of 128 to 16384), and persistent loops were 3 to 5 % slower in cuTile."""
    if N > FORWARD_HELD:
        return ForwardConfig(
            False, rows=1, width=CHUNK, tiles=_cdiv(N, CHUNK), num_warps=CHUNK // ELEMENTS_PER_WARP
        )
    width, tiles = _tiles(N)
    rows = _rows(N, FORWARD_TILE)
    return ForwardConfig(True, rows, width, tiles, _warps(N, FORWARD_MIN_WARPS))


def backward_config(
    M: int, N: int, sm_count: int, heads: int = 1, sms_left: int | None = None
) -> BackwardConfig:
    """Configure a backward of M rows of N elements, or M a head where each has its own weight and walks. All programs
    are resident at once, on `sms_left` of the SMs (None: all), and as few as leave the longest walk no longer."""
    rows = _rows(N, BACKWARD_TILE)
    num_warps = _warps(N, BACKWARD_MIN_WARPS)
    programs_per_walk = 1
    if N <= BACKWARD_HELD:
        plan, (width, tiles) = "held", _tiles(N)
    elif N <= BACKWARD_REREAD:
        plan, width, tiles = "reread", CHUNK, _cdiv(N, CHUNK)
    else:
        plan, rows, width, tiles = "strips", BACKWARD_TILE // STRIP, STRIP, _cdiv(N, STRIP)
        num_warps, programs_per_walk = BACKWARD_MIN_WARPS, tiles
    steps = _cdiv(M, rows)
    resident = (sm_count if sms_left is None else sms_left) * WARPS_PER_SM // num_warps
    most_walks = max(1, resident // (programs_per_walk * heads))
    return BackwardConfig(
        plan,
        walks=_cdiv(steps, _cdiv(steps, most_walks)),
        rows=rows,
        width=width,
        tiles=tiles,
        num_warps=num_warps,
        # "reread" would double its loads' way to shared memory as well.
        num_stages=1 if plan == "reread" else 2,
        dw_width=_dw_width(heads * N, sm_count),
    )


def rope_form(D: int, R: int, **flags: bool) -> RopeForm:
    """flags: those of RopeForm."""
    rest = D - R
    power = _power_of_two(rest) if rest else 0
    # Narrower than those of `_tiles`: other heads of the tile keep the threads busy.
    width, tiles = (power // 4, 3) if power >= 64 and 4 * rest <= 3 * power else (power, min(rest, 1))
    return RopeForm(D, R, **flags, half=_power_of_two(R // 2), rest=width, rests=tiles)


def rope_forward_config(form: RopeForm, heads: Sequence[RopeHeads]) -> RopeForwardConfig:
    """heads: of q, and of k if it is there."""
    return RopeForwardConfig(
        form, _rope_tiles(form, FORWARD_TILE, heads), _warps(form.columns, FORWARD_MIN_WARPS)
    )


def rope_backward_config(
    form: RopeForm, M: int, heads: Sequence[RopeHeads], sm_count: int, sms_left: int | None = None
) -> RopeBackwardConfig:
    """Configure walks over M tokens. All programs are resident at once, as in `backward_config`, and as few as leave
    the longest walk no longer."""
    # With any of these the whole tile takes 147 to 182 registers per thread, and one program would fill an SM.
    is_half = form.is_interleaved or form.rests > 0 or any(each.is_per_head for each in heads)
    tiles = _rope_tiles(form, BACKWARD_TILE // 2 if is_half else BACKWARD_TILE, heads)
    num_warps = _warps(form.columns, BACKWARD_MIN_WARPS)
    blocks = [_cdiv(each.H, tile.heads) for each, tile in zip(heads, tiles, strict=True)]
    groups = [count if tile.is_per_head else 1 for count, tile in zip(blocks, tiles, strict=True)]
    steps = [
        _cdiv(M, tile.tokens) * count // group
        for tile, count, group in zip(tiles, blocks, groups, strict=True)
    ]

    def programs(longest: int) -> tuple[int, ...]:
        return tuple(_cdiv(count, longest) * group for count, group in zip(steps, groups, strict=True))

    resident = (sm_count if sms_left is None else sms_left) * WARPS_PER_SM // num_warps
    # The shortest of the longest walks; one of all steps where even those are too many programs
    longest = 1 + bisect_left(
        range(1, max(steps)), True, key=lambda longest: sum(programs(longest)) <= resident
    )
    dw_width = _dw_width(form.D * max(each.H if each.is_per_head else 1 for each in heads), sm_count)
    return RopeBackwardConfig(
        form,
        tiles,
        walks=tuple(_cdiv(count, longest) for count in steps),
        programs=programs(longest),
        num_warps=num_warps,
        # Wider heads, x, dy, cos and sin in float32, would take 128 KiB of shared memory.
        num_stages=2 if form.columns <= BACKWARD_TILE else 1,
        dw_width=dw_width,
    )


def _rope_tiles(form: RopeForm, elements: int, heads: Sequence[RopeHeads]) -> tuple[RopeTile, ...]:
    rows = min(_power_of_two(max(elements // form.columns, 1) + 1) // 2, MOST_ROWS)
    counts = [_tile_heads(each.H, rows) for each in heads]
    return tuple(
        RopeTile(rows // count, count, each.is_per_head) for count, each in zip(counts, heads, strict=True)
    )


def _tile_heads(H: int, rows: int) -> int:
    """The power of two that leaves the least to do where cos and sin of a token count as two heads more."""
    powers = [1 << i for i in range(rows.bit_length())]
    return min(powers, key=lambda count: _cdiv(H, count) * (count + 2))


def _rows(N: int, tile: int) -> int:
    return min(max(tile // _power_of_two(N), 1), MOST_ROWS)


def _tiles(N: int) -> tuple[int, int]:
    """Width and number of the tiles that hold a row: three quarters of a power of two where they suffice, else one.

    Not below 513 columns: quarter tiles would leave each thread less than four elements (8 bytes of bfloat16) to load.
    """
    power = _power_of_two(N)
    return (power // 4, 3) if power >= 1024 and 4 * N <= 3 * power else (power, 1)


def _warps(N: int, least: int) -> int:
    return min(max(_power_of_two(N) // ELEMENTS_PER_WARP, least), WARPS_PER_SM)


def _dw_width(N: int, sm_count: int) -> int:
    """Two column tiles per SM where N allows it, of 64 bytes (two sectors) to 512 bytes per row."""
    return min(max(_power_of_two(N) // _power_of_two(2 * sm_count), 16), 128)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
