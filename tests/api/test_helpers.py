# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the GPU tests rest on sees a single run that went wrong."""

import math

import pytest
from helpers import BATCH, BF16, FP32, assert_alike, expected_results, make_inputs

RUNS = 2 * BATCH + 3


def _runs_of(wrong_run: int, by: float):
    """The results expected, and what returns them rounded; the run `wrong_run` has one element of dw `by` off."""
    expected = expected_results(make_inputs(13, 100, BF16, FP32))
    count = 0

    def run():
        nonlocal count
        dx, dw = expected["dx"].truth.to(BF16), expected["dw"].truth.to(FP32)
        if count == wrong_run:
            dw[3] += by
        count += 1
        return dx, dw

    return expected, run, lambda: count


@pytest.mark.parametrize("by", [math.nan, math.inf, 1e-6])
@pytest.mark.parametrize("wrong_run", [1, BATCH, BATCH + 1, RUNS - 1])
def test_one_run_with_other_bits_is_found(wrong_run, by):
    expected, run, _ = _runs_of(wrong_run, by)
    with pytest.raises(
        AssertionError, match=rf"differ from the first one.*{{{wrong_run}: {{'dx': 0.0, 'dw': "
    ):
        assert_alike(expected, ("dx", "dw"), run, RUNS)


def test_a_wrong_first_run_is_found():
    expected, run, _ = _runs_of(0, 0.25)
    with pytest.raises(AssertionError, match="dw: 1 of 100 elements beyond the tolerance"):
        assert_alike(expected, ("dx", "dw"), run, RUNS)


def test_runs_alike_pass_and_all_of_them_run():
    expected, run, count = _runs_of(RUNS, 1.0)
    assert_alike(expected, ("dx", "dw"), run, RUNS)
    assert count() == RUNS
