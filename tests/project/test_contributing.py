# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What CONTRIBUTING.md tells a newcomer to type and to change is there. Of the kernels that it names test_docs.py
tells."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tilegym_rmsnorm"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_paths_exist():
    names = re.findall(r"`([\w./-]+(?:\.py|\.json|\.txt|\.md|\.sh|\.toml|/))`", TEXT)
    names += re.findall(r"\]\(([\w./-]+)", TEXT) + re.findall(r"(?<= )tests/[\w/.]+", TEXT)
    folders = (ROOT, PACKAGE, PACKAGE / "backends" / "cutile")
    assert len(names) > 30
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_jobs_exist():
    jobs = yaml.safe_load((ROOT / "ci.yaml").read_text(encoding="utf-8"))["jobs"]
    named = {name for line in re.findall(r"bash \.ci/run((?: [a-z][\w-]*)+)", TEXT) for name in line.split()}
    assert {"docs", "build", "every-config"} <= named <= set(jobs)


def test_what_the_first_change_changes_is_there():
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile import kernels

    kernel, text = re.search(r"In `(forward\w+)` in .*delete `( [^`]+)`", TEXT).groups()
    assert inspect.getsource(getattr(kernels, kernel)).count(text) == 1
    (message,) = re.findall(r"in place of `([^`]+)`", TEXT)
    for path in ("tilegym_rmsnorm/validation.py", "docs/troubleshooting.md"):
        assert path in TEXT and (ROOT / path).read_text(encoding="utf-8").count(message) == 1, path
    (beginning,) = re.findall(r"search `tests` for `([^`]+)`", TEXT)
    assert message.startswith(beginning)
    here = Path(__file__).resolve()
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != here]
    assert sum(text.count(beginning) for text in tests) == 1


def test_nothing_is_left_to_fill_in():
    """There is no address to clone from."""
    assert not re.search(r"git clone|<[a-z]+>", TEXT) and "URL" not in TEXT
