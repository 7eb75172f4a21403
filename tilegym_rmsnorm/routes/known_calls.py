# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Keep what calls came to, so that a call like an earlier one skips all checks and lookups.

A call is *known* by a key, the arguments that are no tensors, and by `TensorGuards`, by which torch.compile tells
whether a graph fits: one call in C++ compares each tensor's class, dtype, device, sizes, strides, requires_grad and
dispatch keys, those of the thread too: so zero or negated tensors, inference mode and autocast make other calls. Guards
do not see all that surrounds a call, freed memory, the grad mode, or where memory begins: `call_of` asks.

A DTensor is described by its spec and its local tensor. Nothing here holds a tensor; keys hold specs, and those a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.registry import is_settled, unseen
from tilegym_rmsnorm.call.tensors import PLAIN_TYPES, TEBIBYTE, dtensor_class, is_plain, local_of
from tilegym_rmsnorm.call.watched import (
    are_transforms_active,
    count_modes,
    is_profiled,
    is_traced_by_jit,
    is_watched,
)

# Without it, in a PyTorch to come, no call is known: slower, and right.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_len_torch_function_stack = torch._C._len_torch_function_stack  # counts the active TorchFunctionModes

MOST_KEYS = 1024  # else calls that each have another shape would leak memory
MOST_KINDS = 8  # of tensors, for one key
_Key = tuple[Any, ...]
_Call = tuple[_Key, list[Tensor]]  # the tensors that are given
Run = Callable[[Any], Any]  # a function of a call's tensors, which holds none of them


class KnownCalls:
    """Functions to run, by the arguments of the calls that they were made for."""

    def __init__(self) -> None:
        self._kinds: dict[_Key, tuple[tuple[Any, Run], ...]] = {}  # guards, and the function

    def find(self, call: _Call | None) -> Run | None:
        """Find the function for a call; None: run all checks."""
        if call is None:
            return None
        key, tensors = call
        try:
            kinds = self._kinds.get(key, ())
        except TypeError:  # an argument that is not hashable
            return None
        for guards, run in kinds:
            if guards.check(*tensors):
                return run
        once = _each_once(call)
        return None if once is call else self.find(once)

    def remember(self, call: _Call | None, run: Run) -> None:
        """Keep a function, which holds no tensor, for calls like this one, which passed all checks."""
        if call is None or _TensorGuards is None:
            return
        key, tensors = _each_once(call)
        sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
        kind = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides), run
        if len(self._kinds) >= MOST_KEYS and key not in self._kinds:
            self._kinds.clear()
        self._kinds[key] = (kind, *self._kinds.get(key, ())[: MOST_KINDS - 1])


WITH_FORGET: list[Callable[[], None]] = []  # what else `forget` calls
_SHARED: list[KnownCalls] = []  # of public calls and library ops; each recorded call has another of its own


def shared() -> KnownCalls:
    """Make a cache that `forget` empties."""
    _SHARED.append(KnownCalls())
    return _SHARED[-1]


def forget() -> None:
    """Empty the shared caches, so that every call passes all checks once more."""
    for calls in _SHARED:
        calls._kinds.clear()
    for forget_more in WITH_FORGET:
        forget_more()


def run_and_remember(
    known: KnownCalls | None,
    described: _Call | None,
    given: tuple[Any, ...],
    tensors: tuple[Any, ...],
    function: Callable[..., Any] | None,
    bind: Callable[[bool], Run],
) -> Any:
    """Run a call that passed all checks, remember it, and return its results.

    Args:
        known: Remembers it; None: nothing does.
        described: The call, for `known`; None: it cannot be known.
        given: Its tensors, as the caller gave them.
        tensors: As the checks made them.
        function: The backend's.
        bind: Returns the function to run. It is told whether that is kept for other calls.
    """
    is_kept = known is not None and described is not None and may_remember(given, tensors, function)
    with unseen(function):
        run = bind(is_kept)
        results = run(tensors)
    if known is not None and is_kept:
        known.remember(described, run)
    return results


def may_remember(
    given: tuple[Any, ...], checked: tuple[Any, ...], function: Callable[..., Any] | None
) -> bool:
    """Whether a call that passed all checks can be known: nothing watches it, the tensors were run as given, and the
    registry chooses this function for all calls like it. Not in a CUDA graph's capture: to bind may copy tensors, and
    the graph would repeat that."""
    if is_watched() or not all([each is one for each, one in zip(given, checked, strict=True)]):
        return False
    x = given[0]
    if function is None or not is_settled(function, x.device):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _each_once(call: _Call) -> _Call:
    """Return a call whose key says which tensor is given twice; the call itself where none is. Guards take no tensor
    twice."""
    key, tensors = call
    ids = [id(each) for each in tensors]
    firsts = tuple([ids.index(each) for each in ids])
    if len(set(firsts)) == len(firsts):
        return call
    return (key, firsts), [tensors[i] for i in sorted(set(firsts))]


def call_of(
    rows: tuple[Any, ...],
    vectors: tuple[Any, ...],
    parts: tuple[Any, ...],
    others: tuple[Any, ...],
    backend: Any,
) -> _Call | None:
    """Describe a call by its key and its tensors. None where anything watches it, or a tensor is not plain.

    rows: tensors of x's shape. vectors: the others; None where absent. The key has the addresses of all, but for
    multiples of 16 bytes. parts: which tensors are None, or their types.
    """
    # As `is_watched`, for callers that Dynamo does not trace. Guards see its dispatch keys.
    if (
        forward_ad._current_level >= 0
        or are_transforms_active()
        or count_modes()
        or is_traced_by_jit()
        or _len_torch_function_stack()
    ):
        return None
    alignment, tensors = 0, [*rows]
    try:
        for each in rows:
            if type(each) not in PLAIN_TYPES:  # PyTorch itself says where the memory is
                return _call_of_dtensors(rows, vectors, parts, others, backend)
            address = each.data_ptr()
            # A higher one has memory behind it.
            if address < TEBIBYTE and not is_plain(each):
                return None
            alignment = alignment << 4 | address & 15
        for each in vectors:
            if each is not None:
                if type(each) not in PLAIN_TYPES:
                    return None
                address = each.data_ptr()
                if address < TEBIBYTE and not is_plain(each):
                    return None
                alignment = alignment << 4 | address & 15
                tensors.append(each)
        if backend is None:
            backend = settings.get_current_backend()
        of_process, has_grad = settings.process_settings(), torch.is_grad_enabled()
        return (rows[0].shape, alignment, parts, others, backend, of_process, has_grad), tensors
    except (RuntimeError, ValueError):  # no memory; an unknown word in the environment: the checks raise
        return None


def _call_of_dtensors(
    rows: tuple[Any, ...],
    vectors: tuple[Any, ...],
    parts: tuple[Any, ...],
    others: tuple[Any, ...],
    backend: Any,
) -> _Call | None:
    """Describe a call of DTensors by their specs and their local tensors, as `call_of` does. Guards compare the
    DTensors too: their dispatch keys and requires_grad may differ from those of the local tensors. Under a profiler the
    engine of DTensor runs, so that the profiler sees the op."""
    cls = dtensor_class()
    if cls is None or is_profiled() or is_watched():
        return None
    given = *rows, *vectors
    specs = tuple([each._spec if type(each) is cls else None for each in given])
    if all([spec is None for spec in specs]):
        return None
    local = tuple([each if spec is None else local_of(each) for each, spec in zip(given, specs, strict=True)])
    call = call_of(local[: len(rows)], local[len(rows) :], (parts, specs), others, backend)
    return None if call is None else (call[0], call[1] + [each for each in given if type(each) is cls])
