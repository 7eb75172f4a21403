# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Choices of `python -m tilegym_rmsnorm tune`, with a timer that says what it is told (search.choose)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.backends.cutile.tuning import search

VARIANTS = [BackwardRows(width=4096, warps=8, occupancy=1, latency=latency) for latency in range(1, 11)]


def halved(variant: BackwardRows) -> BackwardRows:
    return dataclasses.replace(variant, grid_percent=50)


def choose(microseconds: dict[BackwardRows, tuple[float, ...]], wrong=(), told=None, **more):
    """Call `search.choose` on variants with these true times; the short first round sees them distorted."""
    asked = []

    def measure(variants, seconds):
        asked.append(variants)
        noise = 1.0 if seconds else 1.02
        return {
            variant: tuple(us * (noise if i % 2 else 1) for us in microseconds[variant])
            for i, variant in enumerate(variants)
            if variant in microseconds
        }

    def why_wrong(variant):
        return "dw has an error" if variant in wrong else None

    result = search.choose(VARIANTS, measure, why_wrong, (told if told is not None else []).append, **more)
    assert asked[0] == VARIANTS, "every candidate is timed"
    return result


@given(st.permutations(range(10)), st.sets(st.integers(0, 9), max_size=9))
def test_the_fastest_that_is_right_wins(order, wrong):
    microseconds = {variant: (10 * 1.1**place, 7.0) for variant, place in zip(VARIANTS, order, strict=True)}
    told = []
    # A loss above the distortion: none of these looks like a loser, so no place is kept for slower ones.
    variant, times = choose(microseconds, {VARIANTS[i] for i in wrong}, told, most_loss=1.03)
    right = [i for i in sorted(range(10), key=order.__getitem__) if i not in wrong]
    best = right[0] if order[right[0]] < search.FINALISTS or 0 in wrong else 0
    assert VARIANTS.index(variant) == best, "the rules serve where none of the fastest is right"
    assert times[variant] and len(told) <= len(wrong)
    assert all("rejected backward_rows width=4096 " in line and "dw has an error" in line for line in told)


def test_others_of_the_fastest_are_timed_and_win_if_they_are_faster():
    times = {variant: (10.0 + place, 10.0) for place, variant in enumerate(VARIANTS)}
    slow = {halved(variant): (20.0, 20.0) for variant in VARIANTS}
    chosen, _ = choose(
        times | slow | {halved(VARIANTS[2]): (8.0, 8.0)}, others_of=lambda variant: [halved(variant)]
    )
    assert chosen == halved(VARIANTS[2])
    # of the fourth fastest no other is tried
    chosen, _ = choose(
        times | slow | {halved(VARIANTS[3]): (8.0, 8.0)}, others_of=lambda variant: [halved(variant)]
    )
    assert chosen == VARIANTS[0]


def test_the_rules_stay_unless_they_lose_by_more_than_the_spread():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0)) | {VARIANTS[7]: (9.95, 9.95)}
    assert choose(times)[0] == VARIANTS[0]
    assert choose(times | {VARIANTS[7]: (9.5, 10.0)})[0] == VARIANTS[7]


def test_nobody_loses_to_the_rules():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0)) | {VARIANTS[7]: (5.0, 10.05)}
    assert choose(times)[0] == VARIANTS[7]
    times[VARIANTS[7]] = (5.0, 10.2)
    assert choose(times)[0] == VARIANTS[0]
    times[VARIANTS[4]] = (9.0, 9.9)
    assert choose(times)[0] == VARIANTS[4]
    fast = {variant: (5.0, 10.2) for variant in VARIANTS[1:-1]}  # more than there are finalists
    assert choose(times | fast | {VARIANTS[-1]: (9.0, 9.9)})[0] == VARIANTS[-1]
    assert choose(times, wrong=(VARIANTS[0], VARIANTS[4]))[0] not in (VARIANTS[0], VARIANTS[4], VARIANTS[7])


def test_calls_of_few_rows_may_lose_a_little():
    times = dict.fromkeys(VARIANTS, (10.0, 10.0, 10.0))
    times |= {VARIANTS[7]: (9.0, 10.2, 10.2), VARIANTS[8]: (8.0, 10.4, 8.0)}
    for size in ("large", "small"):
        assert choose(times, most_loss=search.MOST_LOSS[size])[0] == VARIANTS[0]
    assert choose(times, most_loss=search.MOST_LOSS["few"])[0] == VARIANTS[7]


@pytest.mark.parametrize("size", SIZES)
def test_losers_of_the_first_round_leave_room_for_others(size):
    """They look as if they stayed below the limit, or may: that round is short."""
    loss = search.MOST_LOSS[size] * 1.01
    losers = dict.fromkeys(VARIANTS[1:8], (10.0 * loss, 8.0, 8.0))
    times = dict.fromkeys(VARIANTS, (10.0, 10.0, 10.0)) | losers | {VARIANTS[8]: (9.5, 9.5, 9.5)}
    assert choose(times, most_loss=search.MOST_LOSS[size])[0] == VARIANTS[8]


def test_a_wrong_winner_makes_no_loser_to_the_rules_win():
    losers = dict.fromkeys(VARIANTS[2:6], (5.0, 10.3))
    times = (
        dict.fromkeys(VARIANTS, (20.0, 20.0)) | losers | {VARIANTS[0]: (10.0, 10.0), VARIANTS[1]: (4.0, 9.5)}
    )
    assert choose(times)[0] == VARIANTS[1]
    assert choose(times, wrong=[VARIANTS[1]])[0] == VARIANTS[0]


def test_a_variant_that_does_not_run_is_no_candidate():
    times = {variant: (10.0,) for variant in VARIANTS[3:]} | {VARIANTS[5]: (5.0,)}
    assert choose(times)[0] == VARIANTS[5]
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose({})
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose(times, wrong=VARIANTS)
