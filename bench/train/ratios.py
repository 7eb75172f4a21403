# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compare times that were taken in turn: ratios of pairs, with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
LEAST_PAIRS = 10


class Ratio(NamedTuple):
    """The median of a base's times over ours, pair by pair: above 1 ours is faster. The interval holds it with 95 %
    confidence, whatever the distribution: its ends are two of the ratios."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2 / self.median


def ratio_of(base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """base, ours: at least six times, the i-th of both taken one after the other."""
    ratios = sorted(theirs / own for theirs, own in zip(base, ours, strict=True))
    first = rank_below(len(ratios))
    return Ratio(statistics.median(ratios), ratios[first], ratios[-1 - first])


def rank_below(count: int) -> int:
    """Return the index, from either end of `count` sorted samples, of the ends of the median's interval: the innermost
    with at most 2.5 % of a binomial distribution outside on each side."""
    outside, below = 0.0, -1
    while (outside := outside + math.comb(count, below + 1) / 2**count) <= (1 - CONFIDENCE) / 2:
        below += 1
    if below < 0:
        raise ValueError(f"pairs: expected at least 6, got {count}")
    return below
