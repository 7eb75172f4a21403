# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Teams that the rules give to rows that the registers of one block do not hold."""

from __future__ import annotations

import pytest
from planning import by_rules, device

from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardPipelinedTeam

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
