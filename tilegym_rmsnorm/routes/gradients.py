# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute the gradients that autograd asks for by the library op of a backward, whose `LibraryOp` says how.

For ops that take a backward's tensors in the order of a backend. tensors: those; options: the arguments behind them.
Under create_graph PyTorch's operations compute the gradients, which are differentiable again. Hooks or
`tensor.data = ...` may have changed saved tensors since the forward, so a backward that is not known checks all of
them.
"""

from __future__ import annotations

from typing import Any

import torch

from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.routes import choose
from tilegym_rmsnorm.routes.known_calls import KnownCalls, run_and_remember
from tilegym_rmsnorm.routes.library_op import LibraryOp, Options, Tensors, call


def of_call(op: LibraryOp, known: KnownCalls | None, tensors: Tensors, options: Options) -> Any:
    """Compute the gradients of an eager call, of a backward like an earlier one in `known` without checks."""
    described = None
    if known is not None and not torch.is_grad_enabled() and not is_traced():
        described = op.known_call(tensors, options)
        if (run := known.find(described)) is not None:
            return run(tensors)
    asked = op.check(*tensors, *options)
    plain = asked.checked.tensors
    route = choose.route_of(asked.checked, asked.backend, asked.wanted, is_by_autograd=True)
    if route.name == choose.OP:
        return call(op, plain, (*options[:-1], route.call.backend))
    if route.name == choose.OPERATIONS:
        return op.by_operations(asked)
    return run_and_remember(
        known,
        lambda: described,
        tensors,
        plain,
        route.call.backward,
        lambda _: op.bind(plain, route.call, asked),
    )


def of_op(op: LibraryOp, tensors: Tensors, options: Options) -> Any:
    """Compute the gradients of a forward op."""
    if choose.why_create_graph() is None:
        return call(op, tensors, options)
    return op.by_operations(op.check(*tensors, *options))
