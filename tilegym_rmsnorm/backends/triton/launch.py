# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the functions of backend "triton". Heads that its kernels of `qk_norm_rope` do not hold are normalized by
those of `rms_norm`, and rotated by PyTorch's operations."""

from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.backends import around_rope
from tilegym_rmsnorm.backends.contract import binding
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.backends.triton import host, host_norm, host_rope
from tilegym_rmsnorm.backends.triton.config import BACKWARD_HELD
from tilegym_rmsnorm.reproducibility import VLLM


def _registered(op: Any, run: Callable[..., Any], are_alike: Callable[..., bool]) -> Any:
    """Register and return the function of an op. Known calls do not ask again whether a level copies their tensors."""

    def bind(spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
        alike = are_alike(spec, tensors, *wanted)
        return lambda tensors: run(spec, tensors, *wanted, alike)

    bind.__name__ = bind.__qualname__ = op
    return register_impl(op, "triton")(binding(bind))


def _rope_forward(spec: Any, tensors: Any, are_alike: bool) -> Any:
    if spec.reproducible & VLLM:
        raise ValueError('reproducible: expected another order than "vllm" for qk_norm_rope, got "vllm"')
    if spec.n > BACKWARD_HELD:
        return around_rope.forward(rms_norm_forward, spec, tensors)
    return host_rope.run_forward(spec, tensors, are_alike)


def _rope_backward(spec: Any, tensors: Any, wanted: Any, are_alike: bool) -> Any:
    if spec.n > BACKWARD_HELD:
        return around_rope.backward(rms_norm_forward, rms_norm_backward, spec, tensors, wanted)
    return host_rope.run_backward(spec, tensors, wanted, are_alike)


rms_norm_forward = _registered("rms_norm_forward", host_norm.run_forward, host_norm.are_alike)
rms_norm_backward = _registered("rms_norm_backward", host_norm.run_backward, host_norm.are_alike)
qk_norm_rope_forward = _registered("qk_norm_rope_forward", _rope_forward, host.are_alike)
qk_norm_rope_backward = _registered("qk_norm_rope_backward", _rope_backward, host.are_alike)
