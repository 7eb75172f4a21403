# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The search of heads that are rotated (the form "rope"): its candidates, what it runs, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import rope_calls as matrices
import torch
from table_cases import TARGET

from tilegym_rmsnorm.backends.cutile.plans import rope as plans
from tilegym_rmsnorm.backends.cutile.plans import tables
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, OPS, ROPE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rope import RopeChoice, entry_problem, has_entries, tiles_of
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.measure import accuracy

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile import rope  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning import rope_calls, search  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning.candidates import fits_registers  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning.rope_candidates import rope_by_rules, rope_candidates  # noqa: E402

CPU = torch.device("cpu")
RESULTS = {
    "forward": {"q_out", "k_out"},
    "backward": {"dq", "dk", "dq_weight", "dk_weight"},
    "dx": {"dq", "dk"},
}


def bucket_of(op: str, dtype: str = "bfloat16", n: int = 32, size: str = "large") -> Bucket:
    return Bucket(op, n, dtype, size, form=ROPE)


def choices_of(op: str) -> list[RopeChoice]:
    numbers = {"elements": 256, "heads": 2, "width": 64, "warps": 4, "occupancy": 1}
    return [RopeChoice(kernel=plans.KERNEL_OF_OP[op], latency=latency, **numbers) for latency in (1, 2, 3)]


@pytest.fixture
def few_heads(monkeypatch):
    """Of which the interpreter has some done soon."""
    monkeypatch.setattr(plans, "ENTRY_HEADS", (4, 2))


# Candidates


@pytest.mark.parametrize("n", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("op", OPS)
def test_candidates_begin_with_what_is_reasoned_and_may_all_be_entries(op, n):
    for dtype, architecture in itertools.product(ITEMSIZE, ARCHITECTURES):
        bucket, asked = bucket_of(op, dtype, n), entry_problem(n, dtype, architecture)
        found = rope_candidates(bucket, architecture, 60)
        assert found[0] == rope_by_rules(bucket, architecture) and 8 < len(found) <= 60
        assert len({tiles_of(asked, each) for each in found}) == len(found)
        assert all(fits_registers(tiles_of(asked, each), op, ITEMSIZE[dtype]) for each in found[1:])
        for each in found:
            each.check(n, dtype, architecture)


@pytest.mark.parametrize("op", OPS)
def test_every_number_is_tried(op):
    found = rope_candidates(bucket_of(op, n=256), 90, 60)
    assert {(each.warps, each.occupancy) for each in found} >= {(4, 3), (4, 4), (8, 1), (8, 2)}
    for name in ("elements", "heads", "width", "latency"):
        assert len({getattr(each, name) for each in found}) > 1, name


def test_what_serves_is_tried_first():
    bucket = bucket_of("backward", n=128)
    default, *others = rope_candidates(bucket, 90, 60)
    serving = dataclasses.replace(default, latency=9)
    assert rope_candidates(bucket, 90, 3, [default, serving, others[4]]) == [default, serving, others[4]]


# How many rows


def test_rows_at_which_heads_are_timed_are_of_whole_tokens():
    """Of 32 and 8 heads."""
    rows = {
        (size, n): [m / 40 for m in search.rows_of(bucket_of("forward", n=n, size=size))]
        for size, n in itertools.product(SIZES, (64, 128, 512))
    }
    assert rows["large", 128] == [16384, 8192, 4096] and rows["large", 64] == [32768, 16384, 8192]
    assert [rows["few", n] for n in (64, 128, 512)] == [[16, 3, 2]] * 3, "one token alone has other tiles"
    assert [rows["small", n] for n in (64, 512)] == [[1632, 192], [192, 32]]
    for (size, n), tokens in rows.items():
        assert all(40 * each in rows_of_class(size, n) for each in tokens)


def test_buckets_without_calls():
    assert all(has_entries(bucket_of(op, n=n)) for op in OPS for n in (16, 80, 512))
    for n in (8, 33, 66, 528):
        assert not has_entries(bucket_of("forward", n=n))
    assert not has_entries(bucket_of("forward")._replace(weight="float32"))


# What is run


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", "large"), ("float32", "small")])
def test_a_search_times_checks_and_describes(finder, op, dtype, size):
    bucket = bucket_of(op, dtype, size=size)
    finder.machine.facts = finder.machine.facts._replace(target=TARGET)
    entry = finder.tune(bucket, choices_of(op))
    assert list(entry.buckets()) == [bucket] and entry.rope in choices_of(op) and not finder.lines
    assert [timing["m"] for timing in entry.evidence] == list(search.rows_of(bucket))
    assert tables.parse_table(tables.render_table(TARGET, [entry]), TARGET) == [entry]


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("op", OPS)
def test_each_result_that_is_wrong_is_refused(finder, op):
    """One element, by an eighth."""
    bucket = bucket_of(op)
    run = rope_calls.runner(finder.machine, bucket, choices_of(op)[0])
    for seed in (0, 1):
        inputs = rope_calls.checked_inputs(6 * 13, bucket, CPU, seed)
        outputs = run(inputs)
        assert set(outputs) == RESULTS[op] and rope_calls.why_wrong(inputs, outputs) is None
        for name, result in outputs.items():
            spoilt = result.clone()
            spoilt.view(-1)[result.abs().argmax()] *= 1.125
            assert rope_calls.why_wrong(inputs, outputs | {name: spoilt}).startswith(name), (name, seed)


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fast_choice_that_is_wrong_is_rejected(finder, monkeypatch, op, is_lost):
    """is_lost: what a kernel fails to write, which is NaN; else every fourth run rounds one element otherwise."""
    wrong, counts, real, run_of = choices_of(op)[2], itertools.count(1), finder.times_at, rope_calls.runner

    def runner(machine, bucket, choice):
        def spoilt(inputs):
            outputs = run(inputs)
            first = next(iter(outputs.values()))
            if is_lost:
                first[-1, -1] = machine.empty(first[-1, -1].shape, first.dtype)
            elif next(counts) % 4 == 0:
                first[0, 0] = torch.nextafter(first[0, 0], torch.tensor(torch.inf, dtype=first.dtype))
            return outputs

        run = run_of(machine, bucket, choice)
        return spoilt if choice == wrong else run

    monkeypatch.setattr(rope_calls, "runner", runner)
    monkeypatch.setattr(finder, "times_at", lambda *asked: real(*asked) | {wrong: 1e-3})
    entry = finder.tune(bucket_of(op), choices_of(op))
    assert entry.rope in choices_of(op)[:2]
    [line] = finder.lines
    assert (
        line.startswith(f"rejected {wrong}")
        and ("relative error of nan" if is_lost else "other bits") in line
    )


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("op", OPS)
def test_what_runs_is_what_users_calls_of_the_bucket_run(finder, monkeypatch, op):
    """Timed or checked, a call is one for which an entry of the bucket is looked for, and by the choice's tiles."""
    bucket, choice, met = bucket_of(op), choices_of(op)[1], []
    run, launch = rope_calls.runner(finder.machine, bucket, choice), rope._launch
    monkeypatch.setattr(rope, "_launch", lambda *asked: (met.append(asked), launch(*asked))[1])
    for inputs in (
        *rope_calls.timed_inputs(96, bucket, 2, CPU),
        *(rope_calls.checked_inputs(90, bucket, CPU, seed) for seed in (0, 1)),
    ):
        run(inputs)
        _, problem, by = met[-1]
        assert by == choice and problem == entry_problem(32, "bfloat16", 90) and problem.takes_entries
        rows = inputs[:2] if op == "forward" else inputs[:4]
        assert rope._dtype_and_size(*rows) == ("bfloat16", "large")
        assert sum(each[..., 0].numel() for each in inputs[:2]) in (90, 96)
    assert len(met) == 4


@pytest.mark.usefixtures("few_heads")
def test_every_set_has_tensors_of_its_own():
    first, second = rope_calls.timed_inputs(96, bucket_of("backward"), 2, CPU)
    assert not {each.data_ptr() for each in first} & {each.data_ptr() for each in second}


# What they should come to


@pytest.mark.usefixtures("few_heads")
@pytest.mark.parametrize("chunk", [6 * 32 * 4, 2**25])
def test_the_check_is_that_of_a_matrix_for_each_position(monkeypatch, chunk):
    """In float64, by autograd. The inverse rotation in the place of the adjoint is refused."""
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", chunk)
    made = rope_calls.checked_inputs(6 * 11, bucket_of("backward", "float32"), CPU, 0)
    inputs = rope_calls.Inputs(*(each.double() for each in made))
    leaves = [each.clone().requires_grad_() for each in inputs.tensors[:4]]
    outputs = matrices.expected(*leaves, inputs.cos, inputs.sin, eps=rope_calls.EPS)
    gradients = torch.autograd.grad(outputs, leaves, (inputs.dq_out, inputs.dk_out))
    names = ("q_out", "k_out", "dq", "dk", "dq_weight", "dk_weight")
    found = {name: each.detach() for name, each in zip(names, (*outputs, *gradients), strict=True)}
    monkeypatch.setattr(accuracy, "FLOAT32_STEP", 1e-15)
    assert rope_calls.why_wrong(inputs, found) is None
    turned = inputs._replace(sin=-inputs.sin)
    assert all(name in rope_calls.why_wrong(turned, found) for name in names)
