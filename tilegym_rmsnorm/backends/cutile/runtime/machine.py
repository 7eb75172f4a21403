# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Allocate and launch on a device: a CUDA device, or for CPU tensors the interpreter. launcher.py does not know
which."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import cuda.tile as ct
import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS
from tilegym_rmsnorm.backends.cutile.plans.problem import LAUNCHES_AT_ONCE, Device
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime import disk_cache, toolchain

try:  # as cuda-tile built it: `import tilegym` puts a function in its place that takes no keyword arguments
    from cuda.tile._cext import launch as launch_kernel
except ImportError:
    launch_kernel = ct.launch

Launch = Callable[[tuple[int, ...], tuple[Any, ...]], None]  # (grid, arguments)

# torch.compile's own code allocates with this: torch.empty takes 2 us more. On the current device only.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


@functools.lru_cache(maxsize=256)  # to compute them takes 0.6 us of each call
def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]


class Machine(Protocol):
    """Interface to a device, for launches, searches and warmups.

    facts: its numbers, by which plans are chosen.
    no_array: the argument for an array that a kernel is compiled not to touch, since an argument cannot be None. It
    outlives a call, so on a GPU it has no memory: in a capture that would come from the graph's own pool, which
    torch.compile lets only results keep.
    """

    facts: Device
    no_array: Tensor

    def __hash__(self) -> int: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def bind(self, function: Callable[..., None], variant: Variant, constants: tuple[Any, ...]) -> Launch: ...


class GpuMachine:
    """One CUDA device. Launches go to that device, whichever is current, and to its current stream."""

    def __init__(self, device: torch.device) -> None:
        disk_cache.turn_off_where_it_fails()
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        architecture, sm_count = properties.major * 10 + properties.minor, properties.multi_processor_count
        # at least 1: a variant without a team counts one member
        most_members = max(1, sm_count // LAUNCHES_AT_ONCE)
        target = toolchain.target_of(properties.name, architecture)
        self.facts = Device(architecture, sm_count, most_members, target)
        self.no_array = torch.empty(64, device=device)
        self.no_array.untyped_storage().resize_(0)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if _empty_strided_cuda is None or torch._C._cuda_getDevice() != self.index:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return _empty_strided_cuda(shape, _packed_strides(shape), dtype)

    def bind(self, function: Callable[..., None], variant: Variant, constants: tuple[Any, ...]) -> Launch:
        index, kernel = self.index, compiled(function, variant.warps, variant.occupancy)
        # The raw handle: torch.cuda.current_stream builds an object for 4 us.
        current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

        # kernels are launched while the one before still runs, and wait
        dependent = self.facts.architecture >= 90

        def launch(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    launch(grid, arguments)
                return
            launch_kernel(
                current_stream(index),
                grid,
                kernel,
                arguments + constants,
                programmatic_dependent_launch=dependent,
            )

        return launch


class InterpretedMachine:
    """CPU tensors. Few SMs, so that small inputs already give every block several rows; every array is tracked."""

    facts = Device(architecture=90, sm_count=3, most_members=MOST_MEMBERS)  # blocks that wait let others run

    def __init__(self) -> None:
        self.no_array = torch.empty(64, device="cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with _default_device_cpu():
            return interpreter.empty(shape, dtype)

    def bind(self, function: Callable[..., None], variant: Variant, constants: tuple[Any, ...]) -> Launch:
        def launch(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            with _default_device_cpu():
                interpreter.launch(function, grid, arguments + constants, dependent=True)

        return launch


def _default_device_cpu() -> contextlib.AbstractContextManager[Any]:
    """Make the interpreter's new tensors on the CPU, where its arrays are. A `torch.device` context slows every
    operation down, so enter one only where the default device is another."""
    try:
        is_cpu = torch.get_default_device().type == "cpu"
    except AttributeError:  # torch 2.9, once set_default_device(None) was called
        is_cpu = True
    return contextlib.nullcontext() if is_cpu else torch.device("cpu")


@functools.cache
def machine_of(device: torch.device) -> Machine:
    return GpuMachine(device) if device.type == "cuda" else InterpretedMachine()


@functools.cache
def compiled(function: Callable[..., None], warps: int, occupancy: int) -> ct.kernel:
    """`function` with these hints. Every kernel object has a JIT cache of its own, so there is one for each set of
    hints."""
    return ct.kernel(function, num_worker_warps=warps, occupancy=occupancy)
