# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "cutile" under levels of reproducibility, by the interpreter: which rows share a kernel, where rows lie, a
lone row, and how rows are shared. It adds by the shapes of tiles alone; machine_code/test_one_order.py reads code."""

import level_cases
import pytest
import torch
from helpers import BF16, FP32, every_config
from level_cases import FORMS, OF_ANY_GPU, assert_a_row_is_alike, behind, bits, pairs, variant_of
from variants import Variant, check, make

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.reproducibility import BATCH

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host import launcher  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans import variant as variant_module
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_empty")
WIDTHS = (1, 64, 100, 211, 1024, 3001, 4096, 5120, 8192, 13790, 16384, 20480)  # every kind of kernel


def run(variant, inputs, level):
    cpu = inputs._replace(
        **{name: None if each is None else each.cpu() for name, each in inputs._asdict().items()}
    )
    return level_cases.run(variant, cpu, level, launch)


@pytest.mark.parametrize(("form", "n"), pairs(FORMS, WIDTHS))
def test_a_row_does_not_depend_on_its_batch(form, n):
    variant = variant_of(form, n, 12 if n > 211 else None)
    assert_a_row_is_alike(lambda part: run(variant, part, BATCH), make(variant))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_results_are_right(form, rows):
    variant = variant_of(form, 640, rows)
    inputs = make(variant)
    results = run(variant, inputs, OF_ANY_GPU)
    residual_out = results.pop("residual_out")
    for name in ("y", "dx"):
        each = results[name]
        assert each.shape == inputs.x.shape and each.is_contiguous() and not each._is_view(), name
    results["rstd"] = results["rstd"].flatten()
    check(variant, inputs, residual_out, **results)


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
    inputs, found = make(variant), []

    def sums(count):
        results = run(variant, behind(inputs, count), OF_ANY_GPU)
        return bits([results.get("dw"), results.get("db")])

    for sm_count in (3, 2, 7, 132):
        monkeypatch.setattr(InterpretedMachine, "facts", InterpretedMachine.facts._replace(sm_count=sm_count))
        launcher.launcher_of.cache_clear()
        found.append(sums(0))
    found += [sums(count) for count in (1, 5, 130 if n <= 640 else 9)]
    for each in found[1:]:
        for one, other in zip(found[0], each, strict=True):
            assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant(BF16, (3, 8200), bias_dtype=BF16), "gradients of a bias of 8200 elements"),
        (Variant(FP32, (1, 3, 2, 2056), "heads"), "gradients of weights of heads with 2056 columns"),
        (Variant(BF16, (3, 64), "none", bias_dtype=BF16), "gradients of a bias of 64 elements"),
    ],
)
def test_sums_of_pytorch_are_refused_on_any_gpu(variant, message):
    with pytest.raises(ValueError, match=f'expected at most "batch" for {message}, got "device"'):
        run(variant, make(variant), OF_ANY_GPU)
    run(variant, make(variant), BATCH)


def test_a_margin_beside_a_fixed_grid_is_refused():
    variant = variant_of("plain", 64, 3)
    inputs = make(variant)
    with settings.use_sm_margin(1):
        with pytest.raises(
            ValueError, match=r'sm_margin: expected 0 with reproducible\("device"\), .* got 1'
        ):
            run(variant, inputs, OF_ANY_GPU)
        run(variant, inputs, BATCH)


def test_more_rows_of_a_form_than_one_launch_takes_are_refused(monkeypatch):
    monkeypatch.setattr(variant_module, "MOST_ROWS", 4)
    launcher.launcher_of.cache_clear()
    variant = variant_of("residual", 640, 5)
    with pytest.raises(ValueError, match="reproducible: expected at most 4 rows of such a call, got 5"):
        run(variant, make(variant), BATCH)
    launcher.launcher_of.cache_clear()
