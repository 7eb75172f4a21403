# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Commands as they are called: `python -m tilegym_rmsnorm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_rmsnorm.commands import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_of_the_reference_run_in_a_process_of_their_own():
    result = doctor.run_kernels_apart("torch")

    assert result["works"], result
    assert set(result["errors"]) == {"y", "rstd", "dx", "dw"}
    assert all(0 < error < doctor.TOLERANCE for error in result["errors"].values())


@pytest.mark.parametrize("options", [(), ("--json", "--backend", "torch")])
def test_reader_that_leaves_early_gets_no_traceback(options):
    """`python -m tilegym_rmsnorm doctor | head -1`. What --json prints is written as the command ends."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilegym_rmsnorm", "doctor", *options],
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(write)
    assert done.returncode == 141 and not any(word in done.stderr for word in (b"Traceback", b"BrokenPipe"))


def test_no_command_is_a_usage_error():
    answer = subprocess.run(
        [sys.executable, "-m", "tilegym_rmsnorm"], cwd=ROOT, capture_output=True, text=True
    )

    assert answer.returncode == 2
    assert "usage: python -m tilegym_rmsnorm" in answer.stderr and "Traceback" not in answer.stderr


def test_without_numpy_a_command_prints_no_warning_of_torch(tmp_path):
    """PyTorch warns while it is imported, above the first line of doctor's report."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def said(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    if "Failed to initialize NumPy" not in said("-c", "import tilegym_rmsnorm"):
        pytest.skip("this PyTorch does not warn")
    assert said("-m", "tilegym_rmsnorm", "doctor", "--backend", "torch") == ""


def test_a_command_of_others_keeps_its_filters_of_warnings(tmp_path):
    """While `python -m other` imports the package other, sys.argv is that of a command of ours."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text(
        "import sys, warnings\n"
        "assert sys.argv[0] == '-m'\n"
        "import tilegym_rmsnorm\n"
        "print(any('NumPy' in getattr(each[1], 'pattern', '') for each in warnings.filters))\n"
    )
    (tmp_path / "other" / "__main__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "other"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
