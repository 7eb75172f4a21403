# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cuTile kernels on a GPU: every variant that its rules can pick, and every entry that ships. Most of the time is
compilation, so each sweep is in parts, which go to different processes."""

import functools

import plain_calls
import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU, assert_alike, expected_results, make_inputs, why_skip
from planning import device, plan, problem, rules_of
from table_cases import copy_rules, entries_that_ship, forget_files

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN_ROWS
from tilegym_rmsnorm.backends.cutile.plans.select import choose
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class, size_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

pytestmark = pytest.mark.usefixtures("poisoned_empty")

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

FACTS = machine_of(DEVICE).facts if HAS_GPU else device()
WIDEST = 131072  # columns: wider rows have no rules of their own


def by_rules(n: int, dtype: torch.dtype, size: str) -> dict[bool, tuple[Variant, Variant]]:
    """Return the forward and the backward beside a float32 weight (True) and one of x's dtype."""
    rules = rules_of(FACTS.architecture)
    return {
        weight is FP32: tuple(
            choose(problem(op, n, dtype, size, weight, FACTS), rules).first for op in ("forward", "backward")
        )
        for weight in (dtype, FP32)
    }


@functools.cache
def widths_of_variants(dtype: torch.dtype, size: str) -> list[int]:
    """Return, for each set of variants, the widest multiple of 16; up to 66000 columns also the widest odd row, and
    above them the narrowest, whose last tile is cut off."""
    widths = {}
    for n in (*range(1, 66000), *range(66000, WIDEST + 1, 16)):
        if n % 16 and n % 2 == 0:
            continue
        variants = by_rules(n, dtype, size)
        if size == "few" and variants == by_rules(n, dtype, "large"):
            continue  # tested
        widths[(*variants.values(), n % 2)] = n
        if n >= 66000:
            widths.setdefault((*variants.values(), "narrowest"), n)
    return sorted(set(widths.values()))


def weight_dtypes(n: int, dtype: torch.dtype, size: str) -> list[torch.dtype]:
    """float32, whose gradient hides nothing, and x's dtype where that is served by another variant."""
    variants = by_rules(n, dtype, size)
    return [FP32] if len(set(variants.values())) == 1 else [FP32, dtype]


RUNS = 1000  # of each variant where it fills the GPU, on NaN
PARTS, TABLE_PARTS = 24, 4


@pytest.fixture
def rules_alone(tmp_path, monkeypatch, fresh_plans):
    """No entry that ships: it would hide the rules of its width, and has a test of its own."""
    from tilegym_rmsnorm.backends.cutile.runtime import tables

    copy_rules(tmp_path, FACTS.architecture)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "SHIPPED_FOLDER", tmp_path)
        forget_files()
        yield
    forget_files()


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_variant(dtype, part):
    """Each block takes two or three row tiles, the last of them partial, where 8M elements are enough for that."""
    from tilegym_rmsnorm.backends.cutile.host import norm

    for n in widths_of_variants(dtype, "large")[part::PARTS]:
        variants = by_rules(n, dtype, "large")
        _, backward = variants[dtype is FP32]
        blocks = FACTS.sm_count * backward.occupancy
        m = min(2 * backward.rows * blocks + backward.rows // 2 + 1, 2**23 // n)
        m = max(m, rows_of_class("large", n)[0])
        for weight_dtype in weight_dtypes(n, dtype, "large"):
            for op, variant in zip(("forward", "backward"), variants[weight_dtype is FP32], strict=True):
                asked = problem(op, n, dtype, size_class(m, n), weight_dtype, FACTS)
                assert norm.plan_for(asked).first == variant
            check_training_step(m, n, dtype, weight_dtype)


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_variant_for_few_rows(dtype, part):
    """1001 rows are four slabs of narrow rows; no M fills its last tile of rows. A single row has kernels of its own,
    since cuda-tile compiles an extent of 1 in."""
    for n in widths_of_variants(dtype, "few")[part::PARTS]:
        most = min(1001, rows_of_class("few", n)[-1] - 3)
        for weight_dtype in weight_dtypes(n, dtype, "few"):
            for m, runs in ((1, 20), (33, 20), (most, RUNS)):
                check_training_step(m, n, dtype, weight_dtype, runs)


def check_training_step(
    m: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype, runs: int = RUNS
) -> None:
    inputs = make_inputs(m, n, dtype, weight_dtype)
    x, dy, weight, eps, *_ = inputs
    expected = expected_results(inputs)
    forward = functools.partial(rms_norm_forward, x, weight, eps, backend="cutile")
    assert_alike(expected, ("y", "rstd"), forward, runs)
    backward = functools.partial(rms_norm_backward, x, dy, weight, forward()[1], backend="cutile")
    assert_alike(expected, ("dx", "dw"), backward, runs)


@pytest.mark.parametrize("part", range(TABLE_PARTS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_every_entry_that_ships(op, dtype, part, monkeypatch):
    """Entries pass tuning's check of winners, with more runs: fresh data, NaN, float64, and the bits of the first run.
    Large calls have a quarter of the elements, since several processes check at once, in float64."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine
    from tilegym_rmsnorm.backends.cutile.tuning import search

    monkeypatch.setattr(search, "RUNS", RUNS)
    monkeypatch.setattr(search, "LARGE", tuple(most // 4 for most in search.LARGE))
    found = machine.machine_of(DEVICE)
    entries = dict(entries_that_ship(found, op, dtype)[part::TABLE_PARTS])
    finder = search.Search(found, DEVICE, print)
    wrong = {bucket: finder.why_wrong(bucket, variant) for bucket, variant in entries.items()}
    assert not any(wrong.values()), wrong
    for bucket, variant in entries.items():
        for m in (1, 33) if bucket.size == "few" else (search.rows_of(bucket)[0],):
            (check_entry if bucket.form == PLAIN_ROWS else check_entry_of_a_form)(found, bucket, variant, m)


def check_entry(machine, bucket, variant, m):
    """Check what tuning does not: single rows, whose kernels are others, and dx alone by a backward's variant."""
    from tilegym_rmsnorm.backends.cutile.host import norm

    inputs = make_inputs(m, bucket.n, getattr(torch, bucket.dtype), FP32)
    x, dy, weight, eps, *_ = inputs
    expected = expected_results(inputs)
    kind = bucket.n, bucket.dtype, bucket.size, FP32, machine.facts
    if bucket.op == "forward":
        run = norm.Forward(machine, plan(variant, "forward", *kind))
        forward = functools.partial(plain_calls.forward, run, x, weight, eps, 0.0)
        assert_alike(expected, ("y", "rstd"), forward, 20)
        return
    _, rstd = rms_norm_forward(x, weight, eps, backend="cutile")
    if bucket.op == "backward":
        backward = norm.Backward(machine, plan(variant, "backward", *kind))
        run = functools.partial(plain_calls.backward, backward, x, dy, weight, rstd, 0.0)
        assert_alike(expected, ("dx", "dw"), run, 20)
    if bucket.op == "dx" or variant.serves_dx_alone:
        dx_alone = norm.Backward(machine, plan(variant, "dx", *kind))
        run = functools.partial(plain_calls.backward, dx_alone, x, dy, weight, rstd, 0.0)
        assert_alike(expected, ("dx",), lambda: run()[:1], 20)


def check_entry_of_a_form(machine, bucket, variant, m):
    """Check an entry with what its form has."""
    from tilegym_rmsnorm.backends.cutile.tuning import calls, search

    ops = {bucket.op, *(["dx"] if variant.serves_dx_alone else [])}
    for op in sorted(ops):
        run = calls.runner(search.Poisoned(machine), bucket._replace(op=op), variant)
        inputs = calls.checked_inputs(m, bucket._replace(op=op), DEVICE, seed=1)
        first = run(inputs)
        assert calls.why_wrong(inputs, first) is None
        for _ in range(20):
            assert all(torch.equal(again, first[name]) for name, again in run(inputs).items())
