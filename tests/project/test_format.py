# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""format.sh: what it mends, and what it fails on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "format.sh").read_text().splitlines()[1:3]


@pytest.fixture(params=["git", "no git"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small checkout, or copy of one, with format.sh and its configuration."""
    for name in ("format.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    if request.param == "git":
        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def format_sh(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    pytest.importorskip("ruff", reason="ruff is not installed")
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(checkout / "format.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_format_mends_headers_order_and_layout(checkout):
    module, script, empty = checkout / "module.py", checkout / "script.sh", checkout / "__init__.py"
    module.write_text("import sys\nimport os\nprint( os.name,sys.path )\n")
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    empty.write_text("")

    before = format_sh(checkout, "--check")
    assert before.returncode == 1
    for name in ("module.py", "script.sh", "__init__.py"):
        assert re.search(rf"{re.escape(name)}: no SPDX header", before.stdout)
    assert module.read_text().startswith("import sys")

    assert format_sh(checkout).returncode == 0
    assert module.read_text().splitlines() == [
        *HEADER,
        "",
        "import os",
        "import sys",
        "",
        "print(os.name, sys.path)",
    ]
    assert script.read_text().splitlines() == ["#!/bin/sh", *HEADER, "echo hello"]
    assert os.access(script, os.X_OK)
    assert empty.read_text().splitlines() == HEADER
    assert format_sh(checkout, "--check").returncode == 0


def test_format_fails_on_what_it_cannot_mend(checkout):
    (checkout / "module.py").write_text("\n".join([*HEADER, "", "print(undefined)", ""]))

    assert format_sh(checkout, "--check").returncode == 1
    assert format_sh(checkout).returncode == 1
