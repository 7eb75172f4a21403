# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Entries of the form "rope": how they are written, what is refused, and which calls of qk_norm_rope they serve."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from table_cases import TARGET, entry_of, ship

from tilegym_rmsnorm.backends.cutile.plans import records, tables
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, OPS, ROPE, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rope import (
    KERNEL_OF_OP,
    RopeChoice,
    entry_problem,
    reasoned,
    tile_of_heads,
    tiles_of,
)
from tilegym_rmsnorm.backends.cutile.plans.select import choose_rope
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES
from tilegym_rmsnorm.backends.cutile.tuning.rope_candidates import rope_candidates

NUMBERS = {"elements": 8192, "heads": 8, "width": 128, "warps": 8, "occupancy": 2, "latency": 5}
ITEM = {
    **{"ops": ["backward"], "dtypes": ["bfloat16"], "sizes": ["large"], "forms": ["rope"], "n": 128},
    **{"kernel": "backward_rope", "settings": NUMBERS},
}
BUCKET = Bucket("backward", 128, "bfloat16", "large", form=ROPE)


def choice(op: str = "backward", **changes: int) -> RopeChoice:
    """One that nothing reasons."""
    return RopeChoice(kernel=KERNEL_OF_OP[op], **(NUMBERS | changes))


def served(folder: Any, bucket: Bucket = BUCKET, dtype: Any = "", **changes: Any) -> tuple[RopeChoice, str]:
    """What serves a call that is like those of the bucket but for changes."""
    asked = entry_problem(bucket.n, bucket.dtype, 90)._replace(**changes)
    found = tables.tables_of(90, TARGET, folder)
    return choose_rope(bucket.op, asked, bucket.dtype if dtype == "" else dtype, bucket.size, found)


def test_an_entry_is_read_as_it_is_written():
    record = records.parse(ITEM, 90)
    assert list(record.buckets()) == [BUCKET] and record.rope == choice()
    assert json.loads(records.render(record)) == ITEM
    assert record == entry_of(BUCKET, choice())


BAD = {
    "a range": ({"n": [64, 128]}, "n: expected one number"),
    "rows too": ({"forms": ["plain", "rope"]}, "forms: expected ['rope']"),
    "rows alone": ({"forms": ["plain"]}, "forms: expected ['rope']"),
    "a kernel of rows": ({"kernel": "backward_rows"}, "kernel: expected backward_rope"),
    "a kernel of another op": ({"kernel": "forward_rope"}, "kernel: expected backward_rope"),
    "an op too many": ({"ops": ["backward", "forward"]}, "kernel: expected forward_rope"),
    "heads that are gathered": ({"n": 72}, "a bucket: expected one that has entries of rope"),
    "heads of no kernel": ({"n": 528}, "a bucket: expected one that has entries of rope"),
    "a float32 weight": ({"weights": ["float32"]}, "a bucket: expected one that has entries of rope"),
    "alternatives": ({"settings": [NUMBERS, NUMBERS]}, "settings: expected one object"),
    **{
        f"{name} {value}": ({"settings": NUMBERS | {name: value}}, expected)
        for name, value, expected in (
            ("elements", 3000, "elements, heads, width: expected powers of two"),
            ("heads", 0, "elements, heads, width: expected powers of two"),
            ("width", 1, "elements, heads, width: expected powers of two"),
            ("heads", 32, "heads: expected at most 16"),
            ("elements", "4096", "elements: expected int"),
            ("elements", 2**17, "elements: expected at most 65536"),
            ("warps", 16, "warps: expected 4 or 8"),
            ("occupancy", 9, "occupancy: expected 1 to 8"),
            ("occupancy", 0, "occupancy: expected 1 to"),
            ("latency", 11, "latency: expected 1 to 10"),
            ("latency", True, "latency: expected int"),
        )
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_entry_is_refused(name):
    changes, said = BAD[name]
    with pytest.raises(ValueError) as raised:
        records.parse(ITEM | changes, 90)
    assert str(raised.value).startswith(said) and ", got " in str(raised.value)


@pytest.mark.parametrize("settings", [{"warps": 8}, NUMBERS | {"rows": 4}])
def test_settings_that_make_no_choice_are_refused(settings):
    with pytest.raises(TypeError):
        records.parse(ITEM | {"settings": settings}, 90)


def test_the_users_table_comes_first_then_what_ships_then_what_is_reasoned(folders):
    user, shipped = folders
    assert served(user) == (
        reasoned("backward", entry_problem(128, "bfloat16", 90)),
        "reasoned (plans/rope.py)",
    )
    ship(shipped, TARGET, entry_of(BUCKET, choice(latency=6)))
    source = "the entry for 128 columns of backward, bfloat16, rope"
    assert served(user) == (choice(latency=6), source)
    tables.update(user, TARGET, [entry_of(BUCKET, choice())])
    assert served(user) == (choice(), source)


def test_an_entry_serves_its_own_bucket_and_those_that_have_none(folders):
    """float16 as bfloat16; a backward without gradients of weights as one with them."""
    user, _ = folders
    tables.update(user, TARGET, [entry_of(BUCKET, choice())])
    lent = {(op, dtype) for op in ("backward", "dx") for dtype in ("bfloat16", "float16")}
    for op, dtype, size, n in itertools.product(OPS, ITEMSIZE, SIZES, (64, 128)):
        found, source = served(user, Bucket(op, n, dtype, size, form=ROPE))
        is_lent = (op, dtype) in lent and (size, n) == ("large", 128)
        assert (found == choice()) == is_lent == source.startswith("the entry"), (op, dtype, size, n)
    tables.update(user, TARGET, [entry_of(BUCKET._replace(op="dx"), choice(latency=7))])
    assert served(user, BUCKET._replace(op="dx"))[0] == choice(latency=7) and served(user)[0] == choice()


def test_calls_of_other_kinds_take_what_is_reasoned(folders):
    """Whose tiles need other registers than those that were compiled."""
    user, _ = folders
    tables.update(user, TARGET, [entry_of(BUCKET, choice())])
    for change in (
        {"rotary_dim": 64},
        {"casting": "llama"},
        *(
            {name: True}
            for name in ("interleaved", "is_scattered", "has_one_step", "has_positions", "per_head")
        ),
    ):
        asked = entry_problem(128, "bfloat16", 90)._replace(**change)
        assert served(user, **change) == (reasoned("backward", asked), "reasoned (plans/rope.py)"), change
    assert served(user, dtype=None)[0] != choice(), "gradients of another dtype"
    for change in ({"has_full_tables": False}, {"rounding": "norm"}, {"rounding": "each"}, {"heads": 1}):
        assert served(user, **change)[0] == choice(), change


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("n", [16, 64, 80, 128, 256, 512])
def test_every_candidate_makes_tiles_for_every_number_of_heads(op, n):
    """That hold no more elements than those which were measured."""
    measured = entry_problem(n, "bfloat16", 90)
    for each in rope_candidates(Bucket(op, n, "bfloat16", "large", form=ROPE), 90, 1000):
        for heads, k_heads in ((1, 1), (5, 1), (16, 16), (28, 4), (64, 8), (1, 5), (300, 300)):
            counts = tile_of_heads(n, heads), tile_of_heads(n, k_heads)
            tiles = tiles_of(measured._replace(heads=counts[0], k_heads=counts[1]), each)
            tiles.check(n, 2, 90)
            assert tiles.tile <= tiles_of(measured, each).tile <= max(each.elements, tiles.lanes)
            assert tiles.of_k.rows_of_tile <= tiles.rows_of_tile and tiles.heads <= counts[0]
