# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find what the cutile backend needs on a machine: cuda-tile, its compiler tileiras, a driver.

cuda-tile has no public question "which tileiras will you run?", so its search is written again here, from
`_find_compiler_bin` of cuda/tile/_compile.py in cuda-tile 1.7.0. The first hit counts:

1. the pip packages nvidia-cuda-tileiras, nvidia-cuda-nvcc and nvidia-nvvm: all three installed, of one
   major.minor (otherwise cuda-tile warns and goes on), and nvidia/cu13/bin/tileiras present;
2. PATH;
3. the bin folder of CUDA_HOME (on Windows of CUDA_PATH, then CUDA_HOME);
4. the bin folder of a toolkit where CUDA installs itself, newest first.

A tileiras found by 2 or 3 runs with CUDA_HOME and CUDA_PATH as they are, and takes libnvvm and ptxas from the
toolkit they name. If that is older than tileiras, or holds no ptxas, every kernel fails with "failed to compile
Tile IR program" and nothing else. One found by 1 or 4 runs without the two variables.

Nothing here imports cuda.tile. Answers about the installation are cached for the life of the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.problem import Target
from tilegym_rmsnorm.backends.versions import Version, package_version, parse_version

# From, below: tested, and measured with by the tuned data that ships.
CUDA_TILE_RANGE = ((1, 7), (1, 8))
CUDA_TILE_EXPECTED = ">={}.{},<{}.{}".format(*CUDA_TILE_RANGE[0], *CUDA_TILE_RANGE[1])
# Gathers without bounds checks, which the kernels use, are refused by cuda-tile for any older tileiras.
OLDEST_TILEIRAS = (13, 4)
OLDEST_DRIVER = (13, 0)  # as the CUDA version that the driver supports: r580
PIP_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
# nvcc asks for any version of its headers. cuda-tile does not look at them: a mismatch breaks what nvcc compiles.
NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt")
PIP_INSTALL = "pip install " + " ".join(
    f'"{name}==13.4.*"' for name in dict.fromkeys(PIP_PACKAGES + NVCC_PACKAGES)
)
CUDA_TILE_INSTALL = f'pip install "cuda-tile{CUDA_TILE_EXPECTED}"'


class Tileiras(NamedTuple):
    """The compiler that cuda-tile will run."""

    path: str
    source: str  # "pip package", "PATH", "CUDA_HOME" or "default folder"
    release: Version | None  # None where the program does not say
    inherits_cuda_home: bool


def can_use_cuda_tile(version: str) -> bool:
    """Whether the kernels run with this cuda-tile. A later one of the same major version is not refused, as a later
    tileiras is not; `doctor` says that it is not tested."""
    oldest, found = CUDA_TILE_RANGE[0], parse_version(version)
    return found >= oldest and found[0] == oldest[0]


@functools.cache
def pip_mismatch(names: tuple[str, ...] = PIP_PACKAGES) -> str | None:
    """Name these packages with their versions if all are installed and not of one major.minor."""
    versions = {name: package_version(name) for name in names}
    minors = {None if version is None else parse_version(version)[:2] for version in versions.values()}
    if None in minors or len(minors) == 1:
        return None
    return ", ".join(f"{name} {version}" for name, version in versions.items())


@functools.cache
def find_tileiras() -> Tileiras | None:
    """The tileiras that cuda-tile will run, None where it finds none."""
    if path := _pip_tileiras():
        return Tileiras(path, "pip package", binary_version(path), inherits_cuda_home=False)
    if path := shutil.which("tileiras"):
        return Tileiras(path, "PATH", binary_version(path), inherits_cuda_home=True)
    windows_path = os.environ.get("CUDA_PATH") if sys.platform == "win32" else None
    home = windows_path or os.environ.get("CUDA_HOME")
    if home and (path := shutil.which("tileiras", path=os.path.join(home, "bin"))):
        return Tileiras(path, "CUDA_HOME", binary_version(path), inherits_cuda_home=True)
    for toolkit in _default_toolkits():
        if path := shutil.which("tileiras", path=str(toolkit / "bin")):
            return Tileiras(path, "default folder", binary_version(path), inherits_cuda_home=False)
    return None


def cuda_home() -> tuple[str, str] | None:
    """The variable that names a CUDA toolkit, and its value: tileiras reads CUDA_HOME, then CUDA_PATH."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(name):
            return name, value
    return None


@functools.cache
def cuda_home_conflict() -> str | None:
    """Why the toolkit that CUDA_HOME or CUDA_PATH names makes tileiras fail, None where it does not."""
    tileiras, home = find_tileiras(), cuda_home()
    if tileiras is None or home is None or not tileiras.inherits_cuda_home:
        return None
    variable, folder = home
    where = f"tileiras (from {tileiras.source}) takes libnvvm and ptxas from {variable}={folder}, which"
    ptxas = shutil.which("ptxas", path=os.path.join(folder, "bin"))
    if ptxas is None:
        return f"{where} holds no ptxas"
    found = binary_version(ptxas)
    if found is not None and tileiras.release is not None and found[:2] < tileiras.release[:2]:
        return f"{where} is CUDA {dotted(found)}, older than tileiras {dotted(tileiras.release)}"
    return None


def cache_folder() -> Path | None:
    """Return the folder of cuda-tile's cache of kernels, None if it is off.

    From `get_cache_dir_from_env` of cutile_cache/_env.py in cuda-tile 1.7.0.
    """
    home_cache = os.path.join(os.path.expanduser("~"), ".cache")
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", home_cache)
    folder = os.environ.get("CUDA_TILE_CACHE_DIR", os.path.join(base, "cutile-python"))
    return None if folder.strip().lower() in ("0", "off", "none", "") else Path(folder)


@functools.cache
def driver_cuda_version() -> Version | None:
    """The newest CUDA version that the NVIDIA driver supports, None where there is no driver to ask."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


@functools.cache
def binary_version(program: str) -> Version | None:
    """The toolkit version that a program of it says it belongs to, None where it does not run or say."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release [\d.]+, V([\d.]+)", answer.stdout)
    return parse_version(match[1]) if match else None


def target_of(model: str | None, architecture: int) -> Target | None:
    """Return the target that tables must have to count for a GPU of this name; None where no table can."""
    if model is None:  # before files are read for versions
        return None
    tileiras, cuda_tile = find_tileiras(), package_version("cuda-tile")
    if cuda_tile is None or tileiras is None or tileiras.release is None:
        return None
    return Target(model, architecture, cuda_tile, dotted(tileiras.release))


def dotted(version: Version | None) -> str:
    """A version as it is written: 13.4."""
    return "unknown" if version is None else ".".join(map(str, version))


def _pip_tileiras() -> str | None:
    if pip_mismatch() or None in map(package_version, PIP_PACKAGES):
        return None
    try:
        package = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:  # not even a package nvidia
        return None
    if package is None or not package.submodule_search_locations:
        return None
    return shutil.which("tileiras", path=os.path.join(next(iter(package.submodule_search_locations)), "bin"))


def _default_toolkits() -> list[Path]:
    windows = sys.platform == "win32"
    prefix = Path("C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA" if windows else "/usr/local")
    pattern = re.compile(r"[vV](\d+)(?:\.(\d+))?" if windows else r"cuda-(\d+)(?:\.(\d+))?")
    found = [] if windows else [((math.inf, math.inf), prefix / "cuda")]
    for folder in prefix.iterdir() if prefix.is_dir() else ():
        if match := pattern.fullmatch(folder.name):
            found.append(((int(match[1]), int(match[2]) if match[2] else math.inf), folder))
    return [folder for _, folder in sorted(found, reverse=True)]
