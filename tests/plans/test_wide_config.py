# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which teams the rules give to rows that the registers of one block do not hold."""

import functools

import pytest

from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config, forward_config

DX = functools.partial(backward_config, has_dw=False)


@pytest.mark.parametrize("size", ["few", "large"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("configure", [forward_config, backward_config, DX])
def test_no_member_of_a_team_is_without_columns_and_few_lanes_are_empty(configure, itemsize, size):
    wide = {n: configure(n, itemsize, 90, size) for n in range(16400, 131073, 112)}
    teams = {n: config for n, config in wide.items() if config.kernel == "teams"}
    assert len(teams) > len(wide) / 2
    for n, config in teams.items():
        assert config.lanes - config.width < n <= config.lanes, (n, config)
        most = {4096: 5 / 4, 8192: 4 / 3}[config.width] if config.tma and config.width >= 4096 else 9 / 8
        assert config.lanes <= n * most, (n, config)
        assert 2 <= config.members <= 16
        fewer = configure(n, itemsize, 90, size, most_members=config.members - 1)
        assert fewer.members < config.members, "a team that does not fit the GPU"


# columns, bytes of an element, with dw: columns of a tile, tiles, members, blocks an SM
LARGE_PARTS = [
    *((n, 2, True, (2048, 3, -(-n // 6144), 2)) for n in (16400, 18432, 24576, 36864, 49152, 73728, 86016)),
    *((n, 2, True, (4096, 1, -(-n // 4096), 3)) for n in (18448, 20480, 21504, 25088, 28672, 32768, 65536)),
    *((n, 2, True, (8192, 2, -(-n // 16384), 1)) for n in (73744, 81920, 98304, 114672, 131072)),
    *((n, 2, True, (8192, 1, -(-n // 8192), 1)) for n in (90112, 106496, 122880)),
    *((n, 2, False, (8192, 1, -(-n // 8192), 2)) for n in (18448, 20480, 28672, 65536, 131072)),
    *((n, 4, dw, (4096, 1, -(-n // 4096), 2)) for n in (16400, 18432, 24576, 65536) for dw in (True, False)),
    *((n, 4, dw, (8192, 1, -(-n // 8192), 1)) for n in (65552, 98304, 131072) for dw in (True, False)),
]


@pytest.mark.parametrize(("n", "itemsize", "has_dw", "parts"), LARGE_PARTS)
def test_wide_rows_come_by_tma_in_parts_as_timed(n, itemsize, has_dw, parts):
    """wide.py says how long others took."""
    config = backward_config(n, itemsize, 90, has_dw=has_dw)
    assert (config.width, config.pieces, config.members, config.occupancy) == parts
    assert config.kernel == "teams" and config.tma and config.latency == 4
    assert config.packed == (config.lanes == config.members * 16384 and itemsize == 2 and has_dw)
    assert config.warps == (8 if config.occupancy == 1 else 4)
    assert backward_config(n, itemsize, 90, has_dw=has_dw, most_members=1).kernel != "teams"


@pytest.mark.parametrize("size", ["few", "large"])
def test_dx_alone_of_nine_tiles_takes_one_block(size):
    for n in (16400, 18432):
        config = backward_config(n, 2, 90, size, has_dw=False)
        assert (config.kernel, config.width, config.pieces, config.members) == ("rows", 2048, 9, 1)
        assert config.tma and backward_config(n, 4, 90, size, has_dw=False).members == 5


@pytest.mark.parametrize(("itemsize", "widest_by_slabs"), [(2, 32768), (4, 18432)])
def test_few_wide_rows_with_dw_take_slabs_up_to_a_width_and_then_teams(itemsize, widest_by_slabs):
    assert backward_config(widest_by_slabs, itemsize, 90, "few").is_fused
    config = backward_config(widest_by_slabs + 16, itemsize, 90, "few")
    assert (config.kernel, config.width, config.pieces) == ("teams", 4096, 1)
    assert config.tma == (itemsize == 4), "those of 16 bits are gathered"
    assert backward_config(widest_by_slabs, itemsize, 90, "few", has_dw=False).tma


@pytest.mark.parametrize(
    ("n", "parts"), [(65536, (4096, 1, 16)), (81920, (8192, 1, 10)), (98304, (2048, 3, 16))]
)
def test_few_rows_of_16_bits_with_dw_are_gathered_in_parts_of_4096_alone(n, parts):
    config = backward_config(n, 2, 90, "few")
    assert (config.width, config.pieces, config.members) == parts
    assert config.tma == (config.width != 4096) and not config.packed
