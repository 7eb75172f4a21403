# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The configs that tuning tries."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.plans.select import RULES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class, slab_tiles
from tilegym_rmsnorm.backends.cutile.plans.tables import check_config
from tilegym_rmsnorm.backends.cutile.tuning import candidates as space
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates, distance, fits_registers
from tilegym_rmsnorm.backends.cutile.tuning.spaces import SWEEPS
from tilegym_rmsnorm.backends.cutile.tuning.tilings import parts_of_rows, rows_of_few_equal_tiles

OPS = tuple(RULES)


@pytest.mark.parametrize("n", [3584, 12288, 16384])
def test_rows_by_tma_are_tried_in_tiles_of_every_width_by_every_share(n):
    found = candidates(Bucket("backward", n, "float16", "large"), 2, 90, most=24)
    by_tma = {(config.width, config.share) for config in found if config.kernel == "rows" and config.tma}
    widths = {tile["width"] for tile in rows_of_few_equal_tiles(n)}
    assert len(widths) == 2 and by_tma == set(itertools.product(widths, (100, 84, 72)))


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
    found = candidates(bucket, itemsize, architecture, most)
    default = RULES[op](n, itemsize, architecture, size)
    assert found[0] == default and 1 <= len(found) <= most
    assert len({replace(config, reason="", spills="") for config in found}) == len(found)
    for config in found[1:]:
        check_config(config, bucket, architecture)
        assert fits_registers(config, op, itemsize)
    most_rows = power_of_two(rows_of_class(size, n)[-1])
    distances = [distance(each, replace(default, slab=min(default.slab, most_rows))) for each in found[1:]]
    assert distances == sorted(distances)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [64, 1024, 4096, 5120, 16384, 65536])
def test_every_width_has_a_choice(op, n):
    """Of more than one value of everything that its kernels have, jointly: no field is kept while others are swept."""
    for size in (each for each in SIZES if rows_of_class(each, n)):
        found = candidates(Bucket(op, n, "bfloat16", size), 2, 90)
        assert len(found) >= 20
        for name in ("warps", "occupancy", "latency"):
            assert len({getattr(config, name) for config in found}) > 1, name
        changed = [
            sum(getattr(config, f.name) != getattr(found[0], f.name) for f in fields(Config))
            for config in found
        ]
        assert max(changed) >= 3


@pytest.mark.parametrize("op", OPS)
def test_sweeps_name_fields_of_config_and_kernels_of_the_op(op):
    names = {field.name for field in fields(Config)}
    for sweep in SWEEPS[op]:
        assert set(sweep.values) < names
        tiles = list(sweep.tiles(sweep.narrowest))
        assert tiles
        together = sweep.values.get("together", (False,))[-1]
        for tile in tiles:
            config = Config(sweep.kernel, **tile, warps=4, occupancy=1, latency=1, together=together)
            check_config(config, Bucket(op, sweep.narrowest, "float32", "large"), 90)


@pytest.mark.parametrize("op", ["backward", "dx"])
@pytest.mark.parametrize("n", [32768, 65536])
def test_packed_teams_are_tried_in_tiles_of_every_width(n, op):
    found = {
        (config.width, config.pieces)
        for config in candidates(Bucket(op, n, "bfloat16", "large"), 2, 90)
        if config.kernel == "teams" and config.packed
    }
    assert found == {(4096, 4), (8192, 2)}


def test_rows_of_18432_are_tried_as_teams_of_two_and_four_blocks_of_nine_tiles():
    found = {(tile["width"], tile["pieces"], tile["members"]) for tile in parts_of_rows(18432)}
    assert {(1024, 9, 2), (512, 9, 4), (2048, 3, 3)} <= found


def test_what_is_known_is_tried_first():
    bucket = Bucket("backward", 5120, "bfloat16", "large")
    default, *others = candidates(bucket, 2, 90, most=60)
    fits, impossible = Config("tiles", 1024, 4, 2, 7, pieces=5, tma=True), Config("rows", 2048, 8, 1, 4)
    too_many = Config("teams", 512, 4, 1, 4, members=10)
    known = [others[9], impossible, default, fits, too_many, fits]
    found = candidates(bucket, 2, 90, most=6, most_members=8, known=known)
    assert found[:3] == [default, others[9], replace(fits, reason=space.REASON)] and len(set(found)) == 6
    assert candidates(bucket, 2, 90, most=2, most_members=8, known=known) == [default, others[9]]


def test_rows_are_tried_in_several_tiles_with_and_without_tma():
    for n, warps in ((2560, (4, 8)), (5120, (4, 8)), (7168, (4, 8)), (12288, (8,))):
        found = candidates(Bucket("backward", n, "bfloat16", "large"), 2, 90)
        in_tiles = {(c.tma, c.warps) for c in found if c.kernel == "tiles" and c.pieces > 1}
        assert in_tiles == set(itertools.product((False, True), warps)), n


def test_registers():
    rows = Config("rows", 16384, 8, 1, 4)
    assert fits_registers(rows, "backward", 2)
    assert not fits_registers(replace(rows, warps=4), "backward", 2), "192 registers and more for each thread"
    assert not fits_registers(replace(rows, occupancy=2), "backward", 2), (
        "two blocks have 128 for each thread"
    )
    assert not fits_registers(replace(rows, width=32768), "backward", 2)
    assert fits_registers(replace(rows, width=32768), "forward", 2)
    assert not fits_registers(Config("tiles", 64, 4, 8, 2, rows=1), "forward", 2), (
        "half of the threads are idle"
    )


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("size", "n", "kernels"),
    [
        *(("few", n, {"fused"}) for n in (64, 1024, 2048, 4096, 8192, 12288, 16384)),
        ("few", 18432, {"fused", "fused_chunks"}),
    ],
)
def test_fused_kernels_are_searched_around_the_one_of_the_rules(size, n, kernels, itemsize):
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    default, *others = candidates(Bucket("backward", n, dtype, size), itemsize, 90)
    assert default.kernel in kernels and fits_registers(default, "backward", itemsize)
    near = [config for config in others if config.kernel == default.kernel]
    assert len(near) >= 10
    assert len({(config.rows, config.strip) for config in near}) >= 4
    assert len({config.slab for config in near}) >= 2


@pytest.mark.parametrize("n", [64, 4096, 5000, 8192, 16384, 65536, 500_000])
def test_no_two_candidates_differ_only_in_a_slab_that_no_call_fills(n):
    found = candidates(Bucket("backward", n, "float32", "few"), 4, 90, most=10_000)
    most = rows_of_class("few", n)[-1]
    seen = {replace(each, slab=slab_tiles(most, each, 132), reason="", spills="") for each in found}
    assert len(seen) == len(found)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("op", "size", "n"),
    [
        *(("backward", "large", n) for n in (18432, 32768, 65536)),
        ("backward", "few", 65536),
        *(("forward", size, n) for size in ("few", "large") for n in (49152, 65536)),
    ],
)
def test_teams_are_searched_around_the_one_of_the_rules(op, size, n, itemsize):
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    default, *others = candidates(Bucket(op, n, dtype, size), itemsize, 90)
    assert default.kernel == "teams" and fits_registers(default, op, itemsize)
    near = [config for config in others if config.kernel == "teams"]
    assert len({(config.members, config.warps, config.occupancy) for config in near}) >= 5
    assert all(config.width * config.pieces * (config.members - 1) < n for config in near), (
        "one has no columns"
    )
    assert {"forward": "chunks", "backward": "strips"}[op] in {config.kernel for config in others}


@pytest.mark.parametrize("n", [2**24, 2**25, 2**26, 2**27 - 2**11])
def test_no_candidate_of_the_widest_rows_passes_int32_or_the_grid(n):
    """2**25 columns: 65536 strips of 512, whose blocks' numbers times strips are no int32."""
    found = candidates(Bucket("backward", n, "float32", "large"), 4, 90, most=10_000)
    chunks = {(config.strip, config.slab) for config in found if config.kernel == "fused_chunks"}
    for strip, slab in chunks:
        strips = -(-n // strip)
        last = strips + slab - 1
        assert (last + 1) * strips < 2**31, (strip, slab)
    assert any(strip == 1024 for strip, _ in chunks) == (n <= 2**25)
    assert all(-(-n // config.width) < 2**16 for config in found if config.kernel == "strips")


def test_kernels_wide_rows_are_not_held_by_are_tried_below_them():
    found = candidates(Bucket("backward", 16384, "bfloat16", "large"), 2, 90)
    assert {"rows", "teams", "strips"} <= {config.kernel for config in found}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "most"), [(12288, 4), (24576, 4), (32768, 3)])
def test_packed_rows_with_a_late_weight_are_tried_by_as_many_blocks_as_fit(n, most, dtype):
    """Two bytes an element are all that a thread keeps then: of 32768 columns 93 registers in each of 8 warps."""
    found = candidates(Bucket("forward", n, dtype, "large"), 2, 90, most=200)
    rows = [each for each in found if each.kernel == "rows" and each.packed and each.warps == 8]
    assert max(each.occupancy for each in rows if not (each.early_weight or each.together)) == most


def test_registers_of_the_two_kinds_of_blocks():
    fused = Config("fused", 16384, 8, 1, 1, rows=8, strip=1024, slab=64)
    assert fits_registers(fused, "backward", 4)
    assert not fits_registers(replace(fused, occupancy=2), "backward", 4), "the rows"
    assert not fits_registers(replace(fused, rows=64), "backward", 2), "256 registers for the sum alone"


def test_the_weight_is_tried_late_early_and_together_with_every_number_of_warps():
    """Which of them is faster depends on both, and the rules know one."""

    def kinds(*bucket, most):
        found = candidates(Bucket("forward", *bucket), 4, 90, most=most)
        return {
            (config.warps, config.early_weight, config.together)
            for config in found
            if config.kernel in ("tiles", "rows")
        }

    weights = ((False, False), (True, False), (False, True))
    every = {(warps, *weight) for warps in (4, 8) for weight in weights}
    for n in (128, 4096):
        assert kinds(n, "float32", "few", most=20) == every
    assert kinds(128, "float32", "large", most=60) == {kind for kind in every if not kind[1]}, "not early"


@pytest.mark.parametrize("dtype", list(ITEMSIZE))
@pytest.mark.parametrize("size", ["few", "large"])
@pytest.mark.parametrize("n", [2048, 4096, 8192, 16384])
def test_each_way_of_the_weight_has_a_share(n, size, dtype):
    """Of 60 at least 8 each, with the same tiles, warps and blocks; more come late, chunks and teams among them."""
    found = candidates(Bucket("forward", n, dtype, size), ITEMSIZE[dtype], 90)
    for way in ((False, False), (True, False), (False, True)):
        assert sum((config.early_weight, config.together) == way for config in found) >= 8


def by_warps(op, n, dtype, size):
    return [
        config
        for config in candidates(Bucket(op, n, dtype, size), ITEMSIZE[dtype], 90)
        if config.kernel == "tiles" and config.pieces > 1 and config.width <= 256
    ]


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
    assert {config.width for config in found} <= {128, widest}
    assert all(config.rows % config.warps == 0 and config.together == (op == "forward") for config in found)
    assert op == "forward" or all(config.rows == config.warps for config in found), (
        "two rows a warp may spill"
    )
    warps = (4,) if dtype == "float32" and n == 2048 else (4, 8)  # two blocks of 8 lack registers for those
    assert {(widest, each) for each in warps} <= {(config.width, config.warps) for config in found}


def test_other_shares_of_a_backward_of_many_rows_alone():
    config = Config("rows", 4096, 8, 1, 4, pieces=4, tma=True, share=84)
    large = Bucket("backward", 16384, "bfloat16", "large")
    found = space.with_other_shares(config, large)
    assert {each.share for each in found} == set(space.SHARES) - {84}
    assert {replace(each, share=84, reason="") for each in found} == {config}
    for each in found:
        check_config(each, large, 90)
    assert not space.with_other_shares(config, large._replace(size="few"))
    assert not space.with_other_shares(config, large._replace(op="forward"))
    assert not space.with_other_shares(Config("strips", 2048, 4, 3, 4), large)


@pytest.mark.parametrize("size", SIZES)
def test_dx_alone_is_searched_among_kernels_that_need_no_dw(size):
    for n in (each for each in (256, 4096, 16384, 65536) if rows_of_class(size, each)):
        found = candidates(Bucket("dx", n, "bfloat16", size), 2, 90)
        kernels = {config.kernel for config in found}
        assert kernels <= {"rows", "tiles", "teams", "chunks"} and ("chunks" in kernels) == (n > 8192)
        assert any(config.tma for config in found)


def test_dx_alone_needs_registers_for_no_sum():
    rows = Config("rows", 8192, 8, 2, 4)
    assert fits_registers(rows, "dx", 4) and not fits_registers(rows, "backward", 4)
    assert space.with_other_shares(rows, Bucket("dx", 8192, "float32", "large"))
