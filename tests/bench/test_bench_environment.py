# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""An interpreter that lacks something is refused in one line, with the command that installs it."""

import os
import subprocess
import sys

from bench import remedy
from bench.measure.provenance import ROOT

SAID = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


def test_an_older_torch_is_refused(tmp_path):
    for name in ("torch", "matplotlib", "tabulate", "tqdm"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "torch-2.8.1.egg-info").write_text("Name: torch\nVersion: 2.8.1\n")
    python = tmp_path / "python"
    command = f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"'  # -S: without site-packages
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", "bench/run.sh"], env=os.environ | {"PYTHON": str(python)}, **SAID)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{python} lacks: torch>=2.9. Install them there: {python} -m pip install " in done.stderr


def test_a_command_names_what_is_missing():
    command = [sys.executable, "-S", "-m", "bench.run"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, **SAID)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.endswith(f"{remedy()}\n")
    assert "the benchmark needs torch matplotlib tabulate tqdm. To install" in done.stderr
