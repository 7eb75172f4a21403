# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which teams the rules give to rows that the registers of one block do not hold."""

import pytest

from tilegym_rmsnorm.backends.cutile.config import backward_config, forward_config


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("configure", [forward_config, backward_config])
def test_no_member_of_a_team_is_without_columns_and_few_lanes_are_empty(configure, itemsize):
    wide = {n: configure(n, itemsize, 90) for n in range(16400, 131073, 112)}
    teams = {n: config for n, config in wide.items() if config.kernel == "teams"}
    assert len(teams) > len(wide) / 2
    for n, config in teams.items():
        assert config.lanes - config.width < n <= config.lanes, (n, config)
        most = 6 / 5 if config.tma and config.width == 4096 else 9 / 8
        assert config.lanes <= n * most, (n, config)
        assert 2 <= config.members <= 16
        fewer = configure(n, itemsize, 90, most_members=config.members - 1)
        assert fewer.members < config.members, "a team that does not fit the GPU"


@pytest.mark.parametrize(
    ("n", "parts"),
    [
        *((n, (2048, 3, -(-n // 6144), 2)) for n in (16400, 18432, 24576, 36864, 49152)),
        *((n, (4096, 1, -(-n // 4096), 3)) for n in (18448, 20480, 21504, 25088, 28672, 32768, 65536)),
    ],
)
def test_wide_rows_of_16_bits_come_by_tma(n, parts):
    """In parts as timed: hopper.py and wide.py say how long others took. Not dx alone, whose stack would grow, nor few
    rows."""
    config = backward_config(n, 2, 90)
    assert (config.width, config.pieces, config.members, config.occupancy) == parts
    assert config.kernel == "teams" and config.tma and config.warps == 4 and config.latency == 4
    assert not backward_config(n, 2, 90, has_dw=False).tma
    assert not backward_config(n, 2, 90, "few").tma
    assert backward_config(n, 2, 90, most_members=1).kernel != "teams"
