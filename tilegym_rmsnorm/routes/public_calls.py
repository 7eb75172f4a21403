# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run public calls that no earlier one was like, in one order for all ops: checked, routed, run, remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.routes import choose, known_dtensors, main_grad
from tilegym_rmsnorm.routes.known_calls import KnownCalls, Run, run_and_remember
from tilegym_rmsnorm.routes.library_op import LibraryOp, Options, Tensors, call


@dataclass(frozen=True)
class PublicCalls:
    """Describe the public calls of an op. Its tensors are in the order of a backend, unless a field says otherwise."""

    forward: LibraryOp
    known: KnownCalls
    arguments: Callable[[Checked, str | None], tuple[Any, ...]]  # those of the forward op
    in_order: Callable[[Tensors], Tensors]  # puts tensors in the order of the forward op
    # returns, for the tensors, a function that takes the results of the op and returns those of the call
    returned: Callable[[Tensors], Callable[[Tensors], Any]]
    by_operations: Callable[[Checked], Any]  # PyTorch's operations, which can be differentiated
    # returns a function that runs tensors like these and records the call where autograd would; it holds no tensor. The
    # last argument: whether it runs other calls too.
    bind: Callable[[Checked, Call, bool], Run]
    weights: slice  # the tensors whose gradients main_grad may get


def run_checked(
    calls: PublicCalls,
    tensors: Tensors,
    numbers: Options,
    backend: str | None,
    described: Any,
    checked: Checked,
    untraced: Callable[..., Any],
) -> Any:
    """Run a call that passed all checks, by its route; Dynamo traces this. tensors, numbers, backend: as the caller
    gave them. described: the call, for `known`; None: it cannot be known, as while Dynamo traces. untraced: runs it
    outside of a graph, given these three."""
    route = choose.route_of(checked, backend, is_differentiable=True)
    if main_grad.IN_USE and any([main_grad.adds(each) for each in tensors[calls.weights]]):
        if is_traced():
            return untraced(tensors, numbers, backend)
        pairs = zip(checked.tensors[calls.weights], tensors[calls.weights], strict=True)
        # autocast may have cast it
        are_given = all([one is each for one, each in pairs if main_grad.adds(each)])
        if route.name != choose.KERNELS or not are_given:
            return untraced(main_grad.entered(tensors, calls.weights), numbers, backend)
    if route.name == choose.UNTRACED:
        return untraced(tensors, numbers, route.call.backend)
    if route.name == choose.OPERATIONS:
        return calls.by_operations(checked)
    if route.name == choose.OP:
        arguments = calls.arguments(checked, route.call.backend)
        results, returned = call(calls.forward, arguments), calls.returned(tensors)
        if described is not None:
            given = tensors, calls.in_order, returned
            if (run := known_dtensors.bind_public(calls.forward, arguments, results, *given)) is not None:
                calls.known.remember(described, run)
        return returned(results)
    return run_and_remember(
        calls.known,
        described,
        tensors,
        checked.tensors,
        route.call.forward,
        lambda is_kept: calls.bind(checked, route.call, is_kept),
    )
