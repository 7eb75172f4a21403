# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What `.ci/run`, tests/run.sh and format.sh ask of the machine: tools, a browser, processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("ruff", ["format.sh", "--check"]),
        ("ruff", [".ci/run"]),
        ("ruff", [".ci/run", "format"]),
        ("mypy", [".ci/run"]),
        ("mypy", [".ci/run", "types"]),
    ],
)
def test_a_tool_is_asked_for_by_what_needs_it(tmp_path, tool, command):
    python = tmp_path / "python"  # any module but that one
    python.write_text(f"""#!/bin/sh
[ "$1" = - ] || exit 1
shift
for name; do [ "$name" != {tool} ] || printf ' {tool}'; done
""")
    python.chmod(0o755)

    answer = subprocess.run(
        ["bash", *command], cwd=ROOT, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True
    )

    assert answer.returncode == 1
    assert f"PYTHON={python} lacks: {tool}. Install them there" in answer.stderr


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"PYTHONDONTWRITEBYTECODE": "1"}, f"[] [{ROOT}/build/bytecode]"),
        ({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/elsewhere"}, "[] [/elsewhere]"),
        ({}, "[] []"),
    ],
)
def test_bytecode_is_kept_where_it_would_not_be(given, kept):
    """Else each process compiles torch anew. Beside the sources, where nothing says otherwise."""
    variables = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    shown = 'echo "[${PYTHONDONTWRITEBYTECODE:-}] [${PYTHONPYCACHEPREFIX:-}]"'
    command = f". scripts/environment.sh; _missing() {{ :; }}; ensure_environment dev; {shown}"
    answer = subprocess.run(
        ["bash", "-euc", command], cwd=ROOT, env=environment | given, capture_output=True, text=True
    )
    assert answer.stdout == f"{kept}\n", answer.stderr


@pytest.fixture
def ci_run_with(tmp_path: Path):
    """`.ci/run` where these programs and no others are found, beside those that it always needs, and a Python that has
    any module but `lacks` and shows what it is called with."""
    folder, python = tmp_path / "bin", tmp_path / "python"

    def write(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def call(*jobs: str, lacks: str = "nothing", **programs: str) -> subprocess.CompletedProcess:
        folder.mkdir()
        for name in ("bash", "dirname", "uname"):
            (folder / name).symlink_to(shutil.which(name))
        for name, text in programs.items():
            write(folder / name.replace("_", "-"), text)
        asks = f"""[ "$1" = - ] || {{ echo "ran $*"; exit; }}
shift
for name; do [ "$name" != {lacks} ] || printf ' {lacks}'; done"""
        write(python, asks)
        environment = os.environ | {"PYTHON": str(python), "PATH": str(folder)}
        return subprocess.run(
            ["bash", ".ci/run", *jobs], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    return call


@pytest.mark.parametrize("tool", ["ruff", "mypy", "mkdocs"])
def test_a_tool_is_not_asked_for_by_other_jobs(ci_run_with, tool):
    answer = ci_run_with("cpu-tests", lacks=tool, chromium="true")

    assert answer.returncode == 0 and answer.stdout == "ran .ci/jobs.py cpu-tests\n", answer.stderr
    assert tool not in answer.stderr or tool == "mypy"  # of which the extra dev makes a note


@pytest.mark.parametrize("jobs", [(), ("docs",), ("--list",)])
def test_without_mkdocs_the_other_jobs_run(ci_run_with, jobs):
    answer = ci_run_with(*jobs, lacks="mkdocs", chromium="true")

    assert answer.returncode == 0 and answer.stdout.startswith("ran .ci/jobs.py"), answer.stderr
    assert "lacks: mkdocs; what needs them is left out" in answer.stderr


INSTALLED = "update\ninstall -y --no-install-recommends chromium\n"
NO_BROWSER = "note: there is no Chromium here; the test that opens a report in it is skipped"


@pytest.mark.parametrize(
    ("jobs", "programs", "asked", "is_told"),
    [
        ((), {"id": "echo 0"}, INSTALLED, False),
        (("cpu-tests",), {"id": "echo 0"}, INSTALLED, False),
        (("cpu-tests",), {"id": "echo 0", "fails": "true"}, INSTALLED, True),
        (("cpu-tests",), {"id": "echo 1000"}, "", True),
        (("cpu-tests",), {"id": "echo 0", "google_chrome": "true"}, "", False),
        (("format", "docs"), {"id": "echo 0"}, "", False),
        (("--list",), {"id": "echo 0"}, "", False),
    ],
)
def test_a_browser_is_installed_where_a_test_wants_one(ci_run_with, tmp_path, jobs, programs, asked, is_told):
    log, fails = tmp_path / "apt", "fails" in programs
    apt = f'echo "$@" >>"{log}"; echo reading; echo "apt says why"; exit {int(fails)}'

    answer = ci_run_with(
        *jobs, apt_get=apt, **{name: text for name, text in programs.items() if name != "fails"}
    )

    assert answer.returncode == 0 and answer.stdout.startswith("ran .ci/jobs.py"), answer.stderr
    assert (log.read_text() if log.exists() else "") == asked
    assert (NO_BROWSER in answer.stderr) == is_told
    assert ("\napt says why\n" in answer.stderr) == fails and "reading" not in answer.stderr


@pytest.mark.parametrize(
    ("has_gpu", "options"),
    [
        (True, "-n auto --maxprocesses 14 --dist loadgroup"),
        (False, "-n auto --maxprocesses 8 --dist load --maxschedchunk 1"),
    ],
)
def test_tests_are_spread_over_processes(tmp_path, has_gpu, options):
    python = tmp_path / "python"  # has everything, a GPU or none, and shows what pytest is called with
    python.write_text(f"""#!/bin/sh
case "$*" in
  "- "*) ;;
  *is_available*) exit {int(not has_gpu)} ;;
  *pytest*) echo "$@" ;;
esac
""")
    python.chmod(0o755)

    answer = subprocess.run(
        ["bash", "tests/run.sh", "-k", "name"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
    )

    assert answer.stdout == f"-m pytest -rfEs {options} -k name\n"


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_is_installed_in_one_line(tmp_path, fails):
    """And pip's errors, which it prints under -qq too."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    python = tmp_path / "python3"
    python.write_text(f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install -qq "*) {"echo ERROR: no such version; exit 1" if fails else "true"} ;;
  *) echo "loud: $*" ;;
esac
""")
    python.chmod(0o755)
    command = ". scripts/environment.sh; _missing() { :; }; _install dev bench"
    path = f"{tmp_path}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", "-uc", command],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )

    line, *errors = answer.stderr.splitlines()
    assert line.startswith(f"installing {tmp_path}[dev,bench] into {tmp_path}/.venv")
    assert (answer.returncode, errors) == ((1, ["ERROR: no such version"]) if fails else (0, []))
