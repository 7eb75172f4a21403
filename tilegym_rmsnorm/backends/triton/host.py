# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Allocate for kernels in Triton, and launch them on the tensors' own device and its current stream: for any op.

With TRITON_INTERPRET=1 the same calls run the kernels in Triton's interpreter, over CPU tensors or copies of CUDA ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.triton import interpreting, reduce
from tilegym_rmsnorm.backends.triton.config import DW_TILE, DW_WARPS
from tilegym_rmsnorm.backends.triton.rows import DIMENSIONS
from tilegym_rmsnorm.call.layout import packed
from tilegym_rmsnorm.call.tensors import overlap

LARGEST_ALIGNMENT = 16  # elements: as far as the width of vector loads goes
ALIGNED_BYTES = 16  # of an address: Triton compiles for those that it divides, and for others
LARGEST_INT = 2**31 - 1  # Triton compiles one kernel for integers up to here, and another for longer ones
INTERPRETED_SM_COUNT = 2  # programs run one after another: few, each with several steps, reach every branch
# Parameters of `sum_partials`, of the first sum and the second
SUMS = (
    ("partial_ptr", "sum_ptr", "P", "N"),
    ("second_partial_ptr", "second_sum_ptr", "second_P", "SECOND_N"),
)
# A kernel, its grid, arguments by the names of its parameters (None where absent), and Triton's compile options
Launch = tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]


def run(device: torch.device, *launches: Launch) -> None:
    with _ready(device):
        for kernel, grid, arguments, options in launches:
            kernel[grid](*map(arguments.get, kernel.arg_names), **options)


def is_alike(array: Tensor | None) -> bool:
    """Whether Triton compiles for an array what it compiles for a packed one, as far as its address and strides decide:
    vectors of loads decide the order of sums."""
    if array is None:
        return True
    *extents, N = array.shape
    align = math.gcd(LARGEST_ALIGNMENT, N)
    return array.data_ptr() % ALIGNED_BYTES == 0 and all(
        extent == 1 or (stride % align == 0 and stride <= LARGEST_INT)
        for extent, stride in zip(extents, array.stride(), strict=False)
    )


def are_alike(spec: Any, tensors: Any, *_: Any) -> bool:
    """Whether a call reads tensors like these where they are: without a level (reproducibility.py) all."""
    return not spec.reproducible or all(map(is_alike, tensors))


def alike(tensors: Any) -> Any:
    return tuple([each if is_alike(each) else packed(each) for each in tensors])


def rows(level: int = 0, **arrays: Tensor | None) -> tuple[dict[str, Any], int]:
    """Return kernel arguments, these arrays and where their rows lie, and the power of two that divides all strides,
    under a level those of packed arrays. Under a level ValueError where a number is above LARGEST_INT."""
    arguments: dict[str, Any] = {}
    align = LARGEST_ALIGNMENT
    for name, array in arrays.items():
        arguments[f"{name}_ptr"] = array
        if array is None:
            continue
        *extents, N = array.shape
        if level:
            align = math.gcd(align, N)
        # The stride of an extent of 1 means nothing and may be anything; it must not decide what is compiled.
        strides = [
            stride if extent > 1 else N for extent, stride in zip(extents, array.stride(), strict=False)
        ]
        if level and (longest := max(math.prod(extents), *strides)) > LARGEST_INT:
            raise ValueError(
                f"reproducible: expected rows and strides of at most {LARGEST_INT}, got {longest}"
            )
        for dimension, stride in zip(DIMENSIONS[-len(extents) :], strides, strict=True):
            arguments[f"{name}_{dimension}_stride"] = stride
            align = math.gcd(align, stride)
    return arguments, align


def options(num_warps: int, contracts: bool = True, most_registers: int | None = None) -> dict[str, Any]:
    """Return Triton's compile options. Contracting a * b + c is Triton's default up to 3.9, and announced to change.

    Products that are rounded to 16 bits and then added must not be contracted: LLVM narrows product and sum to 16 bits,
    fuses them, and so drops a rounding. most_registers: per thread. Triton's compiler for AMD has no such option, and
    refuses what it does not know.
    """
    found = {"num_warps": num_warps, "enable_fp_fusion": contracts}
    if most_registers is not None and torch.version.hip is None:
        found["maxnreg"] = most_registers
    return found


def empty(beside: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
    """Allocate on the device of a tensor; None where dtype is None."""
    return None if dtype is None else torch.empty(shape, dtype=dtype, device=beside.device)


def empty_partials(total: Tensor | None, walks: int) -> Any:
    """Allocate the partial rows that `total` is the sum of; None without a total."""
    return None if total is None else empty(total, (walks, total.numel()), torch.float32)


def sums(dw_width: int, *pairs: tuple[Any, Any], targets: Sequence[Any] = ()) -> list[Launch]:
    """Return the launch that sums partial rows, each array into its total, unless no total is wanted. targets: the
    totals that are added to."""
    wanted = [pair for pair in pairs if pair[1] is not None]
    if not wanted:
        return []
    are_targets = [any(total is each for each in targets) for _, total in wanted]
    if len(wanted) == 2 and all(are_targets) and overlap(wanted[0][1], wanted[1][1]):
        # one after the other, since both add to the same elements
        return [launch for pair in wanted for launch in sums(dw_width, pair, targets=targets)]
    adds = sum(1 << i for i, adds in enumerate(are_targets) if adds)
    arguments = {"ROWS": DW_TILE // dw_width, "WIDTH": dw_width, "ADDS": adds}
    for names, (partial, total) in zip(SUMS, wanted, strict=False):
        arguments |= zip(names, (partial, total, partial.shape[0], total.numel()), strict=True)
    grid = triton.cdiv(max(total.numel() for _, total in wanted), dw_width), len(wanted)
    return [(reduce.sum_partials, grid, arguments, options(DW_WARPS))]


def is_per_head(weight: Tensor | None) -> bool:
    return weight is not None and weight.ndim > 1


def _ready(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context to launch kernels on `device` in: Triton launches on the current device."""
    if interpreting():
        from tilegym_rmsnorm.backends.triton.interpreter import one_launch_at_a_time  # imports numpy

        return one_launch_at_a_time()
    # Switching costs microseconds of a call of about thirty: only where it is needed.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def sms_left(level: int, device: torch.device) -> int:
    """Return the SMs that a backward may use. Forwards ask too, and so refuse what the backward cannot do."""
    return settings.sms_left(sm_count(device), settings.sm_margin_under(level))


@functools.cache
def sm_count(device: torch.device) -> int:
    if interpreting():
        return INTERPRETED_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count
