# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Make calls of DTensors known (known_calls.py): run the local tensors, past the engine of DTensor.

In each call of an op the engine looks up how the results are placed, and moves tensors that are placed otherwise than a
rule of the op says. A call that it has run is known where nothing was moved: each tensor is sharded or replicated as
one rule says, and the results are placed as that rule says. Then a call like it runs what the op ran on the local
tensors, and wraps its results.

The results get the mesh of the first tensor: that of an earlier call may be equal, while its process groups are gone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.call.tensors import PLAIN_TYPES, dtensor_class, local_of
from tilegym_rmsnorm.call.watched import is_watched
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.routes import choose
from tilegym_rmsnorm.routes.autograd import apply_of, is_recorded
from tilegym_rmsnorm.routes.known_calls import WITH_FORGET, Run, may_remember
from tilegym_rmsnorm.settings import get_current_backend

Tensors = tuple[Any, ...]


def remember(op: Any, arguments: Tensors, results: Any) -> None:
    """Remember a call of a library op that autograd does not record, if it may be known. op: the `LibraryOp`."""
    if (run := _bind(op, arguments, results)) is not None:
        op.known.remember(op.known_call(op.for_backend(arguments), arguments[op.count :]), run)


def bind_public(
    op: Any,
    arguments: Tensors,
    results: Any,
    given: Tensors,
    in_order: Callable[[Tensors], Tensors],
    returned: Callable[[Tensors], Any],
) -> Run | None:
    """Return a function of tensors like those of a public call, which records the call where autograd would. It holds
    no tensor. None where the call must not be known.

    Args:
        op: The `LibraryOp` of the forward, which ran the call.
        arguments: Its arguments.
        results: Its results.
        given: The tensors as the caller gave them, in the order of a backend.
        in_order: Puts such tensors in the order of the op.
        returned: Takes the results of the op, and returns those of the call.
    """
    tensors, options = arguments[: op.count], arguments[op.count :]
    added = _added(given, op.for_backend(tensors))
    if added is None or (run := _bind(op, arguments, results)) is None:
        return None
    if not is_recorded(*tensors):
        return lambda tensors: returned(run(added(tensors)))
    *numbers, backend, level = options
    if backend is None:
        backend = get_current_backend()  # autograd's threads do not see `use_backend`
    options = (*numbers, backend, level)
    recording = op.recording(lambda tensors: run(op.for_backend(tensors)), tensors, options)
    recording.returned, record = returned, apply_of(op.node)
    return lambda tensors: record(recording, *in_order(added(tensors)))


def _added(given: Tensors, checked: Tensors) -> Callable[[Tensors], Tensors] | None:
    """Return a function that makes the DTensors that the checks made of plain tensors, which they took for replicated.
    None where the checks made other tensors."""
    cls, specs = dtensor_class(), []
    for each, one in zip(given, checked, strict=True):
        if each is not one and not (
            type(each) in PLAIN_TYPES
            and type(one) is cls
            and not each.requires_grad
            and each.data_ptr() == one._local_tensor.data_ptr()
        ):
            return None
        specs.append(None if each is one else one._spec)
    if all([spec is None for spec in specs]):
        return lambda tensors: tensors
    new = cls.__new__

    def add(tensors: Tensors) -> Tensors:
        pairs = zip(tensors, _on(tensors[0]._spec.mesh, specs), strict=True)
        return tuple([each if s is None else new(cls, each, s, requires_grad=False) for each, s in pairs])

    return add


def _bind(op: Any, arguments: Tensors, results: Any) -> Run | None:
    """Return a function of DTensors like these, in the order of a backend, that returns results like these. It holds no
    tensor. None where such a call must not be known."""
    tensors, options = arguments[: op.count], arguments[op.count :]
    cls, given = dtensor_class(), [each for each in tensors if each is not None]
    if is_watched() or not all([type(each) is cls for each in given]) or not isinstance(results, tuple):
        return None
    try:
        of_tensors, of_results = _specs(tensors), _specs(results)
        if not _are_in_place(op.rules, options, of_tensors, of_results):
            return None
        specs = tuple(map(copy.copy, of_results))
        _wrapped(cls, _local(results), specs)  # fails here, if it does
    except (AttributeError, TypeError):  # private names, which a PyTorch to come may not have
        return None
    local = _local(tensors)
    *others, level = options
    asked = op.check(*local, *others, level | flags())
    if not asked.checked.are_plain or (asked.wanted is not None and asked.wanted.why_no_backend is not None):
        return None
    call = choose.call_of_op(asked.checked, asked.backend, asked.wanted)
    function = call.forward if asked.wanted is None else call.backward
    if not may_remember(op.for_backend(local), asked.checked.tensors, function):
        return None
    run = op.bind(asked.checked.tensors, call, asked)

    def run_local(tensors: Tensors) -> Tensors:
        return _wrapped(cls, run(_local(tensors)), _on(tensors[0]._spec.mesh, specs))

    return run_local


def _specs(tensors: Tensors) -> Tensors:
    return tuple([None if each is None else each._spec for each in tensors])


def _local(tensors: Tensors) -> Tensors:
    return tuple([None if each is None else local_of(each) for each in tensors])


def _wrapped(cls: Any, results: Any, specs: Tensors) -> Tensors:
    new = cls.__new__  # __init__ does nothing, and takes twice as long
    pairs = zip(results, specs, strict=True)
    return tuple(
        [None if spec is None else new(cls, each, spec, requires_grad=False) for each, spec in pairs]
    )


def _on(mesh: Any, specs: Any) -> Any:
    """Return specs of this mesh. The mesh that they name is equal, but its process groups may be gone."""
    if all([each is None or each.mesh is mesh for each in specs]):
        return specs
    copies = tuple(map(copy.copy, specs))
    for each in copies:
        if each is not None:
            each.mesh = mesh
    return copies


@functools.lru_cache(maxsize=1024)
def _are_in_place(rules: Any, options: Tensors, specs: Tensors, of_results: Tensors) -> bool:
    """Whether each dimension of the mesh has a rule of the op that says how all tensors and results are placed, so that
    the engine moved none of them. Kept, since a call that is never known asks each time."""
    from torch.distributed.tensor import Replicate, Shard

    given = [each for each in specs if each is not None]
    mesh = given[0].mesh
    for spec in given:
        # A shard with strides equals one without them, to some releases of PyTorch.
        if spec.mesh != mesh or any(type(each) not in (Shard, Replicate) for each in spec.placements):
            return False
        # The dimensions of the mesh may shard one of a tensor in another order than theirs.
        if spec != type(spec)(spec.mesh, spec.placements, spec.tensor_meta):
            return False
    accepted = [
        [list(placed), list(of_tensors[: len(specs)])] for placed, of_tensors in rules(*specs, *options)
    ]
    for dim in range(mesh.ndim):
        placed = [
            [None if each is None else each.placements[dim] for each in part] for part in (of_results, specs)
        ]
        if placed not in accepted:
            return False
    return True


WITH_FORGET.append(_are_in_place.cache_clear)  # its keys hold meshes
