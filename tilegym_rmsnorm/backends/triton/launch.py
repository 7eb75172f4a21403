# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the functions of backend "triton". Heads that its kernels of `qk_norm_rope` do not hold are normalized by
those of `rms_norm`, and rotated by PyTorch's operations."""

from tilegym_rmsnorm.backends import around_rope
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.backends.triton import host_norm, host_rope
from tilegym_rmsnorm.backends.triton.config import BACKWARD_HELD
from tilegym_rmsnorm.ops.norm.spec import (
    NORM_BACKWARD,
    NORM_FORWARD,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.ops.rope.spec import (
    ROPE_BACKWARD,
    ROPE_FORWARD,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)


@register_impl(NORM_FORWARD, "triton")
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    return host_norm.run_forward(spec, tensors)


@register_impl(NORM_BACKWARD, "triton")
def rms_norm_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    return host_norm.run_backward(spec, tensors, wanted)


@register_impl(ROPE_FORWARD, "triton")
def qk_norm_rope_forward(spec: RopeSpec, tensors: RopeTensors) -> RopeOutputs:
    if spec.n > BACKWARD_HELD:
        return around_rope.forward(rms_norm_forward, spec, tensors)
    return host_rope.run_forward(spec, tensors)


@register_impl(ROPE_BACKWARD, "triton")
def qk_norm_rope_backward(spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted) -> RopeGradients:
    if spec.n > BACKWARD_HELD:
        return around_rope.backward(rms_norm_backward, spec, tensors, wanted)
    return host_rope.run_backward(spec, tensors, wanted)
