# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Selections for calls with a residual, a bias, heads or several dtypes (plans/problem.py: Form); entries of a form:
which calls they serve, what a file may hold, and how they are named; and tiles of rows (B, T, H, N), which are selected
for tensors as models have them, from their strides on."""

import inspect
import itertools
import json
import math

import planning
import pytest
import torch
from helpers import BF16, FP32
from table_cases import BUCKET, ENTRY, GPU, TARGET, VARIANT, choice, chosen, entry_of, rule, ship

from tilegym_rmsnorm.backends.cutile.plans import records, rules, variants
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FLOAT32,
    ITEMSIZE,
    OPS,
    PLAIN,
    PLAIN_ROWS,
    RESIDUAL,
    Bucket,
    Device,
    Form,
    Policy,
    Problem,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.problem import FORMS as FORMS_OF_RECORDS
from tilegym_rmsnorm.backends.cutile.plans.records import Records, parse
from tilegym_rmsnorm.backends.cutile.plans.rules import heads_of_form
from tilegym_rmsnorm.backends.cutile.plans.select import Tables, choose, select
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
from tilegym_rmsnorm.call.layout import viewed, views_of

WIDTHS = (
    *(1, 7, 64, 80, 96, 128, 192, 256, 1000, 1024, 2048, 2560, 4095, 4096, 5120),
    *(8192, 8200, 12288, 14336, 16384),
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
    kernels = pytest.importorskip("tilegym_rmsnorm.backends.cutile.kernels", exc_type=ImportError).KERNELS
    for problem in _problems(op, n):
        if not rules.is_fused(problem):
            continue
        tables = tables_of(problem.device.architecture, problem.device.target, None)
        plan = select(problem, tables)
        plan.first.check(n, problem.itemsize, problem.device.architecture)
        taken = inspect.signature(kernels[plan.first.kernel]).parameters
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


OTHERS = tuple(form for form in FORMS_OF_RECORDS if form != PLAIN_ROWS)
EACH = [BUCKET._replace(op=op, form=form) for form in FORMS_OF_RECORDS for op in OPS]
WITH_CALLS = [(each.op, each.form) for each in EACH if each.has_calls]
WITHOUT_CALLS = [(each.op, each.form) for each in EACH if not each.has_calls]
TUNED = {
    "forward": variants.ForwardRows(width=4096, warps=4, occupancy=3, latency=5),
    "backward": variants.BackwardRows(width=4096, warps=4, occupancy=1, latency=7),
    "dx": variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=7, rows=2),
}


def select_of(form: Form, op: str = "backward", dtype: str = "bfloat16", **others):
    asked = planning.problem(op, 4096, dtype, facts=GPU, form=form, **others)
    return select(asked, tables.tables_of(90, GPU.target, user_folder()))


@pytest.mark.parametrize(("op", "form"), WITH_CALLS)
def test_a_form_is_that_of_its_own_problem(op, form):
    bucket = BUCKET._replace(op=op, form=form)
    assert bucket.problem(GPU).bucket == bucket
    assert (form_named(form) == PLAIN) == (form == PLAIN_ROWS)


@pytest.mark.parametrize(("op", "form"), [each for each in WITH_CALLS if each[1] != PLAIN_ROWS])
@pytest.mark.parametrize("place", ["user", "shipped"])
def test_an_entry_serves_its_form_and_no_other(folders, place, op, form):
    """Plain rows least of all: its settings were timed with more in registers."""
    bucket = BUCKET._replace(op=op, form=form)
    before = {each: chosen(bucket._replace(form=each)) for each in FORMS_OF_RECORDS}
    entry = entry_of(bucket, TUNED[op])
    if place == "user":
        tables.update(folders[0], TARGET, [entry])
    else:
        ship(folders[1], TARGET, entry)
    found = choice(bucket)
    assert found.first == TUNED[op] != before[form]
    assert found.source == f"the entry for 4096 columns of {op}, bfloat16, {form}"
    for other in FORMS_OF_RECORDS:
        if other != form:
            assert chosen(bucket._replace(form=other)) == before[other]
    assert chosen(bucket._replace(dtype="float16")) == TUNED[op], "float16 takes it where it has none"
    assert chosen(bucket._replace(n=4080)) != TUNED[op] != chosen(bucket._replace(size="few"))


def test_an_entry_of_a_residual_serves_calls_that_have_that_alone(folders):
    """Tuning timed and checked those."""
    tables.update(folders[0], TARGET, [entry_of(BUCKET._replace(form=RESIDUAL), TUNED["backward"])])
    tables.update(
        folders[0], TARGET, [entry_of(BUCKET._replace(form=RESIDUAL, dtype="float32"), TUNED["backward"])]
    )
    assert select_of(Form(residual=True)).first == TUNED["backward"]
    assert select_of(Form(residual=True), dtype="float32").first == TUNED["backward"]
    others = Form(residual=True, bias=True), Form(residual=True, heads=8), form_named(D_RESIDUAL)
    for form in (*others, Form(bias=True)):
        assert select_of(form).first != TUNED["backward"], form
    assert select_of(Form(residual=True, narrowest=2), dtype="float32").first != TUNED["backward"]


def test_dx_of_a_form_takes_what_the_backward_of_it_has(folders):
    tables.update(folders[0], TARGET, [ENTRY, entry_of(BUCKET._replace(form=RESIDUAL), TUNED["backward"])])
    assert select_of(Form(residual=True), "dx").first == TUNED["backward"]
    assert select_of(PLAIN, "dx").first == VARIANT


def test_beside_a_float32_weight_entries_of_a_form_are_of_their_own(folders):
    residual = BUCKET._replace(form=RESIDUAL)
    beside = TUNED["backward"], variants.BackwardRows(width=4096, warps=8, occupancy=1, latency=9)
    entries = [entry_of(residual, beside[0]), entry_of(residual._replace(weight=FLOAT32), beside[1])]
    tables.update(folders[0], TARGET, entries)
    for weight, variant in (("bfloat16", beside[0]), (None, beside[0]), ("float32", beside[1])):
        assert select_of(Form(residual=True), weight=weight).first == variant


def test_a_rule_of_a_form_says_so(folders):
    asked = planning.problem("forward", 1024, form=Form(residual=True))
    plan = select(asked, planning.rules_of())
    assert plan.source == "the rule for 513 to 1024 columns, residual"
    assert not select_of(PLAIN).source.endswith(RESIDUAL)


@pytest.mark.parametrize("form", OTHERS)
def test_a_kernel_that_cannot_have_the_form_is_refused_in_a_file(form):
    """The kernel would omit the residual or db in silence."""
    bucket, tile = BUCKET._replace(n=4096, form=form), dict(rows=8, strip=256, slab=64)
    entry = entry_of(bucket, variants.BackwardSplit(width=4096, warps=8, occupancy=1, latency=1, **tile))
    text = tables.render_table(TARGET, [entry])
    expected = f"record 0: kernel: expected one that takes the form '{form}', got 'backward_split'"
    with pytest.raises(ValueError, match=expected):
        tables.parse_table(text, TARGET)
    plain = entry._replace(forms=(PLAIN_ROWS,))
    assert tables.parse_table(tables.render_table(TARGET, [plain]), TARGET) == [plain]


def test_a_form_that_the_op_has_no_calls_of_makes_a_file_unfit(folders):
    """A forward writes no d_residual; dx alone has no db beside it."""
    assert WITHOUT_CALLS == [("forward", "d_residual"), ("dx", "bias")]
    for op, form in WITHOUT_CALLS:
        bucket = BUCKET._replace(op=op, form=form)
        text = tables.render_table(TARGET, [ENTRY, entry_of(bucket, TUNED[op])])
        expected = f"record 1: forms: expected some that a {op} can be of, got '{form}'"
        with pytest.raises(ValueError, match=expected):
            tables.parse_table(text, TARGET)
        path = tables.table_path(folders[0], TARGET)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        tables.table_in.cache_clear()
        with pytest.warns(UserWarning, match=expected):
            assert chosen() == rule() != VARIANT


def test_an_entry_of_several_forms_is_of_ops_that_have_calls_of_each(folders):
    item = json.loads(records.render(ENTRY))
    both = records.parse(item | {"forms": ["plain", "bias"]}, 90)
    assert {bucket.form for bucket in both.buckets()} == {"plain", "bias"}
    with pytest.raises(ValueError, match="forms: expected some that a dx can be of, got 'bias'"):
        records.parse(item | {"forms": ["plain", "bias"], "ops": ["backward", "dx"]}, 90)


def test_a_form_that_there_is_not_makes_a_file_unfit(folders):
    item = json.loads(records.render(ENTRY)) | {"forms": ["sideways"]}
    with pytest.raises(ValueError, match="forms: expected some of "):
        records.parse(item, 90)


def test_a_rule_that_does_not_lend_serves_its_own_form_and_size_alone():
    """Such rules fill registers a residual needs."""
    item = json.loads(records.render(ENTRY)) | {"n": [4096, 4096], "sizes": ["small", "large"]}
    own, lent = (
        records.parse(item | {"settings": item["settings"] | {"latency": latency}, "lends": lends}, 90)
        for latency, lends in ((5, False), (7, True))
    )
    by = Tables(rules=(records.Records([own, lent]),))
    residual = Form(residual=True)

    def latency(form: Form = PLAIN, size: str = "large") -> int:
        return choose(planning.problem("backward", 4096, size=size, form=form), by).first.latency

    assert latency() == latency(size="small") == 5
    assert latency(residual) == latency(residual, "small") == latency(Form(narrowest=2)) == 7
    of_form = records.parse(item | {"forms": [RESIDUAL], "sizes": ["large"], "lends": False}, 90)
    by = Tables(rules=(records.Records([of_form, lent]),))
    assert latency(residual) == of_form.variant(4096).latency != 7
    assert latency(residual, "few") == latency(residual._replace(d_residual=True)) == 7


@pytest.mark.parametrize(("op", "form"), [each for each in WITH_CALLS if each[1] != PLAIN_ROWS])
def test_tuning_tries_what_ships_for_the_form_then_what_ships_for_the_nearest(folders, op, form):
    bucket = BUCKET._replace(op=op, form=form)
    nearest = {
        D_RESIDUAL: (D_RESIDUAL, RESIDUAL, PLAIN_ROWS),
        RESIDUAL: (RESIDUAL, PLAIN_ROWS),
        BIAS: (BIAS, PLAIN_ROWS),
    }
    latencies = {each: latency for latency, each in enumerate(FORMS_OF_RECORDS, 2)}
    shipped = {
        each: type(TUNED[op])(**dict(TUNED[op].settings(), latency=latency))
        for each, latency in latencies.items()
        if bucket._replace(form=each).has_calls
    }
    ship(folders[1], TARGET, *(entry_of(bucket._replace(form=each), own) for each, own in shipped.items()))

    def tried(asked: Bucket) -> list[Variant]:
        return [each for each in tables.shipped_for(asked) if each in shipped.values()]

    assert tried(bucket) == [shipped[each] for each in nearest[form]]
    assert tried(bucket._replace(form=PLAIN_ROWS)) == [shipped[PLAIN_ROWS]]


@pytest.mark.parametrize("form", OTHERS)
def test_a_new_entry_replaces_that_of_its_form_alone(folders, form):
    bucket = BUCKET._replace(form=form)
    later = variants.BackwardRows(width=4096, warps=8, occupancy=1, latency=2)
    tables.update(folders[0], TARGET, [ENTRY, entry_of(bucket, TUNED["backward"])])
    tables.update(folders[0], TARGET, [entry_of(bucket, later)])
    assert chosen(bucket) == later and chosen(BUCKET) == VARIANT
    assert len(tables.table_in(folders[0], TARGET)) == 2


# (rows, heads) of the tiles of a forward and a backward, by D and H. 8, 28 and 32 were timed (rules._tiles_of_heads).
def form_of(*given):
    """The launch code's, with which the kernels are imported."""
    norm = pytest.importorskip("tilegym_rmsnorm.backends.cutile.host.norm", exc_type=ImportError)
    return norm.form_of(*given)


TIMED_OPS = ("forward", "backward")
TIMED = {
    (64, 8): ((8, 8), (8, 8)),
    (64, 28): ((16, 4), (16, 4)),
    (64, 32): ((4, 16), (8, 8)),
    (64, 40): ((8, 8), (8, 8)),
    (80, 8): ((8, 8), (4, 8)),
    (80, 28): ((16, 4), (8, 4)),
    (80, 32): ((4, 16), (4, 8)),
    (80, 40): ((8, 8), (4, 8)),
    (128, 8): ((4, 8), (8, 4)),
    (128, 28): ((8, 4), (8, 4)),
    (128, 32): ((2, 16), (8, 4)),
    (128, 40): ((4, 8), (8, 4)),
    (160, 8): ((4, 8), (2, 8)),
    (160, 28): ((8, 4), (4, 4)),
    (160, 32): ((2, 16), (2, 8)),
    (160, 40): ((4, 8), (2, 8)),
    (256, 8): ((2, 8), (4, 4)),
    (256, 28): ((4, 4), (4, 4)),
    (256, 32): ((1, 16), (4, 4)),
    (256, 40): ((2, 8), (4, 4)),
}


def rows_of(*size):
    return torch.empty(size, dtype=BF16, device="meta")


def selected(*rows, per_head=False, bias=False):
    """B, T and H, the form, and the first kernel of each of TIMED_OPS."""
    n = rows[0].shape[-1]
    given = viewed(rows, views_of(n, rows[0].shape[-2] if per_head else 0, rows))
    _, form = form_of(given, (BF16,), False, bias, per_head)
    asked = (planning.problem(op, n, form=form) for op in TIMED_OPS)
    return tuple(given[0].shape[:3]), form, [select(each, planning.rules_of()).first for each in asked]


@pytest.mark.parametrize("d, h", TIMED)
def test_tiles_that_were_timed(d, h):
    """q lies in (4, 4096, 3, H, D), and a gradient is transposed."""
    q, dy = rows_of(4, 4096, 3, h, d)[:, :, 0], rows_of(4, h, 4096, d).transpose(1, 2)
    lead, _, found = selected(q, dy)
    assert lead == (4, 4096, h)
    assert tuple((each.rows, each.heads) for each in found) == TIMED[d, h]


VIEWS = {
    "tokens but the first": rows_of(2, 4096, 512)[:, 1:],
    "tokens of three images": rows_of(3, 257, 768)[:, 1:],
    "tokens of many images": rows_of(256, 197, 768)[:, 1:],
    "wide": rows_of(3, 4000, 1024)[:, 1:],
    "q but the first": rows_of(2, 4096, 32, 128)[:, 1:],
    "narrow q but the first": rows_of(2, 4096, 32, 64)[:, 1:],
    "q (B, H, T, D)": rows_of(2, 4095, 8, 128).transpose(1, 2),
    "narrow q (B, H, T, D)": rows_of(2, 4095, 8, 64).transpose(1, 2),
    "k of two heads (B, H, T, D)": rows_of(2, 4095, 2, 64).transpose(1, 2),
    "narrower q (B, H, T, D)": rows_of(2, 4095, 8, 32).transpose(1, 2),
    "short q (B, H, T, D)": rows_of(64, 127, 8, 128).transpose(1, 2),
    "q of one token": rows_of(64, 1, 3, 8, 128)[:, :, 0],
    "7 heads": rows_of(2, 4096, 3, 7, 128)[:, :, 0],
    "71 heads": rows_of(2, 4096, 3, 71, 64)[:, :, 0],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_tiles_are_full(name, bias):
    lead, form, found = selected(VIEWS[name], bias=bias)
    assert form.heads
    for op, first in zip(TIMED_OPS, found, strict=True):
        wasted = first.tiled_rows(lead) / math.prod(lead)
        assert wasted < 1.07, (op, lead, first)


@pytest.mark.parametrize("n", [64, 128, 512, 1024, 2048])
def test_many_sequences_have_few_plans(n):
    """Each is a kernel to compile. A sequence of 256 or more has that of rows that `warmup` is told of by one head."""
    for view in (
        lambda t: rows_of(2, t + 1, n)[:, 1:],
        lambda t: rows_of(2, t, 8, n).transpose(1, 2),
        lambda t: rows_of(2, t + 1, 4, n)[:, 1:],
    ):
        forms = {selected(view(t))[1] for t in range(2, 4200, 13)}
        assert len(forms) <= (1 if n > 1024 else 7)
        long = {selected(view(t))[1] for t in range(256, 4200, 13)}
        assert len(long) == 1
    assert (
        selected(rows_of(2, 4096, n)[:, 1:])[1] == form_of([rows_of(1, 1, 1, n)], (), False, False, False)[1]
    )


def test_heads_of_a_tile():
    found = {h: heads_of_form(128, h) for h in range(1, 5000)}
    assert set(found.values()) == {1, 2, 4, 8, 16, 64}
    for h, each in found.items():
        assert each == min(16, h & -h) or -(-h // each) * each <= h * (17 / 16 if h < 256 else 5 / 4)
    assert {heads_of_form(1025, h) for h in (1, 7, 16, 4096)} == {1}, "a row a block"


def test_weights_of_heads_have_tiles_that_divide_them():
    """All rows of a tile along T have the weights of its heads."""
    for h, n in itertools.product((8, 28, 71, 127, 256, 300), (64, 128, 1024)):
        q = rows_of(2, 4096, 3, h, n)[:, :, 0]
        lead, form, found = selected(q, per_head=True)
        assert form == Form(heads=h, per_head=True) and lead[2] == h
        assert all(h % each.heads == 0 and each.heads <= 16 for each in found)


@pytest.mark.parametrize(
    "n, form, found",
    [
        (128, Form(), (64, 4)),
        (128, Form(bias=True), (64, 4)),
        (128, Form(is_scattered=True), (32, 4)),
        (100, Form(), (32, 4)),
        (128, Form(per_head=True), (32, 4)),
        (128, Form(per_head=True, bias=True), (32, 3)),
    ],
    ids=str,
)
def test_forwards_beside_a_residual_hold_what_registers_have_room_for(n, form, found):
    """(rows of a tile, blocks an SM). On Hopper larger tiles spilled up to 408 bytes a thread where weights are of
    heads or rows begin anywhere; others did not, and keep them."""
    asked = planning.problem("forward", n, form=form._replace(residual=True, heads=8))
    first = select(asked, planning.rules_of()).first
    assert (first.rows_of_tile, first.occupancy) == found


def test_forms_of_several_dtypes_have_them_too():
    rows = rows_of(2, 8, 4096, 64).transpose(1, 2)[:, 1:], rows_of(2, 4095, 8, 64).to(FP32)
    dtype, form = form_of(viewed(rows, views_of(64, 0, rows)), (BF16,), True, False, False)
    assert dtype is FP32 and form.heads == 8 and form.narrowest == 2
