# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ratios of times that were taken in turn: their medians, and intervals that hold the median."""

import math
import random

import pytest

from bench.train import ratios


def covered(count, first):
    """The exact probability that the median lies between two ranks, of any distribution without steps."""
    return 1 - 2 * sum(math.comb(count, k) for k in range(first + 1)) / 2**count


@pytest.mark.parametrize("count", [*range(6, 80), 200])
def test_an_interval_holds_the_median_with_95_percent_and_is_the_narrowest(count):
    first = ratios.rank_below(count)
    assert covered(count, first) >= ratios.CONFIDENCE > covered(count, first + 1)
    assert 0 <= first < count / 2


def test_an_interval_holds_the_median_of_simulated_times():
    draw, count, trials = random.Random(0), 20, 4000
    inside = 0
    for _ in range(trials):
        base = [draw.lognormvariate(0, 0.5) for _ in range(count)]
        found = ratios.ratio_of(base, [1.0] * count)
        inside += found.low <= 1 <= found.high
    assert inside / trials == pytest.approx(covered(count, ratios.rank_below(count)), abs=0.015)


@pytest.mark.parametrize("count", range(6))
def test_fewer_than_six_pairs_have_no_interval(count):
    with pytest.raises(ValueError, match=f"expected at least 6, got {count}"):
        ratios.ratio_of([1.0] * count, [1.0] * count)


def test_a_ratio_is_above_1_where_ours_is_faster():
    base, ours = [2.0, 2.2, 2.4, 9.0, 2.0, 2.0, 2.0], [1.0, 1.1, 1.2, 1.5, 1.0, 1.25, 0.5]
    found = ratios.ratio_of(base, ours)
    assert found == ratios.Ratio(2.0, 1.6, 6.0), "pair by pair: not of medians, and of unsorted times"
    assert found.half_width == pytest.approx(1.1)
    with pytest.raises(ValueError, match="shorter"):
        ratios.ratio_of(base, ours[1:])
