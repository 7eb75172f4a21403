# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define a backend by types: the module that says whether it can run, and the two functions that it registers.

mypy compares every backend with these types: functions where `register_impl` (registry.py) decorates them, modules in
backends/__init__.py. A function must run every call that its module's `unusable` lets through, whole or by a simpler
kernel between PyTorch's operations (around_kernels.py). `Request` is all that `unusable` knows of a call: not how many
rows it has.

A backend receives *rows*: x, residual, dy and d_residual_out have one shape in a call, each its own dtype and strides.
The shape is (M, N), with a last stride of 1 and a row stride of at least N. Where the weight is per-head, or leading
dimensions are not evenly spaced, the shape is (B, T, H, N), with a last stride of 1 and any other strides but 0. y,
residual_out, dx and d_residual are new, contiguous, and have that shape too. weight, bias, dw and db are contiguous,
(N,), or (H, N) where the weight is per-head. rstd is contiguous, (M,) with M the product of the leading dimensions,
float32 (float64 for float64 x). spec and wanted give the dtypes of the results (ops/norm/spec.py). None is a tensor
that is absent, or not wanted.

The ops of `qk_norm_rope` receive q (B, T, Hq, D), and k (B, T, Hk, D) or None, with a last stride of 1 and any other
strides but 0; so are dq_out and dk_out, each with its own dtype and strides. Weights are contiguous, (D,) or (H, D), or
None. cos and sin have one shape, (rows, R) or (rows, R / 2), one dtype, and a last stride of 1. positions is int64
or int32, (1, T) or (B, T), contiguous; None: the tables have T rows, or B * T. q_out, k_out, dq and dk are new and
contiguous, in the dtypes of q and k; the gradients of weights have their shapes. There are elements in all of them.

A backend whose calls on small tensors are bound by the host registers functions made by `binding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted
from tilegym_rmsnorm.ops.rope.spec import (
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)


class Request(NamedTuple):
    """Properties of a call on which the choice of a backend depends.

    Fill a new field in `request_of`, and pass it from the callers of `request_of`: registry.py, warmup.py,
    integrations/fx.py, and integrations/aten.py, which keeps answers by a key of its own.
    """

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    casting: str
    other_dtypes: tuple[torch.dtype, ...] = ()  # of all other tensors of the call, see `request_of`
    obstacle: str | None = None  # why no kernel can take these tensors here, see routes/choose.py
    parts: tuple[str, ...] = ()  # see `parts_of`
    n: int | None = None  # elements of a row; None: rows of any width
    is_aligned: bool = True  # all rows begin at multiples of 16 bytes; False may be too careful


class Unusable(NamedTuple):
    """Reason why a backend cannot run, and the command or change that mends it."""

    reason: str
    remedy: str


class BackendModule(Protocol):
    """Module that BACKEND_MODULES (registry.py) names. It imports no optional library."""

    IMPLEMENTATION: str  # the module that registers the functions, imported on first use

    def unusable(self, request: Request | None) -> Unusable | None:
        """Say why the backend cannot run the request (None: any request on this machine); None if it can."""


class ForwardFunction(Protocol):
    """Compute y, rstd and residual_out from x, weight, bias and residual."""

    def __call__(self, spec: Spec, tensors: ForwardTensors, /) -> Outputs: ...


class BackwardFunction(Protocol):
    """Compute dx, d_residual, dw and db from x, dy, weight, rstd and d_residual_out. x is the normalized tensor:
    residual_out where there was a residual."""

    def __call__(self, spec: Spec, tensors: BackwardTensors, wanted: Wanted, /) -> Gradients: ...


class RopeForwardFunction(Protocol):
    """Compute q_out and k_out."""

    def __call__(self, spec: RopeSpec, tensors: RopeTensors, /) -> RopeOutputs: ...


class RopeBackwardFunction(Protocol):
    """Compute dq, dk and the gradients of the weights."""

    def __call__(
        self, spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted, /
    ) -> RopeGradients: ...


def binding(bind: Callable[..., Callable[[Any], Any]]) -> Any:
    """Make the function of a backend from `bind`, which takes the same arguments and does all that their shapes,
    strides, dtypes and alignment to 16 bytes decide. `bind` returns a function of the tensors alone, which holds none
    of them, so that a known call (routes/known_calls.py) can run it on other tensors like these."""

    @functools.wraps(bind)
    def function(spec: Any, tensors: Any, *wanted: Any) -> Any:
        return bind(spec, tensors, *wanted)(tensors)

    function.bind = bind  # type: ignore[attr-defined]
    return function


def bound(function: Any, spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
    """Bind the function of a backend to all but its tensors, see `binding`."""
    bind = getattr(function, "bind", None)
    if bind is None:
        return lambda tensors: function(spec, tensors, *wanted)
    return bind(spec, tensors, *wanted)
