# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What `python -m tilegym_rmsnorm tune` chooses, with a timer that says what it is told (search.choose)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.sizes import MOST_LOSS, SIZES

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile.tuning import search  # noqa: E402

CONFIGS = [Config("rows", 4096, 8, 1, latency) for latency in range(1, 11)]


def halved(config: Config) -> Config:
    return dataclasses.replace(config, share=50)


def choose(microseconds: dict[Config, tuple[float, ...]], wrong=(), told=None, **more):
    """What `search.choose` takes of configs with these true times; the short first round sees them distorted."""
    asked = []

    def measure(configs, seconds):
        asked.append(configs)
        noise = 1.0 if seconds else 1.02
        return {
            config: tuple(us * (noise if i % 2 else 1) for us in microseconds[config])
            for i, config in enumerate(configs)
            if config in microseconds
        }

    def why_wrong(config):
        return "dw has an error" if config in wrong else None

    result = search.choose(CONFIGS, measure, why_wrong, (told if told is not None else []).append, **more)
    assert asked[0] == CONFIGS, "every candidate is timed"
    return result


@given(st.permutations(range(10)), st.sets(st.integers(0, 9), max_size=9))
def test_the_fastest_that_is_right_wins(order, wrong):
    microseconds = {config: (10 * 1.1**place, 7.0) for config, place in zip(CONFIGS, order, strict=True)}
    told = []
    # A loss above the distortion: none of these looks like a loser, so no place is kept for slower ones.
    config, times = choose(microseconds, {CONFIGS[i] for i in wrong}, told, most_loss=1.03)
    right = [i for i in sorted(range(10), key=order.__getitem__) if i not in wrong]
    best = right[0] if order[right[0]] < search.FINALISTS or 0 in wrong else 0
    assert CONFIGS.index(config) == best, "the rules serve where none of the fastest is right"
    assert times[config] and len(told) <= len(wrong)
    assert all("rejected Config(" in line and "dw has an error" in line for line in told)


def test_variants_of_the_fastest_are_timed_and_win_if_they_are_faster():
    times = {config: (10.0 + place, 10.0) for place, config in enumerate(CONFIGS)}
    slow = {halved(config): (20.0, 20.0) for config in CONFIGS}
    chosen, _ = choose(
        times | slow | {halved(CONFIGS[2]): (8.0, 8.0)}, variants=lambda config: [halved(config)]
    )
    assert chosen == halved(CONFIGS[2])
    # of the fourth fastest no variant is tried
    chosen, _ = choose(
        times | slow | {halved(CONFIGS[3]): (8.0, 8.0)}, variants=lambda config: [halved(config)]
    )
    assert chosen == CONFIGS[0]


def test_the_rules_stay_unless_they_lose_by_more_than_the_spread():
    times = dict.fromkeys(CONFIGS, (10.0, 10.0)) | {CONFIGS[7]: (9.95, 9.95)}
    assert choose(times)[0] == CONFIGS[0]
    assert choose(times | {CONFIGS[7]: (9.5, 10.0)})[0] == CONFIGS[7]


def test_nobody_loses_to_the_rules():
    times = dict.fromkeys(CONFIGS, (10.0, 10.0)) | {CONFIGS[7]: (5.0, 10.05)}
    assert choose(times)[0] == CONFIGS[7]
    times[CONFIGS[7]] = (5.0, 10.2)
    assert choose(times)[0] == CONFIGS[0]
    times[CONFIGS[4]] = (9.0, 9.9)
    assert choose(times)[0] == CONFIGS[4]
    fast = {config: (5.0, 10.2) for config in CONFIGS[1:-1]}  # more than there are finalists
    assert choose(times | fast | {CONFIGS[-1]: (9.0, 9.9)})[0] == CONFIGS[-1]
    assert choose(times, wrong=(CONFIGS[0], CONFIGS[4]))[0] not in (CONFIGS[0], CONFIGS[4], CONFIGS[7])


def test_calls_of_few_rows_may_lose_a_little():
    times = dict.fromkeys(CONFIGS, (10.0, 10.0, 10.0))
    times |= {CONFIGS[7]: (9.0, 10.2, 10.2), CONFIGS[8]: (8.0, 10.4, 8.0)}
    for size in ("large", "small"):
        assert choose(times, most_loss=MOST_LOSS[size])[0] == CONFIGS[0]
    assert choose(times, most_loss=MOST_LOSS["few"])[0] == CONFIGS[7]


@pytest.mark.parametrize("size", SIZES)
def test_losers_of_the_first_round_leave_room_for_others(size):
    """They look as if they stayed below the limit, or may: that round is short."""
    loss = MOST_LOSS[size] * 1.01
    losers = dict.fromkeys(CONFIGS[1:8], (10.0 * loss, 8.0, 8.0))
    times = dict.fromkeys(CONFIGS, (10.0, 10.0, 10.0)) | losers | {CONFIGS[8]: (9.5, 9.5, 9.5)}
    assert choose(times, most_loss=MOST_LOSS[size])[0] == CONFIGS[8]


def test_a_wrong_winner_makes_no_loser_to_the_rules_win():
    losers = dict.fromkeys(CONFIGS[2:6], (5.0, 10.3))
    times = dict.fromkeys(CONFIGS, (20.0, 20.0)) | losers | {CONFIGS[0]: (10.0, 10.0), CONFIGS[1]: (4.0, 9.5)}
    assert choose(times)[0] == CONFIGS[1]
    assert choose(times, wrong=[CONFIGS[1]])[0] == CONFIGS[0]


def test_a_config_that_does_not_run_is_no_candidate():
    times = {config: (10.0,) for config in CONFIGS[3:]} | {CONFIGS[5]: (5.0,)}
    assert choose(times)[0] == CONFIGS[5]
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose({})
    with pytest.raises(search.NothingRightError, match="none of 10"):
        choose(times, wrong=CONFIGS)
