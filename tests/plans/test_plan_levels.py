# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Plans under levels of reproducibility: neither M nor the GPU decides in which order a row is added, nor under
"device" what shares the rows."""

import itertools
from typing import Any

import planning
import pytest

from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    ITEMSIZE,
    LAUNCHES_AT_ONCE,
    OPS,
    PLAIN,
    SAME,
    WEIGHTS,
    Device,
    Form,
    Policy,
    Problem,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import (
    ARCHITECTURES,
    adds_heads_as_rows,
    heads_of_form,
    is_fused,
)
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import DIVISOR_OF_P, SIZES
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of

FORMS = (PLAIN, Form(residual=True), Form(bias=True), Form(True, True), Form(True, d_residual=True))
FORMS += (Form(heads=8, per_head=True), Form(residual=True, narrowest=2))
WIDTHS = (1, 7, 64, 211, 1000, 1024, 2051, 3001, 4096, 5120, 8192, 13790, 16384, 20480, 28672, 65536)
SM_COUNTS = (16, 78, 132, 148)
BATCH_INVARIANT, DEVICE_INVARIANT = (
    {"is_batch_invariant": True},
    {"is_batch_invariant": True, "is_device_invariant": True},
)
H100, H200 = (planning.device(target=each) for each in (planning.H100, planning.H200))


def first_of(problem: Problem) -> Variant:
    return select(problem, tables_of(problem.device.architecture, problem.device.target, None)).first


def gpu(sm_count: int, like: Device = H200) -> Device:
    return like._replace(sm_count=sm_count, most_members=max(1, sm_count // LAUNCHES_AT_ONCE))


def orders_of(first: Variant, problem: Problem) -> tuple[Any, ...]:
    return tuple(first.order(vector) for vector in problem.vectors)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("form", ["plain", "residual", "bias"])
def test_one_order_for_any_batch_and_gpu(n, form):
    """And one for a trained weight and a frozen one."""
    for dtype in ("bfloat16", "float32"):
        for ops in (("forward",), ("backward", "dx")):
            if form == "bias" and (n > 8192 and "backward" in ops):
                continue
            found, of_sums = set(), set()
            gpus = [*map(gpu, SM_COUNTS), *(gpu(count, H100) for count in SM_COUNTS)]
            levels = BATCH_INVARIANT, DEVICE_INVARIANT
            for device, size, level, op in itertools.product(gpus, SIZES, levels, ops):
                if form == "bias" and op == "dx":
                    continue
                policy = Policy(**level)
                asked = Problem(op, n, dtype, dtype, size, device, policy=policy, form=form_named(form))
                try:
                    first = first_of(asked)
                except ValueError as error:
                    assert "expected SMs for teams of" in str(error) and device.sm_count < 148
                    continue
                found.add(orders_of(first, asked))
                if op == "backward" and level is DEVICE_INVARIANT:
                    of_sums.add(first)
            assert len(found) == 1
            assert len(of_sums) == (ops != ("forward",)) and not any(
                isinstance(each, Split) for each in of_sums
            )


def test_few_rows_have_kernels_of_their_own_where_those_add_alike():
    """Else a level would cost them twice their time."""
    for n, size in ((4096, "few"), (8192, "few"), (1024, "small")):
        asked = Problem(
            "backward", n, "bfloat16", "bfloat16", size, H200, policy=Policy(is_batch_invariant=True)
        )
        few, large = first_of(asked), first_of(asked._replace(size="large"))
        assert few != large and orders_of(few, asked) == orders_of(large, asked), n


def test_rows_between_16_bytes_have_one_kernel():
    """Two of one order had other bits on an H200."""
    for n, dtype in ((3001, "bfloat16"), (13790, "float32")):
        asked = Problem("backward", n, dtype, dtype, "large", H200, policy=Policy(is_batch_invariant=True))
        others = [asked._replace(size=size, op=op) for size in SIZES for op in ("backward", "dx")]
        assert {first_of(each) for each in others} == {first_of(asked)}


@pytest.mark.parametrize("n", WIDTHS)
def test_a_margin_leaves_the_variant_or_too_few_sms(n):
    whole = Problem(
        "backward", n, "bfloat16", "bfloat16", "large", H200, policy=Policy(is_batch_invariant=True)
    )
    for margin in (1, 13, 64):
        less = whole._replace(policy=whole.policy._replace(sm_margin=margin))
        try:
            assert first_of(less) == first_of(whole)
        except ValueError as error:
            assert "expected SMs for teams of" in str(error)


@pytest.mark.parametrize("n", WIDTHS)
def test_rows_behind_the_others_change_no_walk(n):
    """P is the same on any GPU. It grows by rows that have walks of their own, until it is as large as it gets."""
    asked = Problem("backward", n, "bfloat16", "bfloat16", "large", H200, policy=Policy(**DEVICE_INVARIANT))
    plans = [select(asked._replace(device=gpu(count)), tables_of(90, None, None)) for count in (132, 148)]
    rows = (1, 2, 15, 100, 1000, 5000, 40000, 10**6)
    counts = [[plan.sizes(m).partial_rows for m in rows] for plan in plans]
    assert counts[0] == counts[1]
    [most] = {counts[0][-1], plans[0].sizes(10**7).partial_rows}
    height = plans[0].first.rows_of_tile
    for m, p in zip(rows, counts[0], strict=True):
        assert p % DIVISOR_OF_P == 0
        assert p == most or -(-m // height) <= p < -(-m // height) + DIVISOR_OF_P


def test_without_teams_wide_rows_have_one_block():
    asked = Problem(
        "backward",
        65536,
        "bfloat16",
        "bfloat16",
        "large",
        gpu(16),
        policy=Policy(False, is_batch_invariant=True),
    )
    assert first_of(asked).members == 1
    with pytest.raises(
        ValueError, match=r"expected SMs for teams of \d+ blocks.*set_teams\(False\).*got 16 SMs"
    ):
        first_of(asked._replace(policy=Policy(is_batch_invariant=True)))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(
    ("weight", "form"),
    [("bfloat16", PLAIN), ("float16", Form(residual=True)), ("float32", Form(narrowest=2))],
)
def test_rows_beside_narrower_arrays_have_one_kernel(n, weight, form):
    """The compiler may hold a row as it loads any of them: for few rows otherwise than for many."""
    for ops in (("forward",), ("backward", "dx")):
        found = set()
        for op, size, level in itertools.product(ops, SIZES, (BATCH_INVARIANT, DEVICE_INVARIANT)):
            policy = Policy(**level)
            found.add(first_of(Problem(op, n, "float32", weight, size, H200, policy=policy, form=form)))
        assert len(found) == 1


@pytest.mark.parametrize("n", [n for n in range(1, 1025) if adds_heads_as_rows(n)])
def test_heads_are_added_as_rows(n):
    """(B, T, H, N) of any H, beside one weight for all, as (M, N)."""
    forms = *(each for each in FORMS if not each.heads), Form(True, d_residual=True, narrowest=2)
    for dtype, form, op, size in itertools.product(("bfloat16", "float32"), forms, OPS, SIZES):
        for weight in (dtype, "float32", None) if op != "backward" else (dtype, "float32"):
            policy = Policy(**BATCH_INVARIANT)
            rows = Problem(op, n, dtype, weight, size, H200, policy=policy, form=form)
            if form.narrowest and dtype == "bfloat16" or not is_fused(rows):
                continue
            expected = orders_of(first_of(rows), rows)
            for count in (1, 2, 3, 8, 28, 32, 128, 300, 4096):
                heads = rows._replace(form=form._replace(heads=heads_of_form(n, count)))
                assert is_fused(heads) and orders_of(first_of(heads), heads) == expected, (heads, expected)


@pytest.mark.parametrize("teams", [True, False])
def test_the_sms_decide_no_sharing_of_rows(teams):
    """Slabs of a split backward are taller on few SMs."""
    policy = Policy(teams, **DEVICE_INVARIANT)
    for n, dtype in itertools.product(
        (*WIDTHS, 17408, 18432, 24576, 32768, 98304, 131072), ("bfloat16", "float32")
    ):
        asked = Problem("backward", n, dtype, dtype, "large", H200, policy=policy)
        assert not isinstance(first_of(asked), Split), n


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_plan_serves_its_problem_and_adds_as_that_of_any_number_of_rows(form, op, architecture):
    if op == "dx" and form.bias or op == "forward" and form.d_residual:
        pytest.skip("no such call")
    served = 0
    for dtype in ITEMSIZE if not form.narrowest else ("float32",):
        for weight in WEIGHTS if ITEMSIZE[dtype] == 2 else (SAME,):
            for n in (*WIDTHS, 100, 1165, 3072, 4095, 7168, 8200, 9216, 12288, 14336, 16380, 16400):
                asked = planning.problem(
                    op,
                    n,
                    dtype,
                    "large",
                    weight,
                    planning.device(architecture),
                    policy=Policy(is_batch_invariant=True),
                    form=form,
                )
                if not is_fused(asked):
                    continue
                plans = [select(asked._replace(size=size), planning.rules_of(architecture)) for size in SIZES]
                assert len({orders_of(plan.first, asked) for plan in plans}) == 1
                for plan in plans:
                    plan.first.check(n, ITEMSIZE[dtype], architecture)
                    assert plan.problem.op in (op, "backward" if op == "dx" else op)
                    assert plan.first.serves_form(asked), (n, dtype, plan.first)
                    assert plan.problem.op in plan.first.serves, (n, dtype, plan.first)
                served += 1
    assert served > 5


FREE = [
    ("bfloat16", 2056, 3072),
    ("bfloat16", 7176, 20480),
    ("float16", 2056, 3072),
    ("float16", 7176, 20480),
]
FREE += [("float32", 3080, 14336)]


@pytest.mark.parametrize(("dtype", "first", "last"), FREE)
def test_forwards_that_have_one_order_without_a_level(dtype, first, last):
    """docs/reproducibility.md says of which widths they are, on an H200."""
    for n in range(first, last + 1, 8):
        asked = [Problem("forward", n, dtype, dtype, size, H200) for size in SIZES]
        assert len({orders_of(first_of(each), each) for each in asked}) == 1, n
