# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Launch decisions of `qk_norm_rope` in Triton, by the same measure as config.py."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tilegym_rmsnorm.backends.triton import config

# The compiler is held to them in the backward. Left alone, Triton 3.7.1 gives some forms 139 to 160: half of the
# programs wait. At 128 those spill up to 16 bytes; float32 heads of 64 with positions spill 40, on sm_100 alone. On an
# H200, Triton 3.6.0, (2, 8192, 16+16, 64) with positions in bfloat16 goes from 125.7 to 90.1 us, seven other calls
# change by at most 1.2 %.
BACKWARD_REGISTERS = 65536 // (32 * config.WARPS_PER_SM)


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
    num_stages: int  # as `stages` of Tile (config.py)
    dw_width: int


def rope_form(D: int, R: int, **flags: bool) -> RopeForm:
    """flags: those of RopeForm."""
    rest = D - R
    power = config.power_of_two(rest) if rest else 0
    # Narrower than those of `_tiles` in config.py: other heads of the tile keep the threads busy.
    width, tiles = (power // 4, 3) if power >= 64 and 4 * rest <= 3 * power else (power, min(rest, 1))
    return RopeForm(D, R, **flags, half=config.power_of_two(R // 2), rest=width, rests=tiles)


def rope_forward_config(form: RopeForm, heads: Sequence[RopeHeads]) -> RopeForwardConfig:
    """heads: of q, and of k if it is there."""
    return RopeForwardConfig(
        form,
        _rope_tiles(form, config.FORWARD_TILE, heads),
        config.warps(form.columns, config.FORWARD_MIN_WARPS),
    )


def rope_backward_config(
    form: RopeForm,
    M: int,
    heads: Sequence[RopeHeads],
    sm_count: int,
    sms_left: int | None = None,
    is_fixed: bool = False,
) -> RopeBackwardConfig:
    """Configure walks over M tokens. All programs are resident at once, as in `backward_config`, and as few as leave
    the longest walk no longer. is_fixed: as in `backward_config`."""
    if is_fixed:
        sm_count, sms_left = config.FIXED_SMS, None
    # With any of these the whole tile takes 147 to 182 registers per thread, and one program would fill an SM.
    is_half = form.is_interleaved or form.rests > 0 or any(each.is_per_head for each in heads)
    tiles = _rope_tiles(form, config.BACKWARD_TILE // 2 if is_half else config.BACKWARD_TILE, heads)
    num_warps = config.warps(form.columns, config.BACKWARD_MIN_WARPS)
    blocks = [config.cdiv(each.H, tile.heads) for each, tile in zip(heads, tiles, strict=True)]
    groups = [count if tile.is_per_head else 1 for count, tile in zip(blocks, tiles, strict=True)]
    steps = [
        config.cdiv(M, tile.tokens) * count // group
        for tile, count, group in zip(tiles, blocks, groups, strict=True)
    ]

    def walks(longest: int) -> tuple[int, ...]:
        return tuple(config.cdiv(count, longest) for count in steps)

    def programs(walks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(count * group for count, group in zip(walks, groups, strict=True))

    if is_fixed:
        chosen = tuple(map(min, steps, _walks_of_many(form, tuple(heads))))
    else:
        most_programs = config.resident(num_warps, sm_count, sms_left)
        # The shortest of the longest walks; one of all steps where even those are too many programs
        longest = 1 + bisect_left(
            range(1, max(steps)), True, key=lambda longest: sum(programs(walks(longest))) <= most_programs
        )
        chosen = walks(longest)
    dw_width = config.width_of_sums(
        form.D * max(each.H if each.is_per_head else 1 for each in heads), sm_count
    )
    return RopeBackwardConfig(
        form,
        tiles,
        walks=chosen,
        programs=programs(chosen),
        num_warps=num_warps,
        # Wider heads, x, dy, cos and sin in float32, would take 128 KiB of shared memory.
        num_stages=2 if form.columns <= config.BACKWARD_TILE else 1,
        dw_width=dw_width,
    )


@cache
def _walks_of_many(form: RopeForm, heads: tuple[RopeHeads, ...]) -> tuple[int, ...]:
    """Share out the programs of FIXED_SMS among q and k, as for very many tokens."""
    return rope_backward_config(form, 2**24, heads, config.FIXED_SMS).walks


def _rope_tiles(form: RopeForm, elements: int, heads: Sequence[RopeHeads]) -> tuple[RopeTile, ...]:
    rows = min(config.power_of_two(max(elements // form.columns, 1) + 1) // 2, config.MOST_ROWS)
    counts = [_tile_heads(each.H, rows) for each in heads]
    return tuple(
        RopeTile(rows // count, count, each.is_per_head) for count, each in zip(counts, heads, strict=True)
    )


def _tile_heads(H: int, rows: int) -> int:
    """The power of two that leaves the least to do where cos and sin of a token count as two heads more."""
    powers = [1 << i for i in range(rows.bit_length())]
    return min(powers, key=lambda count: config.cdiv(H, count) * (count + 2))
