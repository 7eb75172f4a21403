# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the job build checks of the wheel. The job itself builds one, and installs it where nothing else is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
check_wheel = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_wheel)

INFO, TOP = "tilegym_rmsnorm-1.2.dist-info/", "tilegym_rmsnorm-1.2/"
PACKAGE = {"tilegym_rmsnorm/__init__.py", "tilegym_rmsnorm/py.typed", "tilegym_rmsnorm/backends/a.json"}
WHEEL = {*PACKAGE, *(INFO + name for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE"))}
SDIST = {TOP + name for name in (*PACKAGE, "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", "setup.cfg")}
SDIST |= {f"{TOP}tilegym_rmsnorm.egg-info/SOURCES.txt"}


@pytest.mark.parametrize(
    ("problems", "names", "lost", "added"),
    [
        (check_wheel.wheel_problems, WHEEL, "tilegym_rmsnorm/py.typed", "tests/test_a.py"),
        (check_wheel.wheel_problems, WHEEL, "tilegym_rmsnorm/backends/a.json", "bench/run.py"),
        (check_wheel.wheel_problems, WHEEL, f"{INFO}licenses/LICENSE", "tilegym_rmsnorm/a.pyc"),
        (check_wheel.sdist_problems, SDIST, f"{TOP}README.md", f"{TOP}tests/test_a.py"),
        (check_wheel.sdist_problems, SDIST, f"{TOP}tilegym_rmsnorm/py.typed", f"{TOP}bench/run.py"),
    ],
)
def test_what_is_lost_and_what_does_not_belong_there_is_named(problems, names, lost, added):
    assert problems(names, PACKAGE, "1.2") == []
    assert problems(names - {lost} | {added}, PACKAGE, "1.2") == [f"lacks {lost}", f"holds {added}"]


def test_every_file_of_the_package_is_declared():
    """setuptools takes folders that are packages, and of other files those that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^tilegym_rmsnorm = \[(.*)\]$", text, re.MULTILINE)
    patterns = re.findall(r'"([^"]+)"', line)
    files = check_wheel.package_files()
    data = {name.removeprefix("tilegym_rmsnorm/") for name in files if not name.endswith(".py")}
    assert {"py.typed", "backends/cutile/plans/any.json", "backends/cutile/plans/sm_90.json"} <= data
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert {f"{Path(name).parent.as_posix()}/__init__.py" for name in files} <= files


def test_a_checkout_does_not_pass_for_an_installed_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    seen = subprocess.run(
        [sys.executable, "-c", check_wheel.USE], capture_output=True, text=True, cwd=tmp_path
    )
    assert seen.returncode == 1
    assert f"imported from {ROOT / 'tilegym_rmsnorm' / '__init__.py'}" in seen.stderr

    code = "import os; print(os.environ.get('PYTHONPATH'))"
    assert check_wheel.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout == "None\n"
