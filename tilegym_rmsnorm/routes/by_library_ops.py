# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run public calls of an op, and the gradients that autograd asks for, by what its two library ops say of themselves.

Use it for an op whose library ops take the tensors of a backend in its order, then the fields of the Spec after n, then
the backend. The backward takes one number before these: which gradients are wanted. Here `tensors` are such tensors,
and `options` all that is behind them.

Under create_graph PyTorch's operations compute gradients, which are differentiable again. Hooks or `tensor.data = ...`
may have changed saved tensors since the forward, so a backward that is not known checks all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.routes import choose, known_dtensors
from tilegym_rmsnorm.routes.autograd import Recording, apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls, Run, run_and_remember
from tilegym_rmsnorm.routes.library_op import CheckedCall, LibraryOp, Options, Tensors, call


@dataclass(frozen=True)
class OpCalls:
    """Calls of an op: its library ops, those of its public calls that are known, and how autograd records one: from a
    function of its tensors, and a function of a backward's tensors and the number of what is wanted."""

    forward: LibraryOp
    backward: LibraryOp
    known: KnownCalls
    recording: Callable[[Run, Callable[[Tensors, int], Tensors]], Recording]


def run_checked(
    op: OpCalls,
    tensors: Tensors,
    numbers: Options,
    backend: str | None,
    checked: Checked,
    untraced: Callable[..., Any],
) -> Any:
    """Run a public call that passed all checks, by its route; Dynamo traces this. tensors, numbers, backend: as the
    caller gave them. untraced: runs the call outside of a graph, given these three."""
    plain, spec = checked.tensors, checked.spec
    route = choose.route_of(checked, backend, is_differentiable=True)
    if route.name == choose.UNTRACED:
        return untraced(tensors, numbers, route.call.backend)
    if route.name == choose.OP:
        options = *spec[1:], route.call.backend
        results = call(op.forward, plain, options)
        if not is_traced() and (
            run := known_dtensors.bind_public(op.forward, (*plain, *options), results, tensors, _same, _same)
        ):
            op.known.remember(op.forward.known_call(tensors, (*numbers, backend)), run)
        return results
    if route.name == choose.OPERATIONS:
        return op.forward.by_operations(CheckedCall(checked, backend))
    return run_and_remember(
        op.known,
        lambda: op.forward.known_call(tensors, (*numbers, backend)),
        tensors,
        plain,
        route.call.forward,
        lambda is_kept: _bind(op, CheckedCall(checked, backend), route.call, is_kept),
    )


def _same(tensors: Tensors) -> Tensors:
    return tensors


def _bind(op: OpCalls, asked: CheckedCall, bound: Call, is_kept: bool) -> Run:
    """Return a function that runs tensors like these, and records the call where autograd would. It holds no tensor.
    is_kept: It runs other calls too."""
    run = op.forward.bind(asked.checked.tensors, bound, asked)
    if not is_recorded(*asked.checked.tensors):
        return run
    known, options = KnownCalls() if is_kept else None, (*bound.spec[1:], bound.backend)
    record = apply_of(op.forward.node)
    recording = op.recording(
        run, lambda given, wanted: _gradients(op.backward, known, given, (wanted, *options))
    )
    return lambda tensors: record(recording, *tensors)


def _gradients(op: LibraryOp, known: KnownCalls | None, tensors: Tensors, options: Options) -> Any:
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


def gradients_of_op(op: LibraryOp, tensors: Tensors, options: Options) -> Any:
    """Compute the gradients of a forward op. op: the backward's; options: those of the backward."""
    if choose.why_create_graph() is None:
        return call(op, tensors, options)
    return op.by_operations(op.check(*tensors, *options))
