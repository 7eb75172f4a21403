# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Calls at the ends of what the cutile backend's kernels take, in the interpreter: each result against float64, inputs
untouched, equal bits twice. Others are in backends/test_pairs_of_options.py."""

import functools

import planning
import pytest
import torch
import variants
from cutile_runs import ShuffledMachine
from helpers import BF16, FP32, unchanged
from narrow_variants import BACKWARDS
from variants import Variant

from tilegym_rmsnorm.backends.cutile import interpreter, launch
from tilegym_rmsnorm.backends.cutile.host import launcher, norm
from tilegym_rmsnorm.backends.cutile.plans import variant as variant_module
from tilegym_rmsnorm.backends.cutile.plans.plan import plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Form
from tilegym_rmsnorm.backends.cutile.plans.rules import WIDEST_BIAS_ROW, WIDEST_FUSED_ROW, WIDEST_PER_HEAD_ROW

STREAM = {"residual_dtype": FP32, "dtype": BF16, "weight_dtype": BF16, "alpha": 0.5}
WITH_BIAS = [
    Variant(BF16, weight_dtype=BF16, residual_dtype=BF16, bias_dtype=FP32, offset=1.0, casting="llama"),
    Variant(**STREAM, bias_dtype=BF16),
    Variant(BF16, weight_dtype=BF16, bias_dtype=BF16),
]
HEADS = [
    Variant(BF16, weight_dtype=BF16),
    Variant(BF16, weight_dtype=FP32, bias_dtype=FP32, offset=1.0),
    Variant(BF16, weight_dtype=BF16, weight="heads", casting="llama"),
    Variant(BF16, weight_dtype=BF16, residual_dtype=BF16, out_dtype=FP32),
]


def _run(variant, inputs):
    spec, wanted = variants.spec_of(variant), variants.wanted_of(variant)
    y, rstd, residual_out = launch.rms_norm_forward(spec, inputs[:4])
    normalized = inputs.x if residual_out is None else residual_out
    tensors = (normalized, inputs.dy, inputs.weight, rstd, inputs.d_residual_out)
    dx, d_residual, dw, db = launch.rms_norm_backward(spec, tensors, wanted)
    results = {"y": y, "rstd": rstd, "dx": dx, "d_residual": d_residual, "dw": dw, "db": db}
    return residual_out, {name: each for name, each in results.items() if each is not None}


def _check(variant):
    inputs = variants.make(variant)
    with unchanged(inputs):
        residual_out, results = _run(variant, inputs)
    if variant.has_residual:
        variants.check_residual_out(variant, inputs, residual_out)
    variants.check(variant, inputs, residual_out, **results)
    assert all(each.is_contiguous() for each in results.values())
    again = _run(variant, inputs)[1]
    assert all(torch.equal(each, again[name]) for name, each in results.items())


@pytest.mark.usefixtures("no_composing")
@pytest.mark.parametrize("layout", ["heads", "mixed"])
@pytest.mark.parametrize("variant", [HEADS[0], HEADS[3]], ids=str)
def test_wide_rows_in_place(variant, layout):
    """The batch comes second, as in (S, B, N)."""
    _check(variant._replace(size=(2, 3, 2, 2052), layout=layout))


@pytest.mark.parametrize("has_two", [False, True])
@pytest.mark.parametrize("kernel", ["rows", "rows, equal tiles", "rows by TMA", "tiles"])
def test_dx_times_alpha(kernel, has_two):
    """dx alone writes no second array for d_residual."""
    variant = Variant(BF16, (5, 93), residual_dtype=BF16, alpha=0.3)
    inputs = variants.make(variant)
    x = (variant.alpha * inputs.x.float() + inputs.residual.float()).bfloat16()
    rstd = (x.double().square().mean(-1) + variant.eps).rsqrt().float()
    machine = ShuffledMachine()
    problem = planning.problem(
        "backward", 93, BF16, weight=FP32, facts=machine.facts, form=Form(residual=True, d_residual=has_two)
    )
    wanted = variants.wanted_of(variant)._replace(**({} if has_two else {"d_residual": None}))
    run = norm.Backward(machine, plan_of(problem, BACKWARDS[kernel]))
    tensors = x, inputs.dy, inputs.weight, rstd, inputs.d_residual_out
    dx, d_residual, dw, _ = run(variants.spec_of(variant), tensors, wanted)
    assert (d_residual is None) != has_two
    variants.check(variant, inputs, x, dx=dx, dw=dw, **({"d_residual": d_residual} if has_two else {}))


@pytest.mark.parametrize("n", [WIDEST_PER_HEAD_ROW + 8, WIDEST_FUSED_ROW + 8])
@pytest.mark.parametrize("variant", HEADS[:3], ids=str)
def test_wider_rows_have_the_same_values(variant, n):
    _check(variant._replace(size=(1, 2, 2, n), layout="heads"))


@pytest.mark.parametrize("variant", WITH_BIAS, ids=str)
def test_wider_rows_have_the_same_db(variant):
    _check(variant._replace(size=(2, WIDEST_BIAS_ROW + 8)))


@pytest.mark.usefixtures("no_composing")
@pytest.mark.parametrize("layout", ["heads", "transposed", "gaps"])
@pytest.mark.parametrize("size", [(2, 3, 261, 64), (2, 261, 1, 80)])
@pytest.mark.parametrize("variant", [each for each in HEADS if each.weight != "heads"], ids=str)
def test_sequences(variant, size, layout):
    """The last leading dimension, behind a short one, or T of one head."""
    _check(variant._replace(size=size, layout=layout))


@pytest.mark.parametrize("size", [(18, 1, 4, 64), (18, 3, 2, 96)], ids=str)
@pytest.mark.parametrize("variant", [HEADS[0], HEADS[2], HEADS[3]], ids=str)
def test_more_tiles_of_heads_than_one_launch_takes(variant, size, monkeypatch):
    """Tiles that are partly empty are blocks too: few rows may need more of them than a grid has."""
    # Launchers keep what they take.
    monkeypatch.setattr(launcher, "launcher_of", functools.cache(launcher.launcher_of.__wrapped__))
    monkeypatch.setattr(variant_module, "LARGEST_GRID", 17)
    monkeypatch.setattr(interpreter, "LARGEST_GRID", (17, 2**16 - 1, 2**16 - 1))
    _check(variant._replace(size=size, layout="heads"))
