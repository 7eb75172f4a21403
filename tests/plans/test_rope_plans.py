# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The settings of the kernels of qk_norm_rope, and how many blocks run: pure functions of numbers."""

import itertools

import pytest
from planning import rope_problem

from tilegym_rmsnorm.backends.cutile.plans.rope import (
    HEADS_OF_TABLES,
    WIDE_HEAD,
    WIDEST_ROTATED_HEAD,
    BackwardRope,
    ForwardRope,
    RopePlan,
    cut,
    is_taken,
    tiles_of,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES

KINDS = (ForwardRope, BackwardRope)
SM_COUNT = 132
HEADS = ((1, 1), (5, 1), (16, 16), (28, 4), (31, 1), (32, 8), (64, 8), (1, 5), (300, 300))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiles_hold_every_head(architecture):
    """Pairs of every width and share that is rotated have room, as has what lies behind, and no tile is empty."""
    for n, itemsize in itertools.product(
        (*range(2, 130, 2), 160, 192, 256, 320, WIDEST_ROTATED_HEAD), (2, 4)
    ):
        for rotary_dim, has_one_step in itertools.product({2, n // 4 * 2, n - 2 or 2, n}, (False, True)):
            if rotary_dim < 2:
                continue
            options = {"itemsize": itemsize, "architecture": architecture, "has_one_step": has_one_step}
            asked = rope_problem(n, rotary_dim, HEADS[n // 2 % len(HEADS)], **options)
            assert is_taken(asked)
            for kind, most in ((ForwardRope, 4096), (BackwardRope, 8192 if n > WIDE_HEAD else 4096)):
                variant = tiles_of(kind, asked)
                variant.check(n, itemsize, architecture)
                assert variant.tile <= max(most, variant.lanes), "more elements than were seen not to spill"
                behind = n - rotary_dim
                for width, count, columns in (
                    (variant.width, variant.pieces, rotary_dim // 2),
                    (variant.rest, variant.rests, behind),
                ):
                    assert width * count >= columns
                    assert width * (count - 1) < columns or count == columns == 0
                assert variant.of_k.rows_of_tile <= variant.rows_of_tile
                assert not has_one_step or variant.rows == variant.k_rows == 1
                constants = RopePlan(asked, variant).constants(variant)
                assert constants["HALF"] % constants["DIVISOR"] == behind % constants["DIVISOR"] == 0


def test_what_no_kernel_takes():
    assert is_taken(rope_problem(WIDEST_ROTATED_HEAD)) and not is_taken(rope_problem(WIDEST_ROTATED_HEAD + 2))
    assert is_taken(rope_problem(128, 16, interleaved=True))
    assert not is_taken(rope_problem(128, 24, interleaved=True))
    assert not is_taken(rope_problem(128, interleaved=True, is_scattered=True))


@pytest.mark.parametrize("kind", KINDS)
def test_few_heads_of_one_step_have_a_pair_for_every_thread(kind):
    """Else a tile of two heads of 64 columns takes up to 255 registers, and spills. One head, and tiles that are full
    without, have no more heads than there are."""
    for heads, n, found in (
        ((4, 2), 64, (4, 4)),
        ((2, 1), 64, (4, 1)),
        ((4, 2), 32, (8, 8)),
        ((4, 2), 128, (4, 2)),
        ((4, 1), 64, (4, 1)),
        ((5, 1), 64, (1, 1)),
        ((32, 8), 64, (8, 8)),
    ):
        variant = tiles_of(kind, rope_problem(n, n, heads=heads, has_one_step=True))
        assert (variant.heads, variant.k_heads) == found, (heads, n)


def test_cut():
    """One tile of what is narrow; of what is wide few tiles, with few lanes past the end."""
    assert [cut(each, 64) for each in (0, 1, 40, 64, 80, 128)] == [
        (0, 0),
        (1, 1),
        (64, 1),
        (64, 1),
        (32, 3),
        (64, 2),
    ]
    assert [cut(each, 128) for each in (128, 192, 448)] == [(128, 1), (64, 3), (128, 4)]


def test_more_rows_than_can_be_counted():
    """Are not for kernels."""
    for variant in (tiles_of(kind, rope_problem()) for kind in KINDS):
        walks = (2**14, 2**11, 32), (2**14, 2**11, 1)
        assert variant.walks_of((walks[0], None), SM_COUNT, (False, False)) is not None
        assert variant.walks_of(walks, SM_COUNT, (False, False)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("per_head", list(itertools.product((False, True), repeat=2)), ids=str)
def test_walks_share_the_sms_by_their_tiles(per_head, heads, kind):
    variant = tiles_of(kind, rope_problem(heads=heads))
    for sm_count, length in itertools.product((1, 3, 132), (1, 9, 500, 40000)):
        leads = (2, length, heads[0]), (2, length, heads[1])
        walks = variant.walks_of(leads, sm_count, per_head)
        for (blocks, p), lead, each, is_per_head in zip(
            walks, leads, (variant, variant.of_k), per_head, strict=True
        ):
            shares = each.tiles_of_heads(lead[2]) if is_per_head else 1
            assert blocks == p * shares and 1 <= p
            assert blocks <= each.tiled_rows(lead) // each.rows_of_tile, "a block without a tile"
        if sm_count == 132 and not any(per_head):
            assert sum(blocks for blocks, _ in walks) <= sm_count * variant.occupancy
            if length == 40000:  # as long in either
                took = [
                    each.tiled_rows(lead) / each.heads * (each.heads + HEADS_OF_TABLES) / blocks
                    for (blocks, _), lead, each in zip(walks, leads, (variant, variant.of_k), strict=True)
                ]
                assert max(took) < 1.15 * min(took)
                longer = [(3, 12345, lead[2]) for lead in leads]
                assert walks == variant.walks_of(tuple(longer), sm_count, per_head), (
                    "another P, another kernel"
                )
    assert variant.walks_of(((2, 9, heads[0]), None), 132, (False, False))[1] == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "heads", [(32, 8), (64, 4), (64, 1), (71, 1), (28, 4), (16, 1), (5, 1), (1, 5), (40, 0)], ids=str
)
def test_no_walk_is_much_longer_than_its_share(heads, kind):
    """Neither q nor k is left with few blocks on any number of SMs, and no block waits for room. cuda-tile would
    compile another kernel for a multiple of 16 partial rows."""
    for n, batch, length in itertools.product((64, 128, 256), (1, 4), (256, 4096, 28520)):
        variant = tiles_of(kind, rope_problem(n, n, heads=(heads[0], heads[1] or heads[0])))
        leads = (batch, length, heads[0]), (batch, length, heads[1]) if heads[1] else None
        rows = [
            each.tiled_rows(lead) if lead else 0
            for each, lead in zip((variant, variant.of_k), leads, strict=True)
        ]
        for sm_count in (78, 108, 128, 132, 142, 148, 188):
            each_tiles = (
                count // each.rows_of_tile for count, each in zip(rows, (variant, variant.of_k), strict=True)
            )
            most = variant.most_blocks(sum(each_tiles), sm_count)
            walks = variant.walks_of(leads, sm_count, (False, False))
            assert sum(blocks for blocks, _ in walks) <= most
            for (blocks, p), each, count in zip(walks, (variant, variant.of_k), rows, strict=True):
                tiles = count // each.rows_of_tile
                assert p % 16 or p == tiles, (n, sm_count, walks)
                longest = -(-tiles // blocks) * each.rows_of_tile if tiles else 0
                assert longest <= max(2.1 * sum(rows) / most, 2 * variant.rows_of_tile), (n, sm_count, walks)


def test_shares_of_the_blocks():
    """An H200 took 122 us for this backward; with 344 + 52 blocks, nearer to the shares of the heads, 137."""
    variant = tiles_of(BackwardRope, rope_problem(256, 256, heads=(16, 2)))
    walks = variant.walks_of(((4, 4096, 16), (4, 4096, 2)), 132, (False, False))
    assert walks == ((328, 328), (68, 68))


def test_by_tma_on_hopper_alone():
    """Elsewhere some of these loops would load over tiles that are still read, as for most parts of a head."""
    for architecture in ARCHITECTURES:
        assert rope_problem(architecture=architecture).has_tma is (architecture == 90)
        for n, rotary_dim in ((128, 64), (256, 64)):
            assert rope_problem(n, rotary_dim, architecture=architecture).has_tma is (architecture == 90)
        for n, rotary_dim in ((256, 256), (128, 64)):
            assert not rope_problem(n, rotary_dim, per_head=True, architecture=architecture).has_tma
        assert not rope_problem(128, 32, architecture=architecture).has_tma
        assert not rope_problem(architecture=architecture, has_one_step=True).has_tma


def test_more_blocks_than_a_grid_has():
    """Each head's weight has blocks of its own."""
    one_head = rope_problem(heads=(1, 1), per_head=True, has_one_step=True)
    variant = tiles_of(BackwardRope, one_head)
    assert variant.walks_of(((1, 1, 2**25), None), SM_COUNT, (True, False)) is None
    assert variant.walks_of(((1, 1, 2**23), None), SM_COUNT, (True, False)) is not None


def test_a_forward_of_few_tokens_has_a_block_for_each_tile():
    variant = tiles_of(ForwardRope, rope_problem(has_one_step=True))
    for batch in (1, 4, 16, 64):
        leads = (batch, 1, 32), (batch, 1, 8)
        walks = variant.walks_of(leads, SM_COUNT, (False, False))
        tiles = [
            each.tiled_rows(lead) // each.rows_of_tile
            for each, lead in zip((variant, variant.of_k), leads, strict=True)
        ]
        assert [blocks for blocks, _ in walks] == tiles
