# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""tests/support/covering.py covers each pair that can be, and no case that may not be."""

import itertools
import random

import pytest
from covering import pairwise


def pairs_of(cases):
    return {frozenset(pair) for case in cases for pair in itertools.combinations(case.items(), 2)}


def all_cases(options, allowed):
    cases = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    return [case for case in cases if allowed(case)]


@pytest.mark.parametrize("seed", range(40))
def test_each_allowed_pair_is_covered_by_allowed_cases(seed):
    """Options and refusals at random: some pairs are refused by a third option alone."""
    rng = random.Random(seed)
    options = {name: range(rng.randint(1, 4)) for name in "abcdef"}
    refused = [
        {name: rng.choice(options[name]) for name in rng.sample("abcdef", rng.randint(1, 3))}
        for _ in range(rng.randint(0, 8))
    ]

    def allowed(case):
        return not any(all(case[name] == value for name, value in each.items()) for each in refused)

    cases = pairwise(options, allowed)
    possible = all_cases(options, allowed)
    assert all(case in possible for case in cases)
    assert pairs_of(cases) == pairs_of(possible)
    assert cases == pairwise(options, allowed)


def test_a_chain_of_conditions_ends_soon():
    """Tried one after another, the values of the options in between would take years."""
    between = {f"option {number}": range(4) for number in range(20)}
    options = {"first": [0, 1], "last": [0, 1], **between, "middle": [0, 1]}
    cases = pairwise(options, lambda case: case["first"] == case["middle"] == case["last"])
    assert {(case["first"], case["last"]) for case in cases} == {(0, 0), (1, 1)}


def test_few_cases_are_enough():
    assert len(pairwise({str(number): range(3) for number in range(13)})) <= 24
    assert len(pairwise({str(number): range(2) for number in range(100)})) <= 20


def test_a_wrong_name_is_an_error():
    with pytest.raises(KeyError, match="bais"):
        pairwise({"bias": [0, 1], "n": [0, 1]}, lambda case: case["bais"])
