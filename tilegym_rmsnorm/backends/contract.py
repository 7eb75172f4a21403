# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define a backend by types: the module that says whether it can run, and the two functions that it registers.

mypy compares every backend with them: functions where `register_impl` (registry.py) decorates them, modules in
backends/__init__.py. Each function runs every call, or composes it of a plain one and PyTorch's operations
(around_kernels.py).

The arrays of rows, x, residual, dy and d_residual_out, have one shape in a call, each its own dtype and strides: (M, N)
with a last stride of 1 and any row stride of at least N, or, where the leading dimensions of one of them are not evenly
spaced, or the weight is per-head, (B, T, H, N) with a last stride of 1 and any other strides but 0. y, residual_out, dx
and d_residual are new, contiguous, and of that shape. weight, bias, dw and db are (N,), contiguous; weight and dw, and
with them bias and db, are (H, N) where the weight is per-head. rstd is (M,), contiguous, float32 (float64 for float64
x), M the product of the leading dimensions. spec, or wanted, has the dtypes of the results (call/spec.py). None stands
for a tensor that is absent, or not wanted.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tilegym_rmsnorm.call.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted


class Request(NamedTuple):
    """All that the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    casting: str
    other_dtypes: tuple[torch.dtype, ...] = ()  # of all else that the call reads and writes, see `request_of`
    obstacle: str | None = None  # why no kernel can be given these tensors here, see `choose.why_no_kernel`
    parts: tuple[str, ...] = ()  # see `parts_of`


class Unusable(NamedTuple):
    """Why a backend cannot run, and the command or change that mends it."""

    reason: str
    remedy: str


class BackendModule(Protocol):
    """The module that BACKEND_MODULES (registry.py) names. It imports nothing optional."""

    IMPLEMENTATION: str  # the module that registers the functions, imported on first use

    def unusable(self, request: Request | None) -> Unusable | None:
        """Why the backend cannot run the request (None as request: on this machine at all), or None if it can."""


class ForwardFunction(Protocol):
    """y, rstd and residual_out of x, weight, bias and residual."""

    def __call__(self, spec: Spec, tensors: ForwardTensors, /) -> Outputs: ...


class BackwardFunction(Protocol):
    """dx, d_residual, dw and db of x, dy, weight, rstd and d_residual_out. x is what was normalized: residual_out where
    there was a residual."""

    def __call__(self, spec: Spec, tensors: BackwardTensors, wanted: Wanted, /) -> Gradients: ...
