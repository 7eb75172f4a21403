# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What this process rules out of the kernels that could serve it."""

from __future__ import annotations

import functools
import os

TEAMS_VARIABLE = "TILEGYM_RMSNORM_TEAMS"
_ON, _OFF = ("1", "true", "on", "yes", ""), ("0", "false", "off", "no")
_teams: bool | None = None  # what `set_teams` said


def set_teams(enabled: bool | None) -> None:
    """Whether kernels may serve whose blocks wait for each other: teams of up to 16 blocks that share a wide row.

    Without teams, calls take kernels whose blocks do not wait, which are slower for rows of more than 16384 elements.
    That is needed where a launch may use fewer of the GPU's SMs than a team has blocks, in a green context or by a
    share of MPS: there such a launch would never end. Also where more than eight calls by teams may run at once.

    Of the cutile backend; others have no such kernels. Holds for this process, in all threads. A backward may take
    another kernel than it would have when its forward ran: both give right values, dw in other bits.

    Args:
        enabled: Whether they may, from now on. None: what the environment variable TILEGYM_RMSNORM_TEAMS says (0 or 1;
            1 where it is not set).

    Raises:
        TypeError: enabled is none of True, False and None.
    """
    global _teams
    if enabled is not None and type(enabled) is not bool:
        raise TypeError(f"enabled: expected True, False or None, got {enabled!r}")
    if enabled is None:
        _teams_by_environment.cache_clear()
    _teams = enabled


def teams() -> bool:
    """Whether kernels may serve whose blocks wait for each other. ValueError where the environment does not say."""
    said = _teams  # once: another thread may set it meanwhile
    return _teams_by_environment() if said is None else said


@functools.cache
def _teams_by_environment() -> bool:
    value = os.environ.get(TEAMS_VARIABLE, "").strip().lower()
    if value not in _ON + _OFF:
        known = f"{', '.join(filter(None, _ON))} or {', '.join(_OFF)}"
        raise ValueError(
            f"{TEAMS_VARIABLE}: expected {known}, or nothing, got {os.environ[TEAMS_VARIABLE]!r}"
        )
    return value in _ON
