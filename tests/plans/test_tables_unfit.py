# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables that say anything unexpected, or whatever hypothesis writes into them: each is ignored as a whole, with one
warning."""

import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import BUCKET, ENTRY, GPU, TARGET, VARIANT, chosen, entry_of, rule

from tilegym_rmsnorm.backends.cutile.plans import problem, rules
from tilegym_rmsnorm.backends.cutile.plans.partition import Registers
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardSplit, BackwardTeam
from tilegym_rmsnorm.backends.cutile.runtime import tables


def stored(**changes) -> str:
    """A table's JSON with its one record changed. What is None is left out; so it is of settings."""
    data = json.loads(tables.render_table(TARGET, [ENTRY]))
    data["records"] = [_without_none(record | changes) for record in data["records"]]
    return json.dumps(data)


def _without_none(item: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in item.items()
        if value is not None
    }


def of_variant(**settings) -> str:
    """Change some of its variant's settings."""
    return stored(settings=VARIANT.settings() | settings)


NUMBERS = {"width": 4096, "warps": 8, "occupancy": 1, "latency": 4}
PARTS = NUMBERS | {"width": 2048, "members": 2}
PACKED_TEAM = PARTS | {"packed": True, "rstd_ahead": True}
TILES = NUMBERS | {"rows": 2}
SPLIT = {"width": 4096, "warps": 4, "occupancy": 1, "latency": 3, "rows": 8, "strip": 64, "slab": 64}


def forward(kernel: str, numbers: dict[str, Any] = NUMBERS, n: int = 4096, **settings) -> str:
    return stored(kernel=kernel, settings=numbers | settings, n=n, ops=["forward"])


def backward(kernel: str, numbers: dict[str, Any] = NUMBERS, n: int = 4096, **settings) -> str:
    return stored(kernel=kernel, settings=numbers | settings, n=n)


UNFIT = {
    "no JSON": "{",
    "not UTF-8": b"\xff\xfe{}",
    "empty": "",
    "a list": "[]",
    "another schema": stored().replace('"schema": 2', '"schema": 1'),
    "another GPU": stored().replace("H100", "H200"),
    "another architecture": stored().replace('"architecture": 90', '"architecture": 100'),
    "another toolkit": stored().replace("13.4.92", "13.5.37"),
    "records no list": json.dumps({**json.loads(stored()), "records": {"a": 1}}),
    "a record no object": json.dumps({**json.loads(stored()), "records": [[]]}),
    "nested beyond reason": "[" * 200_000,
    "unknown op": stored(ops=["sideways"]),
    "ops no list": stored(ops="backward"),
    "no op": stored(ops=[]),
    "n zero": stored(n=0),
    "n text": stored(n="4096"),
    "n no number": stored(n=4096.0),
    "n true": stored(n=True),
    "n nothing": stored(n=[]),
    "n of one end": stored(n=[4096]),
    "a rule": stored(n=[1, 4096]),
    "unknown dtype": stored(dtypes=["float64"]),
    "unknown size": stored(sizes=["medium"]),
    "unknown weight": stored(weights=["bfloat16"]),
    "a float32 weight beside float32": stored(weights=["float32"], dtypes=["float32"]),
    "size that no number of rows has": stored(sizes=["small"]),
    "unknown key": stored(note="x"),
    "no sizes": stored(sizes=None),
    "rows of an unknown kind": stored(rows="odd"),
    "gpus no list": stored(gpus="NVIDIA H100"),
    "spills no text": stored(spills=8),
    "evidence no time": stored(evidence=[{"m": 1, "before": 0.0, "us": float("nan")}]),
    "evidence beyond floats": stored(evidence=[{"m": 1, "before": 10**400, "us": 1}]),
    "evidence no numbers": stored(evidence=[{"m": 1, "before": "a", "us": 1}]),
    "evidence no object": stored(evidence=["fast"]),
    "evidence no list": stored(evidence="fast"),
    "kernel of dx alone": backward("backward_reread"),
    "kernel of a forward": backward("forward_rows"),
    "kernel that is no first one": backward(
        "sum_partials", {"width": 16, "warps": 4, "occupancy": 4, "rows": 128}
    ),
    "unknown kernel": backward("magic"),
    "kernel no text": stored(kernel=["backward_rows"]),
    "no settings": stored(settings=None),
    "settings no object": stored(settings=5),
    "settings of no kind": stored(settings=[]),
    "settings no objects": stored(settings=[5]),
    "unknown field": of_variant(threads=4),
    "width no power of two": of_variant(width=4097),
    "width too narrow": of_variant(width=2048, pieces=1),
    "width zero": of_variant(width=0),
    "width negative": of_variant(width=-4096),
    "width text": of_variant(width="4096"),
    "width true": of_variant(width=True),
    "width huge": of_variant(width=2**20),
    "no warps": of_variant(warps=None),
    "second tile outside the row": of_variant(rest=1024),
    "last tile outside the row": of_variant(width=2048, pieces=3),
    "no pieces": of_variant(pieces=0, rest=4096),
    "too many pieces": of_variant(width=64, pieces=64),
    "packed tiles": backward("backward_tiles", TILES, packed=True),
    "packed float32": stored(settings=VARIANT.settings() | {"packed": True}, dtypes=["float32"]),
    "packed teams of a backward": backward("backward_team", PARTS, packed=True),
    "packed teams without rstd ahead": backward("backward_pipelined_team", PARTS, packed=True),
    "packed teams of two blocks an SM": backward("backward_pipelined_team", PACKED_TEAM, occupancy=2),
    "packed teams by 4 warps": backward("backward_pipelined_team", PACKED_TEAM, warps=4),
    "rstd ahead by gathers": backward("backward_team", PARTS, rstd_ahead=True),
    "tma of teams in tiles of one column": backward("backward_pipelined_team", PARTS, 2, width=1),
    "teams of one member": backward("backward_team", PARTS, width=4096, members=1),
    "teams of 17 members": backward("backward_team", PARTS, 17 * 256, width=256, members=17),
    "teams whose last member has no columns": backward("backward_team", PARTS, members=3),
    "early weight of teams": forward("forward_team", PARTS, weight_load="early"),
    "weight loaded otherwise": forward("forward_rows", weight_load="twice"),
    "joint weight in tiles of one column": forward("forward_rows", n=1, width=1, weight_load="joint"),
    "joint weight in a last tile of one column": forward("forward_rows", n=4097, rest=1, weight_load="joint"),
    "joint weight of a forward that reads twice": forward("forward_reread", weight_load="joint"),
    "pieces of a forward's tiles, weight late": forward("forward_tiles", TILES, width=2048, pieces=2),
    "pieces of a forward's tiles, weight early": forward(
        "forward_tiles", TILES, width=2048, pieces=2, weight_load="early"
    ),
    "rows of the rows kernel": of_variant(rows=2),
    "rows no power of two": backward("backward_tiles", TILES, rows=3),
    "tile too large": backward("backward_tiles", TILES, rows=64),
    "16 warps": of_variant(warps=16),
    "occupancy 0": of_variant(occupancy=0),
    "occupancy 33": of_variant(occupancy=33),
    "occupancy 9 of a backward": of_variant(occupancy=9),
    "occupancy 33 of a forward": forward("forward_rows", occupancy=33),
    "latency 0": of_variant(latency=0),
    "latency 11": of_variant(latency=11),
    "tma text": backward("backward_tiles", TILES, tma="yes"),
    "tma of rows in two tiles": backward("backward_pipelined", width=2048, rest=2048),
    "tma of packed rows by 4 warps": backward("backward_pipelined", packed=True, warps=4),
    "tma of rows in tiles of one column": backward("backward_pipelined", n=1, width=1),
    "tma of gathered rows": of_variant(tma=True),
    "tma of a split backward": backward("backward_split", SPLIT, tma=True),
    "tma of a forward's rows": forward("forward_rows", tma=True),
    "tma of a forward's tiles": forward("forward_tiles", TILES, tma=True),
    "49 percent of the grid": of_variant(grid_percent=49),
    "101 percent of the grid": of_variant(grid_percent=101),
    "percents of a split backward": backward("backward_split", SPLIT, grid_percent=80),
    "percents of a forward": forward("forward_rows", grid_percent=80),
    "early weight of a backward": of_variant(weight_load="early"),
    "early weight of a backward's tiles": backward("backward_tiles", TILES, weight_load="early"),
    "strip of the rows kernel": of_variant(strip=64),
    "slab of the rows kernel": of_variant(slab=64),
    "split without a slab": backward("backward_split", SPLIT, slab=None),
    "slab of no rows": backward("backward_split", SPLIT, slab=0),
    "slab no multiple of rows": backward("backward_split", SPLIT, slab=60),
    "slab too large": backward("backward_split", SPLIT, slab=2048),
    "strip no power of two": backward("backward_split", SPLIT, strip=48),
    "no strip": backward("backward_split", SPLIT, strip=0),
    "strip too large": backward("backward_split", SPLIT, strip=2**14),
    "pieces of a split backward": backward("backward_split", SPLIT, width=2048, pieces=2),
    "more strips than a grid has": backward("backward_strips", n=2**27, width=2048),
    "split rows read twice beyond int32": backward("backward_split_reread", SPLIT, n=2**25, strip=512),
    "split row too narrow": backward("backward_split", SPLIT, width=2048),
    "split row's second tile outside": backward("backward_split", SPLIT, rest=1024),
    "gathers of a split row": backward("backward_split", SPLIT, gathers=True),
    "rows read twice in two tiles": backward("backward_split_reread", SPLIT, width=2048, rest=2048),
}
# Of these Python says what is wrong.
FROM_PYTHON = (
    *("no JSON", "not UTF-8", "empty", "nested beyond reason", "width zero", "width text", "no warps"),
    "split without a slab",
)


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_file_is_ignored_with_one_warning(folders, name):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_bytes(UNFIT[name] if isinstance(UNFIT[name], bytes) else UNFIT[name].encode())
    with pytest.warns(UserWarning) as caught:
        for n in (4096, 8192):
            bucket = BUCKET._replace(n=n)
            assert chosen(bucket) == rule(bucket)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(path) in message and "Delete the file, or run" in message
    assert "expected" in message or name in FROM_PYTHON, message


def test_the_file_that_the_unfit_ones_are_made_of_is_fit(folders):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    fit = {
        "backward_rows": (4096, stored()),
        "backward_pipelined_team": (4096, backward("backward_pipelined_team", PACKED_TEAM)),
        "backward_team": (4096, backward("backward_team", PARTS)),
        "backward_tiles": (4096, backward("backward_tiles", TILES)),
        "backward_pipelined": (4096, backward("backward_pipelined", packed=True)),
        "backward_split": (4096, backward("backward_split", SPLIT)),
        "backward_split_reread": (2**25, backward("backward_split_reread", SPLIT, 2**25, strip=1024)),
        "backward_strips": (2**27, backward("backward_strips", n=2**27)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel, (n, text) in fit.items():
            path.write_text(text)
            tables.table_in.cache_clear()
            assert chosen(BUCKET._replace(n=n)).kernel == kernel
        for kernel, numbers in (("forward_rows", NUMBERS), ("forward_team", PARTS), ("forward_tiles", TILES)):
            path.write_text(forward(kernel, numbers, weight_load="joint"))
            tables.table_in.cache_clear()
            assert chosen(BUCKET._replace(op="forward")).kernel == kernel


def test_of_two_entries_of_a_bucket_the_first_decides(folders):
    data = json.loads(stored())
    data["records"] += json.loads(of_variant(latency=9))["records"]
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    for records, latency in ((data["records"], VARIANT.latency), (data["records"][::-1], 9)):
        path.write_text(json.dumps(data | {"records": records}))
        tables.table_in.cache_clear()
        assert chosen().latency == latency


@pytest.mark.parametrize("name", ["weight_load", "rest", "strip", "members"])
def test_a_setting_of_another_kernel_is_refused_by_its_name(folders, name):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text(backward("backward_tiles", TILES, **{name: 1}))
    with pytest.warns(UserWarning, match=f"BackwardTiles.*unexpected keyword argument '{name}'"):
        chosen()


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
