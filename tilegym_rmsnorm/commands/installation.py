# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe this machine: its GPUs, and one line of text for each thing that a backend depends on."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import cutile
from tilegym_rmsnorm.backends.cutile.runtime import tables, toolchain
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder
from tilegym_rmsnorm.reproducibility import get_reproducible


class Gpu(NamedTuple):
    name: str
    architecture: str  # sm_90, or gfx942 for an AMD one


def visible_gpus() -> list[Gpu]:
    """The GPUs that PyTorch sees, or else those that the NVIDIA driver shows and nobody has hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return torch_gpus() or driver_gpus()[0]


def torch_gpus() -> list[Gpu]:
    """The GPUs that PyTorch sees; none where it cannot even be asked, as with a driver that fails to start."""
    if not torch.cuda.is_available():
        return []
    try:
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:
        return []
    is_amd = torch.version.hip is not None
    return [Gpu(p.name, p.gcnArchName if is_amd else f"sm_{p.major}{p.minor}") for p in properties]


def driver_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs that nvidia-smi shows, and the driver's version; ([], None) without a working driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None
    command = [program, "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return [], None
    rows = [line.split(", ", 2) for line in answer.stdout.splitlines()]
    if answer.returncode != 0 or not rows or any(len(row) != 3 for row in rows):
        return [], None
    return [Gpu(name, f"sm_{capability.replace('.', '')}") for _, capability, name in rows], rows[0][0]


def describe() -> dict[str, str]:
    """One line for each thing; a question that fails says so, and the others are still answered."""
    return {name: _guarded(question) for name, question in _QUESTIONS.items()}


def one_line(error: Exception) -> str:
    """An exception as one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _guarded(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as error:  # whatever a broken installation raises
        return f"unknown: {one_line(error)}"


def _gpu() -> str:
    gpus = visible_gpus()
    if not gpus:
        return "hidden by CUDA_VISIBLE_DEVICES" if driver_gpus()[0] else "none"
    text = "; ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus)
    return text if torch_gpus() else f"{text}, not seen by PyTorch"


def _driver() -> str:
    version, cuda = driver_gpus()[1], toolchain.driver_cuda_version()
    if version is None and cuda is None:
        return "none"
    return f"{version or 'unknown version'}, supports CUDA {toolchain.dotted(cuda)}"


def _torch() -> str:
    if torch.version.hip is not None:
        return f"{torch.__version__}, built for ROCm {torch.version.hip}"
    return f"{torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"


def _cuda_tile() -> str:
    version = toolchain.package_version("cuda-tile")
    if version is None:
        return "not installed"
    oldest, below = toolchain.CUDA_TILE_RANGE
    if oldest <= toolchain.parse_version(version) < below:
        return version
    state = "not tested" if toolchain.can_use_cuda_tile(version) else "not usable"
    expected = toolchain.CUDA_TILE_EXPECTED
    return f"{version}: {state}; expected {expected}. To mend it: {toolchain.CUDA_TILE_INSTALL}"


def _tileiras() -> str:
    tileiras, mismatch = toolchain.find_tileiras(), toolchain.pip_mismatch()
    note = f"; pip packages ignored, not of one version: {mismatch}" if mismatch else ""
    if headers := toolchain.pip_mismatch(toolchain.NVCC_PACKAGES):
        note += (
            f"; nvcc and its headers are not of one version: {headers}. To mend it: {toolchain.PIP_INSTALL}"
        )
    if tileiras is None:
        return f"not found{note}"
    return f"{toolchain.dotted(tileiras.release)}, from {tileiras.source}: {tileiras.path}{note}"


def _cuda_home() -> str:
    home, tileiras = toolchain.cuda_home(), toolchain.find_tileiras()
    if home is None:
        return "not set"
    text = "=".join(home)
    if conflict := toolchain.cuda_home_conflict():
        return f"{text}, in conflict: {conflict}"
    return text if tileiras is None or tileiras.inherits_cuda_home else f"{text}, ignored by this tileiras"


def _cache() -> str:
    folder = toolchain.cache_folder()
    if folder is None:
        return "off (CUDA_TILE_CACHE_DIR): every process compiles its kernels again"
    if str(folder).startswith("~"):
        return "off: no home folder is known. To mend it: set CUDA_TILE_CACHE_DIR to a folder"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return str(folder) if os.access(existing, os.W_OK) else f"{folder}, not writable"


def _tuned() -> str:
    gpus = [gpu for gpu in dict.fromkeys(visible_gpus()) if gpu.architecture in cutile.ARCHITECTURES]
    if not gpus:
        return "none: no GPU that the cuTile kernels support"
    folder = user_folder()
    targets = [toolchain.target_of(gpu.name, int(gpu.architecture.removeprefix("sm_"))) for gpu in gpus]
    lines = [tables.describe(target, folder) for target in targets]
    if len(gpus) > 1:
        lines = [f"{gpu.name}: {line}" for gpu, line in zip(gpus, lines, strict=True)]
    if folder is None:
        lines.append(f"the user's cache is off ({CACHE_VARIABLE}, no home folder, or no platformdirs)")
    return "; ".join(lines)


_QUESTIONS: dict[str, Callable[[], str]] = {
    "python": lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    "GPU": _gpu,
    "driver": _driver,
    "torch": _torch,
    "triton": lambda: toolchain.package_version("triton") or "not installed",
    "cuda-tile": _cuda_tile,
    "tileiras": _tileiras,
    "CUDA_HOME": _cuda_home,
    "kernel cache": _cache,
    "tuned settings": _tuned,
    "teams of blocks": lambda: "allowed" if settings.teams() else f"ruled out by {settings.TEAMS_VARIABLE}",
    "SMs left free": lambda: str(settings.get_sm_margin()),
    "reproducible": get_reproducible,
    "default backend": settings.get_current_backend,
}


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be written there, None if it can. Not to be found out when all has been measured.

    The folder is made and, where it was not there before, removed again: who writes makes it, and a run that ends
    early leaves none.
    """
    made = list(itertools.takewhile(lambda each: not os.path.exists(each), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return None if os.access(folder, os.W_OK) else f"{folder} is not writable"
    except OSError as error:
        return str(error)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # it was not made, or another process writes into it by now
                each.rmdir()
