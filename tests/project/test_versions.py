# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Releases that CI tests with: other ones of PyTorch, and the pins of constraints.txt."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / "ci.yaml").read_text())["jobs"]


@pytest.fixture
def torch_release(tmp_path: Path):
    """`scripts/torch_release.sh` in a checkout that has no environment yet, and a Python that has everything, makes
    environments of its own kind, and shows what pip and pytest are called with."""
    for path in ("scripts/environment.sh", "scripts/torch_release.sh", "tests/run.sh", "constraints.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *is_available*) exit 1 ;;
  "-m pip "* | "-m pytest "*) echo "$@ [$CUDA_VISIBLE_DEVICES]" ;;
esac
""")
    python.chmod(0o755)

    def call(*arguments: str) -> subprocess.CompletedProcess:
        command = ["bash", str(tmp_path / "scripts" / "torch_release.sh"), *arguments]
        environment = os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "0"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return call


def test_a_release_gets_an_environment_once(torch_release, tmp_path):
    folder = tmp_path / ".venv-torch-2.9.1"

    first, again = torch_release("2.9.1", "-k", "name"), torch_release("2.9.1", "-k", "name")

    assert first.returncode == 0, first.stderr
    installed, tested = first.stdout.splitlines()
    assert installed.startswith(f"-m pip install -qq --no-compile -c {folder}/constraints.txt ")
    assert tested.startswith("-m pytest ") and tested.endswith(" -k name []")
    assert again.stdout.splitlines() == [tested]

    kept = (folder / "constraints.txt").read_text().splitlines()
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in pins if line not in kept] == [
        line for line in pins if line.startswith(("torch=", "triton="))
    ]
    assert [line for line in kept if line not in pins] == ["torch==2.9.1", "triton==3.5.1", "numpy<2.4"]


def test_a_release_gets_the_tests_that_may_depend_on_it(torch_release):
    words = torch_release("2.11.0").stdout.splitlines()[-1].split()

    paths = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    assert paths and all(path.exists() for path in paths), "a file that is no longer there"
    ignored = {test.stem for path in paths for test in (path.rglob("test_*.py") if path.is_dir() else [path])}
    assert not ignored & {"test_ops", "test_gate", "test_module", "test_inductor", "test_triton_compile"}
    assert len(ignored) < len(list(ROOT.glob("tests/*/test_*.py"))) / 3


@pytest.mark.parametrize("arguments", [[], ["2.9"], ["tests/api/test_ops.py"]])
def test_a_release_that_nobody_named_is_refused(torch_release, arguments):
    answer = torch_release(*arguments)

    assert answer.returncode == 1 and not answer.stdout
    assert "expected the release 2.9.1, 2.11.0 or 2.14.1, got" in answer.stderr


def test_every_release_has_a_job():
    """The oldest is the one from which pyproject.toml allows PyTorch."""
    commands = [command for job in JOBS.values() for command in job["commands"]]
    releases = [line.split()[1] for line in commands if line.startswith("scripts/torch_release.sh")]
    script = (ROOT / "scripts" / "torch_release.sh").read_text()
    assert releases == re.findall(r"^  ([\d.]+)\) triton=", script, flags=re.MULTILINE)
    (lowest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert releases[0].startswith(f"{lowest}.")


def test_extra_cutile_bounds_the_whole_compiler():
    """Of a package that its packages ask for, pip takes the newest, which need not fit: nvcc with other headers."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {each.name: each for each in map(Requirement, project["optional-dependencies"]["cutile"])}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {each.name: each for each in map(Requirement, (x for x in lines if x and not x.startswith("#")))}

    needed = set(extra)
    for name in extra:
        try:
            needed |= {Requirement(each).name for each in importlib.metadata.requires(name) or ()}
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")

    for name in needed & set(pins):
        (pin,) = (Version(each.version) for each in pins[name].specifier)
        following = f"{pin.major}.{pin.minor + 1}.0"
        assert name in extra, f"constraints.txt pins {name}, the extra takes any"
        assert pin in extra[name].specifier and following not in extra[name].specifier


def test_pinned_versions_are_there_for_the_oldest_python():
    """Where a pinned version asks for a newer one, the pin says so: else pip finds none for the oldest."""
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    environment = {"python_version": oldest, "python_full_version": f"{oldest}.0"}
    checked = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            found = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(found.version).public not in pin.specifier:
            continue  # of this version its metadata says nothing
        checked += 1
        needed = SpecifierSet(found.metadata["Requires-Python"] or "")
        applies = pin.marker is None or pin.marker.evaluate(environment)
        assert not applies or needed.contains(f"{oldest}.0"), line
    assert checked
