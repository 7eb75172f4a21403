# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Bind an eager call of `qk_norm_rope` to its backend, so that its gradient is recorded, as ops/norm/eager.py does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.ops.rope import op, passes
from tilegym_rmsnorm.routes.autograd import apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls

_record = apply_of(op.RopeFunction)


def bind(tensors: tuple[Any, ...], call: Call, is_kept: bool) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that runs tensors like these, and records the call where autograd would. It holds no tensor.
    is_kept: It runs other calls too."""
    run = passes.bind_forward(tensors, call)
    if not is_recorded(*tensors[:4]):
        return run
    known = KnownCalls() if is_kept else None
    recording = passes.recording(run, functools.partial(op.gradients_of, call, known))
    return lambda tensors: _record(recording, *tensors)
