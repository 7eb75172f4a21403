# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""scripts/environment.sh, as the benchmark calls it: what it asks of an interpreter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import require

ROOT = Path(__file__).resolve().parents[2]
BENCH_MODULES = ("matplotlib", "tabulate", "tqdm", "plotly", "triton", "torch", "cuda.tile")


@pytest.fixture
def bare_machine(tmp_path: Path):
    """Call it with {distribution: version} to have an interpreter with these, and empty modules for the benchmark."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    python.chmod(0o755)
    for module in BENCH_MODULES:
        package = tmp_path.joinpath("packages", *module.split("."))
        package.mkdir(parents=True)
        (package / "__init__.py").touch()

    def run(versions: dict[str, str], extras: str = "bench cutile triton") -> subprocess.CompletedProcess:
        for name, version in versions.items():
            information = tmp_path / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_HOME"}
        environment |= {
            "PYTHON": str(python),
            "PYTHONPATH": str(tmp_path / "packages"),
            "PATH": "/usr/bin:/bin",
        }
        command = [
            shutil.which("bash"),
            "-euc",
            f". scripts/environment.sh; ensure_environment {extras}",
        ]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    return run


RIGHT = {"torch": "2.11.0a0+cu130", "cuda-tile": "1.7.0", "nvidia-cuda-tileiras": "13.4.92"}


@pytest.mark.parametrize("torch_version", ["2.8.1", "1.13.0"])
def test_an_interpreter_with_an_older_torch_is_not_taken(bare_machine, torch_version):
    answer = bare_machine(RIGHT | {"torch": torch_version})

    assert answer.returncode == 1
    assert "lacks: torch>=2.9. Install" in answer.stderr


@pytest.mark.parametrize("python", ["/nonexistent", "/usr/bin/false"])
def test_an_interpreter_that_does_not_run_is_named(python):
    """It was told what to install there."""
    answer = subprocess.run(
        [shutil.which("bash"), "-euc", ". scripts/environment.sh; ensure_environment bench"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1 and "lacks" not in answer.stderr
    assert f"PYTHON={python} is no Python of at least 3.10" in answer.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="cuda-tile and Triton are asked for on Linux")
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, None),
        ({"cuda-tile": "1.6.9"}, "cuda-tile>=1.7,<2"),
        ({"cuda-tile": "2.0.0"}, "cuda-tile>=1.7,<2"),
        ({"nvidia-cuda-tileiras": None}, "tileiras"),
    ],
)
def test_what_the_backends_lack_is_named(bare_machine, changes, missing):
    if missing == "tileiras" and list(Path("/usr/local").glob("cuda*/bin/tileiras")):
        pytest.skip("this machine has a toolkit with tileiras")

    answer = bare_machine({name: version for name, version in (RIGHT | changes).items() if version})

    assert answer.returncode == 0
    assert answer.stderr == "" if missing is None else f"lacks: {missing};" in answer.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries to compare with are asked for on Linux")
def test_missing_peers_are_named_and_no_failure(bare_machine):
    answer = bare_machine(RIGHT, "bench peers")

    assert answer.returncode == 0
    assert "lacks: quack liger_kernel tilegym;" in answer.stderr


def test_the_environment_asks_for_the_versions_of_pyproject():
    script, project = ((ROOT / name).read_text() for name in ("scripts/environment.sh", "pyproject.toml"))
    for requirement in ("torch>=2.9", "cuda-tile>=1.7,<2"):
        assert f"printf '{requirement} " in script and f'"{requirement}' in project


def test_an_interpreter_that_lacks_something_gets_one_clear_line(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    bare.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "run.sh")],
        env=os.environ | {"PYTHON": str(bare), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"PYTHON={bare} lacks: torch>=2.9 matplotlib tabulate tqdm. Install them there: " in line


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("gate", "torch"),
        ("studies.host", "torch"),
        ("report.html_report", "torch tabulate tqdm"),
        *(
            (name, "torch matplotlib tabulate tqdm")
            for name in ("report.plots", "measure.processes", "run", "studies.train")
        ),
    ],
)
def test_a_command_that_lacks_something_gets_one_clear_line(command, missing):
    """A traceback of the first import that failed."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"bench.{command}", "--help"],  # -S: without site-packages
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    remedy = f"{sys.executable} -m pip install '{ROOT}[bench]'"
    assert line == f"the benchmark needs {missing}. To install what it needs: {remedy}"


def test_only_what_is_missing_is_named(monkeypatch):
    require()
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="^the benchmark needs tqdm\\. "):
        require()


def options_of_run() -> set[str]:
    from bench import run

    return {"--" + name.replace("_", "-") for name in vars(run.parse_arguments([]))} - {"--part"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_environment(tmp_path, flag):
    """It began to install one."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    python.chmod(0o755)
    (tmp_path / "bench").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("bench/run.sh", "scripts/environment.sh"):  # elsewhere: the checkout may have a .venv
        shutil.copy(ROOT / name, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
    done = subprocess.run(
        [shutil.which("bash"), str(tmp_path / "bench" / "run.sh"), "--quick", flag],
        env=environment | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The benchmark in one command") and "set -euo" not in done.stdout
    assert not (tmp_path / ".venv").exists()
    assert options_of_run() <= set(re.findall(r"--[\w-]+", done.stdout))


def test_help_explains_each_option_where_it_can():
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "run.sh"), "--help"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: bench/run.sh "), done.stderr
    assert options_of_run() <= set(re.findall(r"^  (--[\w-]+)", done.stdout, re.MULTILINE))
