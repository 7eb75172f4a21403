# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Choose the route of a call: a backend's kernels, a library op, or PyTorch's operations.

    KERNELS      a backend runs the call on plain tensors (call/tensors.py): eager calls, float64 by backend "torch"
    OP           a library op replaces the call (op.py of the op): in graphs, for DTensors, and under dispatch modes
    OPERATIONS   PyTorch's differentiable operations compute the call: in transforms, for tensors that
                 neither takes, and with backend="torch" in place of OP
    UNTRACED     torch.compile breaks its graph, and the call runs eagerly: a kernel was asked for by name, and no op
                 can replace the call

docs/architecture.md, "All other calls", has the whole list.

`route_of` decides for the public functions and for the gradients that autograd asks of an eager call: each caller takes
the route. Where Dynamo traces, `norm_in_graph` and its like (op.py of each op) come first: they call the op for usual
calls, with few guards, and leave all others to the checks and to `route_of`.

A library op asks less. PyTorch's operations replace it in a transform (`why_transformed`), and its gradient under
create_graph (`why_create_graph`). `call_of_op` chooses its backend when it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.torch_version import TorchVersion

from tilegym_rmsnorm.backends.contract import check_gradients_ahead
from tilegym_rmsnorm.backends.registry import backward_of, implementations_of
from tilegym_rmsnorm.call import watched
from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.tensors import (
    PLAIN_TYPES,
    check_memory,
    has_own_operations,
    has_tangent,
    is_batched,
    is_dtensor,
    shards_of,
    why_not_plain,
)
from tilegym_rmsnorm.call.validation import is_known
from tilegym_rmsnorm.settings import check_backend_name, get_current_backend, traced_backends

KERNELS, OP, OPERATIONS, UNTRACED = "kernels", "op", "operations", "untraced"
# From 2.14 on F.rms_norm gathers a DTensor with fewer rows than shards, in the backward twice as often as the op.
_PYTORCH_GATHERS = TorchVersion(torch.__version__) >= "2.14"
_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[str, str]] = set()


class Route(NamedTuple):
    name: str  # one of the four above
    # With KERNELS it has the functions of the backend. With OP its backend is the graph's, where None is the backend in
    # effect at each run of the graph. With OPERATIONS nothing of it is read.
    call: Call
    reason: str | None = None  # why the route is not KERNELS, in words


def route_of(
    checked: Checked,
    backend: str | None,
    wanted: Any = None,
    *,
    is_differentiable: bool = False,
    is_by_autograd: bool = False,
) -> Route:
    """Choose the route of a checked call, and its backend unless a graph chooses it later.

    backend: as given by the caller: a name, "auto", or None: the one in effect.
    wanted: an op's Wanted, of a backward; None for a forward.
    is_differentiable: autograd may record this forward, so the backward is chosen too, and PyTorch's operations run
        where the op would gather a DTensor.
    is_by_autograd: autograd asks for these gradients, not the user. Under create_graph, in transforms and while Dynamo
        traces, PyTorch's operations run them where no op does, whatever backend was named in the forward.

    Raises ValueError where the memory of a tensor was freed, BackendUnavailableError where the backend that was asked
    for by name cannot run the call.
    """
    names, tensors, _, spec, are_plain = checked
    are_plain = are_plain and not tensors[0].is_complex()
    if are_plain and not watched.is_watched() and not is_by_autograd:
        return Route(KERNELS, _call_on_backend(checked, backend, wanted, has_backward=is_differentiable))
    given = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    if is_by_autograd and (reason := why_create_graph() or why_transformed(*tensors)) is not None:
        return Route(OPERATIONS, Call(spec, "torch"), reason)
    in_graph = _backend_of_graph(backend)
    if wanted is not None and (reason := wanted.why_no_backend) is not None:
        is_op = watched.is_traced() and in_graph != "torch"
        return Route(OP if is_op else OPERATIONS, Call(spec, in_graph), reason)
    if not is_known(spec.n, 0) and not watched.is_symbol(spec.eps):
        # No mode is shown the op of a backward whose forward was no op.
        reason = _why_op(in_graph, given, sees_modes=are_plain and not is_by_autograd)
        if reason is not None and not (is_differentiable and _would_gather(in_graph, given)):
            # Dynamo can trace neither logging nor, before torch 2.11, a property of a Spec.
            if not watched.is_traced():
                _tell(spec.ops[wanted is not None], reason)
            return Route(OP, Call(spec, in_graph), reason)
    if watched.is_traced():
        if is_by_autograd or in_graph in (None, "auto", "torch"):
            return Route(OPERATIONS, Call(spec, "torch"), "torch.compile traces PyTorch's operations")
        return Route(UNTRACED, Call(spec, in_graph), "no op stands for this call")
    reason = _obstacle_of(given)
    if reason is None and is_known(spec.n, 0):
        reason = "rows of input have no elements"
    if reason is None and watched.is_symbol(spec.eps):
        reason = "eps is known only when the graph runs"
    name = KERNELS if reason is None else OPERATIONS
    call = _call_on_backend(
        checked, backend, wanted, reason, has_backward=is_differentiable and name == KERNELS
    )
    return Route(name, call, reason)


def call_of_op(checked: Checked, backend: str | None, wanted: Any = None) -> Call:
    """Choose the backend of a library op when it runs; the rest as for `route_of`. Backend "torch" runs tensors that no
    kernel can take."""
    reason = None
    if not checked.are_plain or watched.is_watched():
        reason = _obstacle_of(dict(zip(checked.names, checked.tensors, strict=True)))
    return _call_on_backend(checked, backend, wanted, reason)


def why_transformed(*tensors: Tensor | None) -> str | None:
    """Say what transforms this call, so that PyTorch's operations run whatever backend was named: torch.func, a tangent
    or vmap, a translation for another runtime; None if nothing does. Autograd makes such calls inside a backward, not
    the caller of `rms_norm`."""
    if watched.is_in_torch_func():
        return "torch.func transforms this call"
    if watched.is_translated():
        return "another runtime gets this call"
    for tensor in () if watched.is_traced() else tensors:  # Dynamo knows none of these tensors
        if tensor is not None and (has_tangent(tensor) or is_batched(tensor)):
            return why_not_plain(tensor)
    return None


def why_create_graph() -> str | None:
    """Say why a gradient that autograd asks for must be differentiable: create_graph, under which autograd switches
    grad on. None if it need not."""
    return "create_graph differentiates this gradient again" if torch.is_grad_enabled() else None


def _call_on_backend(
    checked: Checked,
    backend: str | None,
    wanted: Any,
    obstacle: str | None = None,
    has_backward: bool = False,
) -> Call:
    """Choose the backend now: another one may be in effect when a backward runs."""
    _, tensors, _, spec, _ = checked
    backend = get_current_backend() if backend is None else backend
    if wanted is not None:
        return Call(spec, backend, None, backward_of(spec, tensors, wanted, backend, obstacle))
    if has_backward:
        has_backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    forward, backward = implementations_of(spec, tensors, backend, obstacle, has_backward)
    check_gradients_ahead(backward, spec, tensors)
    return Call(spec, backend, forward, backward)


def _tell(op: str, reason: str) -> None:
    """Log once why an op replaces a call."""
    if _log.isEnabledFor(logging.INFO) and (op, reason) not in _told:
        _told.add((op, reason))
        _log.info("op tilegym_rmsnorm::%s replaces a call, since %s", op, reason)


def _obstacle_of(given: Mapping[str, Tensor | None]) -> str | None:
    check_memory(**given)
    if (reason := watched.why_not_here()) is not None:
        return reason
    for name, tensor in given.items():
        if tensor is not None and (reason := why_not_plain(tensor)) is not None:
            return f"{name} {reason}"
    return None


def _backend_of_graph(backend: str | None) -> str | None:
    """Return the backend to write into a graph: the one named, or that of `use_backend` in the function that Dynamo
    traces. Otherwise None, so that each run of the graph takes the backend in effect then; but "torch", if in effect
    now, is written into a graph that another tracer than Dynamo makes."""
    if backend is not None:
        check_backend_name(backend)  # here, since Dynamo and DTensor's engine would wrap the op's error
        return backend
    if watched.is_traced():
        return get_current_backend() if traced_backends else None
    return "torch" if get_current_backend() == "torch" else None


def _why_op(backend: str | None, given: Mapping[str, Tensor], sees_modes: bool) -> str | None:
    """Say why an op replaces a call on `_backend_of_graph`'s backend; None if no op does. sees_modes: dispatch modes
    are a reason."""
    if backend == "torch" or watched.is_transformed():
        return None
    for name, tensor in given.items():
        if is_dtensor(tensor):  # DTensor's engine refuses plain tensors beside it
            is_taken = not any(each.is_complex() or each.is_nested for each in given.values())
            return f"{name} is a DTensor" if is_taken else None
    if watched.is_traced():
        are_taken = all(type(each) in PLAIN_TYPES and not each.is_complex() for each in given.values())
        return "torch.compile makes a graph of this call" if are_taken else None
    if (reason := why_recorded(given)) is not None:
        return reason
    return "a dispatch mode sees this call" if sees_modes and watched.count_modes() != 0 else None


def why_recorded(given: Mapping[str, Tensor]) -> str | None:
    """Say why a tracer records this call, or why it needs only shapes; None if neither. Tracers: make_fx, torch.export
    or AOTAutograd. Shapes only: FakeTensorMode or fake tensors. Dynamo, torch.jit.trace and torch.func do not count."""
    standing = [name for name, each in given.items() if isinstance(each, (FakeTensor, FunctionalTensor))]
    if not (standing or watched.makes_graph()):
        return None
    for name, each in given.items():
        if each.is_complex() or each.is_nested or (has_own_operations(each) and name not in standing):
            return None
    if standing:
        return f"{standing[0]} is a {type(given[standing[0]]).__name__}"
    return watched.why_not_here() or "a graph is made of this call"


def _would_gather(backend: str | None, given: Mapping[str, Tensor]) -> bool:
    """Whether the op would gather a DTensor that PyTorch's operations leave in place: one sharded in a dimension with
    fewer elements than shards. False beside a residual with other placements: their sum is redistributed in any case,
    and F.rms_norm of a Partial sum can fail. False where a kernel is asked for by name, which needs the op."""
    if _PYTORCH_GATHERS:
        return False
    if backend is None and not watched.is_traced():  # Dynamo does not see the setting in effect
        backend = get_current_backend()
    x, residual = next(iter(given.values())), given.get("residual")
    is_alike = residual is None or getattr(residual, "placements", None) == getattr(x, "placements", None)
    if backend not in (None, "auto") or not is_alike:
        return False
    shards = shards_of(x)
    if watched.is_traced():  # a size that is not known while Dynamo traces may be small
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return any(guard_or_true(x.shape[dim] < count) for dim, count in shards.items())
    return any(x.shape[dim] < count for dim, count in shards.items())
