# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The wheel holds the whole package. The job build makes one, where there is an index of packages, and installs it."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
check_wheel = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_wheel)


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
