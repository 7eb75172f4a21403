# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call of `qk_norm_rope` on a backend and record its gradient, which runs on the backend of the forward.

Hooks or `tensor.data = ...` may have changed saved tensors since the forward, so a backward that is not known checks
all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.ops.rope import op
from tilegym_rmsnorm.ops.rope.checks import checked_rope_backward
from tilegym_rmsnorm.ops.rope.kernels import (
    RunRope,
    bind_rope,
    bind_rope_backward,
    known_call,
    rope_gradients_by_operations,
    run_rope_backward,
)
from tilegym_rmsnorm.ops.rope.op import RopeFunction, call_rope_backward
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPTIONS, RopeGradients, RopeSpec, RopeWanted
from tilegym_rmsnorm.routes import choose, known_calls
from tilegym_rmsnorm.routes.autograd import apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls

_is_in_inference_mode = torch.is_inference_mode_enabled  # in that mode enable_grad() records nothing
_record = apply_of(RopeFunction)


def bind_eager(tensors: tuple[Any, ...], call: Call) -> RunRope:
    """Return a function that runs tensors with the metadata of these, and records the call where autograd would. It
    holds none of them."""
    run = bind_rope(tensors, call)
    if not is_recorded(*tensors[:4]) or _is_in_inference_mode():
        return run
    recording = op.recording(run, functools.partial(_gradients, call, KnownCalls()))
    return lambda tensors: _record(recording, *tensors)


def _gradients(
    call: Call, backwards: KnownCalls, tensors: tuple[Any, ...], wanted: RopeWanted
) -> RopeGradients:
    """Compute the gradients that autograd asks for, of a backward like an earlier one without checks."""
    described = None
    if not torch.is_grad_enabled() and not is_traced():
        described = known_call(tensors, call.spec[1:], call.backend, wanted)
        if (known := backwards.find(described)) is not None:
            return known(tensors)
    spec: RopeSpec = call.spec
    options: dict[str, Any] = dict(zip(ROPE_OPTIONS, spec[1:], strict=True))
    checked = checked_rope_backward(*tensors, **options)
    route = choose.route_of(checked, call.backend, wanted, is_by_autograd=True)
    if route.name == choose.OP:
        return call_rope_backward(checked.tensors, route.call, wanted)
    if route.name == choose.OPERATIONS:
        return rope_gradients_by_operations(checked.tensors, spec, wanted)
    gradients = run_rope_backward(checked, route.call, wanted)
    if known_calls.may_remember(tensors, checked.tensors, route.call.backward):
        backwards.remember(described, lambda: bind_rope_backward(tensors, route.call, wanted))
    return gradients
