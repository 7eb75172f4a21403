# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The timer that Inductor is given. What it measures on a GPU: tests/gpu/test_gpu.py."""

import math
import pickle
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import async_compile, config
from torch._inductor.runtime import autotune_cache
from torch._inductor.runtime.benchmarking import benchmarker
from torch.compiler import config as caches

from bench.measure import inductor


@pytest.fixture
def events(monkeypatch):
    """Record locks, and whose timer measures. Afterwards Inductor has its own again."""
    found = []
    monkeypatch.setattr(inductor.fcntl, "flock", lambda file, mode: found.append("locked"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(inductor, "device_milliseconds", lambda call: (found.append("ours"), call())[1])
    monkeypatch.setattr(
        type(benchmarker), "benchmark", lambda self, fn, *_, **__: (found.append("its own"), fn())[1]
    )
    monkeypatch.setenv(inductor.TAG_VARIABLE, "of before")
    tag = caches.cache_key_tag
    with config.patch(compile_threads=4):  # monkeypatch would leave the config without it
        yield found
    caches.cache_key_tag = tag
    vars(benchmarker).pop("benchmark", None)


def test_calls_on_a_gpu_are_timed_by_the_device_in_turn(tmp_path, events):
    inductor.time_by_device(tmp_path / "lock")
    assert benchmarker.benchmark(lambda: 3.5, device="cuda", rep=40, is_vetted_benchmarking=True) == 3.5
    assert benchmarker.benchmark(fn=lambda: 4.5, device="cuda") == 4.5
    assert events == ["locked", "ours"] * 2


def test_all_else_is_left_to_inductor(events):
    inductor.time_by_device()
    assert benchmarker.benchmark(lambda: 1.5, device="cpu") == 1.5
    assert benchmarker.benchmark(lambda: 2.5, (), {}, device="cuda") == 2.5
    for option in ({"fn_args": ()}, {"fn_kwargs": {}}, {"return_mode": "all"}):
        assert benchmarker.benchmark(lambda: 2.5, device="cuda", **option) == 2.5
    assert events == ["its own"] * 5


def test_a_kernel_that_fails_is_inductor_s_to_judge(events):
    """torch 2.13 takes an invalid configuration for infinitely slow; all else is raised."""
    outcomes = iter((RuntimeError("invalid configuration"), math.inf))

    def call():
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    inductor.time_by_device()
    assert benchmarker.benchmark(call, device="cuda") == math.inf
    assert events == ["its own"]


def test_a_failure_of_the_timer_is_not_hidden(events, monkeypatch):
    def fail(call):
        raise MemoryError("no room for what empties the L2")

    monkeypatch.setattr(inductor, "device_milliseconds", fail)
    inductor.time_by_device()
    with pytest.raises(MemoryError, match="no room"):
        benchmarker.benchmark(lambda: 1.0, device="cuda")
    assert not events


def test_given_twice_it_measures_once(tmp_path, events):
    inductor.time_by_device()
    inductor.time_by_device(tmp_path / "lock")
    benchmarker.benchmark(lambda: 1.0, device="cuda")
    assert events == ["locked", "ours"]


def test_measuring_within_a_measurement_does_not_wait_for_itself(tmp_path):
    """A second lock of the same file, by another descriptor, would wait for the first for ever."""
    with inductor.held(tmp_path / "lock"), inductor.held(tmp_path / "lock"):
        pass
    assert not inductor._is_held


def test_choices_of_inductor_s_own_timer_are_not_taken_from_its_cache(events):
    def key():
        return autotune_cache.AutotuneCache._prepare_key("/kernels/norm.py")

    before = key()
    inductor.time_by_device()
    assert key() != before


def test_inductor_compiles_in_the_process_that_was_given_the_timer(events):
    """Each of many would start processes of its own, and those that run already have the tag of before."""
    inductor.time_by_device()
    assert config.compile_threads == 1


def test_processes_find_what_inductor_keeps_for_others(events):
    """Keys of its cache on disk are pickled: in a process that a script spawned they would name the script, which has a
    `torch` too and was imported before torch."""
    before, script = dict(sys.modules), types.ModuleType("__mp_main__")
    script.torch = torch
    expected = pickle.dumps(torch.contiguous_format)
    try:
        sys.modules.clear()
        sys.modules["__mp_main__"] = script
        sys.modules.update((name, module) for name, module in before.items() if name != "__mp_main__")
        inductor.time_by_device()
        assert pickle.dumps(torch.contiguous_format) == expected
    finally:
        sys.modules.clear()
        sys.modules.update(before)


def test_worker_processes_of_inductor_name_its_choices_alike(events):
    """They make the cache of a kernel's choice, by whose name it is read and kept."""
    async_compile.shutdown_compile_workers()  # those of before have another tag
    inductor.time_by_device()
    try:
        with config.patch(compile_threads=2):
            key = autotune_cache.AutotuneCache._prepare_key
            theirs = async_compile.AsyncCompile.process_pool().submit(key, "/kernels/norm.py").result(300)
        assert theirs == key("/kernels/norm.py")
    finally:
        async_compile.shutdown_compile_workers()


class Gpu:
    """A GPU that has `seconds` of sleep to do before anything else, and a host that needs 1 ms for each call."""

    def __init__(self, monkeypatch):
        self.now, self.free_at, self.sleeps, self.calls = 0.0, 0.0, [], 0
        monkeypatch.setattr(inductor.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(zero_=lambda: self.work(1e-4)))
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda: setattr(self, "now", max(self.now, self.free_at))
        )
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def work(self, seconds):
        self.free_at = max(self.free_at, self.now) + seconds

    def sleep(self, cycles):
        self.sleeps.append(cycles / 3e9)
        self.work(cycles / 3e9)

    def call(self, host=lambda number: 1e-3):
        self.calls += 1
        self.now += host(self.calls)
        self.work(2e-5)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.free_at, self.gpu.now)

    def query(self):
        return self.at <= self.gpu.now

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_the_host_s_time_between_the_events_does_not_count(monkeypatch):
    gpu = Gpu(monkeypatch)
    assert inductor.device_milliseconds(gpu.call) == pytest.approx(0.02)
    assert len(gpu.sleeps) == 1


def test_a_gpu_that_did_not_wait_long_enough_waits_again(monkeypatch):
    """The host was quick when it was asked how long it takes, and is slow afterwards."""
    gpu = Gpu(monkeypatch)
    took = inductor.device_milliseconds(lambda: gpu.call(lambda number: 1e-3 if number == 1 else 5e-3))
    assert took == pytest.approx(0.02)
    assert len(gpu.sleeps) == 3 and gpu.sleeps[2] == 4 * gpu.sleeps[0]


def test_a_gpu_that_never_waits_long_enough_is_told_once(monkeypatch):
    """Each call takes the host longer than the one before."""
    gpu = Gpu(monkeypatch)
    inductor._warn_of_the_host.cache_clear()
    with pytest.warns(RuntimeWarning, match="the host's time is in what Inductor compares"):
        assert inductor.device_milliseconds(lambda: gpu.call(lambda number: 1e-3 * 1.3**number)) > 0.02
    assert len(gpu.sleeps) == inductor.MOST_WAITS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inductor.device_milliseconds(lambda: gpu.call(lambda number: 1e-3 * 1.3**number))
