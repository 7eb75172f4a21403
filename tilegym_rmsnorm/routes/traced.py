# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tell usual calls while Dynamo traces: op.py of each op then calls the op, past the checks and the choice of a route.

Dynamo guards on each function, module and constant of Python that it meets, and compares all of them before each call
of the compiled function: 200 guards take 5 us. So a usual call meets few of them. The op's implementation for fake
tensors makes all checks, once, and Dynamo does not trace it. Nothing here, or in such a function of an op, may
build a NamedTuple, or ask for the type of a Parameter: with such a guard `torch._dynamo.config.caching_precompile`
cannot keep or load the graph.

A function that returns None leaves the call to all checks, which know what the caller passed, and to `route_of`.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import forward_ad

from tilegym_rmsnorm.call.tensors import OfPlainType
from tilegym_rmsnorm.call.watched import peek_interpreter
from tilegym_rmsnorm.settings import NAMES


def is_usual(tensors: tuple[Any, ...], numbers: tuple[Any, ...], casting: Any, backend: Any) -> bool:
    """Whether an op can stand for a call, as far as all of its floating tensors and these options say. numbers: alpha,
    offset, eps."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    x = tensors[0]
    if x is None:
        return False
    for each in tensors:
        # A floating dtype of one byte is a float8. DTYPES would be five guards.
        if each is not None and not (
            isinstance(each, OfPlainType)
            and each.is_floating_point()
            and each.dtype.itemsize > 1
            and each.device == x.device
        ):
            return False
    alpha, offset, eps = numbers
    for number in (alpha, offset, 0.0 if eps is None else eps):
        # Neither infinite nor NaN. A number that is known only when the graph runs is none for an op.
        if not isinstance(number, float) or not guard_or_false(number * 0.0 == 0.0):
            return False
    if eps is not None and not guard_or_false(eps >= 0.0):
        return False
    if not (casting == "once" or casting == "llama"):
        return False
    if backend is not None and (backend == "torch" or backend not in NAMES):
        return False
    # As `is_transformed`. The class of an interpreter would be one more guard.
    return forward_ad._current_level < 0 and getattr(peek_interpreter(), "level", None) is None
