# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Builds what would be published, and uses it as somebody who has nothing else of this project.

    python scripts/check_wheel.py FOLDER     leaves the source distribution and the wheel in FOLDER

The wheel is built from the source distribution. Both hold the whole package and nothing else of the checkout. pip
installs the wheel, and what it requires, into an empty environment, in the versions of constraints.txt; there, away
from the checkout, the package computes a norm and `doctor` runs. It needs a network, and seconds for each package that
pip has not cached.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tilegym_rmsnorm"
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
USE = """
import sys
import torch
import tilegym_rmsnorm
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of

assert tilegym_rmsnorm.__file__.startswith(sys.prefix), f"imported from {tilegym_rmsnorm.__file__}"
x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
y = tilegym_rmsnorm.rms_norm(x, (2,), torch.tensor([1.0, 10.0]), eps=0.0)
torch.testing.assert_close(y, torch.tensor([[3 / 12.5**0.5, 40 / 12.5**0.5], [0.0, 20 / 2**0.5]]))
assert tables_of(90, None, None)
"""


def package_files() -> set[str]:
    """The package's files in this checkout, by their paths from its root."""
    files = (
        path for path in (ROOT / PACKAGE).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def expected_version() -> str:
    return re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[0]


def wheel_problems(names: Iterable[str], package: set[str], version: str) -> list[str]:
    """List problems of a wheel's files."""
    info = f"{PACKAGE}-{version}.dist-info"
    return problems(set(names), package | {f"{info}/METADATA", f"{info}/licenses/LICENSE"}, (f"{info}/",))


def sdist_problems(names: Iterable[str], package: set[str], version: str) -> list[str]:
    """List problems of a source distribution's files."""
    top = f"{PACKAGE}-{version}/"
    needed = {top + name for name in (*package, "LICENSE", "README.md", "pyproject.toml")}
    made = (f"{top}PKG-INFO", f"{top}setup.cfg", f"{top}{PACKAGE}.egg-info/")
    return problems(set(names), needed, made)


def problems(names: set[str], needed: set[str], made: tuple[str, ...]) -> list[str]:
    """List names that are missing, and those that are neither needed nor begin as what a build makes."""
    missing = [f"lacks {name}" for name in sorted(needed - names)]
    return missing + [f"holds {name}" for name in sorted(names - needed) if not name.startswith(made)]


def build(folder: Path, work: Path) -> tuple[Path, Path]:
    """Build both into the folder. Returns the source distribution's path and the wheel's."""
    python = environment(work / "build")
    print(f"building {PACKAGE} {expected_version()}", flush=True)
    run([python, "-m", "pip", "install", "-qq", *CONSTRAINTS, "build"])
    run([python, "-m", "build", "--outdir", folder, ROOT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    name = f"{PACKAGE}-{expected_version()}"
    return folder / f"{name}.tar.gz", folder / f"{name}-py3-none-any.whl"


def environment(folder: Path) -> Path:
    """Make an environment with nothing in it but pip. Returns its interpreter."""
    run([sys.executable, "-m", "venv", folder])
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def use(wheel: Path, work: Path) -> None:
    """Install a wheel, and use it where no checkout is."""
    python, elsewhere = environment(work / "user"), work / "elsewhere"
    elsewhere.mkdir()
    print(f"installing {wheel.name} and what it requires", flush=True)
    run([python, "-m", "pip", "install", "-qq", "--no-compile", *CONSTRAINTS, wheel])
    version = run([python, "-m", PACKAGE, "--version"], cwd=elsewhere, stdout=subprocess.PIPE).stdout
    if not version.startswith(f"{PACKAGE} {expected_version()}, "):
        sys.exit(f"expected version {expected_version()}, got {version}")
    run([python, "-c", USE], cwd=elsewhere)
    # Without the GPU, if there is one: doctor would ask for the extra cutile.
    bare = clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "PATH": str(python.parent)}
    run([python, "-m", PACKAGE, "doctor"], cwd=elsewhere, env=bare)


def clean_environment() -> dict[str, str]:
    """This process's environment without what would let Python find the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def run(command: list[str | Path], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, **({"check": True, "text": True, "env": clean_environment()} | options))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the source distribution and the wheel are put")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        sdist, wheel = build(folder, Path(work))
        package, version = package_files(), expected_version()
        with tarfile.open(sdist) as archive:
            names = [member.name for member in archive if member.isfile()]
        found = [f"{sdist.name} {each}" for each in sdist_problems(names, package, version)]
        with zipfile.ZipFile(wheel) as archive:
            found += [f"{wheel.name} {each}" for each in wheel_problems(archive.namelist(), package, version)]
        if found:
            print(*found, sep="\n")
            return 1
        use(wheel, Path(work))
    print(f"{wheel.name}: {len(package)} files, installs into an empty environment and works")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout or ''}failed: {error}")
