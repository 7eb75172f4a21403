# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The variants that tuning tries of rows that are not aligned: kernels of unaligned.py beside those of all rows."""

import itertools
from dataclasses import replace

import pytest
import torch
from cutile_runs import ShuffledMachine
from helpers import in_turn
from planning import device

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.plans.partition import Team, Unaligned
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    FLOAT32,
    FORMS,
    ITEMSIZE,
    OPS,
    PLAIN_ROWS,
    RESIDUAL,
    Bucket,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import is_fused, is_unaligned
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardRows, ForwardUnaligned
from tilegym_rmsnorm.backends.cutile.tuning import calls
from tilegym_rmsnorm.backends.cutile.tuning.candidates import by_rules, candidates, fits_registers

# Few and many rows of a tile, one, and parts of a team; of odd numbers of columns and of others.
WIDTHS = [693, 1070, 3001, 13790]
EACH = itertools.product(OPS, FORMS)
CALLS = [(op, form) for op, form in EACH if Bucket(op, 64, "bfloat16", "large", form=form).has_calls]


def classes_of(n: int) -> list[str]:
    return [size for size in SIZES if rows_of_class(size, n)]


def tried(bucket: Bucket, **options) -> tuple[list[Unaligned], list]:
    """Candidates of kernels of unaligned.py, and others."""
    found = candidates(bucket, 90, **options)
    unaligned = [each for each in found if isinstance(each, Unaligned)]
    return unaligned, [each for each in found if not isinstance(each, Unaligned)]


@pytest.mark.parametrize("form", [PLAIN_ROWS, RESIDUAL])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", WIDTHS)
def test_both_kinds_of_kernels_are_tried(n, op, form):
    """And of those of unaligned.py more than one value of what they have, whichever kind the rules take."""
    for size in classes_of(n):
        unaligned, others = tried(Bucket(op, n, "bfloat16", size, form=form))
        assert len(unaligned) >= 10 and len(others) >= 10
        for name in ("warps", "occupancy", "width"):
            assert len({getattr(each, name) for each in unaligned}) > 1, name
        assert {isinstance(each, Team) for each in unaligned} == ({False, True} if n > 8192 else {False})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("dtype", "n", "vectors"),
    [
        ("bfloat16", 3001, {8}),
        ("bfloat16", 1070, {2, 8}),
        ("float16", 3004, {4, 8}),
        ("bfloat16", 13790, {2, 8}),
        ("float32", 693, {4}),
        ("float32", 1070, {2, 4}),
        ("bfloat16", 3008, set()),
        ("float32", 3004, set()),
        ("float32", 13792, set()),
    ],
)
def test_vectors_are_of_16_bytes_or_divide_rows(dtype, n, vectors, op):
    """Aligned rows have other kernels."""
    for size, form in itertools.product(classes_of(n), (PLAIN_ROWS, RESIDUAL)):
        unaligned, _ = tried(Bucket(op, n, dtype, size, form=form))
        assert {each.vector for each in unaligned} == vectors


@pytest.mark.parametrize("op", OPS)
def test_tiles_hold_a_row_and_none_is_empty(op):
    for n in (*range(65, 300, 13), 1001, 2047, 4099, 8193, 8198, 16383, 32762, 60001, 131068):
        for dtype in ("bfloat16", "float32"):
            unaligned, _ = tried(Bucket(op, n, dtype, "large"), most=10_000)
            assert unaligned or n * ITEMSIZE[dtype] % 16 == 0
            for each in unaligned:
                each.check(n, ITEMSIZE[dtype], 90)
                inner = n // each.vector * each.vector
                assert each.width * (each.pieces * each.members - 1) < inner, each
                assert inner <= each.width * each.pieces * each.members, each


@pytest.mark.parametrize(("op", "form"), CALLS)
def test_registers_hold_what_the_rules_take(op, form):
    """All of it compiled without spills."""
    seen = set()
    for n, dtype in itertools.product(range(64, 24_000, 37), ("bfloat16", "float32")):
        bucket = Bucket(op, n, dtype, "large", form=form)
        problem = bucket.problem(device())
        if is_fused(problem) and is_unaligned(problem):
            first = by_rules(bucket, 90)
            seen.add(dtype)
            assert fits_registers(first, op, ITEMSIZE[dtype], form=form_named(form)), (n, first)
    assert seen == {"bfloat16", "float32"}


def test_a_weight_that_comes_first_takes_registers():
    """The rows of a tile share one float32 an element, if it is float32."""
    settings = {"warps": 8, "occupancy": 4, "latency": 4, "vector": 8}
    row = ForwardUnaligned(width=8192, **settings)
    assert fits_registers(row, "forward", 2) and not fits_registers(row, "forward", 2, FLOAT32)
    assert fits_registers(ForwardUnaligned(width=1024, rows=8, **settings), "forward", 2, FLOAT32)
    late = ForwardRows(width=8192, warps=8, occupancy=4, latency=4)
    assert fits_registers(late, "forward", 2, FLOAT32)


@pytest.mark.parametrize(("n", "op", "form"), in_turn(WIDTHS, OPS, [PLAIN_ROWS, RESIDUAL], of=2))
def test_each_gives_right_results(n, op, form):
    """The interpreter ignores hints. More rows run than begin at different places in a vector. Without --every-config
    plain rows and a residual in turn."""
    bucket, machine = Bucket(op, n, "bfloat16", "large", form=form), ShuffledMachine()
    m = 37 if n < 4096 else 9
    unaligned, _ = tried(bucket)
    alike = dict.fromkeys(replace(each, warps=4, occupancy=1, latency=1) for each in unaligned)
    for seed, variant in enumerate(alike):
        inputs = calls.checked_inputs(m, bucket, torch.device("cpu"), seed)
        outputs = calls.runner(machine, bucket, variant)(inputs)
        assert not any(interpreter.unwritten(each) for each in outputs.values()), variant
        assert calls.why_wrong(inputs, outputs) is None, variant
