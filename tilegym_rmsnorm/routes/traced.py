# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Call the op of a usual call while Dynamo traces it, past the checks and the choice of a route.

Dynamo guards on each function, module and constant of Python that it meets, and compares all of them before each call
of the compiled function: 200 guards take 5 us. So a usual call meets few of them. The op's implementation for fake
tensors makes all checks, once, and Dynamo does not trace it. Nothing here, and in such a function of another op, may
build a NamedTuple, or ask for the type of a Parameter: with such a guard `torch._dynamo.config.caching_precompile`
cannot keep or load the graph.

A function that returns None leaves the call to all checks, which know what the caller passed, and to `route_of`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from tilegym_rmsnorm.call.arguments import filled_in
from tilegym_rmsnorm.call.tensors import OfPlainType
from tilegym_rmsnorm.call.validation import are_equal_in_graph
from tilegym_rmsnorm.call.watched import Interpreter, peek_interpreter
from tilegym_rmsnorm.reference import default_eps
from tilegym_rmsnorm.routes.op import FORWARD
from tilegym_rmsnorm.settings import NAMES, traced_backends


def norm_in_graph(
    tensors: tuple[Any, ...],
    normalized_shape: Any,
    eps: Any,
    others: tuple[Any, ...],
    backend: Any,
    follows_autocast: bool,
) -> Any:
    """Call the forward op for a usual call of `rms_norm`: what that returns. others: `known_calls.OTHERS`.
    follows_autocast: as F.rms_norm does."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    x, weight, bias, residual = tensors
    offset, alpha, residual_dtype, out_dtype, casting = others
    if backend is None and traced_backends:
        backend = traced_backends[-1]
    if not is_usual(tensors, (alpha, offset, eps), casting, backend):
        return None
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    elif not isinstance(normalized_shape, tuple) and not isinstance(normalized_shape, list):
        return None
    dims = len(normalized_shape)
    shape = x.shape[-dims:]
    if not 0 < dims <= x.ndim or not are_equal_in_graph(normalized_shape, shape):
        return None
    for size in normalized_shape:
        if not isinstance(size, int) or size is True or guard_or_false(size == 0):
            return None
    like = bias if weight is None else weight
    for vector in (weight, bias):
        if vector is not None and (
            not dims <= vector.ndim <= dims + 1
            or vector.ndim != like.ndim
            or not are_equal_in_graph(vector.shape, x.shape[-vector.ndim :])
        ):
            return None
    for dtype in (residual_dtype, out_dtype):
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            return None
    if residual is None:
        if alpha != 1.0 or residual_dtype is not None:
            return None
    elif not are_equal_in_graph(residual.shape, x.shape):
        return None
    given = *tensors, casting, residual_dtype, out_dtype, follows_autocast
    tensors, (casting, residual_dtype, out_dtype) = filled_in(*given)
    x, weight, bias, residual = tensors
    eps = default_eps(residual_dtype or x.dtype) if eps is None else eps
    numbers = dims, eps, offset, casting, alpha, residual_dtype, out_dtype
    y, _, residual_out = FORWARD(x, residual, weight, bias, *numbers, backend)
    return y if residual is None else (y, residual_out)


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
    # As `is_transformed`.
    return forward_ad._current_level < 0 and not isinstance(peek_interpreter(), Interpreter)
