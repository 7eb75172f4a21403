# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Plans under `reproducible("batch")`. tests/machine_code/test_one_order.py reads what they compile to."""

import planning
import pytest

from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, OPS, PLAIN, SAME, WEIGHTS, Form, Policy
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES, is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.reproducibility import BATCH

WIDTHS = (
    *(
        1,
        7,
        64,
        80,
        100,
        211,
        1000,
        1024,
        1165,
        2048,
        3001,
        3072,
        4095,
        4096,
        5120,
        7168,
        8192,
        8200,
        9216,
        12288,
    ),
    *(13790, 14336, 16380, 16384, 16400, 20480, 65536),
)
FORMS = (PLAIN, Form(residual=True), Form(bias=True), Form(True, True), Form(True, d_residual=True))
FORMS += (Form(heads=8, per_head=True), Form(residual=True, narrowest=2))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_plan_serves_its_problem_and_is_that_of_any_number_of_rows(form, op, architecture):
    if op == "dx" and form.bias or op == "forward" and form.d_residual:
        pytest.skip("no such call")
    served = 0
    for dtype in ITEMSIZE if not form.narrowest else ("float32",):
        for weight in WEIGHTS if ITEMSIZE[dtype] == 2 else (SAME,):
            for n in WIDTHS:
                asked = planning.problem(
                    op,
                    n,
                    dtype,
                    "large",
                    weight,
                    planning.device(architecture),
                    policy=Policy(reproducible=BATCH),
                    form=form,
                )
                if not is_fused(asked):
                    continue
                firsts = {
                    select(asked._replace(size=size), planning.rules_of(architecture)).first for size in SIZES
                }
                [first] = firsts
                first.check(n, ITEMSIZE[dtype], architecture)
                assert first.serves_form(asked) and op in first.serves, (n, dtype, first)
                assert not isinstance(first, BackwardRows) or first.latency == 1, (n, dtype, first)
                served += 1
    assert served > 5
