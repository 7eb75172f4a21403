# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""An interpreter that lacks something is refused in one line, with the command that installs it. An active environment
that is not taken is named."""

import os
import shutil
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("is_complete", [False, True], ids=["lacks packages", "complete"])
@pytest.mark.parametrize("has_venv", [False, True], ids=["nothing else", "another .venv"])
def test_an_active_environment_that_is_not_taken_is_named(tmp_path, is_complete, has_venv):
    """A script says what the environment lacks and how to choose it, before it makes or takes another one."""

    def make_python(path, options):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} {options} "$@"\n')
        path.chmod(0o755)

    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script, active = tmp_path / "run.sh", tmp_path / "active"
    script.write_text('. scripts/environment.sh\nensure_environment bench\necho "$PYTHON"\n')
    make_python(active / "bin" / "python3", "" if is_complete else "-S")
    if has_venv:
        make_python(tmp_path / ".venv" / "bin" / "python", "")
    path = os.pathsep.join([str(active / "bin"), "/usr/bin", "/bin"])
    environment = {"PATH": path, "VIRTUAL_ENV": str(active)}
    if not is_complete:
        (active / "bin" / "python").symlink_to("python3")  # or another one of the machine may be complete
    done = subprocess.run(
        ["bash", script], **SAID | {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
    )
    if is_complete and not has_venv:
        assert (done.returncode, done.stdout, done.stderr) == (0, "python3\n", "")
        return
    note = done.stderr.splitlines()[0]
    assert note.startswith(f"note: runs in {tmp_path}/.venv. To run in the active environment, {active}: ")
    assert note.endswith(f"PYTHON=python3 {script}")
    lacks = "it lacks torch>=2.9 matplotlib tabulate tqdm plotly"
    install = f"{lacks}; python3 -m pip install -e '{tmp_path}[bench]', then PYTHON=python3"
    assert (install in note) is not is_complete
    assert done.returncode == (0 if has_venv else 1)
