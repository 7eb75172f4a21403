# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute a norm and return its input beside it, for a residual connection that forks before the norm.

Autograd would add the gradients of both uses of x in a kernel of its own, and round them twice. Where an eager call is
recorded, the backward of the norm adds them, and dx is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.watched import has_torch_function, is_traced
from tilegym_rmsnorm.functional import rms_norm
from tilegym_rmsnorm.ops.norm import checks, eager
from tilegym_rmsnorm.ops.norm.passes import norm_call
from tilegym_rmsnorm.routes.autograd import is_recorded
from tilegym_rmsnorm.routes.choose import KERNELS, route_of
from tilegym_rmsnorm.routes.known_calls import run_and_remember, shared
from tilegym_rmsnorm.routes.main_grad import adds
from tilegym_rmsnorm.settings import BackendName

_KNOWN = shared()


def norm_with_input(
    x: Tensor,
    weight: Tensor,
    eps: float | None,
    offset: float,
    out_dtype: torch.dtype,
    backend: BackendName | None,
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of x over weight's dimensions, and x: a view of it where the norm's backward adds both
    gradients, else x itself.

    Autograd adds the gradients in graphs, in transforms, for DTensors and other tensors that no kernel takes, and where
    autocast casts x."""
    if not is_traced() and isinstance(x, Tensor) and is_recorded(x):
        tensors = x, weight, None, None
        numbers: tuple[Any, ...] = weight.shape, eps, offset, "once", 1.0, None, out_dtype
        described = norm_call(tensors, numbers, backend)
        if (known := _KNOWN.find(described)) is not None:
            return known(tensors)
        if not has_torch_function(*tensors):
            checked = checks.checked_forward(*tensors, *numbers)
            route = route_of(checked, backend, is_differentiable=True)
            is_copied = adds(weight) and checked.tensors[1] is not weight  # then `rms_norm` adds dw
            if route.name == KERNELS and checked.tensors[0] is x and not is_copied:
                return run_and_remember(
                    _KNOWN,
                    described,
                    tensors,
                    checked.tensors,
                    route.call.forward,
                    lambda is_kept: eager.bind_with_input(checked.tensors, route.call, is_kept),
                )
    return rms_norm(x, weight.shape, weight, eps, offset=offset, out_dtype=out_dtype, backend=backend), x
