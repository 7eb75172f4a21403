# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The benchmark: its byte model, timer and check, who is checked and timed, and what stands where something fails.
Figures themselves need a GPU."""

import dataclasses
import gc
import time
from types import SimpleNamespace

import pytest
import torch
from bench_records import RECORD_FIELDS, run_all
from helpers import BF16, FP32, why_skip

from bench.measure import cell, session
from bench.measure.check import errors_of, make_inputs, run_op
from bench.measure.run_shape import Bench
from bench.measure.shapes import OPS, compulsory_bytes, parse_shapes
from bench.providers.ours import Provider, make_provider
from tilegym_rmsnorm.measure import timer
from tilegym_rmsnorm.measure.accuracy import why_wrong

CPU = torch.device("cpu")


# The byte model and the shapes


def test_bytes_of_bfloat16():
    # 3 x 8: x, y, dy, dx have 24 elements of 2 bytes, weight and dw 8, rstd 3 of 4 bytes
    assert compulsory_bytes("forward", (3, 8), BF16) == 48 + 16 + 48 + 12
    assert compulsory_bytes("backward", (3, 8), BF16) == 48 + 48 + 16 + 12 + 48 + 16
    assert compulsory_bytes("both", (3, 8), BF16) == 124 + 188
    assert compulsory_bytes("dx", (3, 8), BF16) == 188 - 16


def test_bytes_of_float32_keep_rstd_at_four_bytes():
    assert compulsory_bytes("forward", (2, 5), FP32) == 40 + 20 + 40 + 8


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


def test_a_sample_is_the_time_of_one_call_in_microseconds(monkeypatch):
    """Each clock leaves out what empties the L2 before a replay."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)  # milliseconds

    class Array:
        def copy_(self, _):
            clock[0] += 1.0

    class Timer(timer.DeviceTimer):
        def __init__(self):
            self.device, self._source, self._target = torch.device("cuda", 0), Array(), Array()

        def _capture(self, calls):
            return SimpleNamespace(replay=lambda: [call() for call in calls])

    def call():
        clock[0] += 3e-6

    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Array().copy_(None))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    samplers = timer.wall_sampler([call] * 5), timer.host_sampler(call, CPU), Timer().sampler([call] * 5)
    assert [sample() for sample in samplers] == pytest.approx([3.0] * 3)


def test_summary_is_the_median_and_the_outer_deciles():
    timing = timer.summarize([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (timing.us, timing.us_p10, timing.us_p90) == (6.0, 2.0, 10.0)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before_also_after_a_failed_capture(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="lost"), timer._no_collection():
            assert not gc.isenabled()
            raise RuntimeError("lost")
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


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
    chunk = 129 * 10  # several chunks, the last one shorter
    monkeypatch.setattr("tilegym_rmsnorm.measure.accuracy.CHUNK_ELEMENTS", chunk)
    inputs = make_inputs((67, 129), BF16, CPU, sets=1)[0]
    outputs = run_all(make_provider("torch", (67, 129), BF16, CPU), inputs)
    spoil(outputs)
    errors, allowed = errors_of({"torch": outputs}, inputs)
    assert why_wrong(errors["torch"], allowed).startswith(f"{kind} has a relative error of")


def test_a_subnormal_dw_does_not_widen_what_is_allowed():
    """One row of float16: a dw of 1e-6 is rounded by 5 %, and 15 % were allowed to all."""
    inputs = make_inputs((1, 4096), torch.float16, CPU, sets=1)[0]
    inputs.dy[0, :9] = 2.0**-20
    outputs = run_all(make_provider("torch", (1, 4096), torch.float16, CPU), inputs)
    errors, allowed = errors_of({"torch": outputs}, inputs)
    assert why_wrong(errors["torch"], allowed) is None and allowed["dw"] < 0.01
    typical = outputs["dw"].abs().float().sort().indices[2048]
    outputs["dw"][typical] *= 1.05
    errors, allowed = errors_of({"torch": outputs}, inputs)
    assert why_wrong(errors["torch"], allowed).startswith("dw has")


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

    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    records = Bench(("cutile", "torch"), ("forward", "both"), device).measure(
        (5, 24), FP32, lambda step: None
    )
    served = {each["op"]: each["settings"] for each in records if each["provider"] == "cutile"}
    facts = machine.machine_of(device).facts
    plans = [norm.plan_for(problem(op, 24, FP32, "few", facts=facts)) for op in ("forward", "backward")]
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
