# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of tuned settings as files: where they are, and what a write leaves intact."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from planning import device
from table_cases import (
    BUCKET,
    ENTRY,
    TARGET,
    VARIANT,
    chosen,
    entry_of,
    forget_files,
    rule,
    ship,
    write_with_rope,
)

from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder


def test_an_unfit_table_is_replaced_by_the_next_write(folders):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match="are ignored"):
        assert tables.update(folders[0], TARGET, [ENTRY]) == path
    assert chosen() == VARIANT


def test_a_write_that_fails_leaves_the_old_table_and_nothing_else(folders, monkeypatch):
    path = tables.update(folders[0], TARGET, [ENTRY])
    before = path.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tables.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tables.update(folders[0], TARGET, [])
    assert path.read_bytes() == before
    assert {file.suffix for file in path.parent.iterdir()} <= {".json", ".lock"}


def test_a_table_that_cannot_be_read_is_not_written_over(folders, monkeypatch):
    """Taking a table for an empty one would lose its entries."""
    path = tables.update(folders[0], TARGET, [ENTRY])
    before = path.read_bytes()

    def broken(*_, **__):
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        patch.setattr(Path, "read_text", broken)
        with pytest.raises(OSError, match="Input/output error"):
            tables.update(folders[0], TARGET, [])
    assert path.read_bytes() == before


def test_a_write_replaces_the_entries_of_its_buckets_and_leaves_the_others(folders):
    """One of several buckets goes on serving those that no other is for."""
    half, few = BUCKET._replace(dtype="float16"), BUCKET._replace(size="few")
    own, both = (BackwardRows(width=4096, warps=8, occupancy=2, latency=latency) for latency in (5, 6))
    of_two = entry_of(BUCKET, both)._replace(dtypes=("bfloat16", "float16"))
    tables.update(folders[0], TARGET, [of_two, entry_of(few, own)])
    assert chosen() == chosen(half) == both
    tables.update(folders[0], TARGET, [ENTRY])
    assert (chosen(), chosen(half), chosen(few)) == (VARIANT, both, own)
    assert len(tables.table_in(folders[0], TARGET)) == 3
    tables.update(folders[0], TARGET, [entry_of(half, own)])
    assert (chosen(), chosen(half), chosen(few)) == (VARIANT, own, own)
    tables.update(folders[0], TARGET, [of_two])
    assert chosen() == chosen(half) == both and len(tables.table_in(folders[0], TARGET)) == 2


def test_records_of_rope_are_ignored_with_one_warning_and_the_others_serve(folders):
    """`tune` wrote them once. The next write leaves them out."""
    path, few = write_with_rope(folders[0], ENTRY), BUCKET._replace(size="few")
    with pytest.warns(UserWarning) as caught:
        assert chosen() == VARIANT
        tables.update(folders[0], TARGET, [entry_of(few, VARIANT)])
        assert chosen() == chosen(few) == VARIANT
    [message] = (str(each.message) for each in caught)
    assert "are ignored: qk_norm_rope takes the rules' settings. The other records serve" in message
    assert len(tables.table_in(folders[0], TARGET)) == 2 and "rope" not in path.read_text()


def test_what_chooses_is_described(folders):
    user, shipped = folders
    rules = "the rules of plans/; none are for {} alone: `python -m tilegym_rmsnorm tune` makes some"
    assert tables.describe(TARGET, user) == rules.format(TARGET)
    assert tables.describe(None, user) == rules.format("this GPU")
    ship(shipped, TARGET, ENTRY, entry_of(BUCKET._replace(size="few"), VARIANT))
    assert tables.describe(TARGET, user) == "2 that ship for it, then the rules of plans/"
    path = tables.update(user, TARGET, [ENTRY])
    assert tables.describe(TARGET, user) == f"1 in {path}, then 2 that ship for it, then the rules of plans/"
    assert tables.describe(TARGET, None) == "2 that ship for it, then the rules of plans/"


def test_what_ships_serves_any_toolkit_and_the_users_entries_their_own(folders):
    """The rules served after an update of cuda-tile, and nothing said so."""
    user, shipped = folders
    target, few = TARGET._replace(cuda_tile="1.7.99"), BUCKET._replace(size="few")
    ship(shipped, TARGET, ENTRY)
    tables.update(user, TARGET, [entry_of(few, VARIANT)])
    facts = device(target=target)
    assert chosen(facts=facts) == VARIANT and chosen(few, facts) == rule(few)
    assert tables.describe(target, user) == "1 that ship for it, then the rules of plans/"


@pytest.mark.parametrize("value", ["0", "off", " OFF ", "false", "no", "none", "None", ""])
def test_the_users_cache_can_be_off(folders, monkeypatch, value):
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert user_folder() is None
    assert chosen() == rule()


def test_the_users_cache_is_where_the_platform_keeps_caches(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert user_folder() == Path(platformdirs.user_cache_dir("tilegym_rmsnorm", appauthor=False))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert user_folder() is None


@pytest.mark.parametrize("name", ["1", "on", "yes", "./off"])
def test_the_users_cache_may_have_any_other_name(monkeypatch, name):
    monkeypatch.setenv(CACHE_VARIABLE, name)
    assert user_folder() == Path(name)


def test_the_users_cache_may_be_named_from_home(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "~/tuned")
    assert user_folder() == Path.home() / "tuned"


def test_a_file_that_ships_is_read_once(folders, monkeypatch):
    """Parsing once for each record took 0.7 s of the first call on a GPU."""
    reads, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **k: reads.append(path.name) or read_text(path, **k))
    forget_files()
    for _ in range(2):
        tables.tables_of(90, TARGET, None)
        tables.describe(TARGET, None)
        tables.shipped_for(BUCKET)
    assert sorted(reads) == ["any.json", "sm_90.json"]
