# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Selections for calls with a residual, a bias, heads or several dtypes (plans/problem.py: Form)."""

from __future__ import annotations

import inspect
import itertools

import planning
import pytest

from tilegym_rmsnorm.backends.cutile.plans import rules
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    ITEMSIZE,
    PLAIN_ROWS,
    RESIDUAL,
    Device,
    Form,
    Policy,
    Problem,
)
from tilegym_rmsnorm.backends.cutile.plans.problem import FORMS as FORMS_OF_RECORDS
from tilegym_rmsnorm.backends.cutile.plans.records import Records, parse
from tilegym_rmsnorm.backends.cutile.plans.select import Tables, select
from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of

pytest.importorskip("cuda.tile")
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS  # noqa: E402

WIDTHS = (
    1,
    7,
    64,
    80,
    96,
    128,
    192,
    256,
    1000,
    1024,
    2048,
    2560,
    4095,
    4096,
    5120,
    8192,
    8200,
    12288,
    14336,
    16384,
)
WIDER = (16385, 20000, 32768, 65536)
FORMS = [
    Form(residual=True),
    Form(bias=True),
    Form(True, True),
    Form(heads=28),
    Form(True, True, heads=32),
    Form(heads=8, per_head=True),
    Form(True, True, 5, True),
    Form(narrowest=2),
    Form(True, narrowest=2),
    Form(True, d_residual=True),
    Form(True, narrowest=2, d_residual=True),
    Form(heads=32, is_scattered=True),
    Form(heads=40, narrowest=2, is_scattered=True),
]
# The parameter of a first kernel that takes what the form names.
PARAMETERS = {
    "forward": {"residual": "residual", "bias": "bias"},
    "backward": {"residual": "d_residual_out", "bias": "db_partial"},
    "dx": {"residual": "d_residual_out"},
}


def _problems(op, n):
    targets = {90: planning.H100, 80: None, 100: None}
    cases = itertools.product(FORMS, ("bfloat16", "float32"), ("few", "small", "large"), targets)
    for form, dtype, size, architecture in cases:
        if (form.narrowest and dtype != "float32") or (op == "dx" and form.bias):
            continue
        facts = planning.device(architecture, target=targets[architecture])
        yield planning.problem(op, n, dtype, size, facts=facts, form=form)


@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("n", WIDTHS + WIDER)
def test_a_form_gets_a_kernel_that_takes_it(op, n):
    """Or none at all: a kernel that left a residual out would give wrong values in silence."""
    for problem in _problems(op, n):
        if not rules.is_fused(problem):
            continue
        tables = tables_of(problem.device.architecture, problem.device.target, None)
        plan = select(problem, tables)
        plan.first.check(n, problem.itemsize, problem.device.architecture)
        taken = inspect.signature(KERNELS[plan.first.kernel]).parameters
        wanted = {name for field, name in PARAMETERS[op].items() if getattr(problem.form, field)}
        assert wanted <= set(taken), (problem, plan)
        if problem.form.per_head:
            assert "PER_HEAD" in taken
        if problem.form.heads:
            assert plan.first.kernel in ("forward_rows", "forward_tiles", "backward_rows", "backward_tiles")
        if problem.form.is_scattered or (problem.form.narrowest and not problem.is_aligned):
            assert not plan.first.uses_tma


@pytest.mark.parametrize("form", [Form(residual=True), Form(heads=4), Form(bias=True)], ids=str)
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_which_rows_are_fused(op, form):
    """docs/residual-bias-heads.md says it: heads and db to its width, and no column more; a residual and a bias at any
    width. Widths are those near the ones that it names, and some of each kind between."""
    near = (range(width - 32, width + 33) for width in (8192, 12288, 16384))
    widths = sorted({*range(1, 20000, 61), *itertools.chain(*near)})
    db = op == "backward" and form.bias
    for architecture, (dtype, itemsize) in itertools.product(rules.ARCHITECTURES, ITEMSIZE.items()):
        asked = Problem(op, 0, dtype, dtype, "large", Device(architecture, 132, 16), form=form)
        fused = [n for n in widths if rules.is_fused(asked._replace(n=n))]
        if not (form.heads or db):
            assert fused == widths
            continue
        aligned = [n for n in fused if n * itemsize % 16 == 0]
        is_narrow = itemsize == 4 and op != "forward" and architecture != 90
        assert aligned[-1] == (8192 if db else 12288 if is_narrow else 16384)
        assert max({*fused} - {*aligned}) == 8191


def test_what_has_no_kernel_is_refused():
    asked = planning.problem("backward", 20000, form=Form(heads=1))
    with pytest.raises(ValueError, match="expected a form that kernels take"):
        select(asked, planning.rules_of())


def _rules_with(*records):
    """Rules of 64 columns, each (form, occupancy) of backward_rows."""
    made = [
        {
            "ops": ["backward"],
            "dtypes": ["bfloat16"],
            "sizes": ["large"],
            "forms": [form],
            "n": [64, 64],
            "kernel": "backward_rows",
            "settings": {"width": 64, "warps": 4, "occupancy": occupancy, "latency": 4},
        }
        for form, occupancy in records
    ]
    return Tables(rules=(Records(parse(each, 90) for each in made),))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (Form(True, d_residual=True), [D_RESIDUAL, RESIDUAL, PLAIN_ROWS]),
        (Form(True, True, d_residual=True), [D_RESIDUAL, RESIDUAL, PLAIN_ROWS]),
        (Form(True), [RESIDUAL, PLAIN_ROWS]),
        (Form(True, True), [RESIDUAL, PLAIN_ROWS]),
        (Form(bias=True), [BIAS, PLAIN_ROWS]),
        (Form(), [PLAIN_ROWS]),
    ],
    ids=str,
)
def test_rules_of_the_nearest_form_serve(form, expected):
    """A call is of one form; where that has no rule, a plainer one's serve."""
    asked = planning.problem("backward", 64, form=form)
    assert asked.bucket.form == expected[0]
    occupancies = dict(zip(FORMS_OF_RECORDS, range(1, 9), strict=False))
    for without in range(len(expected)):
        left = [form for form in FORMS_OF_RECORDS if form not in expected[:without]]
        tables = _rules_with(*((form, occupancies[form]) for form in left))
        assert select(asked, tables).first.occupancy == occupancies[expected[without]]


def test_rows_that_begin_anywhere_are_gathered():
    for is_scattered, divisor in ((True, 1), (False, 16)):
        asked = planning.problem("backward", 128, form=Form(heads=32, is_scattered=is_scattered))
        plan = select(asked, planning.rules_of())
        assert plan.constants(plan.first)["DIVISOR"] == divisor


def test_heads_have_a_late_weight():
    settings = {"width": 128, "warps": 4, "occupancy": 4, "latency": 4, "rows": 4, "heads": 4}
    ForwardTiles(**settings).check(128, 2, 90)
    with pytest.raises(ValueError, match="weight_load of heads: expected late"):
        ForwardTiles(**settings, weight_load="joint").check(128, 2, 90)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("lead", [(1, 1, 1), (4, 4096, 32), (3, 1000, 28), (70000, 2, 5), (2, 7, 40)])
@pytest.mark.parametrize("per_head", [False, True])
def test_tiles_of_heads_cover_all_rows(op, lead, per_head):
    form = Form(heads=lead[2], per_head=per_head)
    plan = select(planning.problem(op, 128, form=form), planning.rules_of())
    b, t, h = lead
    sizes, first = plan.sizes(b * t * h, lead), plan.first
    tiles = b * -(-t // first.rows) * -(-h // first.heads)
    if op == "forward":
        assert sizes.grids[-1] == (tiles,)
        return
    shares = -(-h // first.heads) if per_head else 1
    blocks = sizes.grids[0][0]
    assert blocks == sizes.partial_rows * shares
    assert sizes.partial_rows <= max(1, tiles // shares)
    assert blocks <= max(shares, 132 * first.occupancy)
    columns = 128 * (h if per_head else 1)
    if sizes.partial_rows > 1:
        assert sizes.temporaries["dw_partial"] == ((sizes.partial_rows, columns), "float32")
        assert sizes.grids[-1] == (-(-columns // plan.steps[-1].width),)


@pytest.mark.parametrize("heads", [1, 7, 28, 32, 67, 71, 131, 263, 265])
@pytest.mark.parametrize("margin", [0, 1, 32, 100])
def test_walks_of_heads_fill_the_sms_that_are_left(heads, margin):
    """Each tile of heads has as many walks as fit, and one where tiles are more than the blocks that fit."""
    form, policy = Form(heads=heads, per_head=True), Policy(sm_margin=margin)
    plan = select(planning.problem("backward", 64, form=form, policy=policy), planning.rules_of())
    shares, fitting = plan.first.tiles_of_heads(heads), (132 - margin) * plan.first.occupancy
    for steps in (100_000, 10**6):  # of fewer tiles a block an SM is enough
        tiles, sizes = -(-steps // plan.first.rows), plan.sizes(steps * heads, (1, steps, heads))
        walks = sizes.partial_rows
        assert sizes.grids[0] == (walks * shares,)
        assert walks * shares <= max(shares, fitting)
        most = max(1, fitting // shares)
        assert -(-tiles // walks) == -(-tiles // most), (
            "no walk is longer than the most blocks would leave it"
        )


def test_walks_of_many_heads():
    def blocks(heads, margin):
        form, policy = Form(heads=heads, per_head=True), Policy(sm_margin=margin)
        plan = select(planning.problem("backward", 64, form=form, policy=policy), planning.rules_of())
        return plan.sizes(10**7 * heads, (1, 10**7, heads)).grids[0]

    assert blocks(71, 100) == (71,), "64 fit 32 SMs, but each head needs one"
    assert blocks(67, 0) == (201,), "3 of each head, of 264 that fit"
