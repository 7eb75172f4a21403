# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Training steps that take turns: when turns end, peak memory, loss curves, two runs of the same bits, and a way that
fails beside others."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest
import torch
from helpers import HAS_GPU
from training_steps import CPU, sizes_of

from bench.train import measure, ratios
from bench.train.measure import Plan, Trainee
from bench.train.norms import Way, ways_of
from bench.train.optimizer import MasterAdamW

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU"),
    pytest.mark.usefixtures("quick_gc"),  # turns collect garbage first
]
MODEL = "decoder-2048-qk"
STEPS = 12
TEXTS = tuple(torch.arange(4000).remainder(97).to(torch.uint8).roll(number) for number in range(2))


def plan_of(model=MODEL, **changes):
    return Plan(sizes_of(model), False, STEPS, CPU, **changes)


def trainee_of(way="F.rms_norm", state=None, **changes):
    return Trainee(ways_of(MODEL)[way], plan_of(**changes), TEXTS[0], state)


# Turns


class Clock:
    """Time that passes in steps alone."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.order = 0.0, seconds, []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def trainee(self, name):
        seconds = self.seconds[name]

        def step(tokens):
            self.order.append(name)
            self.now += next(seconds)

        way = Way(lambda *_: None)
        batches = lambda seed: itertools.count()  # noqa: E731
        return type(
            "OfClock", (), {"way": way, "step": staticmethod(step), "batches": staticmethod(batches)}
        )()


class AsCuda(Plan):
    """A plan whose turns are those of a GPU."""

    is_cuda = True

    def synchronize(self):
        pass


def turns_of(monkeypatch, seconds, limit=1e9):
    clock = Clock(monkeypatch, seconds)
    plan = AsCuda(sizes_of(MODEL), False, STEPS, CPU, seconds=limit)
    found = measure.take_turns({name: clock.trainee(name) for name in seconds}, plan, lambda line: None)
    return clock, found


def test_turns_go_forwards_and_backwards_until_intervals_are_small(monkeypatch):
    clock, found = turns_of(monkeypatch, {"a": itertools.repeat(0.25), "b": itertools.repeat(0.125)})
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys("ab", ratios.LEAST_PAIRS)
    assert set(found["a"]) == {0.25} and set(found["b"]) == {0.125}
    assert "".join(clock.order).startswith("aaa" + "abba" * 3), "three steps say how many a turn has"


def test_a_turn_has_steps_for_a_quarter_of_a_second(monkeypatch):
    clock, found = turns_of(monkeypatch, {"a": itertools.repeat(0.0625)})
    assert len(clock.order) == 3 + 4 * ratios.LEAST_PAIRS and set(found["a"]) == {0.0625}, "of one step"


def test_noisy_turns_go_on(monkeypatch):
    draw = random.Random(0)

    def noisy():
        while True:
            yield draw.uniform(0.2, 0.3)

    _, found = turns_of(monkeypatch, {"a": noisy(), "b": noisy()})
    assert len(found["a"]) == len(found["b"]) == measure.MOST_PAIRS
    _, found = turns_of(monkeypatch, {"a": noisy(), "b": noisy()}, limit=8)
    assert ratios.LEAST_PAIRS < len(found["a"]) < measure.MOST_PAIRS, "time was up"


# Memory


def test_memory_that_is_kept_counts_each_tensor_once():
    one = trainee_of()
    other = trainee_of("fused", state=one)
    assert measure.kept_bytes(one) == sum(6 * each.numel() for each in one.parameters), "and float32 masters"
    one.step(next(one.batches(0)))
    elements = sum(each.numel() for each in one.parameters)
    steps = len(one.parameters) * 4  # AdamW counts in a tensor for each
    assert measure.kept_bytes(one) == elements * (2 + 4 + 4 + 4) + steps
    assert measure.kept_bytes(other) == measure.kept_bytes(one), "of the same optimizer"


def test_memory_of_float32_parameters_that_are_their_own_masters():
    one = trainee_of()
    for each in one.parameters:
        each.data = each.data.float()
    one.optimizer = MasterAdamW(one.parameters, STEPS)
    assert measure.kept_bytes(one) == 4 * sum(each.numel() for each in one.parameters)


def test_the_peak_is_that_of_a_step_and_of_what_its_trainee_keeps(monkeypatch):
    """Others' parameters lie in memory too."""
    one, others = trainee_of(), 10**9
    one.plan = AsCuda(one.plan.sizes, False, STEPS, CPU)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: others)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: others + 5000)
    assert measure.peak_memory(one) == {"peak_bytes": 5000 + measure.kept_bytes(one)}
    assert measure.peak_memory(trainee_of()) == {"peak_bytes": None}


# Trainees


def test_all_trainees_train_the_same_parameters():
    one = trainee_of()
    other = trainee_of("residual", state=one)
    assert other.optimizer is one.optimizer and other.parameters is one.parameters
    before = [each.detach().clone() for each in one.parameters]
    other.step(next(other.batches(0)))
    assert all(each.dtype == torch.bfloat16 for each in one.model.parameters())
    assert not torch.equal(one.model.embedding.weight, before[0])
    one.restart()
    assert all(torch.equal(*pair) for pair in zip(one.parameters, before, strict=True))


@pytest.mark.parametrize("way", ["residual", "replaced"])
def test_a_loss_curve_begins_with_the_first_parameters(way):
    """Training with them before changes nothing."""
    one = trainee_of()
    with ways_of(MODEL)[way].around():
        other = trainee_of(way, state=one)
        first = measure.loss_curves(one, TEXTS[1], True)
        found = measure.loss_curves(other, TEXTS[1], False)
        again = measure.loss_curves(one, TEXTS[1], True)
    assert (
        again == first
        and set(first) == {"losses", "other_losses", "validation_loss"}
        and "other_losses" not in found
    )
    assert len(found["losses"]) == len(first["other_losses"]) == STEPS
    apart = max(abs(a - b) for a, b in zip(first["losses"], found["losses"], strict=True))
    of_seeds = max(abs(a - b) for a, b in zip(first["losses"], first["other_losses"], strict=True))
    assert apart < 2e-3 < of_seeds and first["losses"][-1] < first["losses"][0] - 0.02


@pytest.mark.parametrize("way", ["F.rms_norm", "fused", "traced"])
def test_two_runs_have_the_same_bits(way):
    with ways_of(MODEL)[way].around():
        one = trainee_of(way)
        one.step(next(one.batches(0)))
        assert measure.same_bits(one) == {"same_bits": True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_run_of_other_bits_is_found(monkeypatch):
    """One last bit of one parameter, behind the steps."""
    one, runs = trainee_of(), []

    def bits(trainee):
        runs.append(real(trainee))
        if len(runs) == 2:
            last = runs[1][-1]
            last.view(torch.int16)[-1] += 1
        return runs[-1]

    real = measure.bits
    monkeypatch.setattr(measure, "bits", bits)
    assert measure.same_bits(one) == {"same_bits": False}
    assert len(runs[0]) == measure.SAME_STEPS + len(one.parameters)


def test_an_operation_without_a_deterministic_kernel_says_so(monkeypatch):
    def refuse(trainee):
        raise RuntimeError("x does not have a deterministic implementation")

    monkeypatch.setattr(measure, "bits", refuse)
    found = measure.same_bits(trainee_of())
    assert found["same_bits"] is None and "deterministic implementation" in found["why_no_bits"]

    def fail(trainee):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "bits", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure.same_bits(trainee_of())


# A way that fails


def failing(where):
    """A way that raises: as it is built, in its first step, or in a turn."""
    real, steps = ways_of(MODEL)["rms_norm"], itertools.count()

    def build(sizes, device):
        if where == "build":
            raise RuntimeError("it broke")
        model = real.build(sizes, device)

        def hook(*_):
            if next(steps) >= {"first step": 0, "turns": 10}[where]:
                raise RuntimeError("it broke")

        model.register_forward_pre_hook(hook)
        return model

    return dataclasses.replace(real, build=build)


@pytest.mark.parametrize("where", ["build", "first step", "turns"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_way_that_fails_leaves_the_others_measured(where, place):
    """Also the first one, whose parameters the others would share."""
    chosen = {name: ways_of(MODEL)[name] for name in ("F.rms_norm", "residual")}
    names = list(chosen)
    names.insert(place, "broken")
    chosen["broken"] = failing(where)
    lines = []
    records = measure.measure({name: chosen[name] for name in names}, plan_of(), TEXTS, lines.append)
    assert [each["norm"] for each in records] == names
    for each in records:
        if each["norm"] == "broken":
            first = {"first_step_s": each["first_step_s"]} if where == "turns" else {}
            assert each == {"norm": "broken", "error": "RuntimeError: it broke"} | first
        else:
            assert each["error"] is None and len(each["step_s"]) == ratios.LEAST_PAIRS and each["same_bits"]
            assert len(each["losses"]) == STEPS and math.isfinite(each["validation_loss"])
    others = [each for each in records if each["error"] is None]
    assert "other_losses" in others[0] and "other_losses" not in others[1]
    assert "failed: broken: RuntimeError: it broke" in lines
    assert statistics.median(others[0]["step_s"]) > 0


def test_ways_that_all_fail_are_all_told():
    records = measure.measure(
        {"a": failing("build"), "b": failing("build")}, plan_of(), TEXTS, lambda line: None
    )
    assert records == [{"norm": name, "error": "RuntimeError: it broke"} for name in "ab"]


def test_a_way_that_fails_late_keeps_what_was_measured(monkeypatch):
    def fail(trainee):
        if trainee.way is broken:
            raise RuntimeError("it broke")
        return {"peak_bytes": 1}

    broken, other = ways_of(MODEL)["rms_norm"], ways_of(MODEL)["F.rms_norm"]
    monkeypatch.setattr(measure, "peak_memory", fail)
    records = measure.measure({"broken": broken, "other": other}, plan_of(), TEXTS, lambda line: None)
    assert records[0]["error"] == "RuntimeError: it broke" and "losses" not in records[0]
    assert records[1]["error"] is None and "other_losses" in records[1], "it is the first one now"
