# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Records, rules and entries alike: what is read, what is refused, and which of several decides."""

import itertools
import json
from typing import Any

import pytest

from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.records import Record, Records, parse, render
from tilegym_rmsnorm.backends.cutile.plans.sizes import NO_END, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import BY_KERNEL, BackwardRows, ForwardRows
from tilegym_rmsnorm.backends.cutile.runtime import tables

NUMBERS = {"warps": 8, "occupancy": 1, "latency": 4}
RULE = {
    **{"ops": ["backward", "dx"], "dtypes": ["bfloat16"], "sizes": ["large"], "n": [1025, 8192]},
    **{"kernel": "backward_rows", "settings": NUMBERS},
}
ENTRY = RULE | {"n": 4096, "evidence": [{"gpu": "H100", "m": 16384, "before": 140.0, "us": 130.5}]}
BUCKET = Bucket("backward", 4096, "bfloat16", "large")


def record(**changes: Any) -> Record:
    return parse(RULE | changes, 90)


def found(*records: Record, n: int = 4096, members: int = 16, is_aligned: bool = True, **bucket: str):
    """The variant that the first record which serves a bucket gives; None if none does."""
    pair = Records(records).find(BUCKET._replace(n=n, **bucket), members, is_aligned)
    return pair and pair[1]


def shipped() -> list[tuple[int, Record]]:
    """Each with an architecture that it serves."""
    paths = sorted(tables.SHIPPED_FOLDER.glob("sm_*.json"))
    architectures = [int(path.stem.removeprefix("sm_")) for path in paths]
    own = [(number, each) for number in architectures for each in tables.shipped_records(number)]
    return [*own, *((number, each) for number in (80, 90) for each in tables.shipped_records(None))]


# What is read


def test_what_ships_is_read_as_it_is_written():
    assert len(shipped()) > 200
    for architecture, each in shipped():
        assert parse(json.loads(render(each)), architecture) == each


@pytest.mark.parametrize("item", [RULE, ENTRY], ids=["rule", "entry"])
def test_what_is_not_said_has_a_default_and_is_not_written(item):
    each = parse(item, 90)
    assert (each.weights, each.alignment, each.gpus, each.spills) == (("same",), "aligned", (), "")
    assert each.lends
    assert json.loads(render(each)) == item
    assert each.is_entry == (item is ENTRY)


def test_a_rule_without_an_end_serves_rows_of_any_width():
    each = record(n=[1025, None], settings=NUMBERS | {"width": 2048})
    assert each.last == NO_END and json.loads(render(each))["n"] == [1025, None]
    assert found(each, n=2**20).pieces == 512 and found(each, n=1024) is None


def test_what_follows_from_n_is_left_out():
    def fitted(n: int, **settings: Any) -> BackwardRows:
        return record(settings=NUMBERS | settings).variant(n)

    assert fitted(5120) == BackwardRows(width=8192, **NUMBERS), "one tile holds the row"
    assert fitted(5120, two_tiles=True) == BackwardRows(width=4096, rest=1024, **NUMBERS)
    assert fitted(4096, two_tiles=True) == BackwardRows(width=4096, **NUMBERS)
    assert fitted(5120, width=1024) == BackwardRows(width=1024, pieces=5, **NUMBERS)
    assert fitted(5000, width=1024) == BackwardRows(width=1024, pieces=5, **NUMBERS), "the last is cut off"
    assert fitted(5120, width=4096, rest=1024) == BackwardRows(width=4096, rest=1024, **NUMBERS)


def test_a_team_has_as_few_members_as_hold_the_row():
    def team(n: int, members: int = 16, **settings: Any) -> Team | None:
        return record(kernel="backward_team", settings=NUMBERS | {"width": 4096} | settings).variant(
            n, members
        )

    assert [team(n).members for n in (4097, 8192, 8193, 65536)] == [2, 2, 3, 16]
    assert team(4096) is None, "no team of one"
    assert team(65537) is None and team(65537, members=99) is None, "none of more than 16"
    assert team(20480, members=5).members == 5 and team(20480, members=4) is None
    assert team(20496, pieces=2).members == 3
    assert team(20480, pieces=2) is None, "the last tile of the third member would have no columns"
    assert team(16400, most_lanes=1.25).members == 5 and team(16400, most_lanes=1.2) is None
    assert team(16384, members=4, most_lanes=1.0).members == 4


def name_of(shipped: Any) -> str:
    return str(shipped) if isinstance(shipped, int) else f"{shipped.kernel}-{shipped.first}-{shipped.last}"


@pytest.mark.parametrize(
    ("architecture", "each"), [pair for pair in shipped() if not pair[1].is_entry], ids=name_of
)
def test_what_a_rule_that_ships_gives_can_be_compiled(architecture, each):
    """Its ends and inside compile, where it gives something."""
    last, served = min(each.last, 2**17), 0
    for n in {each.first, last, (each.first + last) // 32 * 16, (each.first + last) // 2}:
        if (variant := each.variant(n)) is None:
            continue
        for op, dtype in itertools.product(each.ops, each.dtypes):
            assert op in BY_KERNEL[each.kernel].serves
            if architecture >= 90 or not variant.uses_tma:
                variant.check(n, ITEMSIZE[dtype], architecture)
        served += any(rows_of_class(size, n) for size in each.sizes)
    assert served


# What is refused

BAD = {
    "no object": (5, "record: expected an object"),
    "a list": ([], "record: expected an object"),
    "a key that nobody knows": (RULE | {"note": "x"}, "keys: expected"),
    "no kernel": ({name: RULE[name] for name in RULE if name != "kernel"}, "keys: expected"),
    "an unknown op": (RULE | {"ops": ["sideways"]}, "ops: expected some of"),
    "no op": (RULE | {"ops": []}, "ops: expected some of"),
    "an op by itself": (RULE | {"ops": "backward"}, "ops: expected some of"),
    "an unknown dtype": (RULE | {"dtypes": ["bfloat16", "float64"]}, "dtypes: expected some of"),
    "an unknown weight": (RULE | {"weights": ["bfloat16"]}, "weights: expected some of"),
    "an unknown size": (RULE | {"sizes": ["medium"]}, "sizes: expected some of"),
    "n of no columns": (RULE | {"n": 0}, "n: expected whole numbers of columns"),
    "n negative": (RULE | {"n": [-1, 4096]}, "n: expected whole numbers of columns"),
    "n backwards": (RULE | {"n": [4096, 1024]}, "n: expected whole numbers of columns"),
    "n of three": (RULE | {"n": [1, 2, 3]}, "n: expected whole numbers of columns"),
    "n without a beginning": (RULE | {"n": [None, 4096]}, "n: expected whole numbers of columns"),
    "n no number": (RULE | {"n": 4096.0}, "n: expected whole numbers of columns"),
    "n true": (RULE | {"n": True}, "n: expected whole numbers of columns"),
    "an unknown kernel": (RULE | {"kernel": "magic"}, "kernel: expected"),
    "lends no truth": (RULE | {"lends": "no"}, "lends: expected true or false"),
    "a kernel that is no first one": (RULE | {"kernel": "sum_partials"}, "kernel: expected"),
    "an unknown alignment": (RULE | {"alignment": "odd"}, "alignment: expected aligned or any"),
    "gpus by themselves": (RULE | {"gpus": "NVIDIA H100"}, "gpus: expected"),
    "spills no text": (RULE | {"spills": 8}, "spills: expected"),
    "settings no object": (RULE | {"settings": 5}, "settings: expected"),
    "no settings": (RULE | {"settings": []}, "settings: expected"),
    "evidence no list": (RULE | {"evidence": {"us": 5}}, "evidence: expected"),
    "evidence no time": (RULE | {"evidence": [{"us": 0}]}, "evidence: expected positive numbers"),
    "evidence of words": (RULE | {"evidence": [{"before": "a"}]}, "evidence: expected positive numbers"),
    "an entry of a kernel for another op": (ENTRY | {"ops": ["forward"]}, "kernel: expected one for forward"),
    "an entry beside a float32 weight that has no other": (
        ENTRY | {"dtypes": ["bfloat16", "float32"], "weights": ["float32"]},
        "weight: expected same",
    ),
    "an entry for a size that no M has": (ENTRY | {"sizes": ["small"]}, "size: expected a class"),
    "an entry that does not hold its row": (
        ENTRY | {"settings": NUMBERS | {"width": 2048, "pieces": 1}},
        "columns of all tiles: expected at least 4096",
    ),
    "an entry of a team of one": (
        ENTRY | {"kernel": "backward_team", "settings": NUMBERS | {"width": 4096}},
        "settings: expected a team that holds 4096 columns",
    ),
    "an entry of 16 warps": (ENTRY | {"settings": NUMBERS | {"warps": 16}}, "warps: expected 4 or 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused(name):
    item, said = BAD[name]
    with pytest.raises(ValueError) as raised:
        parse(item, 90)
    assert str(raised.value).startswith(said) and ", got " in str(raised.value)


@pytest.mark.parametrize(
    "settings", [{"warps": 8}, NUMBERS | {"threads": 4}, NUMBERS | {"width": "4096"}, NUMBERS | {"width": 0}]
)
def test_settings_that_make_no_variant_are_refused_of_an_entry(settings):
    with pytest.raises((TypeError, KeyError, ArithmeticError)):
        parse(ENTRY | {"settings": settings}, 90)


def test_tma_is_refused_of_an_entry_before_hopper():
    item = ENTRY | {"kernel": "backward_pipelined"}
    assert parse(item, 90).variant(4096).uses_tma
    with pytest.raises(ValueError, match="TMA: expected none on sm_80, got 'backward_pipelined'"):
        parse(item, 80)


# Which of several decides


def test_an_entry_serves_rows_that_are_not_aligned_and_a_rule_only_those_that_say_so():
    rule, any_rows, entry = record(), record(alignment="any"), record(n=4097)
    assert found(rule, n=4097) == found(any_rows, n=4097) == found(entry, n=4097) is not None
    assert found(rule, n=4097, is_aligned=False) is None
    assert found(any_rows, n=4097, is_aligned=False) == found(entry, n=4097, is_aligned=False) is not None
    assert found(entry, n=4098) is None, "it is of one width"


def test_a_record_serves_what_it_lists():
    rule = record()
    assert found(rule) == found(rule, op="dx") is not None
    for change in ({"op": "forward"}, {"dtype": "float32"}, {"size": "few"}, {"weight": "float32"}):
        assert found(rule, **change) is None
    assert found(rule, n=1025) is not None and found(rule, n=8192) is not None
    assert found(rule, n=1024) is None and found(rule, n=8193) is None
    of_both = record(
        ops=["forward"], kernel="forward_rows", dtypes=["bfloat16", "float32"], weights=["same", "float32"]
    )
    for dtype, weight in itertools.product(("bfloat16", "float32"), ("same", "float32")):
        assert found(of_both, op="forward", dtype=dtype, weight=weight) == ForwardRows(width=4096, **NUMBERS)


def test_the_first_record_that_fits_decides():
    narrow, wide = record(n=[1025, 4096], settings=NUMBERS | {"latency": 2}), record()
    assert found(narrow, wide).latency == 2 and found(wide, narrow).latency == 4
    assert found(narrow, wide, n=4097).latency == 4, "the first is not of this width"
    aligned, any_rows = record(settings=NUMBERS | {"latency": 2}), record(alignment="any")
    assert found(aligned, any_rows, n=4097, is_aligned=False).latency == 4
    team = record(kernel="backward_team", settings=NUMBERS | {"width": 1024})
    assert found(team, wide).members == 4 and found(team, wide, members=3) == BackwardRows(
        width=4096, **NUMBERS
    )


def test_alternatives_are_tried_in_order():
    parts = [NUMBERS | {"width": width} for width in (1024, 2048, 4096)]
    team = record(kernel="backward_team", settings=parts)
    assert [
        found(team, members=members) and found(team, members=members).members for members in (4, 3, 2, 1)
    ] == [*(4, 2, 2, None)]
    turned = record(kernel="backward_team", settings=parts[::-1])
    assert found(turned).width == 2048, "4096 columns are no team of tiles of 4096"
    by_lanes = [parts[1] | {"most_lanes": 1.1}, parts[0]]
    few_empty = record(kernel="backward_team", settings=by_lanes)
    assert [found(few_empty, n=n).width for n in (4096, 4112, 6144)] == [2048, 1024, 2048]
    assert json.loads(render(few_empty))["settings"] == by_lanes
