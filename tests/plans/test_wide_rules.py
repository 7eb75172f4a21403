# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which teams the rules give to rows that the registers of one block do not hold."""

from __future__ import annotations

import itertools

import pytest
from planning import by_rules, device

from tilegym_rmsnorm.backends.cutile.plans.partition import Split, Team
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardTeam,
)

BF16, FP32 = "bfloat16", "float32"


def first(op: str, n: int, dtype: str = BF16, size: str = "large", most_members: int = 16) -> Variant:
    return by_rules(op, n, dtype, size, facts=device(most_members=most_members)).first


@pytest.mark.parametrize("size", ["few", "large"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_no_member_of_a_team_is_without_columns_and_few_lanes_are_empty(op, dtype, size):
    wide = {n: first(op, n, dtype, size) for n in range(16400, 131073, 112)}
    teams = {n: variant for n, variant in wide.items() if isinstance(variant, Team)}
    assert len(teams) > len(wide) / 2
    for n, team in teams.items():
        assert team.lanes - team.width < n <= team.lanes, (n, team)
        is_large = isinstance(team, BackwardPipelinedTeam) and team.width >= 4096
        most = {4096: 5 / 4, 8192: 4 / 3}[team.width] if is_large else 9 / 8
        assert team.lanes <= n * most, (n, team)
        assert 2 <= team.members <= 16
        fewer = first(op, n, dtype, size, most_members=team.members - 1)
        assert fewer.members < team.members, "a team that does not fit the GPU"


# columns, dtype, op: columns of a tile, tiles, members, blocks an SM
LARGE_PARTS = [
    *((n, BF16, "backward", (2048, 3, -(-n // 6144), 2)) for n in (24576, 36864, 73728, 86016)),
    *((n, BF16, "backward", (4096, 1, -(-n // 4096), 3)) for n in (18448, 20480, 21504, 25088, 28672)),
    *(
        (n, BF16, "backward", (8192, 2, -(-n // 16384), 1))
        for n in (32768, 49152, 65536, 73744, 81920, 98304, 114672, 131072)
    ),
    *((n, BF16, "backward", (8192, 1, -(-n // 8192), 1)) for n in (90112, 106496, 122880)),
    *((n, BF16, "dx", (8192, 1, -(-n // 8192), 2)) for n in (18448, 20480, 28672, 65536, 131072)),
    *(
        (n, FP32, op, (4096, 1, -(-n // 4096), 2))
        for n, op in [*itertools.product((16400, 18432, 24576), ("backward", "dx")), (65536, "backward")]
    ),
    *(
        (n, FP32, op, (8192, 1, -(-n // 8192), 1))
        for n in (65552, 98304, 131072)
        for op in ("backward", "dx")
    ),
]


@pytest.mark.parametrize(("n", "dtype", "op", "parts"), LARGE_PARTS)
def test_wide_rows_come_by_tma_in_parts_as_timed(n, dtype, op, parts):
    """The evidence in sm_90.json says how long others took."""
    team = first(op, n, dtype)
    assert (team.width, team.pieces, team.members, team.occupancy) == parts
    assert isinstance(team, BackwardPipelinedTeam) and team.latency == 4
    assert team.packed == (team.lanes == team.members * 16384 and dtype == BF16 and op == "backward")
    assert team.warps == (8 if team.occupancy == 1 else 4)
    assert team.rstd_ahead == (team.occupancy < 3), "three blocks an SM have no registers for it"
    assert not isinstance(first(op, n, dtype, most_members=1), Team)


@pytest.mark.parametrize("size", ["few", "large"])
def test_dx_alone_of_nine_tiles_takes_one_block(size):
    for n in (16400, 18432):
        variant = first("dx", n, BF16, size)
        assert isinstance(variant, BackwardPipelined) and (variant.width, variant.pieces) == (2048, 9)
        team = first("dx", n, FP32, size)
        assert isinstance(team, BackwardPipelinedTeam) and team.members == 5


@pytest.mark.parametrize(("dtype", "widest_by_slabs"), [(BF16, 32768), (FP32, 18432)])
def test_few_wide_rows_with_dw_take_slabs_up_to_a_width_and_then_teams(dtype, widest_by_slabs):
    assert isinstance(first("backward", widest_by_slabs, dtype, "few"), Split)
    team = first("backward", widest_by_slabs + 16, dtype, "few")
    assert isinstance(team, Team) and (team.width, team.pieces) == (4096, 1)
    assert type(team) is (BackwardPipelinedTeam if dtype == FP32 else BackwardTeam), (
        "those of 16 bits are gathered"
    )
    assert first("dx", widest_by_slabs, dtype, "few").uses_tma


@pytest.mark.parametrize(
    ("n", "parts"), [(65536, (4096, 1, 16)), (81920, (8192, 1, 10)), (98304, (2048, 3, 16))]
)
def test_few_rows_of_16_bits_with_dw_are_gathered_in_parts_of_4096_alone(n, parts):
    team = first("backward", n, BF16, "few")
    assert (team.width, team.pieces, team.members) == parts
    assert team.uses_tma == (team.width != 4096) and not team.packed
