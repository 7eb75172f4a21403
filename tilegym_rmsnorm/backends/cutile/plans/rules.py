# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Choose variants where no record does, by reasoning, for every architecture and for rows that are not aligned.

Thresholds are in elements where registers decide, which hold float32 whatever the dtype, and in bytes where the bytes
in flight do. The tests compile a sample for each architecture; they were timed on sm_90 alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS, Split, Team, two_tiles
from tilegym_rmsnorm.backends.cutile.plans.problem import Problem
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID_Y
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardMeans,
    BackwardReread,
    BackwardRows,
    BackwardStrips,
    BackwardTiles,
    BackwardUnaligned,
    BackwardUnalignedTeam,
    ClearBoard,
    ForwardReread,
    ForwardRows,
    ForwardTiles,
    ForwardUnaligned,
    ForwardUnalignedTeam,
    SumPartials,
)

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
WIDEST_FORWARD_ROW = 32768  # elements that one block of 8 warps holds in registers, float32: 128 each thread
WIDEST_BACKWARD_ROW = 16384  # elements of x and dy: 128 registers, float32, in each thread of 8 warps
STRIP = 2048  # columns
WIDEST_FUSED_ROW = WIDEST_BACKWARD_ROW  # beside a residual or a bias, or of heads, in one block
WIDEST_UNALIGNED_ROW = 8192  # of rows that are not aligned: they need registers for addresses
NARROWEST_UNALIGNED_ROW = 64
WIDEST_UNALIGNED_BLOCK = 10240  # elements of such a row that a block holds
UNALIGNED_PART = 8192  # and of a part of a wider one
WIDEST_BIAS_ROW = 8192  # of a backward that sums db beside dw: twice the float32 registers
WIDEST_TILE_OF_HEADS = 1024
WIDEST_PER_HEAD_ROW = 2048
MOST_HEADS = 16  # of a tile, where they are heads
SEQUENCE_OF_TILE = 64  # where they are a sequence, of which a tile is a small part


def is_fused(problem: Problem) -> bool:
    """Whether kernels take the form of a problem; else PyTorch's operations do their part around a plain call."""
    form = problem.form
    if form.per_head and problem.n > WIDEST_PER_HEAD_ROW:
        return False
    if problem.op == "backward" and form.bias and problem.n > WIDEST_BIAS_ROW:
        return False
    return not form.heads or _fits_one_block(problem)  # heads have no kernel that goes through columns


def takes_form(first: Variant, problem: Problem) -> bool:
    """Whether a rule's variant serves the form of a problem: its kernel takes it, and registers have room for it. Rows
    that one block holds beside a residual or a bias are not for teams or chunks, which were not timed there."""
    if not (problem.form.residual or problem.form.bias):
        return first.serves_form(problem)
    holds_row = first.members == 1 and not first.goes_through_columns
    return first.serves_form(problem) and holds_row == _fits_one_block(problem)


def _fits_one_block(problem: Problem) -> bool:
    """Whether the registers of one block have room for what a form has beside rows and a weight."""
    if not (problem.form.residual or problem.form.bias or problem.form.heads):
        return True
    if problem.op == "forward":
        return problem.n <= (WIDEST_FUSED_ROW if problem.is_aligned else WIDEST_UNALIGNED_ROW)
    return problem.n <= _widest_backward_row(problem)


def heads_of_form(n: int, heads: int) -> int:
    """Return Form.heads for H of (B, T, H, N) beside one weight for all: a power of two of heads that a tile may have.

    These are few, so that few kernels serve every H. A last tile that is partly empty may add a sixteenth to H. From
    256 on H is a sequence, as of q in (B, H, T, D): then tiles lie along H alone, since T may be short.
    """
    if n > WIDEST_TILE_OF_HEADS:
        return 1  # a row is a block
    if heads >= 4 * SEQUENCE_OF_TILE:
        return SEQUENCE_OF_TILE
    counts = (MOST_HEADS >> shift for shift in range(MOST_HEADS.bit_length()))
    return next(each for each in counts if -(-heads // each) * each * 16 <= heads * 17)


def adds_heads_as_rows(n: int) -> bool:
    """Whether under a level (B, T, H, N) beside one weight for all is added as rows of (M, N) are: tiles of both are as
    wide as a row, whose order no layout decides (`Variant.order`)."""
    return n in (8, 16, 32, 64, 128, 256, 512)


def reasoned(problem: Problem) -> Variant:
    """The first kernel of any problem. Raises ValueError where nothing serves such rows."""
    first = _tiles_of_heads(problem) if problem.form.heads else _plain(problem)
    if first.uses_tma and not first.serves_form(problem):
        first = dataclasses.replace(first, **{"tma": False})  # those by TMA here have it as a field
    return first


def _tiles_of_heads(problem: Problem) -> Variant:
    """Rows of (B, T, H, N), each array with its own strides: tiles of some heads of some rows of T, or of a sequence
    that stands as H; from 1024 columns on a row a block.

    Of q in (4, 4096, 3, H, D) with dy transposed, bfloat16, 17 cells of H of 8, 28 and 32 and D from 64 to 256: on an
    H100 these settings take at most 1.03 times what the best of 9 others near them do, 1.01 in the mean; on an H200,
    of 20 to 30 others, 1.08 and 1.02. There a backward of 128 or 256 columns that loads further ahead, by latency 4,
    gains 6 %; on an H100 it loses 5 %. (4, 4096, 32, 128) on an H100: forward 93.1 us, backward 140.8, contiguous 91.5
    and 140.1; D of 80: 59.8 and 102.2, 62.6 and 107.5 (cuda-tile 1.7.0, tileiras 13.4.92). Forwards by TMA were slower,
    and so were backwards without.
    """
    n, form, architecture = problem.n, problem.form, problem.device.architecture
    if n > WIDEST_TILE_OF_HEADS and not form.per_head:
        return _plain(problem)
    width, dividing = power_of_two(n), form.heads & -form.heads  # the largest power of two that divides H
    is_sequence = not form.per_head and form.heads == SEQUENCE_OF_TILE

    def settings(tile_bytes: int, most_heads: int) -> dict[str, Any]:
        rows = max(1, tile_bytes // problem.itemsize // width)
        heads = min(rows, dividing, SEQUENCE_OF_TILE if is_sequence else most_heads)
        return {"width": width, "warps": 4, "rows": rows // heads, "heads": heads}

    if problem.op != "forward":
        latency, most_heads = (2, 4) if n == width >= 128 else (4, 8)
        # Bounds checks of columns beside a residual and the sums of a bias: by TMA up to 112 bytes a thread spilled.
        is_full = form.residual and form.bias and not problem.is_aligned and architecture >= 90
        tiles = settings(4096 if is_full else 8192, most_heads)
        return BackwardTiles(occupancy=2, latency=latency, tma=architecture >= 90, **tiles)
    # Eight blocks an SM leave a thread 64 registers: not for a second array, and see _forward of sm_100. Tiles that are
    # partly empty have fewer bytes in flight: four blocks of twice the size.
    is_bare = not (form.residual or form.bias or form.per_head)
    if is_bare and n == width and architecture < 100 and problem.itemsize == 2:
        return ForwardTiles(occupancy=8, latency=2, **settings(8192, most_heads=MOST_HEADS))
    # Tiles of twice as many bytes spilled x and residual: before Hopper 80 bytes a thread; those of a sequence on
    # sm_100 16; beside weights of heads, or addresses of rows that begin anywhere, on Hopper up to 408.
    # Weights and biases of heads, each a tile of them, left too few of 128 registers even so.
    takes_registers = form.per_head or form.is_scattered or not problem.is_aligned
    tile_bytes = 8192 if is_sequence or (form.residual and (architecture < 90 or takes_registers)) else 16384
    occupancy = 3 if form.residual and form.bias and form.per_head else 4
    return ForwardTiles(occupancy=occupancy, latency=4, **settings(tile_bytes, most_heads=MOST_HEADS))


def _plain(problem: Problem) -> Variant:
    if is_unaligned(problem):
        return _unaligned(problem)
    if problem.op == "forward":
        if problem.n > WIDEST_FORWARD_ROW or not _fits_one_block(problem):
            # Read twice, the second time from L2.
            has_tma = problem.device.architecture >= 90
            if problem.device.architecture == 90 and problem.itemsize == 2 and problem.n > WIDEST_FORWARD_ROW:
                return ForwardReread(width=16384, warps=8, occupancy=1, latency=3, tma=True)
            return ForwardReread(width=4096, warps=8, occupancy=2, latency=4, tma=has_tma)
        return _forward(problem.n, problem.device.architecture)
    if problem.n > _widest_backward_row(problem):
        return _strips(problem) if problem.op == "backward" else _reread(problem)
    return _backward(problem.n, problem.itemsize, problem.device.architecture)


def _vector(problem: Problem) -> int:
    """Choose how many elements unaligned.py loads at once: 8 bytes of them, in a forward 4, if that divides rows; else
    16 bytes, and rows have ends."""
    itemsize = problem.narrowest_itemsize
    dividing = math.gcd(problem.n, 16 // itemsize)
    is_enough = dividing * itemsize >= 8 or problem.op == "forward" and dividing > 1
    return dividing if is_enough else 16 // itemsize


def is_unaligned(problem: Problem) -> bool:
    """Whether rows are for the kernels of unaligned.py: where those were faster than gathers of rows. Few rows were not
    tried.

    Us by gathers and by these on an H200, x of 200 MB (cuda-tile 1.7.0, tileiras 13.4.92), bfloat16: forward of 693
    columns 176 and 133, 901 138 and 163, 3001 155 and 122, 13790 193 and 203; beside a residual of 211 297 and 336,
    3001 288 and 239, 23651 549 and 228; backward of 211 364 and 244, 3001 324 and 187, 23651 320 and 345; beside a
    residual of 693 629 and 240, 3001 479 and 219, 23651 734 and 355. float32: backward of 742 305 and 508, 1165 253
    and 181.
    """
    n, form = problem.n, problem.form
    widest = min(problem.most_members, MOST_MEMBERS) * UNALIGNED_PART
    if problem.is_aligned or problem.size == "few" or problem.partials == "own" or form.heads:
        return False
    if problem.device.architecture != 90 and n > (1024 if form.bias else WIDEST_UNALIGNED_ROW):
        return False  # registers spill; and teams were timed on Hopper alone
    itemsize, is_forward = problem.narrowest_itemsize, problem.op == "forward"
    if problem.policy.is_batch_invariant and n % _vector(problem):
        return False  # where a row begins would decide which lane has a column
    if n > WIDEST_UNALIGNED_BLOCK:
        return n <= widest and itemsize == 2 and (form.residual or is_forward and n > WIDEST_BACKWARD_ROW)
    if n % _vector(problem) == 0:
        return n >= NARROWEST_UNALIGNED_ROW and (itemsize == 2 or n <= 512)
    if itemsize == 4:
        return n > (2048 if is_forward else 1024)
    if is_forward and (form.residual or form.bias):
        return n > 1536
    return n > 1024 or (128 < n <= 768 if is_forward else n >= NARROWEST_UNALIGNED_ROW)


def _unaligned(problem: Problem) -> Variant:
    """Hold some rows a step in the registers of a block, or a wide one in those of a team."""
    n, vector, is_forward = problem.n, _vector(problem), problem.op == "forward"
    has_ends, inner = n % vector > 0, n // vector * vector
    if n > WIDEST_UNALIGNED_BLOCK:
        return _unaligned_team(problem, inner, vector)
    width = _unaligned_width(inner, is_forward, has_ends)
    lanes = -(-inner // width) * width
    elements, occupancy = _unaligned_room(problem, lanes, has_ends)
    rows, warps = max(1, power_of_two(elements // lanes + 1) // 2), 4 if lanes <= 4096 else 8
    tiles = {"width": width, "pieces": lanes // width, "rows": rows, "vector": vector}
    kind = ForwardUnaligned if is_forward else BackwardUnaligned
    return kind(warps=warps, occupancy=max(1, occupancy * 4 // warps), latency=4, **tiles)


def _unaligned_team(problem: Problem, inner: int, vector: int) -> Variant:
    """Take parts of as many columns as a block holds: few members wait for each other. A backward takes narrow parts
    while a team may have as many members: then an SM holds several blocks, which hide each other's waits."""
    is_forward, is_full = problem.op == "forward", problem.form.bias or problem.form.narrowest > 0
    part, warps, occupancy = UNALIGNED_PART, 8, 2 if is_forward and not is_full else 1
    if not is_forward and problem.n <= 2048 * min(problem.most_members, MOST_MEMBERS):
        part, warps, occupancy = 2048, 4, 2 if is_full else 3
    kind = ForwardUnalignedTeam if is_forward else BackwardUnalignedTeam
    settings = {"width": part, "warps": warps, "occupancy": occupancy, "latency": 4, "vector": vector}
    return kind(members=-(-inner // part), **settings)


def _unaligned_width(inner: int, is_forward: bool, has_ends: bool) -> int:
    """Return the width of few tiles with few lanes past the end; of several rows, narrow ones take fewer registers."""
    whole = power_of_two(inner)
    if whole <= 128:
        return 32
    if whole == 256 or (is_forward and not has_ends):
        return whole
    if whole in (1024, 16384) or (whole == 2048 and is_forward):
        return whole // 8
    return whole if 10 * inner > 7 * whole and not is_forward else whole // 4


def _unaligned_room(problem: Problem, lanes: int, has_ends: bool) -> tuple[int, int]:
    """Return as many elements of a step, and blocks of 4 warps an SM, as leave in registers what a thread holds: ends
    beside the lanes, in a backward dy and sums beside x, and whatever a form adds."""
    form, itemsize = problem.form, problem.narrowest_itemsize
    is_full = form.bias or form.narrowest > 0
    if problem.op == "forward":
        if has_ends:
            elements, occupancy = 2048 if lanes <= 256 else 3072, 3 if 1280 < lanes < 2048 else 4
        else:
            elements, occupancy = 4096, 8 if lanes <= 2048 else 4
        if itemsize == 4 or form.residual or form.bias:
            occupancy //= 2
    elif lanes > 1024:  # one row
        elements, occupancy = lanes, 2 if lanes > 1536 or is_full else 4 if itemsize == 2 else 3
    elif has_ends and lanes > 256:
        elements, occupancy = 12288 // itemsize // (2 if is_full or form.residual and lanes > 896 else 1), 2
        elements //= 2 if form.bias and form.narrowest else 1
    else:
        elements, occupancy = 2048 if has_ends else 4096, 3 if itemsize == 2 and not is_full else 2
    if problem.device.architecture != 90:  # there they spill sooner
        elements //= 2
    return elements, occupancy


def _forward(n: int, architecture: int) -> Variant:
    """A block reads its row once and waits for it once, so what counts is how many blocks an SM holds: as many as fit.
    Narrow rows share a block: with fewer elements, launching blocks costs more than their work."""
    width = power_of_two(n)
    if n <= 512:
        rows = min(256, max(2048, 64 * min(width, 64)) // width)
        # With 8 blocks tileiras keeps to 32 registers a thread: sm_100 and later spill then, and where N is no multiple
        # of 16 others did, before kernels knew what divides it.
        occupancy = 8 if architecture < 100 and n % 16 == 0 else 4
        return ForwardTiles(width=width, warps=4, occupancy=occupancy, latency=4, rows=rows)
    if n <= 1024:
        return ForwardRows(width=width, warps=4, occupancy=8, latency=2)
    width, rest = two_tiles(n)
    if n <= 8192:  # 4 blocks of 8 warps fill an SM
        return ForwardRows(width=width, rest=rest, warps=8, occupancy=4 if n % 16 == 0 else 2, latency=4)
    if width == WIDEST_FORWARD_ROW:
        width, rest = 16384, 16384
    return ForwardRows(width=width, rest=rest, warps=8, occupancy=1, latency=4)


def _widest_backward_row(problem: Problem) -> int:
    """Elements of the widest row of which a block's registers hold x, dy, weight and the sum of dw.

    On sm_90 a kernel that spills a little is kept (a record's `spills` says why), elsewhere none may spill. Rows that
    are not aligned need registers for addresses.
    """
    if not problem.is_aligned:
        return WIDEST_UNALIGNED_ROW
    is_hopper, is_float32 = problem.device.architecture == 90, problem.itemsize == 4
    if problem.n % 16 > 0 and (is_float32 or not is_hopper):  # bounds checks take registers too
        return 12288
    return 12288 if is_float32 and not is_hopper else WIDEST_BACKWARD_ROW


def _backward(n: int, itemsize: int, architecture: int) -> Variant:
    """A block keeps weight and its sum of dw, in float32, for the whole row in registers: 8 warps as soon as that is 16
    elements a thread. It waits for x and dy at every step: tiles of 8 KB keep enough bytes in flight."""
    width, rest = two_tiles(n)
    row_bytes = n * itemsize
    if row_bytes <= 2048:  # two blocks hide each other's waits
        rows = min(256, max(1, 8192 // (width * itemsize)))
        return BackwardTiles(width=width, warps=4, occupancy=2, latency=4, rows=rows, tma=architecture >= 90)
    if row_bytes <= 8192:
        warps = 4 if row_bytes <= 4096 else 8
        return BackwardRows(width=width, rest=rest, warps=warps, occupancy=2, latency=4)
    if width == 16384:  # as one tile it spills on sm_100 and later
        width, rest = 8192, 8192
    return BackwardRows(width=width, rest=rest, warps=8, occupancy=1, latency=4)


def _strips(problem: Problem) -> Variant:
    """The mean of each row, then strips of columns: two passes over memory."""
    if problem.n > STRIP * LARGEST_GRID_Y:
        raise ValueError(
            f"a backward with dw: expected rows of at most {STRIP * LARGEST_GRID_Y} elements, got {problem.n}: "
            'use backend="torch"'
        )
    has_tma = problem.device.architecture >= 90
    return BackwardStrips(width=STRIP, warps=4, occupancy=3 if has_tma else 2, latency=4, tma=has_tma)


def _reread(problem: Problem) -> Variant:
    """dx alone: read twice, the second time from L2."""
    latency, has_tma = 4 if problem.itemsize == 2 else 3, problem.device.architecture >= 90
    return BackwardReread(width=4096, warps=4, occupancy=2, latency=latency, tma=has_tma)


def own_partials(problem: Problem, first: Variant) -> Variant:
    """The first kernel of a plan with a row of dw_partial for each row of x, given that of a plan that shares them."""
    n = problem.n
    if isinstance(first, (BackwardTiles, BackwardUnaligned)):
        width, rest = two_tiles(n)
        warps, occupancy, latency = first.warps, first.occupancy, first.latency
        return BackwardRows(width=width, rest=rest, warps=warps, occupancy=occupancy, latency=latency)
    return _strips(problem) if isinstance(first, (BackwardReread, Split)) else first


def means(problem: Problem) -> Variant:
    """Return the kernel that reads wide rows for their mean, before the strips. By TMA all arrays of rows come or none:
    not of several dtypes where rows are not aligned."""
    is_hopper = problem.device.architecture >= 90
    has_tma = is_hopper and (problem.is_aligned or not problem.form.narrowest)
    return BackwardMeans(width=4096 if is_hopper else 2048, warps=4, occupancy=4, latency=4, tma=has_tma)


def clear(team: Team) -> ClearBoard:
    """Return the kernel that empties the board of a launch by teams: 64 KB of slots for 4096 rows."""
    return ClearBoard(width=team.slots, warps=4, occupancy=4, rows=16)


def sum_of(first: Variant, n: int, architecture: int) -> Variant:
    """Return the kernel that adds the partial rows that the first kernel of a backward leaves.

    Narrow strips, so that even 1024 columns are 64 blocks. Each step of them waits for memory, so where several blocks
    an SM leave more than 128 partial rows a step takes 256. Teams of many members and slabs leave fewer partial rows of
    more than 16384 columns, which fill little of such a tile. Timed on sm_90 alone (bench/NOTES.md: The sum of dw).
    """
    rows, width, occupancy = _sum_tile_on_hopper(first, n) if architecture == 90 else (128, 16, 4)
    return SumPartials(width=width, warps=4, occupancy=occupancy, rows=rows)


def _sum_tile_on_hopper(first: Variant, n: int) -> tuple[int, int, int]:
    """Rows, columns, and blocks an SM that the compiler leaves room for."""
    if first.walks and not isinstance(first, Team) and first.occupancy > 1:
        return 256, 16, 2
    if n > WIDEST_BACKWARD_ROW and isinstance(first, Split):
        return 4, 512, 4
    # P is at most SMs * occupancy / members: on 132 SMs 49 of these; others, timed from 66 on, gained nothing
    if n > WIDEST_BACKWARD_ROW and isinstance(first, Team) and 3 * first.members >= 8 * first.occupancy:
        return 32, 128, 2
    return 128, 16, 4
