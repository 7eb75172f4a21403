# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the functions of backend "cutile": each binds the kernels that take a call (host/). A call that none takes
is computed by PyTorch's operations around a kernel of a simpler call.

With TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.backends import around_kernels, around_rope
from tilegym_rmsnorm.backends.contract import binding
from tilegym_rmsnorm.backends.cutile.host import norm, rope
from tilegym_rmsnorm.backends.cutile.host.arrange import bind_arranged
from tilegym_rmsnorm.backends.cutile.host.arrange_rope import bind_arranged_rope
from tilegym_rmsnorm.backends.cutile.host.launcher import Description, bind
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.ops.norm.spec import NORM_OPS


def _registered(op: Any, kernels: Description, compose: Callable[..., Any]) -> Any:
    """Register and return the function of an op. compose: runs a call that no kernel takes."""

    def bind_call(spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
        run = bind(kernels, machine_of(tensors[0].device), spec, tensors, *wanted)
        return run or (lambda tensors: compose(spec, tensors, *wanted))

    def bind_by_level(spec: Any, tensors: Any, *wanted: Any) -> Callable[[Any], Any]:
        if spec.reproducible:
            return arrange(arranged_call, spec, tensors, *wanted)
        return bind_call(spec, tensors, *wanted)

    arrange = bind_arranged if op in NORM_OPS else bind_arranged_rope
    arranged_call = binding(bind_call)
    bind_by_level.__name__ = bind_by_level.__qualname__ = op
    return register_impl(op, "cutile")(binding(bind_by_level))


rms_norm_forward: Any = _registered(
    "rms_norm_forward", norm.FORWARD, lambda *call: around_kernels.forward(rms_norm_forward, *call)
)
rms_norm_backward: Any = _registered(
    "rms_norm_backward", norm.BACKWARD, lambda *call: around_kernels.backward(rms_norm_backward, *call)
)
rms_norm_backward.check_gradients_ahead = norm.check_gradients_ahead
qk_norm_rope_forward = _registered(
    "qk_norm_rope_forward", rope.FORWARD, lambda *call: around_rope.forward(rms_norm_forward, *call)
)
qk_norm_rope_backward = _registered(
    "qk_norm_rope_backward",
    rope.BACKWARD,
    lambda *call: around_rope.backward(rms_norm_forward, rms_norm_backward, *call),
)
