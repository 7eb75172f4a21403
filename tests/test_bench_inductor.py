# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The timer that Inductor is given. What it measures on a GPU: tests/test_gpu.py."""

from __future__ import annotations

import pytest
from torch._inductor.runtime.benchmarking import benchmarker

from bench import inductor


@pytest.fixture
def events(monkeypatch):
    """What happens: locks, and whose timer measures. Afterwards Inductor has its own again."""
    found = []
    monkeypatch.setattr(inductor.fcntl, "flock", lambda file, mode: found.append("locked"))
    monkeypatch.setattr(inductor, "device_milliseconds", lambda call: (found.append("ours"), call())[1])
    monkeypatch.setattr(
        type(benchmarker), "benchmark", lambda self, fn, *_, **__: (found.append("its own"), fn())[1]
    )
    yield found
    vars(benchmarker).pop("benchmark", None)


def test_calls_on_a_gpu_are_timed_by_the_device_in_turn(tmp_path, events):
    inductor.time_by_device(tmp_path / "lock")
    assert benchmarker.benchmark(lambda: 3.5, device="cuda", rep=40, is_vetted_benchmarking=True) == 3.5
    assert benchmarker.benchmark(fn=lambda: 4.5, device="cuda") == 4.5
    assert events == ["locked", "ours"] * 2


def test_all_else_is_left_to_inductor(events):
    inductor.time_by_device()
    assert benchmarker.benchmark(lambda: 1.5, device="cpu") == 1.5
    assert benchmarker.benchmark(lambda: 2.5, (), {}) == 2.5
    assert benchmarker.benchmark(lambda: [2.5], device="cuda", return_mode="all") == [2.5]
    assert events == ["its own"] * 3


def test_a_kernel_that_fails_is_inductor_s_to_judge(events):
    """It takes an invalid configuration for infinitely slow, and raises what else goes wrong."""
    outcomes = iter((RuntimeError("invalid configuration"), float("inf")))

    def call():
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    inductor.time_by_device()
    assert benchmarker.benchmark(call, device="cuda") == float("inf")
    assert events == ["ours", "its own"]


def test_given_twice_it_measures_once(tmp_path, events):
    inductor.time_by_device()
    inductor.time_by_device(tmp_path / "lock")
    benchmarker.benchmark(lambda: 1.0, device="cuda")
    assert events == ["locked", "ours"]
