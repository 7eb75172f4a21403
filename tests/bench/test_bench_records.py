# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The records of the benchmark: who is checked and timed, what stands where something fails."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from bench_records import RECORD_FIELDS
from helpers import why_skip

from bench.measure import cell, session
from bench.measure.check import errors_of, make_inputs, run_op
from bench.measure.run_shape import Bench
from bench.measure.shapes import OPS
from bench.providers.ours import Provider, make_provider
from tilegym_rmsnorm.measure import timer
from tilegym_rmsnorm.measure.accuracy import why_wrong

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def offer(monkeypatch, *providers: Provider) -> tuple[str, ...]:
    """Makes the benchmark know these providers alone; their names."""
    by_name: dict[str, list[Provider]] = {}
    for each in providers:
        by_name.setdefault(each.name, []).append(each)
    monkeypatch.setattr(cell, "make_providers", lambda name, *_: by_name[name])
    return tuple(by_name)


def test_failures_are_reported_and_the_others_timed(monkeypatch):
    right = make_provider("torch", (8, 16), BF16, CPU)

    def raise_error(x, weight):
        raise RuntimeError("no such kernel")

    def forget_weight(x, weight):
        return right.forward(x, torch.ones_like(weight))

    names = offer(
        monkeypatch,
        dataclasses.replace(right, name="raises", forward=raise_error),
        dataclasses.replace(right, name="wrong", forward=forget_weight),
        dataclasses.replace(right, name="right"),
    )
    ops = ("forward", "backward", "both")
    records = Bench(names, OPS, CPU).measure((8, 16), BF16, lambda step: None)
    assert [(record["op"], record["provider"]) for record in records] == [
        (op, name) for op in ops for name in names
    ]
    for record in records:
        assert set(record) == RECORD_FIELDS
        if record["provider"] == "right" or (record["provider"], record["op"]) == ("raises", "backward"):
            assert (
                record["us"] > 0
                and record["us_p10"] <= record["us"] <= record["us_p90"]
                and record["error"] is None
            )
        else:
            assert record["us"] is None and record["gb_per_s"] is None
    errors = {record["provider"]: record["error"] for record in records if record["op"] == "both"}
    assert errors["raises"] == "RuntimeError: no such kernel"
    assert errors["wrong"].startswith("y has a relative error of")


def test_a_provider_that_cannot_be_made_says_why_in_every_op(monkeypatch):
    def make(name, *_):
        raise ValueError("rows of 16 are too wide")

    monkeypatch.setattr(cell, "make_providers", make)
    records = Bench(("narrow",), OPS, CPU).measure((8, 16), BF16, lambda step: None)
    assert [(record["op"], record["error"]) for record in records] == [
        (op, "ValueError: rows of 16 are too wide") for op in ("forward", "backward", "both")
    ]


def test_of_several_settings_the_fastest_right_one_counts(monkeypatch):
    right = make_provider("torch", (64, 64), BF16, CPU)

    def slow(x, weight):
        time.sleep(0.01)
        return right.forward(x, weight)

    def wrong(x, weight):
        return x, right.forward(x, weight)[1]

    several = dataclasses.replace(right, name="several", norm=None)
    names = offer(
        monkeypatch,
        dataclasses.replace(several, forward=slow, settings="slow"),
        dataclasses.replace(several, backward=None, settings="fast"),
        dataclasses.replace(several, forward=wrong, backward=None, settings="wrong"),
    )
    forward, backward = Bench(names, ("forward", "backward"), CPU).measure((64, 64), BF16, lambda step: None)
    assert forward["settings"] == "fast" and forward["us"] == forward["tried_us"]["fast"] < 10_000
    assert forward["tried_us"]["slow"] > 10_000
    assert "against float64" in forward["tried_us"]["wrong"], "why it has no time"
    assert backward["settings"] == "slow" and set(backward["tried_us"]) == {"slow"}
    assert forward["error"] is None and backward["error"] is None


def test_a_backward_that_overwrites_dy_spoils_nobody_elses(monkeypatch):
    right = make_provider("torch", (8, 16), BF16, CPU)

    def backward(x, dy, weight, rstd):
        dx, dw = right.backward(x, dy, weight, rstd)
        return dy.copy_(dx), dw

    names = offer(
        monkeypatch,
        dataclasses.replace(right, name="in place", backward=backward, norm=None, overwrites_dy=True),
        dataclasses.replace(right, name="after it"),
    )
    records = Bench(names, ("backward", "both"), CPU).measure((8, 16), BF16, lambda step: None)
    assert [record["error"] for record in records] == [None] * 4


def test_dx_alone_is_checked(monkeypatch):
    right = make_provider("torch", (8, 16), BF16, CPU)
    wrong = dataclasses.replace(right, name="wrong", backward_dx=lambda x, dy, weight, rstd: dy)
    (record,) = Bench(offer(monkeypatch, wrong), ("dx",), CPU).measure((8, 16), BF16, lambda step: None)
    assert record["error"].startswith("dx has a relative error of")


@pytest.mark.parametrize("backend", ["cutile", "triton"])
def test_dx_alone_is_dx(backend):
    if reason := why_skip(backend):
        pytest.skip(reason)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = make_inputs((5, 24), FP32, device, sets=1)[0]
    provider = make_provider(backend, (5, 24), FP32, device)
    errors, allowed = errors_of({backend: run_op(provider, "dx", inputs)}, inputs)
    assert set(errors[backend]) == {"dx"} and why_wrong(errors[backend], allowed) is None


def test_records_of_cutile_name_the_kernel_that_served():
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    from planning import problem

    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    records = Bench(("cutile", "torch"), ("forward", "both"), device).measure(
        (5, 24), FP32, lambda step: None
    )
    served = {each["op"]: each["settings"] for each in records if each["provider"] == "cutile"}
    facts = machine.machine_of(device).facts
    plans = [launch.plan_for(problem(op, 24, FP32, "few", facts=facts)) for op in ("forward", "backward")]
    kernel, *fields = served["forward"].split()
    said, first = dict(field.split("=") for field in fields), plans[0].first
    assert kernel == first.kernel and {"width", "warps", "occupancy", "latency"} <= said.keys()
    assert all(value == str(getattr(first, name)) for name, value in said.items())
    assert served["both"].split("; ") == [str(plan.first) for plan in plans]
    assert served["both"].split("; ")[0] == served["forward"]
    assert {each["settings"] for each in records if each["provider"] == "torch"} == {None}


@pytest.mark.gpu
def test_a_gpu_is_timed_and_a_failed_capture_stays_alone(monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    right = make_provider("torch", (256, 512), BF16, device)

    def synchronize(x, weight):
        assert not x.isnan().any()  # a CUDA graph cannot wait for an answer
        return right.forward(x, weight)

    names = offer(
        monkeypatch,
        dataclasses.replace(right, name="synchronizes", forward=synchronize),
        right,
        make_provider("F.rms_norm", (256, 512), BF16, device),
    )
    bench = Bench(names, OPS, device)
    assert bench.copy_bytes_per_second > 1e10
    records = bench.measure((256, 512), BF16, lambda step: None)
    for record in records:
        if record["provider"] == "synchronizes" and record["op"] in ("forward", "both"):
            assert record["us"] is None and record["error"]
        else:
            assert record["error"] is None and record["us"] > 0 and record["host_us"] > 0
            assert 0 < record["copy_fraction"] < 1.2 and record["workspace_bytes"] >= 0
            assert record["dtype"] == "bfloat16" and record["samples"] >= timer.MIN_SAMPLES


def test_a_hidden_exception_is_described_too():
    try:
        try:
            raise ValueError("the reason")
        finally:
            raise RuntimeError("capture failed")
    except RuntimeError as error:
        assert session.describe(error) == "RuntimeError: capture failed (after ValueError: the reason)"
    coloured = RuntimeError("\x1b[91m\x1b[1mno such \x1b[0mkernel\n")
    assert session.describe(coloured) == "RuntimeError: no such kernel"
