# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of tuned configs, over whatever hypothesis writes into them."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import BUCKET, ENTRY, TARGET

from tilegym_rmsnorm.backends.cutile.plans import problem, select, tables
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.tables import Entry, Timing

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**k for k in range(20)]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["rows", "tiles", "teams", "fused", "strips", "chunks", "forward", "float32", "few", "small"]
    ),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_whatever_a_table_says_it_is_refused_or_describes_kernels(data):
    fused = Config("fused", 4096, 8, 1, 1, rows=64, strip=32, slab=512)
    teams = Config("teams", 1024, 8, 1, 1, members=4)
    config = data.draw(st.sampled_from([ENTRY.config, fused, teams]))
    text = json.loads(tables.render(TARGET, {BUCKET: Entry(config, ENTRY.timings)}))
    owners = [text, text["entries"][0], text["entries"][0]["config"]]
    for _ in range(data.draw(st.integers(1, 3))):
        owner = data.draw(st.sampled_from(owners))
        owner[data.draw(st.sampled_from(sorted(owner)))] = data.draw(VALUES)
    try:
        table = tables.parse(json.dumps(text), TARGET)
    except ValueError:
        return
    for bucket, entry in table.items():
        tables.check_config(entry.config, bucket, TARGET.architecture)
        assert entry.config.width * entry.config.rows >= 1 and bucket.n >= 1
        assert rows_of_class(bucket.size, bucket.n)
        if entry.config.kernel in ("rows", "tiles", "teams", "fused"):
            assert entry.config.lanes >= bucket.n
    assert tables.parse(tables.render(TARGET, table), TARGET) == table


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(data):
    """Every field of Config that decides something is kept, also one that is added later."""
    buckets = st.builds(
        Bucket,
        st.sampled_from(list(select.RULES)),
        st.integers(1, 65536),
        st.sampled_from(list(problem.ITEMSIZE)),
        st.sampled_from(SIZES),
        st.sampled_from(problem.WEIGHTS),
    ).filter(
        lambda bucket: (
            rows_of_class(bucket.size, bucket.n) and (bucket.dtype, bucket.weight) != ("float32", "float32")
        )
    )
    times = st.floats(0.1, 1e6)
    table = {}
    for bucket in data.draw(st.lists(buckets, max_size=5)):
        config = select.RULES[bucket.op](bucket.n, problem.ITEMSIZE[bucket.dtype], 90, bucket.size)
        timings = data.draw(st.lists(st.builds(Timing, st.integers(1, 2**24), times, times), max_size=2))
        table[bucket] = Entry(config, tuple(timings))
    read = tables.parse(tables.render(TARGET, table), TARGET)
    assert read.keys() == table.keys()
    for bucket, entry in read.items():
        expected = table[bucket]
        assert entry.timings == expected.timings
        assert replace(entry.config, reason="", spills="") == replace(expected.config, reason="", spills="")
