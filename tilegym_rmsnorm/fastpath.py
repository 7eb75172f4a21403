# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Fast path: validated dispatch, cached by device, dtypes, casting and backend. 1 us of a small call instead of 4.

The checks and the choice of a backend depend on little of a call: what kind of tensors it has and where they are. What
they came to is kept here for each such combination. `find` compares the rest (shapes, eps, offset) itself, and knows
plain tensors (gate.py) normalized over their last dimension; anything else takes full validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.autograd import Call
from tilegym_rmsnorm.gate import is_plain
from tilegym_rmsnorm.reference import default_eps
from tilegym_rmsnorm.registry import Request, get_current_backend, is_settled
from tilegym_rmsnorm.spec import Spec

_SEQUENCES = (tuple, torch.Size, list)
_INF = math.inf

MOST_CALLS = 256  # of one outcome; more would be a leak, by an eps of its own in each call


class _Outcome(NamedTuple):
    """What full validation and the choice of a backend came to. calls: by N, eps and offset."""

    default_eps: float
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None  # None as long as nobody needed it
    calls: dict[tuple[int, float, float], Call]


# By device, dtype of x, dtype of weight or None, casting and backend.
_outcomes: dict[tuple[Any, ...], _Outcome] = {}


def find(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    offset: float,
    casting: str,
    backend: str | None,
) -> Call | None:
    """The call that `rms_norm` without bias and residual makes of its arguments. None: run full validation."""
    if type(offset) is not float or not -_INF < offset < _INF:
        return None
    n = normalized_shape
    if type(n) in _SEQUENCES and len(n) == 1:
        n = n[0]
    if type(n) is not int or n < 1 or not is_plain(x):
        return None
    try:
        shape, device, weight_dtype = x.shape, x.device, None
    except RuntimeError:  # a nested tensor of layout torch.strided has no shape
        return None
    if not shape or shape[-1] != n:
        return None
    if weight is not None:
        if not is_plain(weight) or weight.shape != (n,) or weight.device != device:
            return None
        weight_dtype = weight.dtype
    try:
        if backend is None:
            backend = get_current_backend()
        outcome = _outcomes.get((device, x.dtype, weight_dtype, casting, backend))
    except (TypeError, ValueError):  # a name that is not hashable, or an environment that names no backend
        return None
    if outcome is None:
        return None
    if eps is None:
        eps = outcome.default_eps
    elif type(eps) is not float or not 0.0 <= eps < _INF:
        return None
    call = outcome.calls.get((n, eps, offset))
    return _added(outcome, Spec(n, eps, offset, casting), backend) if call is None else call


def _added(outcome: _Outcome, spec: Spec, backend: str) -> Call:
    if len(outcome.calls) >= MOST_CALLS:
        outcome.calls.clear()
    call = Call(spec, outcome.forward, outcome.backward, backend)
    outcome.calls[spec.n, spec.eps, spec.offset] = call
    return call


def remember(
    request: Request, backend: str, forward: Callable[..., Any], backward: Callable[..., Any] | None
) -> None:
    """Keep what full validation came to, unless the environment may change it."""
    if (
        request.other_dtypes
        or request.obstacle is not None
        or not is_settled("rms_norm_forward", request, backend)
    ):
        return
    key = (request.device, request.dtype, request.weight_dtype, request.casting, backend)
    if backward is not None or key not in _outcomes:
        _outcomes[key] = _Outcome(default_eps(request.dtype), forward, backward, {})


def forget() -> None:
    """Send every call through full validation once more."""
    _outcomes.clear()
