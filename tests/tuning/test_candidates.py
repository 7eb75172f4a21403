# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The variants that tuning tries."""

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning import by_rules

from tilegym_rmsnorm.backends.cutile.plans.partition import Chunks, Split, Team, Walks
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, OPS, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    WEIGHT_LOADS,
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
    ForwardTiles,
)
from tilegym_rmsnorm.backends.cutile.tuning import candidates as space
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates, distance, fits_registers
from tilegym_rmsnorm.backends.cutile.tuning.spaces import PARTS, SWEEPS


@pytest.mark.parametrize("n", [3584, 12288, 16384])
def test_pipelined_rows_are_tried_in_tiles_of_every_width_by_every_share(n):
    found = candidates(Bucket("backward", n, "float16", "large"), 90, most=24)
    pipelined = {(each.width, each.grid_percent) for each in found if isinstance(each, BackwardPipelined)}
    [sweep] = [each for each in SWEEPS["backward"] if each.variant is BackwardPipelined]
    widths = {tile["width"] for tile in sweep.tiles(n)}
    assert len(widths) == 2 and pipelined == set(itertools.product(widths, (100, 84, 72)))


@given(
    op=st.sampled_from(OPS),
    n=st.one_of(st.integers(1, 2000), st.integers(2000, 100_000)),
    dtype=st.sampled_from(list(ITEMSIZE)),
    size=st.sampled_from(SIZES),
    architecture=st.sampled_from(ARCHITECTURES),
    most=st.integers(1, 80),
)
def test_candidates_are_few_distinct_possible_and_begin_with_the_rules(
    op, n, dtype, size, architecture, most
):
    assume(rows_of_class(size, n))
    bucket, itemsize = Bucket(op, n, dtype, size), ITEMSIZE[dtype]
    found = candidates(bucket, architecture, most)
    default = by_rules(op, n, dtype, size, architecture=architecture).first
    assert found[0] == default and 1 <= len(found) <= most
    assert len(set(found)) == len(found)
    for variant in found[1:]:
        assert op in variant.serves
        variant.check(n, itemsize, architecture)
        assert fits_registers(variant, op, itemsize)
    if isinstance(default, Split):
        most_rows = power_of_two(rows_of_class(size, n)[-1])
        default = replace(default, slab=min(default.slab, most_rows))
    distances = [distance(each, default) for each in found[1:]]
    assert distances == sorted(distances)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [64, 1024, 4096, 5120, 16384, 65536])
def test_every_width_has_a_choice(op, n):
    """Everything that its kernels have varies, jointly: no field is kept while others are swept."""
    for size in (each for each in SIZES if rows_of_class(each, n)):
        found = candidates(Bucket(op, n, "bfloat16", size), 90)
        assert len(found) >= 20
        for name in ("warps", "occupancy", "latency"):
            assert len({getattr(variant, name) for variant in found}) > 1, name
        of_all = {"kernel", *vars(found[0])}
        both = [(each, of_all & {"kernel", *vars(each)}) for each in found]
        changed = [
            sum(getattr(each, name) != getattr(found[0], name) for name in names) for each, names in both
        ]
        assert max(changed) >= 3


@pytest.mark.parametrize("op", OPS)
def test_sweeps_name_fields_of_variants_that_serve_the_op(op):
    for sweep in SWEEPS[op]:
        assert op in sweep.variant.serves
        tiles = list(sweep.tiles(sweep.narrowest))
        assert tiles
        for tile in tiles:
            names = {field.name for field in fields(sweep.variant)}
            assert set(tile) | set(sweep.values) <= names and not set(tile) & set(sweep.values)
            variant = sweep.variant(**tile, **{name: values[-1] for name, values in sweep.values.items()})
            variant.check(sweep.narrowest, 2, 90)


@pytest.mark.parametrize("op", ["backward", "dx"])
@pytest.mark.parametrize("n", [32768, 65536])
def test_packed_teams_are_tried_in_tiles_of_every_width(n, op):
    found = {
        (variant.width, variant.pieces)
        for variant in candidates(Bucket(op, n, "bfloat16", "large"), 90)
        if isinstance(variant, BackwardPipelinedTeam) and variant.packed
    }
    assert found == {(4096, 4), (8192, 2)}


def test_rows_of_18432_are_tried_as_teams_of_two_and_four_blocks_of_nine_tiles():
    found = {(tile["width"], tile["pieces"], tile["members"]) for tile in PARTS(18432)}
    assert {(1024, 9, 2), (512, 9, 4), (2048, 3, 3)} <= found


@pytest.mark.parametrize("op", ["backward", "dx"])
def test_what_a_pipelined_team_and_chunks_of_a_split_row_do_follows_from_their_blocks_and_latency(op):
    """rstd ahead takes registers that three blocks an SM lack; gathers pay where no chunk is issued ahead."""
    found = [
        variant
        for n, size in ((16384, "large"), (65536, "large"), (65536, "few"))
        for variant in candidates(Bucket(op, n, "bfloat16", size), 90, most=10_000)
    ]
    teams = [each for each in found if isinstance(each, BackwardPipelinedTeam)]
    assert {each.rstd_ahead for each in teams} == {False, True}
    assert all(each.rstd_ahead == (each.occupancy < 3) for each in teams)
    reread = [each for each in found if isinstance(each, BackwardSplitReread)]
    assert {each.gathers for each in reread} == ({False, True} if op == "backward" else set())
    assert all(each.gathers == (each.latency == 1) for each in reread)


def test_what_is_known_is_tried_first():
    bucket = Bucket("backward", 5120, "bfloat16", "large")
    default, *others = candidates(bucket, 90, most=60)
    fits = BackwardTiles(width=1024, warps=4, occupancy=2, latency=7, pieces=5, tma=True)
    impossible = BackwardRows(width=2048, warps=8, occupancy=1, latency=4)
    of_another_op = ForwardRows(width=8192, warps=8, occupancy=1, latency=4)
    too_many = BackwardTeam(width=512, warps=4, occupancy=1, latency=4, members=10)
    known = [others[9], impossible, of_another_op, default, fits, too_many, fits]
    found = candidates(bucket, 90, most=6, most_members=8, known=known)
    assert found[:3] == [default, others[9], fits] and len(set(found)) == 6
    assert candidates(bucket, 90, most=2, most_members=8, known=known) == [default, others[9]]


def test_rows_are_tried_in_several_tiles_with_and_without_tma():
    for n, warps in ((2560, (4, 8)), (5120, (4, 8)), (7168, (4, 8)), (12288, (8,))):
        found = candidates(Bucket("backward", n, "bfloat16", "large"), 90)
        in_tiles = {(c.tma, c.warps) for c in found if isinstance(c, BackwardTiles) and c.pieces > 1}
        assert in_tiles == set(itertools.product((False, True), warps)), n


def test_distance_counts_a_field_that_a_variant_lacks_as_neutral():
    rows = BackwardRows(width=4096, warps=8, occupancy=1, latency=4)
    pipelined = BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4)
    tiles = BackwardTiles(width=4096, warps=8, occupancy=1, latency=4)
    assert distance(rows, rows) == 0 and distance(rows, replace(rows, warps=4)) == 1
    assert (
        distance(rows, tiles) == distance(rows, pipelined) == distance(rows, replace(rows, packed=True)) == 1
    )
    assert distance(pipelined, replace(tiles, tma=True)) == 1 and distance(pipelined, tiles) == 2, (
        "kernel, TMA"
    )
    assert distance(rows, ForwardRows(width=4096, warps=8, occupancy=1, latency=4, weight_load="early")) == 1
    halves = replace(rows, width=2048, rest=2048)
    assert distance(rows, halves) == 1 and distance(halves, tiles) == 2
    split = BackwardSplit(width=4096, warps=8, occupancy=1, latency=4, rows=32, strip=64, slab=128)
    assert distance(split, rows) == 1 and distance(split, replace(split, slab=512)) == 2


def test_registers():
    rows = BackwardRows(width=16384, warps=8, occupancy=1, latency=4)
    assert fits_registers(rows, "backward", 2)
    assert not fits_registers(replace(rows, warps=4), "backward", 2), "192 registers and more for each thread"
    assert not fits_registers(replace(rows, occupancy=2), "backward", 2), (
        "two blocks have 128 for each thread"
    )
    assert not fits_registers(replace(rows, width=32768), "backward", 2)
    assert fits_registers(ForwardRows(width=32768, warps=8, occupancy=1, latency=4), "forward", 2)
    narrow = ForwardTiles(width=64, warps=4, occupancy=8, latency=2)
    assert not fits_registers(narrow, "forward", 2), "half of the threads are idle"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("size", "n", "kernels"),
    [*(("few", n, BackwardSplit) for n in (64, 1024, 2048, 4096, 8192, 12288, 16384)), ("few", 18432, Split)],
)
def test_split_kernels_are_searched_around_the_one_of_the_rules(size, n, kernels, itemsize):
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    default, *others = candidates(Bucket("backward", n, dtype, size), 90)
    assert isinstance(default, kernels) and fits_registers(default, "backward", itemsize)
    near = [variant for variant in others if type(variant) is type(default)]
    assert len(near) >= 10
    assert len({(variant.rows, variant.strip) for variant in near}) >= 4
    assert len({variant.slab for variant in near}) >= 2


@pytest.mark.parametrize("n", [64, 4096, 5000, 8192, 16384, 65536, 500_000])
def test_no_two_candidates_differ_only_in_a_slab_that_no_call_fills(n):
    found = candidates(Bucket("backward", n, "float32", "few"), 90, most=10_000)
    most = rows_of_class("few", n)[-1]
    seen = {replace(e, slab=e.slab_tiles(most, 132)) if isinstance(e, Split) else e for e in found}
    assert len(seen) == len(found)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("op", "size", "n"),
    [
        *(("backward", "large", n) for n in (20480, 32768, 65536)),
        ("backward", "few", 65536),
        *(("forward", size, n) for size in ("few", "large") for n in (49152, 65536)),
    ],
)
def test_teams_are_searched_around_the_one_of_the_rules(op, size, n, itemsize):
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    default, *others = candidates(Bucket(op, n, dtype, size), 90)
    assert isinstance(default, Team) and fits_registers(default, op, itemsize)
    near = [variant for variant in others if isinstance(variant, Team)]
    assert len({(each.members, each.warps, each.occupancy) for each in near}) >= 5
    assert all(each.width * each.pieces * (each.members - 1) < n for each in near), "one has no columns"
    assert {"forward": ForwardReread, "backward": BackwardStrips}[op] in set(map(type, others))


@pytest.mark.parametrize("n", [2**24, 2**25, 2**26, 2**27 - 2**11])
def test_no_candidate_of_the_widest_rows_passes_int32_or_the_grid(n):
    """2**25 columns: 65536 strips of 512, whose blocks' numbers times strips are no int32."""
    found = candidates(Bucket("backward", n, "float32", "large"), 90, most=10_000)
    chunks = {(each.strip, each.slab) for each in found if isinstance(each, BackwardSplitReread)}
    for strip, slab in chunks:
        strips = -(-n // strip)
        last = strips + slab - 1
        assert (last + 1) * strips < 2**31, (strip, slab)
    assert any(strip == 1024 for strip, _ in chunks) == (n <= 2**25)
    assert all(-(-n // each.width) < 2**16 for each in found if isinstance(each, BackwardStrips))


def test_kernels_wide_rows_are_not_held_by_are_tried_below_them():
    found = candidates(Bucket("backward", 16384, "bfloat16", "large"), 90)
    assert any(isinstance(variant, Team) for variant in found)
    assert {BackwardRows, BackwardStrips} <= set(map(type, found))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "most"), [(12288, 4), (24576, 4), (32768, 3)])
def test_packed_rows_with_a_late_weight_are_tried_by_as_many_blocks_as_fit(n, most, dtype):
    """Two bytes an element are all that a thread keeps then: of 32768 columns 93 registers in each of 8 warps."""
    found = candidates(Bucket("forward", n, dtype, "large"), 90, most=200)
    rows = [each for each in found if isinstance(each, ForwardRows) and each.packed and each.warps == 8]
    assert max(each.occupancy for each in rows if each.weight_load == "late") == most


def test_registers_of_the_two_kinds_of_blocks():
    split = BackwardSplit(width=16384, warps=8, occupancy=1, latency=1, rows=8, strip=1024, slab=64)
    assert fits_registers(split, "backward", 4)
    assert not fits_registers(replace(split, occupancy=2), "backward", 4), "the rows"
    assert not fits_registers(replace(split, rows=64), "backward", 2), "256 registers for the sum alone"


def test_the_weight_is_tried_late_early_and_jointly_with_every_number_of_warps():
    """The faster one depends on both, and the rules know one."""

    def kinds(*bucket, most):
        found = candidates(Bucket("forward", *bucket), 90, most=most)
        return {
            (each.warps, each.weight_load) for each in found if isinstance(each, (ForwardTiles, ForwardRows))
        }

    every = set(itertools.product((4, 8), WEIGHT_LOADS))
    for n in (128, 4096):
        assert kinds(n, "float32", "few", most=20) == every
    assert kinds(128, "float32", "large", most=60) == {kind for kind in every if kind[1] != "early"}


@pytest.mark.parametrize("dtype", list(ITEMSIZE))
@pytest.mark.parametrize("size", ["few", "large"])
@pytest.mark.parametrize("n", [2048, 4096, 8192, 16384])
def test_each_way_of_the_weight_has_a_share(n, size, dtype):
    """Each has at least 8 of 60, with the same tiles, warps and blocks; more come late, chunks and teams among them."""
    found = candidates(Bucket("forward", n, dtype, size), 90)
    for way in WEIGHT_LOADS:
        assert sum(variant.weight_load == way for variant in found) >= 8


def by_warps(op, n, dtype, size):
    found = candidates(Bucket(op, n, dtype, size), 90)
    tiles = [each for each in found if isinstance(each, (ForwardTiles, BackwardTiles))]
    return [each for each in tiles if each.pieces > 1 and each.width <= 256]


@pytest.mark.parametrize("dtype", list(ITEMSIZE))
@pytest.mark.parametrize(
    ("op", "n", "size"),
    [
        *(("forward", n, size) for n in (512, 1024, 2048) for size in SIZES),
        *(("backward", n, size) for n in (512, 1024) for size in ("small", "large")),
    ],
)
def test_rows_that_a_warp_holds_are_tried(op, n, size, dtype):
    """Each row of a block is in one warp where its tiles are of at most 512 bytes: their sums take no barrier."""
    found = by_warps(op, n, dtype, size)
    widest = 512 // ITEMSIZE[dtype]
    assert {each.width for each in found} <= {128, widest}
    assert all(each.rows % each.warps == 0 for each in found)
    if op == "forward":
        assert all(each.weight_load == "joint" for each in found)
    else:
        assert all(each.rows == each.warps for each in found), "two rows a warp may spill"
    warps = (4,) if dtype == "float32" and n == 2048 else (4, 8)  # two blocks of 8 lack registers for those
    assert {(widest, each) for each in warps} <= {(each.width, each.warps) for each in found}


def test_other_shares_of_a_backward_of_many_rows_alone():
    variant = BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4, pieces=4, grid_percent=84)
    large = Bucket("backward", 16384, "bfloat16", "large")
    found = space.with_other_shares(variant, large)
    assert {each.grid_percent for each in found} == set(space.SHARES) - {84}
    assert {replace(each, grid_percent=84) for each in found} == {variant}
    for each in found:
        each.check(16384, 2, 90)
    assert not space.with_other_shares(variant, large._replace(size="few"))
    forward = ForwardRows(width=16384, warps=8, occupancy=1, latency=4)
    assert not space.with_other_shares(forward, large._replace(op="forward"))
    assert not space.with_other_shares(BackwardStrips(width=2048, warps=4, occupancy=3, latency=4), large)


@pytest.mark.parametrize("size", SIZES)
def test_dx_alone_is_searched_among_kernels_that_need_no_dw(size):
    for n in (each for each in (256, 4096, 16384, 65536) if rows_of_class(size, each)):
        found = candidates(Bucket("dx", n, "bfloat16", size), 90)
        kinds: set[type[Variant]] = set(map(type, found))
        assert all(issubclass(kind, (Walks, BackwardReread)) for kind in kinds)
        assert any(issubclass(kind, Chunks) for kind in kinds) == (n > 8192)
        assert any(variant.uses_tma for variant in found)


def test_dx_alone_needs_registers_for_no_sum():
    rows = BackwardRows(width=8192, warps=8, occupancy=2, latency=4)
    assert fits_registers(rows, "dx", 4) and not fits_registers(rows, "backward", 4)
    assert space.with_other_shares(rows, Bucket("dx", 8192, "float32", "large"))
