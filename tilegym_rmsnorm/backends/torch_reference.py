# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "torch": the reference itself. Any device and any floating dtypes; many kernels, so slow."""

from __future__ import annotations

import torch
from torch import Tensor

from tilegym_rmsnorm.reference import rms_norm_backward_torch, rms_norm_forward_torch
from tilegym_rmsnorm.registry import Request, Unusable, register_impl
from tilegym_rmsnorm.spec import Spec, Tensors

IMPLEMENTATION = __name__
AUTO_ON_CPU = True


def unusable(request: Request | None) -> Unusable | None:
    """Always None: plain PyTorch runs wherever torch does."""
    return None


@register_impl("rms_norm_forward", "torch")
@torch.no_grad()
def rms_norm_forward(spec: Spec, tensors: Tensors) -> tuple[Tensor, Tensor]:
    x, weight, bias = tensors
    return rms_norm_forward_torch(x, weight, spec.eps, bias=bias, offset=spec.offset, casting=spec.casting)


@register_impl("rms_norm_backward", "torch")
@torch.no_grad()
def rms_norm_backward(spec: Spec, tensors: Tensors, needs_dw: bool) -> tuple[Tensor, Tensor | None]:
    dx, dw = rms_norm_backward_torch(*tensors, offset=spec.offset, casting=spec.casting)
    return dx, dw if needs_dw else None
