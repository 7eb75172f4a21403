# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The search of forms (plans/problem.py: FORMS): its candidates, what it runs, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import Inputs, make_inputs
from table_cases import TARGET

from tilegym_rmsnorm.backends.cutile.plans import rules, tables
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    FORMS,
    ITEMSIZE,
    OPS,
    PLAIN_ROWS,
    Bucket,
    Device,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardRows,
    BackwardTiles,
    ForwardRows,
    ForwardTiles,
)

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning import calls  # noqa: E402
from tilegym_rmsnorm.backends.cutile.tuning.candidates import (  # noqa: E402
    by_rules,
    candidates,
    fits_registers,
)
from tilegym_rmsnorm.measure import accuracy  # noqa: E402

OTHERS = tuple(form for form in FORMS if form != PLAIN_ROWS)
FACTS = Device(90, 132, 16)
TILES, BACKWARD_TILES = (
    [kind(width=64, warps=4, occupancy=1, latency=latency, rows=8) for latency in (1, 2, 3)]
    for kind in (ForwardTiles, BackwardTiles)
)


def bucket_of(op: str, form: str, dtype: str = "bfloat16") -> Bucket:
    return Bucket(op, 64, dtype, "small", form=form)


def tiles_of(op: str) -> list:
    return TILES if op == "forward" else BACKWARD_TILES


# Candidates


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("n", [64, 1000, 1024, 4096, 5120, 8192, 12288])
def test_every_candidate_takes_the_form(n, form, op):
    for dtype, size in itertools.product(("bfloat16", "float32"), SIZES):
        bucket = Bucket(op, n, dtype, size, form=form)
        asked = bucket.problem(FACTS)
        if not rows_of_class(size, n) or not rules.is_fused(asked):
            continue
        found = candidates(bucket, ITEMSIZE[dtype], 90)
        assert found[0] == by_rules(bucket, 90) and len(found) > 8
        assert all(each.serves_form(asked) and not each.heads for each in found)
        assert all(fits_registers(each, op, ITEMSIZE[dtype], form=asked.form) for each in found[1:])


@pytest.mark.parametrize("form", OTHERS)
def test_a_form_takes_registers(form):
    has, op = form_named(form), "backward"
    tight = BackwardRows(width=16384, warps=8, occupancy=1, latency=4)
    assert fits_registers(tight, op, 2) and not fits_registers(tight, op, 4, form=has)
    if has.residual:
        loads = ForwardRows(width=16384, warps=8, occupancy=4, latency=4, packed=True)
        assert fits_registers(loads, "forward", 2) and not fits_registers(loads, "forward", 2, form=has)


@pytest.mark.parametrize("form", OTHERS)
def test_what_serves_plain_rows_is_tried_where_it_takes_the_form(form):
    bucket = Bucket("backward", 4096, "bfloat16", "large", form=form)
    known = [
        BackwardTiles(width=4096, warps=8, occupancy=1, latency=9, tma=True),
        BackwardPipelined(width=1024, warps=4, occupancy=2, latency=4, pieces=4, grid_percent=92),
    ]
    found = candidates(bucket, 2, 90, most=5, known=known)
    fit = [each for each in known if each.serves_form(bucket.problem(FACTS))]
    assert found[1 : 1 + len(fit)] == fit and set(known) & set(found) == set(fit)


# What is run


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", OTHERS)
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
    ("backward", "residual"): [{"dx", "dw"}, {"dx", "d_residual", "dw"}],
    ("dx", "residual"): [{"dx"}, {"dx", "d_residual"}],
    ("forward", "bias"): [{"y", "rstd"}] * 2,
    ("backward", "bias"): [{"dx", "dw", "db"}] * 2,
}


@pytest.mark.parametrize(("op", "form"), [key for key in RESULTS if key[1] in FORMS])
def test_each_result_that_is_wrong_is_refused(finder, op, form):
    """One element of one row, by more than a rounding. Of every other seed the residual has an alpha."""
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


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_residual_that_is_left_out_is_refused(finder, monkeypatch, op):
    """What a kernel that does not take it would do."""
    name = "Forward" if op == "forward" else "Backward"

    class Forgetful(getattr(launch, name)):
        def formed(self, spec, tensors, *wanted):
            *others, last = tensors  # residual, or d_residual_out
            return super().formed(spec, (*others, torch.zeros_like(last)), *wanted)

    monkeypatch.setattr(launch, name, Forgetful)
    reason = finder.why_wrong(bucket_of(op, "residual"), tiles_of(op)[0])
    assert "residual_out has other bits" in reason if op == "forward" else "dx has a relative error" in reason


# What they should come to


@pytest.mark.parametrize("chunk", [64 * 16, 2**25])
def test_the_check_of_sums_and_residuals_is_that_of_autograd(monkeypatch, chunk):
    """In float64 PyTorch's own derivatives are within every allowance, by far."""
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", chunk)
    inputs: Inputs = make_inputs(100, 64, torch.float32, torch.float32)
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
