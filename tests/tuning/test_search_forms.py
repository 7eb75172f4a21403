# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The search of forms (plans/problem.py: FORMS): its candidates, what it runs, and what it refuses."""

import itertools

import planning
import pytest
import torch
from cutile_runs import set_launcher
from helpers import Inputs, make_inputs
from table_cases import TARGET, entry_of

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host.launcher import find
from tilegym_rmsnorm.backends.cutile.plans import rules, variants
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FORMS,
    ITEMSIZE,
    OPS,
    PLAIN_ROWS,
    RESIDUAL,
    Bucket,
    Device,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.records import Records
from tilegym_rmsnorm.backends.cutile.plans.select import choose
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.tuning import calls
from tilegym_rmsnorm.backends.cutile.tuning.candidates import by_rules, candidates, fits_registers
from tilegym_rmsnorm.measure import accuracy

OTHERS = tuple(form for form in FORMS if form != PLAIN_ROWS)
EACH = [Bucket(op, 64, "bfloat16", "small", form=form) for form in FORMS for op in OPS]
CALLS = [(each.op, each.form) for each in EACH if each.has_calls]
OF_OTHERS = [(op, form) for op, form in CALLS if form != PLAIN_ROWS]
FACTS = Device(90, 132, 16)
TILES, BACKWARD_TILES = (
    [kind(width=64, warps=4, occupancy=1, latency=latency, rows=8) for latency in (1, 2, 3)]
    for kind in (variants.ForwardTiles, variants.BackwardTiles)
)


def bucket_of(op: str, form: str, dtype: str = "bfloat16") -> Bucket:
    return Bucket(op, 64, dtype, "small", form=form)


def tiles_of(op: str) -> list:
    return TILES if op == "forward" else BACKWARD_TILES


# Candidates


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
@pytest.mark.parametrize("n", [64, 1000, 1024, 4096, 5120, 8192, 8201, 12288, 20480, 28672])
def test_every_candidate_takes_the_form(n, form, op):
    for dtype, size in itertools.product(("bfloat16", "float32"), SIZES):
        bucket = Bucket(op, n, dtype, size, form=form)
        asked = bucket.problem(FACTS)
        if not rows_of_class(size, n) or not rules.is_fused(asked):
            continue
        found = candidates(bucket, 90)
        assert found[0] == by_rules(bucket, 90) and len(found) > 8
        assert all(each.serves_form(asked) and not each.heads for each in found)
        assert all(fits_registers(each, op, ITEMSIZE[dtype], form=asked.form) for each in found[1:])


@pytest.mark.parametrize(
    ("op", "n", "form"),
    [
        ("forward", 20480, BIAS),
        ("dx", 8201, RESIDUAL),
        ("backward", 16392, RESIDUAL),
        ("backward", 14336, D_RESIDUAL),
    ],
)
def test_every_candidate_serves_once_it_is_an_entry(op, n, form):
    """Tuning timed and checked it, whatever the rules choose."""
    bucket = Bucket(op, n, "bfloat16", "large", form=form)
    for variant in candidates(bucket, 90):
        entries = (Records((entry_of(bucket, variant),)),)
        of_entry = planning.rules_of()._replace(entries=entries)
        assert choose(bucket.problem(FACTS), of_entry).first == variant


@pytest.mark.parametrize("form", OTHERS)
def test_a_form_takes_registers(form):
    has, op = form_named(form), "backward"
    tight = variants.BackwardRows(width=16384, warps=8, occupancy=1, latency=4)
    assert fits_registers(tight, op, 4) and not fits_registers(tight, op, 4, form=has)
    if form == RESIDUAL:
        loads = variants.ForwardRows(width=16384, warps=8, occupancy=4, latency=4, packed=True)
        assert fits_registers(loads, "forward", 2) and not fits_registers(loads, "forward", 2, form=has)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_sum_of_db_takes_the_registers_of_a_sum_of_dw(itemsize):
    """The widest row that fits keeps one float32 more an element, whatever the bytes of x and dy."""

    def most_elements(form):
        sizes = range(1024, 32769, 1024)
        kinds = {
            n: variants.BackwardRows(width=1024, pieces=n // 1024, warps=8, occupancy=1, latency=4)
            for n in sizes
        }
        return max(n for n, each in kinds.items() if fits_registers(each, "backward", itemsize, form=form))

    kept = 2 + itemsize / 2
    expected = most_elements(form_named(PLAIN_ROWS)) * kept / (kept + 1)
    assert abs(most_elements(form_named(BIAS)) - expected) <= 1024


@pytest.mark.parametrize("form", OTHERS)
def test_rows_by_tma_are_tried_with_every_form(form):
    bucket = Bucket("backward", 4096, "bfloat16", "large", form=form)
    assert any(isinstance(each, variants.BackwardPipelined) for each in candidates(bucket, 90))


@pytest.mark.parametrize("form", OTHERS)
def test_what_serves_plain_rows_is_tried_where_it_takes_the_form(form):
    bucket = Bucket("backward", 4096, "bfloat16", "large", form=form)
    known = [
        variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=9, tma=True),
        variants.BackwardPipelined(width=1024, warps=4, occupancy=2, latency=4, pieces=4, grid_percent=92),
    ]
    found = candidates(bucket, 90, most=5, known=known)
    split = variants.BackwardSplit(width=4096, warps=8, occupancy=1, latency=1, rows=8, strip=256, slab=64)
    assert found[1:3] == known and split not in candidates(bucket, 90, most=5, known=[split])


# What is run


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_search_times_checks_and_describes(finder, form, op, dtype):
    bucket = bucket_of(op, form, dtype)
    finder.machine.facts = finder.machine.facts._replace(target=TARGET)
    entry = finder.tune(bucket, tiles_of(op))
    assert list(entry.buckets()) == [bucket] and entry.variant(64) in tiles_of(op) and not finder.lines
    assert all(timing["us"] > 0 for timing in entry.evidence)
    assert tables.parse_table(tables.render_table(TARGET, [entry]), TARGET) == [entry]


RESULTS = {
    ("forward", "residual"): [{"y", "rstd", "residual_out"}] * 2,
    ("backward", "residual"): [{"dx", "dw"}] * 2,
    ("dx", "residual"): [{"dx"}] * 2,
    ("backward", "d_residual"): [{"dx", "d_residual", "dw"}] * 2,
    ("dx", "d_residual"): [{"dx", "d_residual"}] * 2,
    ("forward", "bias"): [{"y", "rstd"}] * 2,
    ("backward", "bias"): [{"dx", "dw", "db"}] * 2,
}


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
def test_each_result_that_is_wrong_is_refused(finder, op, form):
    """One element of one row, by more than a rounding. Of every other seed a forward's residual has an alpha."""
    bucket = bucket_of(op, form)
    run = calls.runner(finder.machine, bucket, tiles_of(op)[0])
    for seed, names in enumerate(RESULTS[op, form]):
        inputs = calls.checked_inputs(37, bucket, torch.device("cpu"), seed)
        outputs = run(inputs)
        assert set(outputs) == names and calls.why_wrong(inputs, outputs) is None
        for name in names:
            spoilt = outputs | {name: outputs[name].clone()}
            spoilt[name].view(-1)[11] *= 1.03125
            assert calls.why_wrong(inputs, spoilt).startswith(name), (name, seed)


MOVED = {  # rows that a call reads, and writes
    ("forward", "plain"): (1, 1),
    ("forward", "residual"): (2, 2),
    ("forward", "bias"): (1, 1),
    ("backward", "plain"): (2, 1),
    ("backward", "residual"): (3, 1),
    ("backward", "d_residual"): (3, 2),
    ("backward", "bias"): (2, 1),
    ("dx", "plain"): (2, 1),
    ("dx", "residual"): (3, 1),
    ("dx", "d_residual"): (3, 2),
}


@pytest.mark.parametrize(("op", "form"), CALLS)
def test_what_is_timed_moves_so_many_rows(finder, op, form):
    bucket = bucket_of(op, form)
    [inputs] = calls.timed_inputs(16, bucket, 1, torch.device("cpu"))
    outputs = calls.runner(finder.machine, bucket, tiles_of(op)[0])(inputs)
    read = [each for each in (inputs.x, inputs.residual, *([] if op == "forward" else [inputs.dy]))]
    read, written = (
        [each for each in some if each is not None and each.ndim == 2] for some in (read, outputs.values())
    )
    assert calls.rows_moved(bucket) == (len(read), len(written)) == MOVED[op, form]


@pytest.mark.parametrize(("op", "form"), OF_OTHERS)
def test_what_runs_is_what_users_calls_of_the_form_run(finder, monkeypatch, op, form):
    """Timed or checked, a call is one for which the launch code would look for an entry of its bucket."""
    bucket, met, device = bucket_of(op, form), [], torch.device("cpu")
    run = calls.runner(finder.machine, bucket, tiles_of(op)[0])
    [launcher] = run.args
    bind = launcher.bind
    monkeypatch.setattr(launcher, "bind", lambda *asked: (met.append(asked), bind(*asked))[1])
    for inputs in (
        *calls.timed_inputs(16, bucket, 1, device),
        *(calls.checked_inputs(16, bucket, device, seed) for seed in (0, 1)),
    ):
        run(inputs)
        problem = find(launcher.description, finder.machine, *met[-1]).plan.problem
        assert problem.form == form_named(form) and problem.op == op
        assert problem.bucket._replace(weight=bucket.weight) == bucket._replace(size=problem.size)
    assert len(met) == 3


@pytest.mark.parametrize(
    ("op", "form"), [("forward", "residual"), ("backward", "residual"), ("backward", "d_residual")]
)
def test_a_residual_that_is_left_out_is_refused(finder, monkeypatch, op, form):
    """A kernel that takes no residual would do so."""
    name = "Forward" if op == "forward" else "Backward"

    class Forgetful(launch.Launcher):
        def __call__(self, spec, tensors, *wanted):
            *others, last = tensors  # residual, or d_residual_out
            return super().__call__(spec, (*others, torch.zeros_like(last)), *wanted)

    set_launcher(monkeypatch, name, Forgetful)
    reason = finder.why_wrong(bucket_of(op, form), tiles_of(op)[0])
    assert "residual_out has other bits" in reason if op == "forward" else "dx has a relative error" in reason


def test_an_alpha_that_is_left_out_is_refused(finder, monkeypatch):
    class Forgetful(launch.Launcher):
        def __call__(self, spec, tensors, wanted):
            return super().__call__(spec._replace(alpha=1.0), tensors, wanted)

    bucket = bucket_of("backward", D_RESIDUAL)
    assert finder.why_wrong(bucket, BACKWARD_TILES[0]) is None
    set_launcher(monkeypatch, "Backward", Forgetful)
    assert "dx has a relative error" in finder.why_wrong(bucket, BACKWARD_TILES[0])


# What they should come to


@pytest.mark.parametrize("chunk", [64 * 16, 2**25])
def test_the_check_of_sums_and_residuals_is_that_of_autograd(monkeypatch, chunk):
    """PyTorch's own derivatives in float64 are within every allowance, by far."""
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", chunk)
    inputs: Inputs = make_inputs(100, 64, torch.float32, torch.float32, device="cpu")
    x, dy, weight, eps = (each if isinstance(each, float) else each.double() for each in inputs[:4])
    bias, d_out = torch.randn(64, dtype=torch.float64), torch.randn(100, 64, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = torch.nn.functional.rms_norm(leaves[0], (64,), leaves[1], eps) + leaves[2]
    ((y * dy).sum() + (leaves[0] * d_out).sum()).backward()
    d = leaves[0].grad
    outputs = {"y": y.detach(), "dx": 0.5 * d, "d_residual": d, "dw": leaves[1].grad, "db": leaves[2].grad}
    given = {"bias": bias, "d_residual_out": d_out, "alpha": 0.5}
    errors, allowed = accuracy.errors_of({"it": outputs}, x, dy, weight, eps, **given)
    assert set(errors["it"]) == set(outputs) and max(errors["it"].values()) < 1e-12
    assert accuracy.why_wrong(errors["it"], allowed) is None
    for name in ("bias", "d_residual_out", "alpha"):
        without = {key: value for key, value in given.items() if key != name}
        errors, allowed = accuracy.errors_of({"it": outputs}, x, dy, weight, eps, **without)
        assert accuracy.why_wrong(errors["it"], allowed) is not None, name
