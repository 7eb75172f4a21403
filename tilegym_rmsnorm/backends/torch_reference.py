# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "torch": the reference itself. Any device and any floating dtypes; many kernels, so slow."""

from __future__ import annotations

import torch

from tilegym_rmsnorm.reference import rms_norm_backward_torch, rms_norm_forward_torch
from tilegym_rmsnorm.registry import Request, Unusable, register_impl
from tilegym_rmsnorm.spec import Gradients, Outputs, Spec, Tensors, Wanted

IMPLEMENTATION = __name__
AUTO_ON_CPU = True


def unusable(request: Request | None) -> Unusable | None:
    """Always None: plain PyTorch runs wherever torch does."""
    return None


@register_impl("rms_norm_forward", "torch")
@torch.no_grad()
def rms_norm_forward(spec: Spec, tensors: Tensors) -> Outputs:
    x, weight, bias, _ = tensors
    y, rstd = rms_norm_forward_torch(x, weight, spec.eps, bias=bias, offset=spec.offset, casting=spec.casting)
    return y, rstd, None


@register_impl("rms_norm_backward", "torch")
@torch.no_grad()
def rms_norm_backward(spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
    dx, dw = rms_norm_backward_torch(*tensors[:4], offset=spec.offset, casting=spec.casting)
    return dx, None, None if wanted.dw is None else dw, None
