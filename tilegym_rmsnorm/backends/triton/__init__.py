# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": whether it can run here. The kernels and their launch are imported on first use.

With TRITON_INTERPRET=1 the kernels run as Python over CPU tensors, without a GPU; CUDA tensors then work too, by way of
copies on the host.
"""

from __future__ import annotations

import functools
import os
import sys

import torch

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import refusals, versions
from tilegym_rmsnorm.backends.contract import Request, Unusable

IMPLEMENTATION = "tilegym_rmsnorm.backends.triton.launch"

OLDEST_CAPABILITY = (8, 0)  # the oldest that Triton supports


def interpreting() -> bool:
    """Whether the kernels run in Triton's interpreter, which is decided where Triton is first imported."""
    language = sys.modules.get("triton.language")
    if language is None:
        # Triton refuses nothing: "y" is on, too, and what is no known word is off.
        value = os.environ.get("TRITON_INTERPRET", "")
        return value.lower() == "y" or settings.parse_switch(value) is True
    return type(language.sum).__name__ == "InterpretedFunction"


def unusable(request: Request | None) -> Unusable | None:
    """Why these tensors (None: this machine at all) cannot be run by the Triton kernels, None if they can."""
    if request is None:
        if interpreting():
            return _triton_unusable() or _interpreter_unusable()
        return refusals.any_gpu_unusable(_gpu_unusable) or _triton_unusable()
    if problem := refusals.tensors_unusable(request):
        return problem
    if request.device.type not in ("cpu", "cuda"):
        return Unusable(f"it runs on CUDA tensors, these are on {request.device}", 'use backend="torch"')
    if interpreting():
        return _triton_unusable() or _interpreter_unusable()
    if request.device.type == "cpu":
        remedy = f"{refusals.remedy_of_cpu_tensors(*_gpu())}, or {_interpret_remedy()}"
        return Unusable("it runs on CUDA tensors, these are on the CPU", remedy)
    if request.reproducible and torch.version.hip is not None:
        reason = (
            "Triton compiles one kernel for arrays of up to 2 GiB on AMD GPUs, and another for longer ones"
        )
        return Unusable(reason, 'reproducible("run")')
    return _gpu_unusable(request.device) or _triton_unusable()


def _gpu() -> tuple[str, bool]:
    """Return the GPU that kernels need, and whether this PyTorch is built for it."""
    return "a GPU", torch.version.cuda is not None or torch.version.hip is not None


def _interpret_remedy() -> str:
    install = "" if _triton_unusable() is None else "pip install triton, and "
    return (
        f"{install}set TRITON_INTERPRET=1 before Python starts to run the kernels' Python on the CPU (slow)"
    )


@functools.cache
def _triton_unusable() -> Unusable | None:
    is_missing = not versions.is_installed("triton")
    return Unusable("triton is not installed", "pip install triton") if is_missing else None


@functools.cache
def _interpreter_unusable() -> Unusable | None:
    """Triton's interpreter computes with numpy, which since 2.4 refuses how Triton before 3.7 begins a loop."""
    if not versions.is_installed("numpy"):
        return Unusable("Triton's interpreter needs numpy", "pip install numpy")
    triton, numpy = map(versions.package_version, ("triton", "numpy"))
    if triton is None or numpy is None:
        return None  # another distribution of it, such as triton-windows
    if versions.parse_version(triton) < (3, 7) and versions.parse_version(numpy) >= (2, 4):
        reason = f"the interpreter of Triton {triton} does not work with numpy {numpy}"
        return Unusable(reason, 'pip install "numpy<2.4"')
    return None


@functools.cache
def _gpu_unusable(device: torch.device) -> Unusable | None:
    if not torch.cuda.is_available():
        problem = refusals.no_gpu(*_gpu())
        return Unusable(problem.reason, f"{problem.remedy}, or {_interpret_remedy()}")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return Unusable(f"{found}, Triton needs 8.0", 'use backend="torch"')
    return None
