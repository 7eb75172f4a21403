# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Bind public calls of an op, and compute the gradients that autograd asks for, by what its two library ops say.

Use it for an op whose library ops take the tensors of a backend in its order, then the fields of the Spec after n, with
the backend before the last, the level. The backward takes one number before these: which gradients are wanted. Here
`tensors` are such tensors, and `options` all that is behind them.

Under create_graph PyTorch's operations compute gradients, which are differentiable again. Hooks or `tensor.data = ...`
may have changed saved tensors since the forward, so a backward that is not known checks all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.tensors import add_to
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.routes import choose
from tilegym_rmsnorm.routes.autograd import Recording, apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls, Run, run_and_remember
from tilegym_rmsnorm.routes.library_op import CheckedCall, LibraryOp, Options, Tensors, call
from tilegym_rmsnorm.routes.main_grad import IN_USE, adds


def bind(
    op: LibraryOp,
    backward: LibraryOp,
    recording: Callable[..., Recording],
    checked: Checked,
    bound: Call,
    is_kept: bool,
) -> Run:
    """Return a function that runs tensors like these, and records the call where autograd would. It holds no tensor.

    op, backward: The library ops. recording: From a function of the tensors, and one of a backward's tensors and the
    number of what is wanted, how autograd records the call; with the tensors, it holds those that add to main_grad.
    is_kept: It runs other calls too.
    """
    run = op.bind(checked.tensors, bound, CheckedCall(checked, bound.backend))
    if not is_recorded(*checked.tensors):
        return run
    known, options = KnownCalls() if is_kept else None, options_of(bound.spec, bound.backend)
    record = apply_of(op.node)

    def gradients(given: Tensors, wanted: int, targets: Tensors = ()) -> Tensors:
        return _gradients(backward, known, given, (wanted, *options), targets)

    if IN_USE and any([adds(each) for each in checked.tensors]):
        return lambda tensors: record(recording(run, gradients, tensors), *tensors)
    recorded = recording(run, gradients)
    return lambda tensors: record(recorded, *tensors)


def options_of(spec: Any, backend: str | None) -> Options:
    """Return the options of the forward op for a call with this Spec."""
    return *spec[1:-1], backend, spec.reproducible


def _gradients(
    op: LibraryOp, known: KnownCalls | None, tensors: Tensors, options: Options, targets: Tensors = ()
) -> Any:
    """Compute the gradients of an eager call, of a backward like an earlier one in `known` without checks. targets:
    what the last results are added to, None for one that is not."""
    described = None
    if known is not None and not torch.is_grad_enabled() and not is_traced():
        described = op.known_call(tensors, options)
        if described is not None and targets:
            present = [each for each in targets if each is not None]
            described = (described[0], tuple(map(type, targets))), described[1] + present
        if (run := known.find(described)) is not None:
            return run((*tensors, *targets))
    asked = op.check(*tensors, *options)
    plain = asked.checked.tensors
    route = choose.route_of(asked.checked, asked.backend, asked.wanted, is_by_autograd=True)
    if targets:
        asked = asked._replace(wanted=asked.wanted.added_to(targets))
    if route.name == choose.OP and not targets:
        return call(op, (*plain, *options[:-2], route.call.backend, options[-1]))
    if route.name != choose.KERNELS:
        results = op.by_operations(asked)
        add_to(targets, results)
        return results
    given, plain = (*tensors, *targets), (*plain, *targets)
    return run_and_remember(
        known, described, given, plain, route.call.backward, lambda _: op.bind(plain, route.call, asked)
    )


def gradients_of_op(op: LibraryOp, tensors: Tensors, options: Options) -> Any:
    """Compute the gradients of a forward op. op: the backward's; options: those of the backward."""
    if choose.why_create_graph() is None:
        return call(op, (*tensors, *options))
    return op.by_operations(op.check(*tensors, *options))
