# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Entries of a form (plans/problem.py: FORMS): which calls they serve, what a file may hold, and how they are named."""

from __future__ import annotations

import json

import planning
import pytest
from table_cases import BUCKET, ENTRY, GPU, TARGET, VARIANT, choice, chosen, entry_of, rule, ship

from tilegym_rmsnorm.backends.cutile.plans import records, select, variants
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FLOAT32,
    FORMS,
    OPS,
    PLAIN,
    PLAIN_ROWS,
    RESIDUAL,
    Bucket,
    Form,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder

OTHERS = tuple(form for form in FORMS if form != PLAIN_ROWS)
EACH = [BUCKET._replace(op=op, form=form) for form in FORMS for op in OPS]
WITH_CALLS = [(each.op, each.form) for each in EACH if each.has_calls]
WITHOUT_CALLS = [(each.op, each.form) for each in EACH if not each.has_calls]
TUNED = {
    "forward": variants.ForwardRows(width=4096, warps=4, occupancy=3, latency=5),
    "backward": variants.BackwardRows(width=4096, warps=4, occupancy=1, latency=7),
    "dx": variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=7, rows=2),
}


def select_of(form: Form, op: str = "backward", dtype: str = "bfloat16", **others):
    asked = planning.problem(op, 4096, dtype, facts=GPU, form=form, **others)
    return select.select(asked, tables.tables_of(90, GPU.target, user_folder()))


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
    before = {each: chosen(bucket._replace(form=each)) for each in FORMS}
    entry = entry_of(bucket, TUNED[op])
    if place == "user":
        tables.update(folders[0], TARGET, [entry])
    else:
        ship(folders[1], TARGET, entry)
    found = choice(bucket)
    assert found.first == TUNED[op] != before[form]
    assert found.source == f"the entry for 4096 columns of {op}, bfloat16, {form}"
    for other in FORMS:
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
    plan = select.select(asked, planning.rules_of())
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
    by = select.Tables(rules=(records.Records([own, lent]),))
    residual = Form(residual=True)

    def latency(form: Form = PLAIN, size: str = "large") -> int:
        return select.choose(planning.problem("backward", 4096, size=size, form=form), by).first.latency

    assert latency() == latency(size="small") == 5
    assert latency(residual) == latency(residual, "small") == latency(Form(narrowest=2)) == 7
    of_form = records.parse(item | {"forms": [RESIDUAL], "sizes": ["large"], "lends": False}, 90)
    by = select.Tables(rules=(records.Records([of_form, lent]),))
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
    latencies = {each: latency for latency, each in enumerate(FORMS, 2)}
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
