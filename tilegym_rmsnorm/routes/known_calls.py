# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Cache the `Call` of each kind of call that passed all checks, so that the next call like it skips them.

A *kind* of calls (device, dtypes, casting, backend) passed all checks once. N, eps and offset may be new: `find` checks
these itself, and that x and weight are plain (call/tensors.py) and the last dimension is normalized. All other calls
pass the full checks. A `Call` holds no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.registry import is_settled
from tilegym_rmsnorm.call.spec import Call, Spec
from tilegym_rmsnorm.call.tensors import is_plain
from tilegym_rmsnorm.reference import default_eps
from tilegym_rmsnorm.settings import get_current_backend

_SEQUENCES = (tuple, torch.Size, list)

MOST_CALLS = 1024  # else calls that each have another eps would leak memory

# One Call of each kind. A kind: device, dtypes of x and weight, casting, backend.
_kinds: dict[tuple[Any, ...], Call] = {}
# Calls by kind, N, eps and offset.
_calls: dict[tuple[Any, ...], Call] = {}


def find(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    offset: float,
    casting: str,
    backend: str | None,
) -> Call | None:
    """Find the `Call` for these arguments of an `rms_norm` without bias and residual. None: run all checks."""
    n: Any = normalized_shape
    if type(n) in _SEQUENCES and len(n) == 1:
        n = n[0]
    if type(n) is not int or not is_plain(x):
        return None
    # A number of another type may equal a float as a key, but must raise an error.
    if type(offset) is not float or not (type(eps) is float or eps is None):
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
        kind = device, x.dtype, weight_dtype, casting, backend
        call = _calls.get((kind, n, eps, offset))
        if call is not None:
            return call
        like = _kinds.get(kind)
    except (TypeError, ValueError):  # a name that is not hashable, or an unknown one in the environment
        return None
    # A kind that may be known, with new numbers.
    if like is None or not -math.inf < offset < math.inf or not (eps is None or 0.0 <= eps < math.inf):
        return None
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    spec = Spec(n, default_eps(kind[1]) if eps is None else eps, offset, casting)
    _calls[kind, n, eps, offset] = call = like._replace(spec=spec)
    return call


def remember(x: Tensor, weight: Tensor | None, call: Call) -> None:
    """Keep a call of plain tensors without bias and residual, unless the environment may change its backend."""
    spec = call.spec
    if (
        spec.y_dtype is not None
        or spec.heads
        or call.forward is None
        or not is_settled(call.forward, x.device)
    ):
        return
    kind = x.device, x.dtype, None if weight is None else weight.dtype, spec.casting, call.backend
    like = _kinds.get(kind)
    if like is None or (like.backward is None and call.backward is not None):
        _kinds[kind] = call
        for key in list(_calls):  # those of this kind lack the backward
            if key[0] == kind:
                _calls.pop(key, None)


def forget() -> None:
    """Empty the cache, so that every call passes all checks once more."""
    _kinds.clear()
    _calls.clear()
