# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark: its byte model, timer and check. Figures themselves need a GPU."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from helpers import why_skip

from bench import cell, measure, timer
from bench.check import errors_of, make_inputs, run_all, run_op, why_wrong
from bench.measure import Bench
from bench.providers import Provider, make_provider
from bench.shapes import DEFAULT_SHAPES, GRID, OPS, compulsory_bytes, parse_shapes

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
RECORD_FIELDS = {
    *("op", "rows", "cols", "dtype", "provider", "us", "us_p10", "us_p90", "samples", "gb_per_s"),
    *("copy_fraction", "host_us", "errors", "workspace_bytes", "error"),
    *("settings", "tried_us", "first_calls_s"),
}


# The byte model and the shapes


def test_bytes_of_bfloat16():
    # 3 x 8: x, y, dy, dx have 24 elements of 2 bytes, weight and dw 8, rstd 3 of 4 bytes
    assert compulsory_bytes("forward", (3, 8), BF16) == 48 + 16 + 48 + 12
    assert compulsory_bytes("backward", (3, 8), BF16) == 48 + 48 + 16 + 12 + 48 + 16
    assert compulsory_bytes("both", (3, 8), BF16) == 124 + 188
    assert compulsory_bytes("dx", (3, 8), BF16) == 188 - 16


def test_bytes_of_float32_keep_rstd_at_four_bytes():
    assert compulsory_bytes("forward", (2, 5), FP32) == 40 + 20 + 40 + 8


def test_default_shapes_hold_the_widths_of_real_models_and_no_shape_twice():
    widths = {2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 18432}
    assert widths <= {cols for _, cols in DEFAULT_SHAPES}
    assert len(set(DEFAULT_SHAPES)) == len(DEFAULT_SHAPES)


def test_the_grid_reaches_its_corners_and_no_giant():
    assert {(1, 64), (1, 65536), (262144, 64), (16384, 4096)} <= set(GRID)
    assert max(rows * cols for rows, cols in GRID) == 1 << 26


@pytest.mark.parametrize("text", ["", "12", "12x", "0x4", "4x0", "ax4", "4x4,", "4x4x4", "-1x4"])
def test_wrong_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected ROWSxCOLS"):
        parse_shapes(text)


def test_shapes_are_parsed():
    assert parse_shapes("4096x1024,16x64") == ((4096, 1024), (16, 64))


# The timer


def test_interleave_takes_turns_and_bounds_slow_samplers(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])

    def sampler(name: str, seconds: float):
        def sample() -> float:
            order.append(name)
            clock[0] += seconds
            return seconds * 1e6

        return sample

    timings = timer.interleave({"fast": sampler("fast", 1e-6), "slow": sampler("slow", 1.0)})
    assert order[:4] == ["fast", "slow", "fast", "slow"]
    assert timings["slow"].samples == timer.MIN_SAMPLES
    assert timings["fast"].samples == timer.MAX_SAMPLES
    assert timings["slow"].us == 1e6


def test_summary_is_the_median_and_the_outer_deciles():
    timing = timer.summarize([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (timing.us, timing.us_p10, timing.us_p90) == (6.0, 2.0, 10.0)


@pytest.mark.parametrize("sets", [2, 3, 25, 1024])
def test_calls_use_every_set_equally_and_fill_a_replay(sets):
    calls = timer.calls_needed(sets, bytes_moved=16 << 20, copy_bytes_per_second=3e12)
    assert calls % sets == 0
    assert calls == sets == timer.MAX_CALLS or calls * ((16 << 20) / 3e12 + 2e-6) >= timer.REPLAY_SECONDS


# The check against float64


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("name", ["torch", "F.rms_norm"])
def test_right_providers_pass_the_check(name, dtype):
    inputs = make_inputs((67, 129), dtype, CPU, sets=1)[0]
    outputs = run_all(make_provider(name, (67, 129), dtype, CPU), inputs)
    errors, allowed = errors_of({name: outputs}, inputs)
    assert why_wrong(errors[name], allowed) is None


def spoil_nan(outputs):
    outputs["dx"][5, 7] = float("nan")


def spoil_one_element(outputs):
    outputs["y"][66, 128] *= 1.05


def spoil_lost_row(outputs):
    outputs["dw"] -= outputs["dw"].abs().max() / 20


def spoil_rstd(outputs):
    outputs["rstd"][0] *= 1.001


def spoil_autograd_only(outputs):
    outputs["autograd_dx"][0] = 0


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (spoil_nan, "dx"),
        (spoil_one_element, "y"),
        (spoil_lost_row, "dw"),
        (spoil_rstd, "rstd"),
        (spoil_autograd_only, "dx"),
    ],
)
def test_wrong_outputs_fail_the_check(spoil, kind, monkeypatch):
    monkeypatch.setattr("bench.check.CHUNK_ELEMENTS", 129 * 10)  # several chunks, the last one shorter
    inputs = make_inputs((67, 129), BF16, CPU, sets=1)[0]
    outputs = run_all(make_provider("torch", (67, 129), BF16, CPU), inputs)
    spoil(outputs)
    errors, allowed = errors_of({"torch": outputs}, inputs)
    assert why_wrong(errors["torch"], allowed).startswith(f"{kind} has a relative error of")


def test_a_result_of_another_dtype_is_refused():
    inputs = make_inputs((4, 8), BF16, CPU, sets=1)[0]
    right = make_provider("torch", (4, 8), BF16, CPU)
    wide = dataclasses.replace(
        right, forward=lambda x, weight: tuple(map(torch.Tensor.float, right.forward(x, weight)))
    )
    with pytest.raises(
        ValueError, match="y: expected 32 elements of torch.bfloat16, got 32 of torch.float32"
    ):
        run_all(wide, inputs)


# Records


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
        if record["provider"] == "right":
            assert (
                record["us"] > 0
                and record["us_p10"] <= record["us"] <= record["us_p90"]
                and record["error"] is None
            )
        else:
            assert record["us"] is None and record["gb_per_s"] is None
    errors = {record["provider"]: record["error"] for record in records}
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
    assert forward["tried_us"]["slow"] > 10_000 and forward["tried_us"]["wrong"] is None
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
        assert measure.describe(error) == "RuntimeError: capture failed (after ValueError: the reason)"
