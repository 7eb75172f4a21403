# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define a backend by types: the module that says whether it can run, and what it knows of a call.

mypy compares the module of each backend with `BackendModule` (backends/__init__.py). A function must run every call
that its module's `unusable` lets through, whole or by a simpler kernel between PyTorch's operations
(around_kernels.py). `Request` is all that `unusable` knows of a call: not how many rows it has.

A backend receives the tensors of a call in the order, shapes and strides that spec.py of the op says, as
ops/norm/spec.py. None is a tensor that is absent, or not wanted.

A backend whose calls on small tensors are bound by the host registers functions made by `binding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


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
    reproducible: int = 0  # flags of the level, see reproducibility.py


class Unusable(NamedTuple):
    """Reason why a backend cannot run, and the command or change that mends it."""

    reason: str
    remedy: str


class BackendModule(Protocol):
    """Module that BACKEND_MODULES (registry.py) names. It imports no optional library."""

    IMPLEMENTATION: str  # the module that registers the functions, imported on first use

    def unusable(self, request: Request | None) -> Unusable | None:
        """Say why the backend cannot run the request (None: any request on this machine); None if it can."""


def binding(bind: Callable[..., Callable[[Any], Any]]) -> Any:
    """Make the function of a backend from `bind`, which takes the same arguments and does all that their shapes,
    strides, dtypes and alignment to 16 bytes decide. `bind` returns a function of the tensors alone, which holds none
    of them, so that a known call (routes/known_calls.py) can run it on other tensors like these."""

    @functools.wraps(bind)
    def function(spec: Any, tensors: Any, *wanted: Any) -> Any:
        return bind(spec, tensors, *wanted)(tensors)

    function.bind = bind  # type: ignore[attr-defined]
    return function


def check_gradients_ahead(backward: Any, spec: Any, tensors: Any) -> None:
    """Let a forward that autograd records raise what its backward would. backward: the function of a backend. If it has
    an attribute of this name, that gets the Spec and the tensors of the forward."""
    if (check := getattr(backward, "check_gradients_ahead", None)) is not None:
        check(spec, tensors)
