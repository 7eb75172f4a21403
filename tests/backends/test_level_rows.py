# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What tests/gpu/test_gpu_levels.py runs on a GPU, of small shapes by the kernels' interpreters; and that it can
fail."""

import level_rows
import level_sums
import pytest
import torch
from helpers import BF16, DEVICE, FP32, HAS_GPU
from level_rows import Case, Pool, differing

from tilegym_rmsnorm import reproducible

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="tests/gpu has these tests"),
    pytest.mark.usefixtures("poisoned_empty", "marks_end"),
]
CASES = [
    *(Case(72, BF16, form) for form in level_rows.FORMS),
    *(Case(37, FP32, form) for form in ("plain", "residual", "bias")),
]


@pytest.fixture(autouse=True)
def kernels_alone(backend, monkeypatch):
    """Of few SMs walks are long."""
    if backend == "torch":
        pytest.skip("it has no kernels")
    if backend == "triton":
        from tilegym_rmsnorm.backends.triton import config as counted
    else:
        from tilegym_rmsnorm.backends.cutile.plans import variant as counted
    monkeypatch.setattr(counted, "FIXED_SMS", 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(case, backend):
    assert differing(Pool(case, backend, 3), (1, 2, 9), 5) == []


@pytest.mark.parametrize("way", [level_rows.compiled, level_rows.exported])
def test_so_it_has_in_other_ways_to_call(way, backend, fresh_dynamo):
    pool = Pool(Case(72, BF16, "residual"), backend, 3)
    run = way(pool)
    for m in (1, 2, 9):
        index = pool.index(m)
        assert pool.differing(index, run(index)) == [], m


def test_a_frozen_weight_changes_no_bit(backend):
    pool = Pool(Case(72, FP32, "residual"), backend, 3)
    with reproducible("batch"):
        for m in (1, 9):
            index = pool.index(m)
            assert pool.differing(index, pool.run(index, is_frozen=True)) == [], m


@pytest.mark.parametrize("form", level_sums.FORMS)
def test_dw_depends_on_neither_padding_nor_the_number_of_sms(form, backend):
    run = level_sums.of_norm(Case(72, BF16, form), backend)
    level_sums.assert_sums_are_alike(run, backend, (1, 40), (1, 30))


@pytest.mark.parametrize("kind", level_sums.KINDS_OF_ROPE)
def test_so_do_those_of_rope(kind, backend):
    run = level_sums.of_rope(16, 8, kind, backend)
    level_sums.assert_sums_are_alike(run, backend, (1, 20), (1, 7))


# These can fail


def test_other_bits_of_a_row_are_found(backend):
    pool = Pool(Case(72, BF16, "residual"), backend, 3)
    index = torch.tensor([2, 0, 1, 0], device=DEVICE)
    with reproducible("batch"):
        results = pool.run(index)
    assert pool.differing(index, results) == []
    names = "y of rms_norm_forward", "rstd"
    for name in names:
        row = results[name][2:3]
        row.copy_(torch.nextafter(row, torch.full_like(row, 9.0)))
    assert pool.differing(index, results) == [f"1 of 4 rows of {name}" for name in names]


def test_other_bits_of_a_sum_are_found(backend):
    def sms():
        if backend == "triton":
            from tilegym_rmsnorm.backends.triton import host

            return host.sm_count(DEVICE)
        from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

        return machine_of(DEVICE).facts.sm_count

    own = sms()
    for run in (lambda m, padding: padding, lambda m, padding: sms()):
        with pytest.raises(AssertionError):
            level_sums.assert_sums_are_alike(
                lambda *given, run=run: [torch.tensor([float(run(*given))])], backend, (4,), (2,)
            )
        assert sms() == own
