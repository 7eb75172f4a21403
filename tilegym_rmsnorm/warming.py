# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiling before the first step, so that no later call has to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tilegym_rmsnorm.backends.checks import tensors_unusable
from tilegym_rmsnorm.registry import BackendUnavailableError, Request, why_unusable
from tilegym_rmsnorm.validation import check_casting

Width = tuple[int, torch.dtype] | tuple[int, torch.dtype, torch.dtype | None]


def warmup(
    widths: Width | Iterable[Width], *, casting: str = "once", device: torch.device | str | None = None
) -> None:
    """Compile the kernels of backend "cutile" that the forward and the backward of these widths need, for any M.

    Afterwards a call with contiguous rows compiles nothing, whatever its number of rows, and loads nothing from the
    disk cache either; the weight's gradient is taken to be wanted. Needs a few times 100 MB of the device's memory
    while it runs.

    Args:
        widths: `(n, dtype of x)` or `(n, dtype of x, dtype of weight)`, each; None as the last: no weight. Or one of
            these.
        casting: As for `rms_norm`; eps and offset do not matter.
        device: Default: the current CUDA device.

    Raises:
        BackendUnavailableError: The backend cannot run there.
        ValueError: A width or a device that has no kernels.
        TypeError: Something else than widths, or a dtype that has no kernels.
    """
    check_casting(casting)
    requests = [_checked(width) for width in _each(widths)]
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}: nothing is compiled for others")
    for _, dtype, weight_dtype in requests:
        if unusable := why_unusable("cutile", Request(device, dtype, weight_dtype, casting)):
            raise BackendUnavailableError(f"warmup: {unusable.reason}. To mend it: {unusable.remedy}")
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
    from tilegym_rmsnorm.backends.cutile.warm import warm

    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for n, dtype, weight_dtype in requests:
        warm(machine_of(device), n, dtype, weight_dtype, casting)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _each(widths: object) -> Iterator[object]:
    """What is asked for, one after the other; a pair or triple by itself, which no sequence of such looks like."""
    if isinstance(widths, tuple) and len(widths) in (2, 3) and isinstance(widths[1], torch.dtype):
        return iter((widths,))
    if not isinstance(widths, Iterable) or isinstance(widths, str):
        expected = "a sequence of (n, dtype) or (n, dtype, weight dtype), such as [(4096, torch.bfloat16)]"
        raise TypeError(f"widths: expected {expected}, got {widths!r}")
    return iter(widths)


def _checked(width: object) -> tuple[int, torch.dtype, torch.dtype | None]:
    if not isinstance(width, tuple) or len(width) not in (2, 3):
        raise TypeError(f"widths: expected (n, dtype) or (n, dtype, weight dtype), got {width!r}")
    n, dtype, weight_dtype = width if len(width) == 3 else (*width, width[1])
    if type(n) is not int or n < 1:
        raise ValueError(f"widths: expected a whole number of at least 1 as n, got {n!r}")
    if not isinstance(dtype, torch.dtype) or not isinstance(weight_dtype, torch.dtype | None):
        raise TypeError(f"widths: expected dtypes of torch, got {width!r}")
    if problem := tensors_unusable(Request(torch.device("cuda"), dtype, weight_dtype, "once")):
        raise TypeError(
            f"widths: expected dtypes that there are kernels for, got {width!r}: {problem.reason}"
        )
    return n, dtype, weight_dtype
