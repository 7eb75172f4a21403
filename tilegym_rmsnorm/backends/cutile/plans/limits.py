# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which configs there can be: what a table may say, and what tuning may try. No torch, no cuda.tile."""

from __future__ import annotations

import dataclasses

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_ROWS, LARGEST_GRID_Y
from tilegym_rmsnorm.backends.cutile.plans.wide import MOST_MEMBERS

BACKWARDS = ("backward", "dx")  # with dw, and without: the weight is frozen, or there is none
KERNELS = {
    "forward": ("rows", "tiles", "teams", "chunks"),
    "backward": ("rows", "tiles", "teams", "fused", "fused_chunks", "strips"),
    "dx": ("rows", "tiles", "teams", "chunks"),
}
WITH_TMA = {
    "forward": ("chunks",),
    "backward": ("rows", "tiles", "teams", "strips"),
    "dx": ("rows", "tiles", "teams", "chunks"),
}
# Backwards whose blocks walk the rows, and read x and dy once for dx and dw.
WALKS_ROWS = ("rows", "tiles", "teams")
SMALLEST_SHARE = 50  # percent; `tune` tries 68 and more
MOST_PIECES = 32  # each is code of its own; 32768 columns in tiles of 1024
LARGEST_TILE = 2**16  # elements: the registers of an SM, each 4 bytes
LARGEST_SLAB = FEW_ROWS  # rows: one slab of few rows; warmup needs memory for 16 slabs
STORED = [field for field in dataclasses.fields(Config) if field.name not in ("reason", "spills")]
_TYPES = {"int": int, "bool": bool, "str": str}


def largest_tile(config: Config) -> int:
    """Elements of the largest tile that a block of this config holds."""
    row = config.lanes // config.members
    return max(row, config.rows * config.strip) if config.is_fused else config.rows * row


def check_config(config: Config, bucket: Bucket, architecture: int) -> None:
    """Raise ValueError unless a kernel of the bucket's op can be compiled with this config and covers every column."""
    op, n, c = bucket.op, bucket.n, config
    expect(c.kernel in KERNELS[op], "kernel", KERNELS[op], c.kernel)
    for field in STORED:
        value = getattr(c, field.name)
        expect(type(value) is _TYPES[str(field.type)], field.name, field.type, value)

    fewest, most = (2, MOST_MEMBERS) if c.kernel == "teams" else (1, 1)
    expect(fewest <= c.members <= most, "members", f"{fewest} to {most}", c.members)
    is_fused = c.kernel in ("fused", "fused_chunks")
    extents = (c.width, c.rows, *([c.rest] if c.rest else []), *([c.strip] if is_fused else []))
    expect(all(e > 0 and e == power_of_two(e) for e in extents), "extents", "powers of two", extents)
    elements = largest_tile(c)
    expect(elements <= LARGEST_TILE, "a tile", f"at most {LARGEST_TILE} elements", elements)
    if c.kernel in ("rows", "tiles", "teams", "fused"):
        expect(c.lanes >= n, "columns of all tiles", f"at least {n}", c.lanes)
    has_pieces = c.kernel in ("rows", "teams") or c.kernel == "tiles" and (op in BACKWARDS or c.together)
    most = MOST_PIECES if has_pieces else 1
    expect(1 <= c.pieces <= most, "pieces", f"1 to {most}", c.pieces)
    expect(not c.rest or c.kernel in ("rows", "fused"), "rest", "0, or kernel rows or fused", c.rest)
    last = c.rest or c.width  # the only tile that is bounds-checked
    expect(
        c.lanes == last or c.lanes - last < n, "columns before the last tile", f"below {n}", c.lanes - last
    )
    is_packable = c.kernel in ("rows", "teams") and ITEMSIZE[bucket.dtype] == 2
    expect(not c.packed or is_packable, "packed", "kernel rows or teams and 2-byte elements", c.packed)
    expect(c.rows == 1 or c.kernel in ("tiles", "strips") or is_fused, "rows", 1, c.rows)
    if is_fused:
        is_slab = 0 < c.slab <= LARGEST_SLAB and c.slab % c.rows == 0
        expect(is_slab, "slab", f"a multiple of {c.rows}, at most {LARGEST_SLAB}", c.slab)
    else:
        expect(c.strip == c.slab == 0, "strip and slab", "0 for this kernel", (c.strip, c.slab))
    if c.kernel == "fused_chunks":
        # By such a product, of int32, a block finds its place. Taller slabs (sizes.slab_tiles) are of more rows of such
        # a width than any memory holds.
        strips = -(-n // c.strip)
        product = strips * (strips + c.slab)
        expect(product < 2**31, "strips * (strips + slab)", "below 2**31", product)
    if c.kernel == "strips":
        strips = -(-n // c.width)
        expect(strips <= LARGEST_GRID_Y, "strips", f"at most {LARGEST_GRID_Y} in a grid", strips)
    expect(c.warps in (4, 8), "warps", "4 or 8", c.warps)  # cuda-tile refuses others up to tileiras 13.4
    most = (
        8 if op == "backward" else 32
    )  # each block of a backward leaves a row of dw_partial: P of at most 8 per SM
    expect(1 <= c.occupancy <= most, "occupancy", f"1 to {most}", c.occupancy)
    expect(1 <= c.latency <= 10, "latency", "1 to 10", c.latency)
    expect(architecture >= 90 or not c.tma, "tma", f"false on sm_{architecture}", c.tma)
    # Not forward's tiles: tileiras 13.4 makes some of them of warps that together ask for more registers than a block
    # has, and wait forever: M x 1 on an H100
    expect(not c.tma or c.kernel in WITH_TMA[op], "tma", f"false, or kernel of {WITH_TMA[op]}", c.kernel)
    if c.tma and c.kernel in ("rows", "teams"):
        expect(c.width > 1, "tma", "tiles of 2 columns or more", c.width)  # bfloat16 is widened two at a time
        # By 4 warps some rows of 7168 to 10240 columns load over x that is still read; such teams were not looked at
        expect(c.warps == 8 or not c.packed, "packed rows and teams by tma", "8 warps", c.warps)
    if c.tma and c.kernel == "rows":
        expect(not (c.rest or c.short), "tma of rows", "no rest, not short", c)
    if c.packed and c.kernel == "teams" and op in BACKWARDS:
        # With rstd ahead, which by gathers and by three blocks an SM there is not
        expect(c.tma and c.occupancy == 1, "packed teams of a backward", "tma, one block an SM", c)
    has_share = op in BACKWARDS and c.kernel in WALKS_ROWS
    expect(c.share == 100 or has_share, "share", f"100, or a backward's kernel of {WALKS_ROWS}", c.share)
    expect(SMALLEST_SHARE <= c.share <= 100, "share", f"{SMALLEST_SHARE} to 100", c.share)
    kind = f"{op}'s {c.kernel}"
    is_early = op == "forward" and c.kernel in ("rows", "tiles")
    expect(not c.early_weight or is_early, "early_weight", "forward's kernel rows or tiles", kind)
    may_wait = op == "forward" and c.kernel in ("rows", "tiles", "teams")
    expect(not c.together or may_wait, "together", "forward's kernel rows, tiles or teams", kind)
    expect(not (c.together and c.early_weight), "together", "no early_weight beside it", c)
    if c.together and c.kernel != "tiles":  # rows and teams take two 16-bit elements as one word
        expect(min(c.width, last) > 1, "together", "tiles of 2 columns or more", min(c.width, last))
    may_be_short = op in BACKWARDS and c.kernel == "rows"
    expect(not c.short or may_be_short, "short", "backward's kernel rows", kind)


def expect(is_right: bool, what: str, expected: object, got: object) -> None:
    """Raise ValueError that says what was expected and what was given, unless it is right."""
    if not is_right:
        raise ValueError(f"{what}: expected {expected}, got {got!r}")
