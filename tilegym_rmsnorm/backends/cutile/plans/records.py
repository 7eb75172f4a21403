# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Records: which variant serves which rows, as data, with the evidence for it. Those that ship, for a range of N or for
one, and those that `tune` writes, entries for one N, have the same schema:

    ops, dtypes, weights, sizes, forms      lists: what it serves (problem.py, sizes.py)
    n                             [first, last] columns, or [first, null]; one number for an entry
    alignment                     "any" for rows that are not aligned too (Problem.is_aligned)
    lends                         false: it serves its own form and size class alone, not those that have no record
    gpus                          the models that it is for alone; none: all of an architecture
    kernel, settings              the variant (variants.py) but for what follows from N (`fitted`): a width that holds
                                  the row, the pieces or members that it takes; a list: the first that fits
    spills                        why it is kept although its kernel spills registers
    evidence                      measurements: gpu, m, n (of a rule) and us a whole call; `before`: by what served
                                  until then, or by the alternative that `by` names; gb_per_s instead: compulsory bytes
                                  of a backward, by its first kernel alone (of its time: a copy reached 2991), or
                                  with_sum of dw; op, dtype, weight: which of several, where it is known; `why`: what is
                                  no such figure

The first record that fits decides, so where several do their order matters.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    D_RESIDUAL,
    FORMS,
    ITEMSIZE,
    OPS,
    PLAIN_ROWS,
    RESIDUAL,
    SAME,
    WEIGHTS,
    Bucket,
    Device,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import NO_END, SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect
from tilegym_rmsnorm.backends.cutile.plans.variants import BY_KERNEL

SCHEMA = 2
SERVED_BY = {"forward": ("forward",), "backward": ("backward",), "dx": ("dx", "backward")}
OF_LISTS = {"ops": OPS, "dtypes": tuple(ITEMSIZE), "weights": WEIGHTS, "sizes": SIZES, "forms": FORMS}
OPTIONAL = {
    "weights": [SAME],
    "forms": [PLAIN_ROWS],
    "alignment": "aligned",
    "lends": True,
    "gpus": [],
    "spills": "",
    "evidence": [],
}


class Record(NamedTuple):
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    weights: tuple[str, ...]
    sizes: tuple[str, ...]
    first: int
    last: int
    kernel: str
    settings: tuple[dict[str, Any], ...]
    alignment: str = "aligned"
    lends: bool = True
    gpus: tuple[str, ...] = ()
    spills: str = ""
    evidence: tuple[dict[str, Any], ...] = ()
    forms: tuple[str, ...] = (PLAIN_ROWS,)
    is_entry: bool = False  # of one N, which it serves whether its rows are aligned or not

    def variant(self, n: int, most_members: int = MOST_MEMBERS) -> Variant | None:
        """Return the variant for rows of n elements; None where no settings fit them, or a team would be too large."""
        fitted = (BY_KERNEL[self.kernel].fitted(n, most_members, **each) for each in self.settings)
        return next(filter(None, fitted), None)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets that an entry serves."""
        kinds = itertools.product(self.ops, self.dtypes, self.sizes, self.weights, self.forms)
        for op, dtype, size, weight, form in kinds:
            yield Bucket(op, self.first, dtype, size, weight, form)


class Records:
    """Records in their order, found by what they serve."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = tuple(records)
        self._by_key: dict[Bucket, list[Record]] = {}
        for record in self._records:
            for bucket in record.buckets():
                self._by_key.setdefault(bucket._replace(n=0), []).append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def find(
        self, bucket: Bucket, most_members: int, is_aligned: bool, is_lent: bool = False
    ) -> tuple[Record, Variant] | None:
        """The first record that serves a bucket, and its variant. is_lent: the call is like the bucket, not of it."""
        n = bucket.n
        for record in self._by_key.get(bucket._replace(n=0), ()):
            fits = is_aligned or record.is_entry or record.alignment == "any"
            if record.first <= n <= record.last and fits and (record.lends or not is_lent):
                if (variant := record.variant(n, most_members)) is not None:
                    return record, variant
        return None


def parse(item: Any, architecture: int) -> Record:
    """A record of JSON. ValueError, TypeError, KeyError or ArithmeticError on the first thing that is not as `render`
    writes it."""
    expect(isinstance(item, dict), "record", "an object", item)
    known = {*OF_LISTS, "n", "kernel", "settings", *OPTIONAL}
    item = OPTIONAL | item
    expect(set(item) == known, "keys", sorted(known), sorted(item))
    for name, values in OF_LISTS.items():
        is_known = isinstance(item[name], list) and item[name] and set(item[name]) <= set(values)
        expect(bool(is_known), name, f"some of {values}", item[name])
    n, settings = item["n"], item["settings"] if isinstance(item["settings"], list) else [item["settings"]]
    is_range = isinstance(n, list) and len(n) == 2
    first, last = (n[0], NO_END if n[1] is None else n[1]) if is_range else (n, n)
    is_counted = (is_range or type(n) is int) and type(first) is type(last) is int and 0 < first <= last
    expect(is_counted, "n", "whole numbers of columns", n)
    is_kernel = isinstance(item["kernel"], str) and item["kernel"] in BY_KERNEL
    expect(is_kernel, "kernel", tuple(BY_KERNEL), item["kernel"])
    for name, each in (("settings", settings), ("evidence", item["evidence"])):
        are_objects = isinstance(each, list) and all(isinstance(one, dict) for one in each)
        expect(are_objects, name, "objects", item[name])
    expect(bool(settings), "settings", "one object or more", settings)
    are_names = isinstance(item["gpus"], list) and all(isinstance(gpu, str) for gpu in item["gpus"])
    expect(are_names, "gpus", "a list of names", item["gpus"])
    expect(isinstance(item["spills"], str), "spills", "a text", item["spills"])
    expect(item["alignment"] in ("aligned", "any"), "alignment", "aligned or any", item["alignment"])
    expect(isinstance(item["lends"], bool), "lends", "true or false", item["lends"])
    given: dict[str, Any] = {name: tuple(item[name]) for name in (*OF_LISTS, "gpus", "evidence")}
    given |= {name: item[name] for name in ("kernel", "alignment", "lends", "spills")}
    record = Record(first=first, last=last, settings=tuple(settings), is_entry=type(n) is int, **given)
    for measured in record.evidence:
        numbers = [measured[name] for name in ("m", "us", "before") if name in measured]
        is_number = all(type(each) in (int, float) and 0 < each <= sys.float_info.max for each in numbers)
        expect(is_number, "evidence", "positive numbers", measured)
    # A rule has ranges in which some widths have no calls of its size class.
    if record.gpus or record.is_entry:
        for n in dict.fromkeys((first, last)):
            _check_at(record, n, architecture)
    return record


def _check_at(record: Record, n: int, architecture: int) -> None:
    variant = record.variant(n)
    if variant is None:
        raise ValueError(f"settings: expected a team that holds {n} columns, got {record.settings}")
    for bucket in (each._replace(n=n) for each in record.buckets()):
        serves, itemsize = BY_KERNEL[record.kernel].serves, ITEMSIZE[bucket.dtype]
        expect(bucket.has_calls, "forms", f"some that a {bucket.op} can be of", bucket.form)
        expect(bucket.op in serves, "kernel", f"one for {bucket.op}", record.kernel)
        expect(itemsize == 2 or bucket.weight == SAME, "weight", SAME, bucket.weight)
        has_rows = bool(rows_of_class(bucket.size, bucket.n))
        expect(has_rows, "size", f"a class that some number of rows of {bucket.n} is in", bucket.size)
        expect(variant.heads == 0, "heads", "0: records are of rows", variant.heads)
        takes_form = variant.serves_form(bucket.problem(Device(architecture, 1, MOST_MEMBERS)))
        expect(takes_form, "kernel", f"one that takes the form {bucket.form!r}", record.kernel)
        variant.check(bucket.n, itemsize, architecture)


def render(record: Record) -> str:
    """One line of JSON."""
    last = None if record.last == NO_END else record.last
    item = record._asdict() | {"n": record.first if record.is_entry else [record.first, last]}
    del item["first"], item["last"], item["is_entry"]
    item = {name: list(value) if isinstance(value, tuple) else value for name, value in item.items()}
    if len(record.settings) == 1:
        item["settings"] = record.settings[0]
    order = [*OF_LISTS, "n", "alignment", "lends", "gpus", "kernel", "settings", "spills", "evidence"]
    return json.dumps({name: item[name] for name in order if item[name] != OPTIONAL.get(name)})


class Tables(NamedTuple):
    """Records in the order in which they decide: of this GPU model (`entries`), then rules for its architecture."""

    entries: tuple[Records, ...] = ()
    rules: tuple[Records, ...] = ()


def nearest_forms(form: str) -> tuple[str, ...]:
    """A form, and those whose records suit it where it has none, the nearest first."""
    of_residual = (RESIDUAL,) if form == D_RESIDUAL else ()
    return tuple(dict.fromkeys((form, *of_residual, PLAIN_ROWS)))
