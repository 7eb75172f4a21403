# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Say why backends "cutile" and "triton" cannot run: dtypes that no kernel of theirs takes.

The `unusable` of each backend's module (cutile/__init__.py, triton/__init__.py) asks these and adds its own. Other
reasons to refuse a kernel stand elsewhere: docs/architecture.md, "refuse a kernel under a new condition", has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilegym_rmsnorm.backends.contract import Request, Unusable

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def tensors_unusable(request: Request) -> Unusable | None:
    """Say why the kernels of cutile and triton do not take these dtypes, on any device; None if they do."""
    if request.obstacle is not None:
        reason = (
            "it takes tensors with memory of their own, in calls that nothing records or transforms, but "
        )
        return Unusable(reason + request.obstacle, 'use backend="torch" or "auto", which take them')
    other_backend = 'use backend="torch" or "auto"'
    if request.dtype not in KERNEL_DTYPES:
        return Unusable(f"it takes x of float16, bfloat16 or float32, not {request.dtype}", other_backend)
    if request.weight_dtype not in (None, *KERNEL_DTYPES):
        reason = f"it takes a weight of float16, bfloat16 or float32, not {request.weight_dtype}"
        return Unusable(reason, other_backend)
    for dtype in request.other_dtypes:
        if dtype not in KERNEL_DTYPES:
            reason = (
                f"it takes bias, residual, gradients and results of float16, bfloat16 or float32, not {dtype}"
            )
            return Unusable(reason, other_backend)
    return None


def no_gpu(gpu: str, is_built: bool) -> Unusable:
    """Say why PyTorch sees no GPU. is_built: whether this build of it could; else nothing but another build helps.

    gpu: what the backend runs on, with its article.
    """
    if not is_built:
        remedy = f"install a CUDA build of PyTorch, as https://pytorch.org/get-started says, on a machine with {gpu}"
        return Unusable("this PyTorch is built without CUDA", remedy)
    return Unusable(f"PyTorch sees no {gpu.partition(' ')[2]}", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def remedy_of_cpu_tensors(gpu: str, is_built: bool) -> str:
    """Say where tensors should be; where PyTorch sees no GPU they can be nowhere else, and that comes first."""
    if torch.cuda.is_available():
        return f"move the tensors to {gpu}"
    problem = no_gpu(gpu, is_built)
    return f"{problem.remedy} ({problem.reason})"


def any_gpu_unusable(gpu_unusable: Callable[[torch.device], Unusable | None]) -> Unusable | None:
    """Return None if `gpu_unusable` accepts any GPU, else its answer for the first GPU, present or not."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 1
    problems = [gpu_unusable(torch.device("cuda", index)) for index in range(count)]
    return None if None in problems else problems[0]
