# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The selector of the cutile backend, swept over M x N x element size x architecture. Neither torch nor a GPU takes
part."""

import functools
import itertools
from dataclasses import replace

import pytest

from tilegym_rmsnorm.backends.cutile.plans import hopper
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, power_of_two, two_tiles
from tilegym_rmsnorm.backends.cutile.plans.rules import (
    ARCHITECTURES,
    backward_config,
    forward_config,
    row_partials_config,
    sum_config,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    LARGEST_GRID,
    SIZES,
    most_partial_rows,
    partial_rows,
    rows_of_class,
    size_class,
    slab_tiles,
)
from tilegym_rmsnorm.backends.cutile.plans.wide import means_config

SM_COUNTS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 160, 120: 188}
WIDTHS = sorted(
    {*range(1, 130), *(p + d for k in range(7, 17) for p in (1 << k, 3 << k) for d in (-1, 0, 1)), 131072}
)
few_rows_config = functools.partial(backward_config, size="few")
few_forward_config = functools.partial(forward_config, size="few")
dx_config = functools.partial(backward_config, has_dw=False)
EVERY_ROW_MEETS = [
    (configure, architecture, itemsize)
    for configure in (
        *(forward_config, few_forward_config),
        *(backward_config, few_rows_config, dx_config, row_partials_config),
    )
    for architecture in ARCHITECTURES
    for itemsize in (2, 4)
]


@pytest.mark.parametrize(("configure", "architecture", "itemsize"), EVERY_ROW_MEETS)
def test_every_width_gets_a_config_that_holds_it(configure, architecture, itemsize):
    for n in WIDTHS:
        config = configure(n, itemsize, architecture)
        extents = [e for e in (config.width, config.rows, config.rest, config.strip, config.slab) if e]
        assert all(extent == power_of_two(extent) for extent in extents), (n, config)
        assert config.warps in (4, 8), "other counts need a later cuda-tile"
        assert 1 <= config.latency <= 10 and 1 <= config.occupancy <= 32 and config.reason
        if config.kernel in ("rows", "tiles", "fused"):
            assert config.lanes >= n, "columns past the tiles would be dropped"
            assert config.lanes < 2 * n or n == 1, "a smaller tile holds the row"
            last = config.rest or config.width
            assert config.lanes == last or config.lanes - last < n, "only the last tile is bounds-checked"
        assert not config.rest or config.kernel in ("rows", "fused"), config
        is_forward = configure in (forward_config, few_forward_config)
        has_tiles = config.together or not is_forward
        with_pieces = ("rows", "teams", "tiles") if has_tiles else ("rows", "teams")
        assert config.pieces == 1 or config.kernel in with_pieces, config
        assert not config.packed or (config.kernel in ("rows", "teams") and itemsize == 2), config
        if config.kernel in ("fused", "fused_chunks"):
            assert config.strip and config.slab % config.rows == 0 < config.slab
            assert configure not in (dx_config, row_partials_config), "it has blocks for dw"
        else:
            assert not config.strip and not config.slab
        if config.kernel == "rows":
            assert config.rows == 1
        assert not config.tma or architecture >= 90
        assert not (config.tma and is_forward and config.kernel == "tiles"), "some of these hang"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_config_asks_for_more_registers_than_an_sm_has(architecture, itemsize):
    """4-byte registers, 64K an SM, 255 a thread. The backward holds x and dy in their own dtype, the sum of dw and
    weight in float32; the forward x in float32, or in its own dtype, and little else at the same time."""
    for n in WIDTHS:
        needs = []
        for size in SIZES:
            forward = forward_config(n, itemsize, architecture, size)
            held = forward.rows * forward.lanes // forward.members
            needs.append((forward, held // 2 if forward.packed else held))
            backward = backward_config(n, itemsize, architecture, size)
            row, tile = backward.lanes // backward.members, backward.rows * backward.strip
            if backward.slab:  # a block for dx, whose sums are scalars or, in chunks, a tile; or one for dw
                registers = max(row * 2 * itemsize / 4 + row, tile * (2 * itemsize + 4) / 4)
            else:
                registers = backward.rows * row * (2 * itemsize + 4) / 4 + row
            needs.append((backward, registers))
        for config, registers in needs:
            assert registers / (32 * config.warps) <= 255 or config.spills, (n, config)
            assert registers * config.occupancy <= 65536 or config.spills, (n, config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_x_is_read_once_in_the_forward_up_to_32768_columns(architecture):
    """And on Hopper up to 131072, by teams."""
    for n in WIDTHS:
        for itemsize in (2, 4):
            is_shared = architecture == 90 and n % 16 == 0 and n <= 131072
            assert (forward_config(n, itemsize, architecture).kernel == "chunks") == (
                n > 32768 and not is_shared
            )


def test_forwards_of_teams_begin_where_one_block_is_slower():
    """16-bit rows of up to 24576, float32 of up to 16384, few rows of up to 32768: one block each."""
    kernels = {
        (itemsize, size): [forward_config(n, itemsize, 90, size).kernel for n in (16384, 16400, 24576, 24592)]
        for itemsize in (2, 4)
        for size in ("few", "large")
    }
    assert kernels[2, "large"] == ["rows", "rows", "rows", "teams"]
    assert kernels[4, "large"] == ["rows", "teams", "teams", "teams"]
    assert kernels[2, "few"] == kernels[4, "few"] == ["rows"] * 4
    for itemsize in (2, 4):
        few = [forward_config(n, itemsize, 90, "few") for n in (32768, 32784)]
        assert [config.kernel for config in few] == ["rows", "teams"]
        assert all(config.packed == (itemsize == 2) for config in few)


@pytest.mark.parametrize("architecture", [80, 90])
def test_rows_of_more_strips_than_a_grid_has_are_refused_with_dw(architecture):
    """CUDA has 65535 blocks in a grid's second dimension, where other calls have one. The grid of the sum of dw has
    fewer then than its first dimension takes."""
    widest = 65535 * 2048
    for configure in (backward_config, row_partials_config):
        config = configure(widest, 2, architecture)
        assert config.kernel == "strips" and -(-widest // config.width) == 65535
        assert -(-widest // sum_config(config, widest, architecture).width) <= LARGEST_GRID
        with pytest.raises(ValueError, match=f"at most {widest} elements, got {widest + 1}: use backend"):
            configure(widest + 1, 2, architecture)
    assert backward_config(widest + 1, 2, architecture, has_dw=False).kernel == "chunks"
    assert forward_config(widest + 1, 2, architecture).kernel == "chunks"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_partial_rows_are_few_and_never_more_than_row_tiles(architecture):
    sm_count = SM_COUNTS[architecture]
    for n in WIDTHS:
        for itemsize in (2, 4):
            for m in (1, 2, 31, 132, 1000, 4096, 65536, 2**24, 2**30):
                config = backward_config(n, itemsize, architecture, size_class(m, n))
                p = partial_rows(m, n, config, sm_count)
                assert 1 <= p <= min(8 * sm_count, -(-m // config.rows), LARGEST_GRID)
                tiles, blocks = -(-m // config.rows), sm_count * config.occupancy // config.members
                if config.slab:
                    slab = slab_tiles(m, config, sm_count)
                    assert (p - 1) * slab < tiles <= p * slab, (
                        "every row tile is in one slab, no slab is empty"
                    )
                elif config.kernel != "strips" and tiles > 8 * sm_count:
                    assert -(-tiles // p) == -(-tiles // blocks), "some block walks further than it has to"


def test_a_split_row_wastes_fewer_lanes_than_one_tile():
    assert (backward_config(2560, 2, 90).width, backward_config(2560, 2, 90).rest) == (2048, 512)
    for n in WIDTHS:
        config = backward_config(n, 2, 90)
        if config.rest:
            assert config.lanes <= power_of_two(n) * 3 // 4


def test_every_rule_that_splits_rows_splits_some():
    """In one of the tables that have it: two_tiles makes one tile of what fills more than three quarters of it."""
    rests = {}
    for rules in vars(hopper).values():
        if not isinstance(rules, tuple) or not all(hasattr(rule, "up_to") for rule in rules):
            continue
        for before, rule in itertools.pairwise(rules):
            if getattr(rule, "split", False):
                widths = range(before.up_to + 1, rule.up_to + 1)
                rests.setdefault(rule, set()).update(two_tiles(n)[1] for n in widths)
    assert len(rests) > 3 and all(found - {0} for found in rests.values()), rests


def test_configs_compile_few_kernels():
    """Every distinct config is a kernel to compile: the sweep of all widths must not invent one per width."""
    for configure in (forward_config, backward_config, few_rows_config):
        distinct = {configure(n, 2, 90) for n in range(1, 40000)}
        assert len(distinct) <= 65


def test_only_the_widest_hopper_rows_may_spill():
    for architecture, itemsize, size in itertools.product(ARCHITECTURES, (2, 4), SIZES):
        spilling = [n for n in WIDTHS if backward_config(n, itemsize, architecture, size).spills]
        assert all(architecture == 90 and n > 12288 for n in spilling)
        spilling = [n for n in WIDTHS if forward_config(n, itemsize, architecture, size).spills]
        assert all(architecture == 90 and n > (18432 if itemsize == 2 else 28672) for n in spilling)


@pytest.mark.parametrize("arguments", [(0, 2, 90), (128, 8, 90), (128, 2, 75)])
def test_what_no_kernel_serves_is_refused(arguments):
    for configure in (forward_config, backward_config):
        with pytest.raises(ValueError, match="expected n >= 1, itemsize 2 or 4, architecture one of"):
            configure(*arguments)


def test_helper_kernels_have_tiles_of_powers_of_two():
    kinds = itertools.product(WIDTHS, (2, 4), SIZES)
    sums = {sum_config(backward_config(n, itemsize, 90, size), n, 90) for n, itemsize, size in kinds}
    for config in (*sums, *map(means_config, ARCHITECTURES)):
        assert config.width == power_of_two(config.width) and config.rows == power_of_two(config.rows)


def test_the_sum_takes_the_partial_rows_of_two_blocks_an_sm_in_two_steps():
    """Each step waits for memory; fewer rows than a tile has waste its lanes. Many rows in slabs are no such case."""
    for n in WIDTHS:
        for itemsize in (2, 4):
            for size in ("few", "large"):
                config = backward_config(n, itemsize, 90, size)
                if config.kernel == "strips" or (config.is_fused and size == "large"):
                    continue
                most = most_partial_rows(config, 132)
                if config.is_fused:
                    most = max(partial_rows(m, n, config, 132) for m in rows_of_class(size, n))
                assert -(-most // sum_config(config, n, 90).rows) <= 2, (n, config, most)


def test_the_sum_differs_only_where_it_was_measured_to_win():
    two, one = (Config("rows", 2048, 8, blocks, 6) for blocks in (2, 1))
    fused = Config("fused", 16384, 8, 1, 1, 2048, 8, 1024, 32)
    chunks = replace(fused, kernel="fused_chunks", width=4096, rest=0)

    def team(members: int, occupancy: int) -> Config:
        return Config("teams", 4096, 4, occupancy, 2, members=members)

    tiles = {
        (256, 16, 2): [(two, 2048), (replace(two, kernel="tiles"), 2048)],
        (32, 128, 2): [(team(8, 2), 65536), (team(16, 3), 65536), (team(8, 3), 32768), (team(6, 2), 49152)],
        (4, 512, 4): [(fused, 18432), (chunks, 16400), (chunks, 131072)],
        (128, 16, 4): [
            *((one, 8192), (replace(one, kernel="strips"), 140000), (fused, 4096), (chunks, 16384)),
            *((team(members, 2), 8192 * members) for members in (3, 4, 5)),
            *((team(6, 4), 18432), (team(4, 3), 16384)),
        ],
    }
    for expected, cases in tiles.items():
        for first, n in cases:
            found = sum_config(first, n, 90)
            assert (found.rows, found.width, found.occupancy) == expected, (first, n)
            for architecture in (80, 100):
                found = sum_config(first, n, architecture)
                assert (found.rows, found.width, found.occupancy) == (128, 16, 4), (first, n)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_index_of_a_fused_block_passes_int32(architecture):
    """backward_split multiplies a block's number by the number of strips."""
    for n in (*WIDTHS, 2**18, 2**20, 2**25, 2**27 - 2048):
        for m in (1, 1000, 2**16, 2**20, 2**24):
            config = backward_config(n, 2, architecture, size_class(m, n))
            if config.is_fused and m * n < 2**42:  # 8 TB of x
                strips = -(-n // config.strip)
                rows = slab_tiles(m, config, SM_COUNTS[architecture]) * config.rows
                assert (strips + rows) * (1 if config.kernel == "fused" else strips) < 2**31, (m, n, config)
