# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "cutile" under levels of reproducibility, by the interpreter: which kernels add alike, where rows lie, a
lone row, and how rows are shared. It adds by the shapes of tiles alone; machine_code/test_one_order.py reads code."""

import itertools

import helpers
import level_cases
import pytest
import torch
from helpers import BF16, FP32, every_config
from level_cases import (
    FORMS,
    OF_ANY_GPU,
    WITH_WEIGHT,
    assert_a_frozen_weight_changes_nothing,
    assert_a_margin_is_refused,
    assert_a_row_is_alike,
    assert_right,
    assert_sums_are_alike,
    behind,
    pairs,
    variant_of,
)
from variants import Variant, make, spec_of, wanted_of

from tilegym_rmsnorm import reproducible, rms_norm, settings
from tilegym_rmsnorm.ops.norm.spec import DW, DX
from tilegym_rmsnorm.reproducibility import BATCH

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from tilegym_rmsnorm.backends.cutile import interpreter, launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import launcher, norm  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans import variant as variant_module
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_empty")
WIDTHS = (1, 64, 100, 211, 1024, 3001, 4096, 5120, 8192, 13790, 16384, 20480)  # every kind of kernel


def run(variant, inputs, level, **options):
    cpu = inputs._replace(
        **{name: None if each is None else each.cpu() for name, each in inputs._asdict().items()}
    )
    return level_cases.run(variant, cpu, level, launch, **options)


@pytest.mark.parametrize(("form", "n"), pairs(FORMS, WIDTHS))
def test_a_row_does_not_depend_on_its_batch(form, n):
    variant = variant_of(form, n, 12 if n > 211 else None)
    assert_a_row_is_alike(lambda part: run(variant, part, BATCH), make(variant))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("form", "n"), pairs(WITH_WEIGHT, (64, 1000, 1024, 2560, 4096, 5120, 8192)))
def test_a_row_does_not_depend_on_the_size_class(form, n, is_frozen, monkeypatch):
    """The kernels of each class, and those beside a frozen weight, take the same few rows."""
    variant = variant_of(form, n, 3)
    inputs, found = make(variant), []
    for size in SIZES:
        monkeypatch.setattr(norm, "size_class", lambda m, n, size=size: size)
        found.append(run(variant, inputs, BATCH, is_frozen=is_frozen and size != "large"))
    for name in ("y", "rstd", "residual_out", "dx", "d_residual"):
        assert all(each.get(name) is None or torch.equal(each[name], found[-1][name]) for each in found), name


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(("form", "n"), pairs(WITH_WEIGHT, WIDTHS))
def test_a_frozen_weight_has_the_dx_of_a_trained_one(form, n, rows):
    variant = variant_of(form, n, rows)
    assert_a_frozen_weight_changes_nothing(
        lambda inputs, **options: run(variant, inputs, BATCH, **options), make(variant)
    )


def test_a_weight_that_adds_to_main_grad_has_it_too():
    variant = variant_of("residual", 5120, 12)
    x, weight, _, _, dy, d_residual_out = make(variant, device="cpu")
    tensors, wanted = (x, dy, weight, torch.rand(12), d_residual_out), wanted_of(variant)
    spec = spec_of(variant)._replace(reproducible=BATCH)
    dx, *_ = launch.rms_norm_backward(spec, tensors, wanted._replace(dw=None))
    target = torch.zeros(5120)
    assert torch.equal(launch.rms_norm_backward(spec, (*tensors, target), wanted._replace(dw=FP32))[0], dx)
    assert target.all()


@pytest.mark.parametrize("residual_dtype", [None, FP32])
def test_known_calls_and_ops_beside_a_frozen_weight_too(residual_dtype, monkeypatch):
    helpers.settle_interpreters(monkeypatch)
    variant = Variant(BF16, (6, 640), weight_dtype=BF16, residual_dtype=residual_dtype)
    x, weight, _, residual, dy, _ = make(variant, device="cpu")
    found, residual_dtype = [], variant.normalized_dtype if residual_dtype else None
    with reproducible("batch"):
        for is_trained in (True, True, False, False):
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_(is_trained)
            y = rms_norm(leaves[0], (640,), leaves[1], 1e-6, residual=residual, backend="cutile")
            (y if residual is None else y[0]).backward(dy)
            assert (leaves[1].grad is not None) == is_trained
            found.append(leaves[0].grad)
        options = 1, 1e-6, 0.0, "once", 1.0, residual_dtype, None, "cutile"
        _, rstd, residual_out = torch.ops.tilegym_rmsnorm.rms_norm_forward(
            x, residual, weight, None, *options
        )
        for wanted in (DX + DW, DX):
            tensors = dy, x if residual is None else residual_out, weight, rstd, None
            options = wanted, 1, 0.0, "once", 1.0, BF16, None, None, None, "cutile", BATCH
            dx, dw, *_ = torch.ops.tilegym_rmsnorm.rms_norm_backward(*tensors, *options)
            assert (dw is not None) == (wanted != DX)
            found.append(dx)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_results_are_right(form, rows):
    variant = variant_of(form, 640, rows)
    assert_right(lambda inputs: run(variant, inputs, OF_ANY_GPU), variant)


@pytest.fixture(params=[3, None] if every_config else [3], ids=str)
def fixed_sms(request, monkeypatch):
    """Of few SMs walks are long."""
    if request.param:
        monkeypatch.setattr(variant_module, "FIXED_SMS", request.param)
    launcher.launcher_of.cache_clear()
    yield
    launcher.launcher_of.cache_clear()


@pytest.mark.parametrize(("form", "n"), pairs(FORMS, (64, 640, 4096, 16384, 20480)))
def test_sums_do_not_depend_on_the_gpu_or_on_padding(form, n, fixed_sms, monkeypatch):
    if n > 8192 and variant_of(form, n).bias_dtype:
        pytest.skip("PyTorch's operations sum db, which raises")
    if n > 2048 and form == "weights of heads":
        pytest.skip("PyTorch's operations sum dw, which raises")
    variant = variant_of(form, n, 70 if n <= 640 else 7)
    inputs = make(variant)

    def sums(count):
        results = run(variant, behind(inputs, count), OF_ANY_GPU)
        return [results.get("dw"), results.get("db")]

    def set_sm_count(sm_count):
        monkeypatch.setattr(InterpretedMachine, "facts", InterpretedMachine.facts._replace(sm_count=sm_count))
        launcher.launcher_of.cache_clear()

    assert_sums_are_alike(sums, set_sm_count, (1, 5, 130 if n <= 640 else 9))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant(BF16, (3, 8200), bias_dtype=BF16), "gradients of bias with 8200 columns"),
        (Variant(FP32, (1, 3, 2, 2056), "heads"), "gradients of weights of heads with 2056 columns"),
        (Variant(BF16, (3, 64), "none", bias_dtype=BF16), "gradients of bias with 64 columns"),
    ],
)
def test_sums_of_pytorch_are_refused_on_any_gpu(variant, message):
    with pytest.raises(ValueError, match=f'expected at most "batch" for {message}, got "device"'):
        run(variant, make(variant), OF_ANY_GPU)
    run(variant, make(variant), BATCH)


@pytest.mark.parametrize(
    "learned", [each for each in itertools.product((False, True), repeat=3) if any(each)]
)
@pytest.mark.parametrize(
    ("weight", "n"), [("vector", 8192), ("vector", 8200), ("heads", 2048), ("heads", 2056), ("none", 64)]
)
def test_a_forward_refuses_what_its_backward_would(weight, n, learned, monkeypatch):
    """learned: x, weight and bias. An op that is recorded cannot know the backend: there the backward refuses."""
    variant = Variant(BF16, (1, 2, 2, n), weight, BF16, BF16)
    inputs, check = make(variant, device="cpu"), launch.rms_norm_backward.check_gradients_ahead

    def step():
        """Return what the forward raises, and what the backward does."""
        names = zip(("x", "weight", "bias"), learned, strict=True)
        x, weight, bias = (
            None if each is None else each.detach().requires_grad_(needs)
            for each, needs in ((getattr(inputs, name), needs) for name, needs in names)
        )
        with reproducible("device"):
            try:
                y = rms_norm(x, (n,), weight, bias=bias, backend="cutile")
            except ValueError as error:
                return str(error), None
            try:
                torch.autograd.backward(y, inputs.dy) if y.requires_grad else None
            except ValueError as error:
                return None, str(error)
        return None, None

    monkeypatch.setattr(launch.rms_norm_backward, "check_gradients_ahead", lambda *_: None)
    in_forward, in_backward = step()
    assert in_forward is None
    monkeypatch.setattr(launch.rms_norm_backward, "check_gradients_ahead", check)
    if in_backward is not None:
        monkeypatch.setattr(interpreter, "launch", lambda *_, **__: pytest.fail("launched"))
    assert step() == (in_backward, None)


def test_without_gradients_such_a_bias_is_not_refused():
    x, weight, bias, _, dy, _ = make(Variant(BF16, (2, 8200), bias_dtype=BF16), device="cpu")
    bias.requires_grad_(), x.requires_grad_()
    options = 1, 1e-6, 0.0, "once", 1.0, None, None, "cutile"
    with reproducible("device"):
        with torch.no_grad():
            rms_norm(x, (8200,), weight, bias=bias, backend="cutile")
        y, *_ = torch.ops.tilegym_rmsnorm.rms_norm_forward(x, None, weight, bias, *options)
        with pytest.raises(ValueError, match="gradients of bias with 8200 columns"):
            y.backward(dy)
    for needs_bias in (False, True):
        with reproducible("device" if not needs_bias else "batch"):
            rms_norm(x, (8200,), weight, bias=bias.requires_grad_(needs_bias), backend="cutile").backward(dy)


def test_a_margin_beside_a_fixed_grid_is_refused():
    variant = variant_of("plain", 64, 3)
    inputs = make(variant)
    assert_a_margin_is_refused(lambda: run(variant, inputs, OF_ANY_GPU))
    with settings.use_sm_margin(1):
        run(variant, inputs, BATCH)


def test_more_rows_of_a_form_than_one_launch_takes_are_refused(monkeypatch):
    monkeypatch.setattr(variant_module, "MOST_ROWS", 4)
    launcher.launcher_of.cache_clear()
    variant = variant_of("residual", 640, 5)
    with pytest.raises(ValueError, match="reproducible: expected at most 4 rows of such a call, got 5"):
        run(variant, make(variant), BATCH)
    launcher.launcher_of.cache_clear()
