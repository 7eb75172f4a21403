# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The selector: the plan of a problem.

The first that serves it decides: records of the GPU model (the user's entries, then those that ship), rules of all
architectures, rules of this one, and what can be reasoned (rules.py). Of records of a GPU model float16 takes
bfloat16's where it has none of its own; dx alone, where none is of it, takes a backward's, if that variant
`serves_dx_alone`. Rows of 2-byte elements beside a float32 weight take records and rules of such a weight, and only
then what serves beside a weight of x's dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tilegym_rmsnorm.backends.cutile.plans import rules
from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS, Split
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    FLOAT32,
    ITEMSIZE,
    LAUNCHES_AT_ONCE,
    PLAIN,
    PLAIN_ROWS,
    SAME,
    Bucket,
    Problem,
    form_named,
)
from tilegym_rmsnorm.backends.cutile.plans.records import SERVED_BY, Record, Tables, nearest_forms
from tilegym_rmsnorm.backends.cutile.plans.sizes import NO_END
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant

SHARED = {"float16": ("bfloat16",)}  # the same bytes, and the same float32 registers


class Choice(NamedTuple):
    first: Variant
    source: str
    spills: str = ""


def select(problem: Problem, tables: Tables) -> Plan:
    """The plan that serves a problem. Raises ValueError where nothing does."""
    n, dtype, architecture = problem.n, problem.dtype, problem.device.architecture
    if n < 1 or dtype not in ITEMSIZE or architecture not in rules.ARCHITECTURES:
        known = f"a dtype of {tuple(ITEMSIZE)}, architecture one of {rules.ARCHITECTURES}"
        raise ValueError(f"expected rows of 1 element or more, {known}, got {n}, {dtype}, {architecture}")
    if problem.partials == "own" and problem.op == "backward":
        shared = _unshared(problem, tables)
        first = rules.own_partials(problem, shared.first)
        return plan_of(problem, first, "partials of its own", shared.spills if first is shared.first else "")
    if problem.policy.is_batch_invariant:
        return _select_batch_invariant(problem, Tables(rules=tables.rules))
    return plan_of(problem, *choose(problem, tables))


def _select_batch_invariant(problem: Problem, tables: Tables) -> Plan:
    """The plan whose first kernel adds a row as the rules' kernel for many rows does, on any number of SMs; for dx
    alone as that of a backward beside a trained weight. Raises ValueError where fewer SMs are left than its teams need.
    """
    device = problem.device._replace(most_members=MOST_MEMBERS)
    asked = problem._replace(device=device, policy=problem.policy._replace(sm_margin=0))
    trained = asked._replace(op="backward") if asked.op == "dx" and asked.weight else asked
    of_all = choose(trained._replace(size="large"), tables)
    is_mixed_team = bool(problem.form.narrowest) and of_all.first.members > 1 and of_all.first.uses_tma
    if is_mixed_team or problem.policy.is_device_invariant and isinstance(of_all.first, Split):
        # Beside a wider residual teams by TMA have two orders by ct.sum, and in one order the compiler makes some of
        # them load over x that is still read (tests/machine_code/test_one_order.py). The SMs decide the slabs of a
        # split backward, whose rows share a row of dw_partial.
        alone = trained._replace(size="large", policy=trained.policy._replace(teams=False))
        of_all = Choice(rules.reasoned(alone), "reasoned (plans/rules.py)")
    first = of_all.first
    if first.members > problem.most_members:
        raise ValueError(
            f"reproducible: expected SMs for teams of {first.members} blocks, {LAUNCHES_AT_ONCE} for each, or"
            f" set_teams(False) on every GPU, for rows of {problem.n} elements; got {problem.sm_count} SMs"
        )
    # Two kernels of one order had other bits on an H200 where rows begin between 16 bytes (3001 columns). They have
    # other orders in machine code beside narrower arrays, as float32 beside a weight of 2 bytes (2048 columns).
    is_held_alike = problem.is_aligned and not problem.has_narrower_arrays
    for choice in _own_of_batch_invariant(asked, of_all, tables) if is_held_alike else ():
        if all(choice.first.order(each) == first.order(each) for each in problem.vectors):
            return plan_of(problem, *choice)
    return plan_of(problem._replace(op=trained.op), *of_all)


def _own_of_batch_invariant(asked: Problem, of_all: Choice, tables: Tables) -> Iterator[Choice]:
    """Yield choices of the problem's own op and size class. Of "device" the rows of a sum over rows are shared one way
    whatever M is. A block of a split backward holds a row once, so it has registers for one by as many warps."""
    is_of_sums = asked.policy.is_device_invariant and asked.op == "backward"
    for size in ("large",) if is_of_sums else dict.fromkeys((asked.size, "large")):
        own = choose(asked._replace(size=size), tables)
        yield own
        if isinstance(own.first, Split) and own.first.warps != of_all.first.warps:
            yield own._replace(first=dataclasses.replace(own.first, warps=of_all.first.warps))
    if of_all.first.serves_dx_alone:
        yield of_all


def choose(problem: Problem, tables: Tables) -> Choice:
    """The variant of the first kernel, and why.

    A call with a residual, a bias or several dtypes takes the first rule whose kernel can have them (rules.takes_form):
    of its form, or of plain calls, of its size class or of large calls, whose kernels are the plainest. An entry, or a
    rule that does not lend, serves calls that have its form and no more, since it fills the registers that others need:
    the backward's rule for 3072 plain columns takes 116.8 us with a residual, the one that lends 95.7 (H200,
    16384x3072, bfloat16). Heads have what can be reasoned.
    """
    if problem.form == PLAIN:
        found = next(_recorded(problem.bucket, tables, problem, is_lent=False), None)
        return found or Choice(rules.reasoned(problem), "reasoned (plans/rules.py)")
    own, without_entries = problem.bucket, Tables(rules=tables.rules)
    for bucket in () if problem.form.heads else _like(own):
        is_exact = bucket == own and problem.form == form_named(own.form)
        for choice in _recorded(bucket, tables if is_exact else without_entries, problem, not is_exact):
            # An entry was timed and checked with the form.
            if choice.first.serves_form(problem) if is_exact else rules.takes_form(choice.first, problem):
                return choice
    first = rules.reasoned(problem)
    if not first.serves_form(problem):
        raise ValueError(f"expected a form that kernels take (rules.is_fused), got {problem.form}")
    return Choice(first, "reasoned (plans/rules.py)")


def _like(bucket: Bucket) -> Iterator[Bucket]:
    """The bucket, and those whose rules serve it where it has none."""
    for form in nearest_forms(bucket.form):
        for size in dict.fromkeys((bucket.size, "large")):
            yield bucket._replace(form=form, size=size)


def _recorded(bucket: Bucket, tables: Tables, problem: Problem, is_lent: bool) -> Iterator[Choice]:
    """Yield the choices of the records for a bucket, in order."""
    bucket = bucket._replace(weight=SAME)
    for weight in (FLOAT32, SAME) if problem.is_beside_float32 else (SAME,):
        beside = bucket._replace(weight=weight)
        if found := _entry(beside, tables, problem):
            yield found
        for each in tables.rules:
            if rule := each.find(beside, problem.most_members, problem.is_aligned, is_lent):
                yield Choice(rule[1], f"the rule for {_columns(rule[0])}{_of(bucket)}", rule[0].spills)


def _entry(bucket: Bucket, tables: Tables, problem: Problem) -> Choice | None:
    """The first entry that serves a bucket."""
    dtypes = (bucket.dtype, *SHARED.get(bucket.dtype, ()))
    for op, entries, dtype in itertools.product(SERVED_BY[bucket.op], tables.entries, dtypes):
        asked = bucket._replace(op=op, dtype=dtype)
        found = entries.find(asked, problem.most_members, problem.is_aligned)
        if found and (op == bucket.op or found[1].serves_dx_alone):
            source = f"the entry for {_columns(found[0])} of {op}, {dtype}{_of(bucket)}"
            return Choice(found[1], source, found[0].spills)
    return None


def _unshared(problem: Problem, tables: Tables) -> Choice:
    """Choose the first kernel of a plan that shares no partial rows: the rules' kernel for many rows. dx alone leaves
    registers for a row's terms of dw, but not in wide rows."""
    op = "backward" if problem.n > rules.WIDEST_BACKWARD_ROW else "dx"
    plain = problem._replace(op=op, size="large", weight=problem.dtype)
    return choose(plain, Tables(rules=tables.rules))


def _of(bucket: Bucket) -> str:
    return "" if bucket.form == PLAIN_ROWS else f", {bucket.form}"


def _columns(record: Record) -> str:
    if record.first == record.last:
        return f"{record.first} columns"
    if record.last == NO_END:
        return f"{record.first} columns or more"
    return f"{record.first} to {record.last} columns"
