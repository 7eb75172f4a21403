# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Slowdowns that gate.py lets pass, each with its reason, such as a check that a kernel was wrong without.

An entry is a limit of its own: a figure may be as far above `us` as it may be above a kept one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slowdown:
    """A cell, its microseconds that are accepted, and why."""

    gpu: str  # as results name it
    op: str
    rows: int
    cols: int
    dtype: str
    provider: str
    us: float
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(
                f"reason: expected why {self.provider} {self.op} may take {self.us} us, got none"
            )


ACCEPTED: tuple[Slowdown, ...] = ()
