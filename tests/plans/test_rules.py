# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rules of the cutile backend, swept over M x N x dtype x architecture: size classes, slabs of few rows, and teams for
rows that the registers of one block do not hold. No GPU takes part."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import by_rules, device, problem, rules_of

from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Registers, Split, Team, Unaligned, two_tiles
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES, means, sum_of
from tilegym_rmsnorm.backends.cutile.plans.select import Choice, select
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID, NO_END, SIZES, rows_of_class, size_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardPipelinedTeam
from tilegym_rmsnorm.backends.cutile.runtime import tables

SM_COUNTS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 160, 120: 188}
WIDTHS = sorted(
    {*range(1, 130), *(p + d for k in range(7, 17) for p in (1 << k, 3 << k) for d in (-1, 0, 1)), 131072}
)
BF16, FP32 = "bfloat16", "float32"
DTYPES = {BF16: 2, FP32: 4}  # float16 is served as bfloat16 is, which a test asserts
OWN = "backward with partials of its own"
EVERY_ROW_MEETS = [
    (asked, architecture, dtype)
    for asked in (
        *(("forward", "large"), ("forward", "few"), ("backward", "large"), ("backward", "few")),
        *(("dx", "large"), (OWN, "large")),
    )
    for architecture in ARCHITECTURES
    for dtype in DTYPES
]


def chosen(op: str, n: int, dtype: str = BF16, architecture: int = 90, size: str = "large") -> Choice:
    if op == OWN:
        asked = problem("backward", n, dtype, size, architecture=architecture, partials="own")
        plan = select(asked, rules_of(architecture))
        return Choice(plan.first, plan.source, plan.spills)
    return by_rules(op, n, dtype, size, architecture=architecture)


def first(*arguments, **options) -> Variant:
    return chosen(*arguments, **options).first


@pytest.mark.parametrize(("asked", "architecture", "dtype"), EVERY_ROW_MEETS)
def test_every_width_gets_a_variant_that_holds_it(asked, architecture, dtype):
    op, size = asked
    for n in WIDTHS:
        variant, source, _ = chosen(op, n, dtype, architecture, size)
        variant.check(n, DTYPES[dtype], architecture)
        slab = variant.slab if isinstance(variant, Split) else 1
        extents = [variant.width, variant.rows, variant.strip, slab, variant.rest or 1]
        assert all(extent == power_of_two(extent) for extent in extents), (n, variant)
        assert variant.warps in (4, 8), "other counts need a later cuda-tile"
        assert 1 <= variant.latency <= 10 and 1 <= variant.occupancy <= 32 and source
        assert op.split()[0] in variant.serves
        if isinstance(variant, (Registers, variants.BackwardSplit)) and not isinstance(variant, Team):
            last = variant.rest or variant.width
            assert variant.lanes >= n, "columns past the tiles would be dropped"
            assert variant.lanes < 2 * n + 8 or n == 1, "a smaller tile holds the row"
            assert variant.lanes == last or variant.lanes - last < n + 8, (
                "only the last tile is bounds-checked"
            )
        if isinstance(variant, variants.ForwardTiles):
            assert variant.pieces == 1 or variant.weight_load == "joint", variant
        assert not variant.packed or DTYPES[dtype] == 2, variant
        assert not isinstance(variant, Split) or op == "backward", "it has blocks for dw"
        assert not variant.uses_tma or architecture >= 90


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", SIZES)
def test_float16_is_served_as_bfloat16_is(architecture, size):
    """But for rules of sm_90 that were timed and serve one of the two."""
    records = tables.shipped_records(90) if architecture == 90 else ()
    of_one = [each for each in records if not each.gpus and size in each.sizes and len(each.dtypes) == 1]
    for n, op, weight in itertools.product(WIDTHS, ("forward", "backward", "dx"), ("same", FP32)):
        half, other = (
            by_rules(op, n, dtype, size, weight, architecture=architecture) for dtype in ("float16", BF16)
        )
        is_timed = any(op in each.ops and each.first <= n <= each.last for each in of_one)
        assert half == other or is_timed, (op, n, weight)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_variant_asks_for_more_registers_than_an_sm_has(architecture, dtype):
    """4-byte registers, 64K an SM, 255 a thread. The backward holds x and dy in their own dtype, the sum of dw and
    weight in float32; the forward x in float32, or in its own dtype, and little else at the same time."""
    itemsize = DTYPES[dtype]
    for n in WIDTHS:
        needs = []
        for size in SIZES:
            forward = chosen("forward", n, dtype, architecture, size)
            held = forward.first.tile
            needs.append((forward, held // 2 if forward.first.packed else held))
            backward = chosen("backward", n, dtype, architecture, size)
            if isinstance(
                backward.first, Split
            ):  # a block for dx, whose sums are scalars or, in chunks, a tile; or dw
                row = backward.first.width + backward.first.rest
                tile = backward.first.rows * backward.first.strip
                registers = max(row * 2 * itemsize / 4 + row, tile * (2 * itemsize + 4) / 4)
            else:
                tile, row = backward.first.tile, backward.first.tile // backward.first.rows
                registers = tile * (2 * itemsize + 4) / 4 + row
            needs.append((backward, registers))
        for (variant, _, spills), registers in needs:
            assert registers / (32 * variant.warps) <= 255 or spills, (n, variant)
            assert registers * variant.occupancy <= 65536 or spills, (n, variant)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_x_is_read_once_in_the_forward_up_to_32768_columns(architecture):
    """And on Hopper up to 131072, by teams."""
    for n in WIDTHS:
        for dtype in DTYPES:
            has_teams = n * DTYPES[dtype] % 16 == 0 or DTYPES[dtype] == 2
            is_shared = architecture == 90 and has_teams and n <= 131072
            is_reread = isinstance(first("forward", n, dtype, architecture), variants.ForwardReread)
            assert is_reread == (n > 32768 and not is_shared)


@pytest.mark.parametrize("architecture", [80, 90])
def test_rows_of_more_strips_than_a_grid_has_are_refused_with_dw(architecture):
    """CUDA has 65535 blocks in a grid's second dimension, where other calls have one. The grid of the sum of dw has
    fewer then than its first dimension takes."""
    widest = 65535 * 2048
    for op in ("backward", OWN):
        variant = first(op, widest, BF16, architecture)
        assert isinstance(variant, variants.BackwardStrips) and -(-widest // variant.width) == 65535
        assert -(-widest // sum_of(variant, widest, architecture).width) <= LARGEST_GRID
        with pytest.raises(ValueError, match=f"at most {widest} elements, got {widest + 1}: use backend"):
            first(op, widest + 1, BF16, architecture)
    assert isinstance(first("dx", widest + 1, BF16, architecture), variants.BackwardReread)
    assert isinstance(first("forward", widest + 1, BF16, architecture), variants.ForwardReread)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_partial_rows_are_few_and_never_more_than_row_tiles(architecture):
    sm_count = SM_COUNTS[architecture]
    for n in WIDTHS:
        for dtype in DTYPES:
            for m in (1, 2, 31, 132, 1000, 4096, 65536, 2**24, 2**30):
                variant = first("backward", n, dtype, architecture, size_class(m, n))
                p, tiles = variant.partial_rows(m, n, sm_count), -(-m // variant.rows)
                if isinstance(variant, Unaligned) and variant.has_ends(n):  # as many blocks of each shift
                    blocks = max(1, sm_count * variant.occupancy // variant.members // variant.vector)
                    steps = -(-m // (variant.rows * variant.vector))
                    assert p % variant.vector == 0 and p <= variant.most_partial_rows(sm_count)
                    assert -(-steps // (p // variant.vector)) == -(-steps // blocks)
                    continue
                assert 1 <= p <= min(8 * sm_count, tiles, LARGEST_GRID)
                assert p <= variant.most_partial_rows(sm_count)
                blocks = sm_count * variant.occupancy * variant.grid_percent // 100 // variant.members
                if isinstance(variant, Split):
                    slab = variant.slab_tiles(m, sm_count)
                    assert (p - 1) * slab < tiles <= p * slab, (
                        "every row tile is in one slab, no slab is empty"
                    )
                elif not isinstance(variant, variants.BackwardStrips) and tiles > 8 * sm_count:
                    assert -(-tiles // p) == -(-tiles // blocks), "some block walks further than it has to"


def test_a_split_row_wastes_fewer_lanes_than_one_tile():
    assert (first("backward", 2560).width, first("backward", 2560).rest) == (2048, 512)
    for n in WIDTHS:
        variant = first("backward", n)
        if variant.rest:
            assert variant.lanes <= power_of_two(n) * 3 // 4


def test_every_rule_of_two_tiles_splits_some_rows():
    """One range that has its settings is enough: two_tiles makes one tile of what fills more than three quarters of
    it."""
    rests: dict[str, set[int]] = {}
    for record in (*tables.shipped_records(None), *tables.shipped_records(90)):
        for settings in record.settings:
            if "two_tiles" in settings:
                found = rests.setdefault(f"{record.kernel} {sorted(settings.items())}", set())
                found.update(two_tiles(n)[1] for n in range(record.first, record.last + 1))
    assert len(rests) > 3 and all(found - {0} for found in rests.values()), rests


def test_rules_compile_few_kernels():
    """Every distinct variant is a kernel to compile: the sweep of all widths must not invent one per width."""
    for op, size in (("forward", "large"), ("backward", "large"), ("backward", "few")):
        distinct = {first(op, n, size=size) for n in range(1, 40000)}
        assert len(distinct) <= 100


def test_only_the_widest_hopper_rows_may_spill():
    for architecture, dtype, size in itertools.product(ARCHITECTURES, DTYPES, SIZES):
        for op, widest in (("backward", 12288), ("forward", 18432 if dtype == BF16 else 28672)):
            spilling = [n for n in WIDTHS if chosen(op, n, dtype, architecture, size).spills]
            assert all(architecture == 90 and n > widest for n in spilling)


@pytest.mark.parametrize(
    ("n", "dtype", "architecture"), [(0, BF16, 90), (128, "float64", 90), (128, BF16, 75)]
)
@pytest.mark.parametrize("op", ["forward", "backward", "dx", OWN])
def test_what_no_kernel_serves_is_refused(op, n, dtype, architecture):
    partials = {"partials": "own"} if op == OWN else {}
    asked = problem(op.split()[0], n, dtype, architecture=architecture, **partials)
    with pytest.raises(
        ValueError, match="expected rows of 1 element or more, a dtype of .*, architecture one of"
    ):
        select(asked, rules_of(architecture))


def test_helper_kernels_have_tiles_of_powers_of_two():
    kinds = itertools.product(WIDTHS, DTYPES, SIZES)
    sums = {sum_of(first("backward", n, dtype, size=size), n, 90) for n, dtype, size in kinds}
    wide = (problem("backward", 140000, architecture=each) for each in ARCHITECTURES)
    for variant in (*sums, *map(means, wide)):
        rows = variant.rows
        assert variant.width == power_of_two(variant.width) and rows == power_of_two(rows)


def test_the_sum_takes_the_partial_rows_of_two_blocks_an_sm_in_two_steps():
    """Each step waits for memory; fewer rows than a tile has waste its lanes. Many rows in slabs are no such case."""
    for n in WIDTHS:
        for dtype in DTYPES:
            for size in ("few", "large"):
                variant = first("backward", n, dtype, size=size)
                is_split = isinstance(variant, Split)
                if isinstance(variant, variants.BackwardStrips) or (is_split and size == "large"):
                    continue
                most = variant.most_partial_rows(132)
                if is_split:
                    most = max(variant.partial_rows(m, n, 132) for m in rows_of_class(size, n))
                assert -(-most // sum_of(variant, n, 90).rows) <= 2, (n, variant, most)


def test_the_sum_differs_only_where_it_was_measured_to_win():
    two, one = (variants.BackwardRows(width=2048, warps=8, occupancy=blocks, latency=6) for blocks in (2, 1))
    numbers = {"width": 2048, "warps": 8, "latency": 6}
    strips = variants.BackwardStrips(occupancy=1, **numbers)
    slabs = {"warps": 8, "occupancy": 1, "latency": 8, "rows": 8, "strip": 1024, "slab": 32}
    split = variants.BackwardSplit(width=16384, rest=2048, **slabs)
    reread = variants.BackwardSplitReread(width=4096, **slabs)

    def team(members: int, occupancy: int) -> variants.BackwardTeam:
        return variants.BackwardTeam(width=4096, warps=4, occupancy=occupancy, latency=2, members=members)

    tiles = {
        (256, 16, 2): [
            *((two, 2048), (variants.BackwardTiles(occupancy=2, **numbers), 2048)),
            (variants.BackwardPipelined(occupancy=2, **numbers), 2048),
        ],
        (32, 128, 2): [(team(8, 2), 65536), (team(16, 3), 65536), (team(8, 3), 32768), (team(6, 2), 49152)],
        (4, 512, 4): [(split, 18432), (reread, 16400), (reread, 131072)],
        (128, 16, 4): [
            *((one, 8192), (strips, 140000), (split, 4096), (reread, 16384)),
            *(
                (dataclasses.replace(strips, occupancy=3), 140000),
                (variants.BackwardPipelined(occupancy=1, **numbers), 2048),
            ),
            *((team(members, 2), 8192 * members) for members in (3, 4, 5)),
            *((team(6, 4), 18432), (team(4, 3), 16384)),
        ],
    }
    for expected, cases in tiles.items():
        for variant, n in cases:
            found = sum_of(variant, n, 90)
            assert (found.rows, found.width, found.occupancy) == expected, (variant, n)
            for architecture in (80, 100):
                found = sum_of(variant, n, architecture)
                assert (found.rows, found.width, found.occupancy) == (128, 16, 4), (variant, n)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_index_of_a_split_block_passes_int32(architecture):
    """backward_split multiplies a block's number by the number of strips."""
    sm_count = SM_COUNTS[architecture]
    for n in (*WIDTHS, 2**18, 2**20, 2**25, 2**27 - 2048):
        for m in (1, 1000, 2**16, 2**20, 2**24):
            variant = first("backward", n, BF16, architecture, size_class(m, n))
            if isinstance(variant, Split) and m * n < 2**42:  # 8 TB of x
                strips = -(-n // variant.strip)
                rows = variant.slab_tiles(m, sm_count) * variant.rows
                factor = 1 if isinstance(variant, variants.BackwardSplit) else strips
                assert (strips + rows) * factor < 2**31, (m, n, variant)


def first_of_team(op: str, n: int, dtype: str = BF16, size: str = "large", most_members: int = 16) -> Variant:
    return by_rules(op, n, dtype, size, facts=device(most_members=most_members)).first


@pytest.mark.parametrize("size", ["few", "large"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_no_member_of_a_team_is_without_columns_and_few_lanes_are_empty(op, dtype, size):
    wide = {n: first_of_team(op, n, dtype, size) for n in range(16400, 131073, 112)}
    teams = {n: variant for n, variant in wide.items() if isinstance(variant, Team)}
    assert len(teams) > len(wide) / 2
    for n, team in teams.items():
        assert team.lanes - team.width < n <= team.lanes, (n, team)
        is_large = isinstance(team, BackwardPipelinedTeam) and team.width >= 4096
        most = {4096: 5 / 4, 8192: 4 / 3}[team.width] if is_large else 9 / 8
        assert team.lanes <= n * most, (n, team)
        assert 2 <= team.members <= 16
        fewer = first_of_team(op, n, dtype, size, most_members=team.members - 1)
        assert fewer.members < team.members, "a team that does not fit the GPU"


def test_size_classes_follow_rows_and_elements():
    assert [size_class(m, 4096) for m in (0, 1, 1024, 1025, 2**20)] == ["few", "few", "few", "large", "large"]
    assert [size_class(m, 256) for m in (1024, 1025, 16384, 16385)] == ["few", "small", "small", "large"]
    assert size_class(16, 2**18) == "few" and size_class(16, 2**18 + 1) == "large"


@given(size=st.sampled_from(SIZES), n=st.integers(1, 2**23))
def test_the_rows_of_a_class_are_those_that_are_in_it(size, n):
    rows = rows_of_class(size, n)
    assert all(size_class(m, n) == size for m in (*rows[:3], *rows[-3:]))
    for m in (rows.start - 1, rows.stop):
        assert m < 1 or size_class(m, n) != size or m == NO_END


def test_which_few_rows_take_more_than_one_slab():
    """One row of dw_partial is dw itself."""

    for n in (64, 512, 513, 1024, 2048, 4096, 8192, 12288, 16384):
        for dtype in ("bfloat16", "float32"):
            first = by_rules("backward", n, dtype, "few").first
            one_slab = {"bfloat16": {8192: 512}, "float32": {64: 128, 16384: 64}}[dtype].get(
                n, 256 if n <= 512 else 1024
            )
            for m in (1, 16, 128, 129, 256, 257, 1024):
                if m in rows_of_class("few", n):
                    assert first.partial_rows(m, n, 132) == -(-m // one_slab), (m, n, dtype)
