# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run an eager call of `qk_norm_rope` on a backend and record its gradient, as ops/norm/eager.py does for a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.ops.rope import op, passes
from tilegym_rmsnorm.ops.rope.checks import checked_rope_backward
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPTIONS, RopeGradients, RopeWanted
from tilegym_rmsnorm.routes import choose
from tilegym_rmsnorm.routes.autograd import apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls, run_and_remember

_record = apply_of(op.RopeFunction)


def bind(tensors: tuple[Any, ...], call: Call, is_kept: bool) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that runs tensors like these, and records the call where autograd would. It holds no tensor.
    is_kept: It runs other calls too."""
    run = passes.bind_forward(tensors, call)
    if not is_recorded(*tensors[:4]):
        return run
    backwards = KnownCalls() if is_kept else None
    recording = passes.recording(run, functools.partial(_gradients, call, backwards))
    return lambda tensors: _record(recording, *tensors)


def _gradients(
    call: Call, backwards: KnownCalls | None, tensors: tuple[Any, ...], wanted: RopeWanted
) -> RopeGradients:
    """Compute the gradients that autograd asks for, of a backward like an earlier one without checks."""
    described = None
    if backwards is not None and not torch.is_grad_enabled() and not is_traced():
        described = passes.known_call(tensors, call.spec[1:], call.backend, wanted)
        if (known := backwards.find(described)) is not None:
            return known(tensors)
    options: dict[str, Any] = dict(zip(ROPE_OPTIONS, call.spec[1:], strict=True))
    checked = checked_rope_backward(*tensors, **options)
    route = choose.route_of(checked, call.backend, wanted, is_by_autograd=True)
    if route.name == choose.OP:
        return op.call_backward(checked.tensors, route.call, wanted)
    if route.name == choose.OPERATIONS:
        return passes.rope_gradients_by_operations(checked.tensors, call.spec, wanted)
    return run_and_remember(
        backwards,
        lambda: described,
        tensors,
        checked.tensors,
        route.call.backward,
        lambda _: passes.bind_backward(checked.tensors, route.call, wanted),
    )
