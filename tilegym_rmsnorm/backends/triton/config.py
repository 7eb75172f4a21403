# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Launch decisions of the Triton backend, as data: pure functions of the shape and the SM count.

Only the grid depends on M. All that is compiled in depends on N (the dw tile on the SM count besides), so that a new
batch size compiles nothing. Sizes are in elements, not bytes: what limits them is registers, where all is float32
whatever x's dtype. The measure is 16 elements per thread. It leaves the backward 32 to 128 registers per thread (x, dy,
weight and dw sums), so that 16 warps fit an SM, and gives each thread 32 bytes of a bfloat16 array to load at once.
Only rows that vector loads cannot take (N not a multiple of 8) need up to 200, and then half as many warps fit.

Registers and spills here and in each op's config are ptxas's, for sm_90 and from Triton 3.6 and 3.9 where nothing else
is said. Of these choices BACKWARD_REGISTERS of one of them alone was timed.
"""

from __future__ import annotations

from dataclasses import dataclass

ELEMENTS_PER_WARP = 512
WARPS_PER_SM = 16  # of the backward: 512 threads share 65536 registers, 128 each

# The forward has many small programs per SM to overlap; the backward has two of 8 warps that stay, since each of its
# programs costs a row of dw_partial.
FORWARD_TILE, FORWARD_MIN_WARPS = 2048, 4
BACKWARD_TILE, BACKWARD_MIN_WARPS = 4096, 8
MOST_ROWS = 128  # per tile: of narrow rows, more take up to 255 registers per thread, for their addresses

FORWARD_HELD = 16384  # widest row that is read once: up to 110 registers per thread
# Most per thread of such 16-bit rows as spill nothing by it: an SM holds three programs of 512 threads. ptxas takes 42
# at 7168 columns by itself, which makes it two: 78 us for 62 (8192 rows, H200).
FORWARD_REGISTERS, FORWARD_LIMITED = 40, 8192
BACKWARD_HELD = 8192  # twice as wide, x, dy, weight and sums spill 184 to 224 bytes per thread
# Twice as wide, the sums alone spill 80 to 472 bytes per thread. What it spills itself is in test_triton_compile.py.
BACKWARD_REREAD = 16384
CHUNK = 4096  # per step over a row that is not held: 8 warps, or 16 of them where the sums for dw are
STRIP = 1024  # 2 KiB of a bfloat16 row in one burst, and 6 % padding at most
VLLM_BLOCK, VLLM_WARPS = 1024, 4  # of its rms_norm_batch_invariant: both are in the order of its sums

# SMs that a backward under DEVICE counts on, whatever the GPU has: those of an H100 or H200, which lose nothing by it
FIXED_SMS = 132

DW_TILE, DW_WARPS = 4096, 4  # eight 16-byte loads in flight per thread


@dataclass(frozen=True)
class Form:
    """Constants of a call of `rms_norm`, for which its kernels are compiled."""

    N: int
    rounds_xhat: bool
    is_per_head: bool  # weight and bias


@dataclass(frozen=True)
class Tile:
    """Tiles of (rows, width) elements: a program holds `tiles` of them at once, `strips` times as many make a row."""

    rows: int
    width: int
    tiles: int = 1
    strips: int = 1
    stages: int = 1  # 2: the next step's x and dy travel to shared memory (64 KiB at most) during this one


@dataclass(frozen=True)
class ForwardConfig:
    kernel: str  # a name in forward.py
    tile: Tile
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """dw_partial has `walks` rows."""

    kernel: str  # a name in backward.py
    tile: Tile
    walks: int
    num_warps: int
    dw_width: int  # of the tiles of DW_TILE elements that sum dw_partial
    c_tile: Tile | None = None  # of backward_c, which runs before


def forward_config(N: int, is_vllms: bool = False) -> ForwardConfig:
    """Configure a forward of N columns, with a program per tile of rows, however many: on an H100 such grids reached
    2700 to 2930 GB/s in Triton (bfloat16, N of 128 to 16384), and persistent loops were 3 to 5 % slower in cuTile.
    is_vllms: in the order of vLLM's sums."""
    if is_vllms:
        tile = Tile(rows=1, width=VLLM_BLOCK, strips=cdiv(N, VLLM_BLOCK))
        return ForwardConfig("forward_vllm", tile, VLLM_WARPS)
    if N > FORWARD_HELD:
        tile = Tile(rows=1, width=CHUNK, strips=cdiv(N, CHUNK))
        return ForwardConfig("forward_reread", tile, CHUNK // ELEMENTS_PER_WARP)
    tile = Tile(_rows(N, FORWARD_TILE), *_tiles(N))
    return ForwardConfig("forward_rows", tile, warps(N, FORWARD_MIN_WARPS))


def backward_config(
    M: int, N: int, sm_count: int, heads: int = 1, sms_left: int | None = None, is_fixed: bool = False
) -> BackwardConfig:
    """Configure a backward of M rows of N elements, or M a head where each has its own weight and walks. All programs
    are resident at once, on `sms_left` of the SMs (None: all), and as few as leave the longest walk no longer.
    is_fixed: M and the GPU do not decide which walk takes a row, and rows behind the others change no row's walk.

    backward_dx reads whole rows once or, after backward_c, a strip of each row. backward_dx_reread reads one whole row
    at a time, and again (from cache) once c is known."""
    kernel, c_tile, num_warps = "backward_dx", None, warps(N, BACKWARD_MIN_WARPS)
    if N <= BACKWARD_HELD:
        tile = Tile(_rows(N, BACKWARD_TILE), *_tiles(N), stages=2)
    elif N <= BACKWARD_REREAD:
        # Two stages would double its loads' way to shared memory as well.
        kernel, tile = "backward_dx_reread", Tile(rows=1, width=CHUNK, tiles=cdiv(N, CHUNK))
    else:
        tile = Tile(BACKWARD_TILE // STRIP, STRIP, strips=cdiv(N, STRIP), stages=2)
        c_tile = Tile(rows=1, width=BACKWARD_TILE, strips=cdiv(N, BACKWARD_TILE))
        num_warps = BACKWARD_MIN_WARPS
    if is_fixed:
        sm_count, sms_left = FIXED_SMS, None
    steps = cdiv(M, tile.rows)
    most_walks = max(1, resident(num_warps, sm_count, sms_left) // (tile.strips * heads))
    walks = min(steps, most_walks) if is_fixed else cdiv(steps, cdiv(steps, most_walks))
    return BackwardConfig(kernel, tile, walks, num_warps, width_of_sums(heads * N, sm_count), c_tile)


def _rows(N: int, tile: int) -> int:
    return min(max(tile // power_of_two(N), 1), MOST_ROWS)


def _tiles(N: int) -> tuple[int, int]:
    """Width and number of the tiles that hold a row: three quarters of a power of two where they suffice, else one.

    Not below 513 columns: quarter tiles would leave each thread less than four elements (8 bytes of bfloat16) to load.
    """
    power = power_of_two(N)
    return (power // 4, 3) if power >= 1024 and 4 * N <= 3 * power else (power, 1)


def warps(N: int, least: int) -> int:
    return min(max(power_of_two(N) // ELEMENTS_PER_WARP, least), WARPS_PER_SM)


def resident(num_warps: int, sm_count: int, sms_left: int | None) -> int:
    """Count the programs of a backward that run at once."""
    return (sm_count if sms_left is None else sms_left) * WARPS_PER_SM // num_warps


def width_of_sums(N: int, sm_count: int) -> int:
    """Two column tiles per SM where N allows it, of 64 bytes (two sectors) to 512 bytes per row."""
    return min(max(power_of_two(N) // power_of_two(2 * sm_count), 16), 128)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
