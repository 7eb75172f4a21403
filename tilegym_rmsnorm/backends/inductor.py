# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "inductor": the reference under torch.compile. Any floating dtypes; CUDA devices with Triton, CPUs with a
C++ compiler.

One compilation per width, dtypes and casting, shared by all batch sizes, row strides, eps and offsets. M = 1, rows
without gaps, and offsets of 0 and 1 have their own: the compiler always takes these for constants.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends import checks
from tilegym_rmsnorm.reference import rms_norm_backward_torch, rms_norm_forward_torch
from tilegym_rmsnorm.registry import Request, Unusable, register_impl

IMPLEMENTATION = __name__
AUTO_ON_CPU = False  # each width compiles for seconds, more than a CPU run of the reference costs
_CXX_NAMES = ("g++", "clang++", "c++", "cl")


def unusable(request: Request | None) -> Unusable | None:
    """Why torch.compile cannot run the request, or, without a request, any at all on this machine."""
    if request is None:
        return _cuda_unusable() if torch.cuda.is_available() else _cpu_unusable()
    if request.obstacle is not None:  # of DTensors Dynamo fails on some: those of sequence parallelism
        return checks.no_plain_tensors(request.obstacle)
    if request.device.type == "cpu":
        return _cpu_unusable()
    if request.device.type == "cuda":
        return _cuda_unusable()
    return Unusable(f"it is tested on cpu and cuda tensors, not on {request.device.type}", 'backend="torch"')


def _cpu_unusable() -> Unusable | None:
    names = os.environ["CXX"].split()[:1] if os.environ.get("CXX") else _CXX_NAMES
    if not any(shutil.which(name) for name in names):
        return Unusable(
            f"no C++ compiler found (looked for {', '.join(names)})", "apt-get install g++, or set CXX"
        )
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return Unusable("Python.h, which compiled code includes, is missing", "apt-get install python3-dev")
    return None


def _cuda_unusable() -> Unusable | None:
    if not checks.is_installed("triton"):
        return Unusable("torch.compile needs Triton on a CUDA device", "pip install triton")
    return None


@register_impl("rms_norm_forward", "inductor")
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    compiled = _compiled(_forward, casting, *_specialization(x, weight, offset), _dtype(bias))
    with _one_mode(x):
        return compiled(*_aliases(x, weight, bias), eps, offset, casting)


@register_impl("rms_norm_backward", "inductor")
def rms_norm_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting: str, needs_dw: bool
) -> tuple[Tensor, Tensor | None]:
    compiled = _compiled(
        _backward, casting, *_specialization(x, weight, offset), dy.is_contiguous(), needs_dw
    )
    with _one_mode(x):
        return compiled(*_aliases(x, dy, weight), rstd.detach(), offset, casting, needs_dw)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    return rms_norm_forward_torch(x, weight, eps, bias=bias, offset=offset, casting=casting)


def _backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting: str, needs_dw: bool
) -> tuple[Tensor, Tensor | None]:
    dx, dw = rms_norm_backward_torch(x, dy, weight, rstd, offset=offset, casting=casting)
    return dx, dw if needs_dw else None


@contextlib.contextmanager
def _one_mode(x: Tensor) -> Iterator[None]:
    """Without grad and autocast, for each of which, and each pair of them, torch.compile would compile once more."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        yield


def _specialization(x: Tensor, weight: Tensor | None, offset: float) -> tuple[Any, ...]:
    """All that the compiler takes for a constant, beside what only one of the two passes has."""
    m, n = x.shape
    constant_offset = offset if offset in (0.0, 1.0) else None
    return x.device, n, x.dtype, _dtype(weight), constant_offset, m == 1, x.is_contiguous()


@functools.cache
def _compiled(function: types.FunctionType, *_specialization: Any) -> Callable[..., Any]:
    """`function` compiled apart from every other specialization.

    Each gets a code object of its own: torch.compile counts recompilations per code object and gives up after 8,
    which the widths of one model's norms can reach.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    # dynamic=True: M, eps and offset are symbols from the first compilation on; the width is marked as none.
    return torch.compile(own, fullgraph=True, dynamic=True)


def _aliases(*tensors: Tensor | None) -> list[Tensor | None]:
    """Detached, with the width marked as constant: on aliases, so that no mark lands on a caller's tensor."""
    aliases = [None if tensor is None else tensor.detach() for tensor in tensors]
    for alias in aliases:
        if alias is not None:
            torch._dynamo.mark_static(alias, alias.ndim - 1)
    return aliases


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
