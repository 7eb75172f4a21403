# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "cutile": whether it can run here. The kernels and their launch are imported on first use.

With TILEGYM_RMSNORM_INTERPRET=1 the kernels' own Python runs over CPU tensors; that needs cuda-tile, but neither a GPU
nor tileiras. The variable is read where the interpreter would be used, and nowhere else.
"""

from __future__ import annotations

import functools

import torch

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import refusals
from tilegym_rmsnorm.backends.contract import Request, Unusable
from tilegym_rmsnorm.backends.cutile.plans import rules
from tilegym_rmsnorm.backends.cutile.runtime import toolchain
from tilegym_rmsnorm.reproducibility import VLLM
from tilegym_rmsnorm.settings import INTERPRET_VARIABLE

IMPLEMENTATION = "tilegym_rmsnorm.backends.cutile.launch"

ARCHITECTURES = tuple(f"sm_{number}" for number in rules.ARCHITECTURES)
# Whose machine code was read for the order in which it adds a row, and by which compiler (`sum_of_lanes` in tiles.py)
IN_ONE_ORDER, IN_ONE_ORDER_BY = "sm_90", (13, 4)
_INTERPRET_REMEDY = (
    f"set {INTERPRET_VARIABLE}=1 to run the kernels' Python on the CPU (slow, for tests and pdb)"
)


def interpreting() -> bool:
    """Whether CPU tensors are to be run through the kernels' own Python. ValueError on a value that does not say."""
    return settings.switch(INTERPRET_VARIABLE, default=False)


def unusable(request: Request | None) -> Unusable | None:
    """Why these tensors (None: this machine at all) cannot be run by cuTile kernels, None if they can.

    A misspelt TILEGYM_RMSNORM_INTERPRET is a ValueError for CPU tensors, and a reason for a machine without a GPU.
    """
    if request is None:
        if torch.cuda.is_available():
            problem = refusals.any_gpu_unusable(_gpu_unusable)
            return problem or _cuda_tile_unusable() or _tileiras_unusable()
        try:
            if interpreting():
                return _cuda_tile_unusable()
        except ValueError as error:
            return Unusable(str(error), f"correct {INTERPRET_VARIABLE}, or unset it")
        problem = refusals.no_gpu(*_gpu())
        return Unusable(problem.reason, f"{problem.remedy}, or {_INTERPRET_REMEDY}")
    if problem := refusals.tensors_unusable(request):
        return problem
    if request.reproducible & VLLM:
        return Unusable("the compiler owns the order of its sums", 'use backend="triton" or "auto"')
    if request.device.type == "cpu" and interpreting():
        return _cuda_tile_unusable()
    if request.device.type != "cuda":
        reason = f"it runs on CUDA tensors, these are on {request.device}"
        remedy = "move the tensors to an NVIDIA GPU"
        if request.device.type == "cpu":
            remedy = f"{refusals.remedy_of_cpu_tensors(*_gpu())}, or {_INTERPRET_REMEDY}"
        return Unusable(reason, remedy)
    problem = _gpu_unusable(request.device) or _cuda_tile_unusable() or _tileiras_unusable()
    return problem or (_level_unusable(request.device) if request.reproducible else None)


@functools.cache
def _level_unusable(device: torch.device) -> Unusable | None:
    """Say why no level of reproducibility but "run" is kept on a GPU, or None."""
    architecture, tileiras = _architecture(device), toolchain.find_tileiras()
    release = None if tileiras is None else tileiras.release
    if architecture == IN_ONE_ORDER and release is not None and release[:2] == IN_ONE_ORDER_BY:
        return None
    known = f"{IN_ONE_ORDER} with tileiras {toolchain.dotted(IN_ONE_ORDER_BY)}"
    found = f"{torch.cuda.get_device_name(device)} is {architecture}"
    found += f", tileiras {'of no known release' if release is None else toolchain.dotted(release)}"
    reason = f"the order of its sums was compared on {known} alone, and {found}"
    return Unusable(reason, 'use backend="triton"')


@functools.cache
def _gpu_unusable(device: torch.device) -> Unusable | None:
    if not torch.cuda.is_available():
        return refusals.no_gpu(*_gpu())
    if torch.version.hip is not None:
        return Unusable("it runs on NVIDIA GPUs, this PyTorch drives AMD ones", 'use backend="triton"')
    driver = toolchain.driver_cuda_version()
    if driver is not None and driver < toolchain.OLDEST_DRIVER:
        reason = f"the NVIDIA driver supports CUDA {toolchain.dotted(driver)}, cuTile kernels need 13.0"
        return Unusable(reason, 'update the driver to r580 or later, or use backend="triton"')
    if (architecture := _architecture(device)) not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        name = torch.cuda.get_device_name(device)
        return Unusable(f"{name} is {architecture}, the kernels support {known}", 'use backend="triton"')
    return None


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _gpu() -> tuple[str, bool]:
    """Return the GPU that kernels need, and whether this PyTorch is built for it."""
    return "an NVIDIA GPU", torch.version.cuda is not None


@functools.cache
def _cuda_tile_unusable() -> Unusable | None:
    """Why the installed cuda-tile cannot be used, or None."""
    version = toolchain.package_version("cuda-tile")
    if version is None:
        return Unusable("cuda-tile is not installed", toolchain.CUDA_TILE_INSTALL)
    if not toolchain.can_use_cuda_tile(version):
        reason = f"cuda-tile {version} is installed, expected {toolchain.CUDA_TILE_EXPECTED}"
        return Unusable(reason, toolchain.CUDA_TILE_INSTALL)
    return None


@functools.cache
def _tileiras_unusable() -> Unusable | None:
    tileiras = toolchain.find_tileiras()
    if tileiras is None:
        mismatch = toolchain.pip_mismatch()
        reason = (
            f"pip packages of different versions ({mismatch})" if mismatch else "tileiras is not installed"
        )
        return Unusable(reason, toolchain.PIP_INSTALL)
    if tileiras.release is not None and tileiras.release < toolchain.OLDEST_TILEIRAS:
        found = f"tileiras {toolchain.dotted(tileiras.release)} (from {tileiras.source}: {tileiras.path})"
        reason = f"{found} is too old, expected {toolchain.dotted(toolchain.OLDEST_TILEIRAS)} or later"
        return Unusable(reason, toolchain.PIP_INSTALL)
    if conflict := toolchain.cuda_home_conflict():
        return Unusable(conflict, f"unset CUDA_HOME and CUDA_PATH, or {toolchain.PIP_INSTALL}")
    return None
