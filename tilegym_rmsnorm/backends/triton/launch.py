# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the functions of backend "triton". Heads that its kernels of `qk_norm_rope` do not hold are normalized by
those of `rms_norm`, and rotated by PyTorch's operations."""

from typing import Any

from tilegym_rmsnorm.backends import around_rope
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.backends.triton import host_norm, host_rope
from tilegym_rmsnorm.backends.triton.config import BACKWARD_HELD
from tilegym_rmsnorm.reproducibility import VLLM


@register_impl("rms_norm_forward", "triton")
def rms_norm_forward(spec: Any, tensors: Any) -> Any:
    return host_norm.run_forward(spec, tensors)


@register_impl("rms_norm_backward", "triton")
def rms_norm_backward(spec: Any, tensors: Any, wanted: Any) -> Any:
    return host_norm.run_backward(spec, tensors, wanted)


@register_impl("qk_norm_rope_forward", "triton")
def qk_norm_rope_forward(spec: Any, tensors: Any) -> Any:
    if spec.reproducible & VLLM:
        raise ValueError('reproducible: expected another order than "vllm" for qk_norm_rope, got "vllm"')
    if spec.n > BACKWARD_HELD:
        return around_rope.forward(rms_norm_forward, spec, tensors)
    return host_rope.run_forward(spec, tensors)


@register_impl("qk_norm_rope_backward", "triton")
def qk_norm_rope_backward(spec: Any, tensors: Any, wanted: Any) -> Any:
    if spec.n > BACKWARD_HELD:
        return around_rope.backward(rms_norm_forward, rms_norm_backward, spec, tensors, wanted)
    return host_rope.run_backward(spec, tensors, wanted)
