# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define library ops, `torch.ops.tilegym_rmsnorm`, which represent a forward or a backward in graphs.

A `LibraryOp` describes an op. `define` does the rest, in one way for all ops: known calls first, the backend
that is in effect when the op runs, fake tensors, gradients, vmap, tracers, shards.

The kernel is chosen when an op runs, not when a graph is made: a graph may serve any number of rows. All arguments are
positional, tensors first, as sharding rules need them. Behind the numbers are the backend, a name, "auto", or None for
the backend in effect, and the flags of reproducibility.py: an op that runs has these and those in effect, so that a
graph keeps what it was traced with, and one without them, of an older release, follows the level in effect. Ops have no
rule for autocast: the public functions cast.

The gradient of a forward op is an autograd.Function at the dispatch key Autograd: half the host time of
register_autograd. A gradient through a backward op runs PyTorch's operations. So do all ops inside a transform of
torch.func and on tensors with a tangent, since PyTorch can transform its own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call import watched
from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.tensors import is_plain
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.routes import choose, known_dtensors
from tilegym_rmsnorm.routes.autograd import RecordedFunction, Recording, Tensors, is_recorded
from tilegym_rmsnorm.routes.known_calls import KnownCalls, Run, run_and_remember
from tilegym_rmsnorm.routes.sharding_rules import add_rules, register_sharding
from tilegym_rmsnorm.settings import get_current_backend

NAMESPACE = "tilegym_rmsnorm"
library = torch.library.Library(NAMESPACE, "DEF")
below_autograd = torch._C._AutoDispatchBelowAutograd
Options = tuple[Any, ...]  # the arguments behind the tensors: numbers, the backend, the level
# PyTorch's operations for each op.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


class CheckedCall(NamedTuple):
    """A call of an op whose arguments passed all checks."""

    checked: Checked
    backend: str | None
    wanted: Any = None  # which gradients; None for a forward
    own: Any = None  # what the op's own functions need besides, as its `check` says


@dataclass(frozen=True)
class LibraryOp:
    """Describe one library op: its arguments, how it runs, and what graphs and autograd need of it."""

    name: str
    schema: str
    count: int  # of the tensors, which are the first arguments
    for_backend: Callable[[Tensors], Tensors]  # selects them in the order in which a backend takes them
    check: Callable[..., CheckedCall]  # takes all arguments
    known: KnownCalls
    # takes tensors for a backend, and the options; None: such a call cannot be known
    known_call: Callable[[Tensors, Options], Any]
    # returns the function that runs tensors like these, in the order of a backend; it holds none of them
    bind: Callable[[Tensors, Call, CheckedCall], Callable[[Any], Any]]
    for_fakes: Callable[[CheckedCall], Any]  # results that have shapes and dtypes alone
    by_operations: Callable[[CheckedCall], Any]  # PyTorch's operations, which can be differentiated
    rules: Callable[..., Any]  # placements of results and arguments on one dimension of a mesh
    # The results of a call for which no backend is asked; None: a backend is.
    without_backend: Callable[[CheckedCall], Any] = lambda _: None
    # returns the `Recording` of a forward; it gets a function of the tensors that runs the op, the tensors, and the
    # options with the backend and the level in effect. None: autograd differentiates `by_operations`.
    recording: Callable[[Run, Tensors, Options], Recording] | None = None
    node: type[RecordedFunction] = RecordedFunction
    map: Callable[..., Any] | None = None  # for vmap; None: `one_by_one`

    @functools.cached_property
    def overload(self) -> Any:
        return getattr(torch.ops.tilegym_rmsnorm, self.name).default


def call(op: LibraryOp, arguments: tuple[Any, ...]) -> Any:
    """Call a library op."""
    register_sharding(arguments[: op.count])
    return op.overload(*arguments)


def define(op: LibraryOp) -> Any:
    """Define a library op. Return its overload, which callers call."""
    library.define(op.name + op.schema)
    overload = op.overload
    dispatch = _find_known_first(overload, functools.partial(_run_known, op))
    count = len(overload._schema.arguments)

    def filled_in(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        """Give `function` all arguments: PyTorch leaves out a level of 0, since it is the last one and the default."""
        run = functools.partial(function, op, *first)
        return lambda *given: run(*given) if len(given) == count else run(*given, 0)

    transformed = filled_in(_transformed)
    library.impl(op.name, filled_in(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", filled_in(_fake), lib=library)
    library.impl(op.name, filled_in(_differentiated, dispatch), "Autograd")
    mapped = op.map or functools.partial(one_by_one, overload)
    torch.library.register_vmap(f"{NAMESPACE}::{op.name}", mapped, lib=library)
    # torch.jit.trace cannot take an op whose results may be None. Neither can the older vmap, by which
    # autograd.grad(is_grads_batched=True) maps a backward.
    for key in ("Tracer", "Batched"):
        library.impl(op.name, transformed, key)
    DECOMPOSITIONS[overload] = transformed
    add_rules(overload, op.rules)
    return overload


def _find_known_first(overload: Any, run_known: Callable[[Tensors], Any]) -> Callable[..., Any]:
    """Let a call of the op from Python, as compiled graphs and DTensors make it, look for a known call before PyTorch's
    dispatcher, which takes as long as all else: it boxes each argument. Under a profiler the dispatcher is called, so
    that the profiler sees the op; an `ExecutionTraceObserver` alone does not. Return a function that calls the
    dispatcher at once."""
    dispatch, count = overload._op, len(overload._schema.arguments)

    def call(*given: Any, **named: Any) -> Any:
        if len(given) == count - 1 and not named:  # without the level
            given += (0,)  # unpacking takes twice as long
        if len(given) == count and not watched.is_profiled():
            if (known := run_known(given)) is not None:
                return known
        return dispatch(*given, **named)

    overload._op = call  # An op's hash is that of `_op`: replace it before any table holds the op.
    return dispatch


def _run_known(op: LibraryOp, arguments: tuple[Any, ...]) -> Any:
    """Run an op like an earlier call, without checks; None: none was like it."""
    tensors = op.for_backend(arguments)
    run = op.known.find(op.known_call(tensors, arguments[op.count :]))
    return None if run is None else run(tensors)


def _run(op: LibraryOp, *arguments: Any) -> Any:
    """Run an op, on real tensors."""
    tensors = op.for_backend(arguments)
    described = op.known_call(tensors, arguments[op.count :])
    # Not every call comes by `_find_known_first`: AOTInductor's come from C++.
    if (run := op.known.find(described)) is not None:
        return run(tensors)
    asked = checked_here(op, arguments)
    if (results := op.without_backend(asked)) is not None:
        return results
    call = choose.call_of_op(asked.checked, asked.backend, asked.wanted)
    return run_and_remember(
        op.known,
        described,
        tensors,
        asked.checked.tensors,
        call.forward if asked.wanted is None else call.backward,
        lambda _: op.bind(asked.checked.tensors, call, asked),
    )


def checked_here(op: LibraryOp, arguments: tuple[Any, ...]) -> CheckedCall:
    """Check a call that runs now: its level is that of its arguments and the one in effect."""
    *given, level = arguments
    return op.check(*given, level | flags())


def _fake(op: LibraryOp, *arguments: Any) -> Any:
    return op.for_fakes(op.check(*arguments))


def _differentiated(op: LibraryOp, dispatch: Callable[..., Any], *arguments: Any) -> Any:
    """Run an op at the dispatch key Autograd."""
    tensors = arguments[: op.count]
    register_sharding(tensors)
    if choose.why_transformed(*tensors) is not None:
        return _transformed(op, *arguments)
    if is_recorded(*tensors):
        return _transformed(op, *arguments) if op.recording is None else _recorded(op, *arguments)
    # Not below autograd: the next call like this one looks for it with the dispatch keys of here. No mode and no
    # subclass stands between this rule and the op's own implementation: run that, past a kernel that somebody else
    # registered for a device.
    if not watched.is_watched() and all(each is None or is_plain(each) for each in tensors):
        return _run(op, *arguments)
    with below_autograd():
        results = dispatch(*arguments)
    if op.recording is None:  # Public calls remember forwards.
        known_dtensors.remember(op, arguments, results)
    return results


def _recorded(op: LibraryOp, *arguments: Any) -> Any:
    tensors, options = arguments[: op.count], arguments[op.count :]

    def run(tensors: Tensors) -> Any:
        with below_autograd():
            return op.overload(*tensors, *options)

    assert op.recording is not None
    recording = op.recording(run, tensors, options_in_effect(options, tensors[0]))
    return op.node.apply(recording, *tensors)


def _transformed(op: LibraryOp, *arguments: Any) -> Any:
    return op.by_operations(checked_here(op, arguments))


def one_by_one(overload: Any, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """Call an op once for each element of a batch, for vmap: each has a weight, or a dw, of its own."""

    def of_batch(i: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [each if dim is None else each.select(dim, i) for each, dim in pairs]

    if info.batch_size == 0:  # the shapes of the results come from one call on zeros
        pairs = zip(arguments, in_dims, strict=True)
        moved = [(each if dim is None else each.movedim(dim, 0), dim) for each, dim in pairs]
        one = [each if dim is None else each.new_zeros(each.shape[1:]) for each, dim in moved]
        found = [overload(*one)]
    else:
        found = [overload(*of_batch(i)) for i in range(info.batch_size)]
    is_one = isinstance(found[0], Tensor)  # such an op returns no tuple
    columns = zip(*([each] if is_one else each for each in found), strict=True)
    results = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    if info.batch_size == 0:
        results = tuple(None if each is None else each[:0] for each in results)
    of_batch_dim = tuple(None if each is None else 0 for each in results)
    return (results[0], 0) if is_one else (results, of_batch_dim)


def options_in_effect(options: Options, x: Tensor) -> Options:
    """Return the options of a gradient: it has the backend and the level of its forward, and runs later, in a thread
    that does not see `use_backend`. In a graph that is being made they stay, for those in effect at each run."""
    *numbers, backend, level = options
    if watched.makes_graph() or choose.why_recorded({"x": x}) is not None:
        return options
    return *numbers, get_current_backend() if backend is None else backend, level | flags()
