# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Versions that stand in several files agree. The wheel holds the whole package: the job build makes one, where there
is an index of packages, and installs it."""

import importlib.metadata
import importlib.util
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.runtime.tables import SHIPPED_FOLDER
from tilegym_rmsnorm.backends.cutile.runtime.toolchain import CUDA_TILE_EXPECTED, OLDEST_DRIVER

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if line and not line.startswith("#")]


def test_readme_names_the_versions_of_the_package():
    (python,) = re.findall(r'requires-python = ">=(.*?)"', PROJECT)
    (pytorch,) = re.findall(r'"torch>=(.*?)"', PROJECT)
    assert f"Python {python} or later and PyTorch {pytorch} or later" in README
    (gpus,) = re.findall(r"^\| (.* \(sm_.*?) \|", README, re.MULTILINE)
    assert re.findall(r"\((?:sm_)?(\d+)\)", gpus) == list(map(str, ARCHITECTURES))
    assert "r580" in README and OLDEST_DRIVER == (13, 0)  # the CUDA version of driver r580


def test_the_newest_version_of_the_changelog_is_the_package_s():
    """`dev0` marks a version until its release: its wheel is no release."""
    (version,) = re.findall(r'^version = "(.*?)"', PROJECT, re.MULTILINE)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    form = r"^## (\d\S*) - (\d{4}-\d\d-\d\d|unreleased|never released)$"
    newest, when = re.findall(form, text, re.MULTILINE)[0]
    assert version == (f"{newest}.dev0" if when == "unreleased" else newest)


def test_every_release_has_a_job():
    """The oldest is the one from which pyproject.toml allows PyTorch."""
    jobs = (ROOT / "ci.yaml").read_text(encoding="utf-8")
    script = (ROOT / "scripts" / "torch_release.sh").read_text(encoding="utf-8")
    releases = re.findall(r"- scripts/torch_release\.sh ([\d.]+)$", jobs, re.MULTILINE)
    assert releases == re.findall(r"^  ([\d.]+)\) triton=", script, re.MULTILINE)
    (lowest,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert releases[0].startswith(f"{lowest}.")


def test_the_range_of_cuda_tile_is_that_of_the_tuned_data():
    """And the same in the package, pyproject.toml and what makes environments."""
    requirement = f"cuda-tile{CUDA_TILE_EXPECTED}"
    script = (ROOT / "scripts" / "environment.sh").read_text(encoding="utf-8")
    assert f'"{requirement}; ' in PROJECT and f"'{requirement} " in script
    (pin,) = (str(each.specifier).removeprefix("==") for each in PINS if each.name == "cuda-tile")
    tuned = json.loads((SHIPPED_FOLDER / "sm_90.json").read_text(encoding="utf-8"))
    for version in (pin, tuned["cuda_tile"]):
        assert version in SpecifierSet(CUDA_TILE_EXPECTED)


def test_extra_cutile_bounds_the_whole_compiler():
    """pip takes the newest of what its packages ask for, which need not fit: nvcc with other headers."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads(PROJECT)["project"]
    extra = {each.name: each for each in map(Requirement, project["optional-dependencies"]["cutile"])}
    pins = {each.name: each for each in PINS}

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
    """A pin says so where its version asks for a newer one: else pip finds none for the oldest."""
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', PROJECT)
    environment = {"python_version": oldest, "python_full_version": f"{oldest}.0"}
    checked = 0
    for pin in PINS:
        try:
            found = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(found.version).public not in pin.specifier:
            continue  # of this version its metadata says nothing
        checked += 1
        needed = SpecifierSet(found.metadata["Requires-Python"] or "")
        applies = pin.marker is None or pin.marker.evaluate(environment)
        assert not applies or needed.contains(f"{oldest}.0"), pin
    assert checked


def test_what_to_cite_is_this_version():
    """CITATION.cff has what its format 1.2.0 requires, and agrees with pyproject.toml."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"authors", "cff-version", "message", "title"}
    assert required <= citation.keys() <= required | {"abstract", "keywords", "license", "type", "version"}
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    for name in ("version", "license"):
        assert re.findall(rf'^{name} = "(.*?)"', PROJECT, re.MULTILINE) == [citation[name]]
    assert re.findall(r'^name = "(.*?)"', PROJECT, re.MULTILINE)[0] == citation["title"]
    (author,) = re.findall(r'^authors = \[\{ name = "(.*?)" \}\]', PROJECT, re.MULTILINE)
    assert citation["authors"] == [{"name": author}]
    assert all(
        isinstance(each, str) for each in (citation["message"], citation["abstract"], *citation["keywords"])
    )


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
