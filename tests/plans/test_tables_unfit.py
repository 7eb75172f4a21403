# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables that say anything unexpected: each is ignored as a whole, with one warning."""

from __future__ import annotations

import json
import warnings

import pytest
from table_cases import BUCKET, ENTRY, TARGET, chosen, without_reason

from tilegym_rmsnorm.backends.cutile.plans import tables
from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config


def stored(**changes) -> str:
    """A table's JSON with its one entry changed; a change named config_X is to the config."""
    data = json.loads(tables.render(TARGET, {BUCKET: ENTRY}))
    for name, value in changes.items():
        owner = data["entries"][0]
        if name.startswith("config_"):
            owner, name = owner["config"], name.removeprefix("config_")
        if value is None:
            del owner[name]
        else:
            owner[name] = value
    return json.dumps(data)


TEAMS = {
    "config_kernel": "teams",
    "config_short": False,
    "config_width": 2048,
    "config_members": 2,
    "config_packed": True,
    "config_tma": True,
}
FUSED = {"config_kernel": "fused", "config_short": False, "config_rows": 8, "config_strip": 64}

UNFIT = {
    "no JSON": "{",
    "not UTF-8": b"\xff\xfe{}",
    "empty": "",
    "a list": "[]",
    "another schema": stored().replace('"schema": 1', '"schema": 2'),
    "another GPU": stored().replace("H100", "H200"),
    "another architecture": stored().replace('"architecture": 90', '"architecture": 100'),
    "another toolkit": stored().replace("13.4.92", "13.5.37"),
    "entries no list": json.dumps({**json.loads(stored()), "entries": {"a": 1}}),
    "nested beyond reason": "[" * 200_000,
    "an entry twice": json.dumps(
        {**json.loads(stored()), "entries": 2 * json.loads(stored())["entries"]},
    ),
    "unknown op": stored(op="sideways"),
    "n zero": stored(n=0),
    "n text": stored(n="4096"),
    "unknown dtype": stored(dtype="float64"),
    "unknown size": stored(size="medium"),
    "unknown weight": stored(weight="bfloat16"),
    "a float32 weight beside float32": stored(dtype="float32", weight="float32"),
    "size that no number of rows has": stored(size="small"),
    "unknown key": stored(note="x"),
    "no timings": stored(timings=None),
    "timings no time": stored(timings=[{"m": 1, "us_rules": 0.0, "us": float("nan")}]),
    "timings beyond floats": stored(timings=[{"m": 1, "us_rules": 10**400, "us": 1}]),
    "timings no numbers": stored(timings=[{"m": 1, "us_rules": "a", "us": 1}]),
    "kernel of dx alone": stored(config_kernel="chunks"),
    "unknown kernel": stored(config_kernel="magic"),
    "kernel no text": stored(config_kernel=["rows"]),
    "unknown field": stored(config_threads=4),
    "width no power of two": stored(config_width=4097),
    "width too narrow": stored(config_width=2048),
    "width negative": stored(config_width=-4096),
    "width text": stored(config_width="4096"),
    "width true": stored(config_width=True),
    "width huge": stored(config_width=2**20),
    "no width": stored(config_width=None),
    "second tile outside the row": stored(config_rest=1024),
    "last tile outside the row": stored(config_width=2048, config_pieces=3),
    "no pieces": stored(config_pieces=0, config_rest=4096),
    "pieces of a forward's tiles": stored(
        op="forward", config_kernel="tiles", config_short=False, config_width=2048, config_pieces=2
    ),
    "too many pieces": stored(config_width=64, config_pieces=64),
    "packed tiles": stored(config_kernel="tiles", config_short=False, config_packed=True),
    "packed float32": stored(config_packed=True, dtype="float32"),
    "packed teams of a backward": stored(
        config_kernel="teams", config_short=False, config_width=2048, config_members=2, config_packed=True
    ),
    "packed teams of two blocks an SM": stored(**TEAMS, config_warps=8, config_occupancy=2),
    "packed teams by 4 warps": stored(**TEAMS, config_warps=4),
    "packed teams by gathers": stored(**TEAMS | {"config_tma": False}, config_warps=8),
    "tma of teams in tiles of one column": stored(
        **TEAMS | {"config_packed": False, "config_width": 1}, config_warps=8, n=2
    ),
    "early weight of teams": stored(
        op="forward",
        config_kernel="teams",
        config_short=False,
        config_width=2048,
        config_members=2,
        config_early_weight=True,
    ),
    "weight of a row early and together": stored(
        op="forward", config_short=False, config_early_weight=True, config_together=True
    ),
    "together in tiles of one column": stored(
        op="forward", config_short=False, config_together=True, n=1, config_width=1
    ),
    "together in a last tile of one column": stored(
        op="forward", config_short=False, config_together=True, n=4097, config_rest=1
    ),
    "together of a forward by chunks": stored(
        op="forward", config_kernel="chunks", config_short=False, config_together=True
    ),
    "pieces of a forward's tiles, weight late": stored(
        op="forward", config_kernel="tiles", config_short=False, config_width=2048, config_pieces=2
    ),
    "rows of the rows kernel": stored(config_rows=2),
    "rows no power of two": stored(config_kernel="tiles", config_rows=3),
    "tile too large": stored(config_kernel="tiles", config_rows=64, config_short=False),
    "16 warps": stored(config_warps=16),
    "occupancy 0": stored(config_occupancy=0),
    "occupancy 33": stored(config_occupancy=33),
    "latency 11": stored(config_latency=11),
    "tma text": stored(config_tma="yes"),
    "tma of rows in two tiles": stored(
        config_short=False, config_width=2048, config_rest=2048, config_tma=True
    ),
    "tma of packed rows by 4 warps": stored(
        config_short=False, config_packed=True, config_tma=True, config_warps=4
    ),
    "tma of rows in tiles of one column": stored(config_short=False, config_tma=True, n=1, config_width=1),
    "tma of short rows": stored(config_tma=True),
    "tma of a fused backward": stored(**FUSED, config_slab=64, config_tma=True),
    "tma of a forward's rows": stored(op="forward", config_short=False, config_tma=True),
    "a share of 49 percent": stored(config_short=False, config_share=49),
    "a share of 101 percent": stored(config_short=False, config_share=101),
    "a share of a fused backward": stored(**FUSED, config_slab=64, config_share=80),
    "a share of a forward": stored(op="forward", config_short=False, config_share=80),
    "short tiles": stored(config_kernel="tiles"),
    "early weight of a backward": stored(config_early_weight=True),
    "early weight of a backward's tiles": stored(
        config_kernel="tiles", config_short=False, config_early_weight=True
    ),
    "strip of the rows kernel": stored(config_strip=64),
    "slab of the rows kernel": stored(config_slab=64),
    "fused without a slab": stored(**FUSED),
    "slab no multiple of rows": stored(**FUSED, config_slab=60),
    "slab too large": stored(**FUSED, config_slab=2048),
    "strip no power of two": stored(**FUSED | {"config_strip": 48}, config_slab=64),
    "no strip": stored(**FUSED | {"config_strip": 0}, config_slab=64),
    "strip too large": stored(**FUSED | {"config_strip": 2**14}, config_slab=64),
    "pieces of fused rows": stored(**FUSED, config_slab=64, config_width=2048, config_pieces=2),
    "more strips than a grid has": stored(
        n=2**27, config_kernel="strips", config_width=2048, config_short=False
    ),
    "fused chunks beyond int32": stored(
        **FUSED | {"config_kernel": "fused_chunks", "config_strip": 512}, n=2**25, config_slab=64
    ),
    "fused row too narrow": stored(**FUSED, config_slab=64, config_width=2048),
    "chunks in two tiles": stored(
        **FUSED | {"config_kernel": "fused_chunks"}, config_slab=64, config_width=2048, config_rest=2048
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_file_is_ignored_with_one_warning(folders, name):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_bytes(UNFIT[name] if isinstance(UNFIT[name], bytes) else UNFIT[name].encode())
    with pytest.warns(UserWarning) as caught:
        for n in (4096, 8192):
            bucket = BUCKET._replace(n=n)
            assert chosen(bucket) == backward_config(n, 2, 90)
    assert len(caught) == 1
    assert str(path) in str(caught[0].message) and "Delete the file, or run" in str(caught[0].message)
    from_python = ("no JSON", "not UTF-8", "empty", "nested beyond reason", "unknown field", "no width")
    assert "expected" in str(caught[0].message) or name in from_python


def test_the_file_that_the_unfit_ones_are_made_of_is_fit(folders):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text(stored())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_reason(chosen()) == ENTRY.config
        for kernel in ("fused", "fused_chunks"):
            path.write_text(stored(**FUSED | {"config_kernel": kernel}, config_slab=64))
            tables.table_in.cache_clear()
            assert chosen().kernel == kernel
        wide = {
            "strips": {"config_width": 4096},
            "fused_chunks": FUSED | {"config_strip": 1024, "config_slab": 64},
        }
        for n, (kernel, changes) in zip((2**27, 2**25), wide.items(), strict=True):
            changes = changes | {"config_kernel": kernel, "config_short": False, "n": n}
            path.write_text(stored(**changes))
            tables.table_in.cache_clear()
            assert chosen(BUCKET._replace(n=n)).kernel == kernel


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("early_weight", "forward's kernel rows or tiles"),
        ("together", "forward's kernel rows, tiles or teams"),
        ("short", "backward's kernel rows"),
    ],
)
def test_a_switch_of_another_kernel_is_refused_with_its_op(folders, name, expected):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text(stored(config_kernel="tiles", **{"config_short": False, f"config_{name}": True}))
    with pytest.warns(UserWarning, match=f'{name}: expected {expected}, got "backward\'s tiles"'):
        chosen()
