# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Compiling kernels into cuda-tile's disk cache before they are launched, in processes beside the one that launches.

cuda-tile compiles under a lock of its process, so more threads would not do.
"""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.config import Config, uses_dependent_launch

if TYPE_CHECKING:
    from pathlib import Path

    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature

MOST_PROCESSES = 16
FLOAT32 = torch.float32


class Job(NamedTuple):
    """The kernels that a config launches for m rows."""

    op: str
    n: int
    m: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    config: Config


class CompilingMachine:
    """A machine whose launches only compile. Its tensors are of device "meta": they have no memory."""

    model = None

    def __init__(self, architecture: int, sm_count: int) -> None:
        self.architecture, self.sm_count = architecture, sm_count
        self.dependent_launch = uses_dependent_launch(architecture)
        self.no_weight, self.no_dw_partial = torch.empty(2, 64, device="meta").unbind()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def bind(
        self, function: Callable[..., None], config: Config, constants: tuple[Any, ...]
    ) -> Callable[..., None]:
        from tilegym_rmsnorm.backends.cutile.machine import compiled

        kernel = compiled(function, config.warps, config.occupancy)

        def launch(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            self.compile(kernel, config, arguments, constants)

        return launch

    def compile(
        self, kernel: ct.kernel, config: Config, arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        """What a launch with these arguments would compile; export_kernel keeps it in the same cache."""
        from cuda.tile.compilation import KernelSignature

        convention = calling_convention(arguments)
        signature = KernelSignature.from_kernel_args(kernel, (*arguments, *constants), convention)
        self.export(kernel, signature, io.BytesIO())

    def export(self, kernel: ct.kernel, signature: KernelSignature, file: io.BytesIO | Path) -> None:
        """Writes the cubin of a kernel for this architecture."""
        from cuda.tile.compilation import export_kernel

        gpu_code = f"sm_{self.architecture}"
        export_kernel(kernel, [signature], file, gpu_code=gpu_code, output_format="cubin")


def calling_convention(arguments: tuple[Any, ...]) -> CallingConvention:
    """The one that cuda-tile's JIT takes for these arguments: the second knows extents of 1."""
    from cuda.tile.compilation import CallingConvention

    has_extent_of_1 = any(isinstance(each, Tensor) and 1 in each.shape for each in arguments)
    return CallingConvention.cutile_python_v2() if has_extent_of_1 else CallingConvention.cutile_python_v1()


def compile_job(job: Job, architecture: int, sm_count: int) -> str | None:
    """Compile one job's kernels; why that failed, None if it did not."""
    from tilegym_rmsnorm.backends.cutile import launch

    machine = CompilingMachine(architecture, sm_count)
    weight = machine.empty((job.n,), job.weight_dtype)
    x, rstd = machine.empty((job.m, job.n), job.dtype), machine.empty((job.m,), FLOAT32)
    try:
        if job.op == "forward":
            launch.Forward(machine, job.config, job.n, True, False)(x, weight, 1e-6, 0.0)
        else:
            launch.Backward(machine, job.config, job.n, True, True, False)(x, x, weight, rstd, 0.0)
    except Exception as error:  # whatever the compiler says of a config that it cannot compile
        return repr(error)
    return None


class Compilers:
    """Processes that compile jobs, in the order in which they are given."""

    def __init__(self, architecture: int, sm_count: int) -> None:
        self.device = architecture, sm_count
        processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))
        # spawn: a fork of a process that has used CUDA cannot use its libraries.
        self.pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def submit(self, job: Job) -> Future[str | None]:
        return self.pool.submit(compile_job, job, *self.device)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
