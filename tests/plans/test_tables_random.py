# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of tuned settings, over whatever hypothesis writes into them."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import BUCKET, GPU, TARGET, VARIANT, entry_of, rule

from tilegym_rmsnorm.backends.cutile.plans import problem, rules
from tilegym_rmsnorm.backends.cutile.plans.partition import Registers
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardSplit, BackwardTeam
from tilegym_rmsnorm.backends.cutile.runtime import tables

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**k for k in range(20)]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        [
            "backward_rows",
            "backward_tiles",
            "backward_team",
            "backward_split",
            "backward_strips",
            "forward_rows",
        ]
        + ["backward_reread", "forward", "float32", "few", "small", "any"]
    ),
    st.lists(st.sampled_from(["forward", "dx", "float16", "float32", "few", "small", "same"]), max_size=2),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
SETTINGS = st.sampled_from(
    ["pieces", "rest", "packed", "rows", "grid_percent", "two_tiles", "most_lanes", "tma"]
)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_whatever_a_table_says_it_is_refused_or_describes_kernels(data):
    numbers = {"warps": 8, "occupancy": 1, "latency": 1}
    split = BackwardSplit(width=4096, rows=64, strip=32, slab=512, **numbers)
    team = BackwardTeam(width=1024, members=4, **numbers)
    variant = data.draw(st.sampled_from([VARIANT, split, team]))
    entry = entry_of(BUCKET, variant, {"m": 16384, "before": 140.0, "us": 130.5})
    text = json.loads(tables.render_table(TARGET, [entry]))
    [record] = text["records"]
    for _ in range(data.draw(st.integers(1, 3))):
        owners = [text, record, record["settings"]] if isinstance(record.get("settings"), dict) else [text]
        owner = data.draw(st.sampled_from(owners))
        known = st.sampled_from(sorted(owner) or ["width"])
        name = data.draw(known | SETTINGS if owner is not text and owner is not record else known)
        if data.draw(st.integers(0, 9)):
            owner[name] = data.draw(VALUES)
        else:
            owner.pop(name, None)
    try:
        records = tables.parse_table(json.dumps(text), TARGET)
    except ValueError:
        return
    for record in records:
        assert record.is_entry and record.first >= 1
        variant = record.variant(record.first)
        for bucket in record.buckets():
            variant.check(bucket.n, problem.ITEMSIZE[bucket.dtype], TARGET.architecture)
            assert bucket.op in variant.serves and variant.tile >= 1
            assert rows_of_class(bucket.size, bucket.n)
            if isinstance(variant, Registers):
                assert variant.lanes >= bucket.n
            if isinstance(variant, BackwardSplit):
                assert variant.width + variant.rest >= bucket.n
    assert tables.parse_table(tables.render_table(TARGET, records), TARGET) == records


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(data):
    """Every setting of a variant is kept, also one that is added later."""
    buckets = st.builds(
        Bucket,
        st.sampled_from(problem.OPS),
        st.integers(1, 65536),
        st.sampled_from(list(problem.ITEMSIZE)),
        st.sampled_from(SIZES),
        st.sampled_from(problem.WEIGHTS),
        st.sampled_from(problem.FORMS),
    ).filter(
        lambda bucket: (
            rows_of_class(bucket.size, bucket.n)
            and (bucket.dtype, bucket.weight) != ("float32", "float32")
            and bucket.has_calls
            and rules.is_fused(bucket.problem(GPU))
        )
    )
    times = st.floats(0.1, 1e6)
    evidence = st.fixed_dictionaries({"m": st.integers(1, 2**24), "before": times, "us": times})
    written = {}
    for bucket in data.draw(st.lists(buckets, max_size=5)):
        variant = rule(bucket)
        written[bucket] = variant, entry_of(bucket, variant, *data.draw(st.lists(evidence, max_size=2)))
    text = tables.render_table(TARGET, [entry for _, entry in written.values()])
    read = tables.parse_table(text, TARGET)
    assert read == [entry for _, entry in written.values()]
    for record, (bucket, (variant, _)) in zip(read, written.items(), strict=True):
        assert list(record.buckets()) == [bucket] and record.variant(bucket.n) == variant
