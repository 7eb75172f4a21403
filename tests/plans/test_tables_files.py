# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of tuned configs as files: where they are, and what a write leaves intact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from table_cases import BUCKET, ENTRY, TARGET, chosen, without_reason

from tilegym_rmsnorm.backends.cutile.plans import tables
from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config


def test_an_unfit_table_is_replaced_by_the_next_write(folders):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match="are ignored"):
        assert tables.update(folders[0], TARGET, {BUCKET: ENTRY}) == path
    assert without_reason(chosen()) == ENTRY.config


def test_a_write_that_fails_leaves_the_old_table_and_nothing_else(folders, monkeypatch):
    path = tables.update(folders[0], TARGET, {BUCKET: ENTRY})
    before = path.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tables.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tables.update(folders[0], TARGET, {})
    assert path.read_bytes() == before
    assert {file.suffix for file in path.parent.iterdir()} <= {".json", ".lock"}


def test_a_table_that_cannot_be_read_is_not_written_over(folders, monkeypatch):
    """It is no empty one: that would take its 288 entries for none."""
    path = tables.update(folders[0], TARGET, {BUCKET: ENTRY})
    before = path.read_bytes()

    def broken(*_, **__):
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        patch.setattr(Path, "read_text", broken)
        with pytest.raises(OSError, match="Input/output error"):
            tables.update(folders[0], TARGET, {})
    assert path.read_bytes() == before


def test_a_toolkit_that_no_table_is_for_is_named(folders, monkeypatch):
    """Tables are for one version of each: the rules served after an update, and nothing said so."""
    target = TARGET._replace(cuda_tile="1.7.99")
    tables.update(folders[1], TARGET, {BUCKET: ENTRY})
    said = tables.describe(target)
    assert said.startswith(
        f"the rules of rules.py; no table for {TARGET.gpu} with cuda-tile 1.7.99 and tileiras"
    )
    assert f"those that ship are for {TARGET}. `python -m tilegym_rmsnorm tune` makes one" in said


WRITER = """
import sys
from pathlib import Path
from tilegym_rmsnorm.backends.cutile.plans import problem, tables
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import (Config)
target = tables.Target("NVIDIA H100 80GB HBM3", 90, "1.7.0", "13.4.92")
for n in range(int(sys.argv[2]), 40, 2):
    entry = tables.Entry(Config("rows", 4096, 8, 1, 4), ())
    tables.update(Path(sys.argv[1]), target, {problem.Bucket("forward", 4000 + n, "bfloat16", "large"): entry})
"""


def test_two_processes_that_write_lose_nothing(folders):
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folders[0]), str(first)], cwd=root)
        for first in (0, 1)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert {bucket.n for bucket in tables.table_in(folders[0], TARGET)} == set(range(4000, 4040))


@pytest.mark.parametrize("value", tables.OFF)
def test_the_users_cache_can_be_off(folders, monkeypatch, value):
    monkeypatch.setenv(tables.CACHE_VARIABLE, value)
    assert tables.user_folder() is None
    assert chosen() == backward_config(4096, 2, 90)


def test_the_users_cache_is_where_the_platform_keeps_caches(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.delenv(tables.CACHE_VARIABLE, raising=False)
    assert tables.user_folder() == Path(platformdirs.user_cache_dir("tilegym_rmsnorm", appauthor=False))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert tables.user_folder() is None


def test_the_users_cache_may_be_named_from_home(monkeypatch):
    monkeypatch.setenv(tables.CACHE_VARIABLE, "~/tuned")
    assert tables.user_folder() == Path.home() / "tuned"
