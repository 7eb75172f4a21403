# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Choose the backend that runs a forward or backward, and import and register the backends.

"auto" takes the first backend of AUTO_ORDER (settings.py) that has the op and can run these tensors on this machine. A
backend asked for by name runs or raises `BackendUnavailableError`; it never falls back to another.

contract.py defines a backend; docs/architecture.md says where one is added.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.contract import BackendModule, Request, Unusable
from tilegym_rmsnorm.call.spec import Facts
from tilegym_rmsnorm.call.tensors import are_aligned
from tilegym_rmsnorm.call.watched import count_modes
from tilegym_rmsnorm.ops.norm.spec import NORM_OPS
from tilegym_rmsnorm.ops.rope.spec import ROPE_OPS
from tilegym_rmsnorm.reproducibility import name_of
from tilegym_rmsnorm.settings import AUTO_ORDER, NAMES, check_name, get_current_backend

OPS = NORM_OPS + ROPE_OPS
BACKEND_MODULES = {
    "cutile": "tilegym_rmsnorm.backends.cutile",
    "triton": "tilegym_rmsnorm.backends.triton",
    "torch": "tilegym_rmsnorm.backends.torch_reference",
}
Function = Callable[..., Any]
_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[Any, ...]] = set()
_NOTHING_HIDDEN = contextlib.nullcontext()
# "auto" does not take these for tensors off CUDA devices. There they run in interpreters: by name only, and while the
# environment switches the interpreter on, which may change between calls.
_BY_NAME_OFF_CUDA = ("cutile", "triton")


def request_of(
    device: torch.device,
    casting: str,
    obstacle: str | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    *rest: torch.dtype | None,
    n: int | None,
    is_aligned: bool,
    parts: tuple[str, ...] = (),
    level: int = 0,
) -> Request:
    """Make a Request. rest: the dtypes of bias, residual, dy and the results, None for absent tensors. Their order, and
    dtypes that x or weight have too, make no other Request. level: flags of reproducibility.py."""
    found = {each for each in rest if each and each is not dtype and each is not weight_dtype}
    other_dtypes = tuple(sorted(found, key=str)) if found else ()
    width = n if type(n) is int else None  # a symbol of a traced graph serves every width
    return Request(
        device, dtype, weight_dtype, casting, other_dtypes, obstacle, parts, width, is_aligned, level
    )


class BackendUnavailableError(RuntimeError):
    """A backend that was asked for by name cannot run here, or not on these tensors."""

    __module__ = "tilegym_rmsnorm"


_modules: dict[str, ModuleType] = {}
_impls: dict[tuple[str, str], Function] = {}
_chosen: dict[tuple[str, Request, str], Function] = {}
MOST_CHOICES = 1024  # else calls that each have another width would leak memory


def register_impl(op: str, backend: str) -> Callable[[Any], Any]:
    """Decorate a function to register it as the backend's implementation of `op`; registering twice is a ValueError."""
    check_name("op", op, OPS)
    check_name("backend", backend, AUTO_ORDER)

    def register(function: Function) -> Function:
        if (op, backend) in _impls:
            raise ValueError(
                f"{op} of backend {backend!r} is registered already, by {_impls[op, backend].__module__}"
            )
        _impls[op, backend] = function
        return function

    return register


def dispatch(op: str, request: Request, backend: str | None = None) -> Function:
    """Return the function that runs `op` on tensors like `request`: of the named backend, or of the one in effect."""
    name = get_current_backend() if backend is None else backend
    try:
        function = _chosen.get((op, request, name))
    except TypeError:  # a name that is not hashable: _choose raises the error for unknown names
        function = None
    return function or _choose(op, request, name)


def implementations_of(
    spec: Any,
    tensors: tuple[Any, ...],
    backend: str,
    obstacle: str | None = None,
    with_backward: bool = False,
) -> tuple[Any, Any]:
    """`dispatch` the forward of a checked call, and its backward where with_backward says so, else None. spec, tensors:
    an op's Spec, and the forward's tensors in the order of a backend.

    obstacle: why no kernel can take the tensors (routes/choose.py). Raises BackendUnavailableError where the backend
    that was asked for by name cannot run the call.
    """
    request, (op, op_of_backward) = _request_of(spec, spec.facts(tensors), obstacle), spec.ops
    forward = dispatch(op, request, backend)
    return forward, dispatch(op_of_backward, request, backend) if with_backward else None


def backward_of(
    spec: Any, tensors: tuple[Any, ...], wanted: Any, backend: str, obstacle: str | None = None
) -> Any:
    """`dispatch` a backward alone. tensors: those of the backward. wanted: an op's Wanted. The rest as
    `implementations_of`."""
    return dispatch(spec.ops[1], _request_of(spec, spec.facts(tensors, wanted), obstacle), backend)


def _request_of(spec: Any, facts: Facts, obstacle: str | None) -> Request:
    dtypes, rows, parts = facts
    n, is_aligned = spec.n, obstacle is not None or are_aligned(spec.n, *rows)
    how = {"n": n, "is_aligned": is_aligned, "parts": parts, "level": spec.reproducible}
    return request_of(rows[0].device, spec.casting, obstacle, *dtypes, **how)


def _is_of(backends: tuple[str, ...], function: Callable[..., Any]) -> bool:
    return any(function is _impls.get((op, backend)) for backend in backends for op in OPS)


def unseen(function: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """Return a block that hides dispatch modes while a kernel runs: a mode such as FlopCounterMode, a logger or
    selective checkpointing could keep, wrap or replace the memory that the kernel is about to fill. The reference is
    PyTorch's operations, which a mode may count, save or replace: for it modes stay."""
    if count_modes() == 0 or function is None or _is_of(("torch",), function):
        return _NOTHING_HIDDEN
    return _disable_current_modes()


def is_settled(function: Callable[..., Any], device: torch.device) -> bool:
    """Whether `dispatch` returns this function for the same arguments from now on, whatever the environment says."""
    return device.type == "cuda" or not _is_of(_BY_NAME_OFF_CUDA, function)


def why_unusable(backend: str, request: Request | None = None) -> Unusable | None:
    """Say why `backend` cannot run the request (None: any request on this machine); None if it can."""
    return _probe(backend).unusable(request)


def is_backend_available(backend: str) -> bool:
    """Check whether a backend can run on this machine.

    Args:
        backend: A name.

    Raises:
        ValueError: There is no backend of this name.
    """
    return why_unusable(backend) is None


def get_available_backends() -> list[str]:
    """List the backends that can run on this machine, fastest first."""
    return [name for name in AUTO_ORDER if is_backend_available(name)]


def get_available_backends_for_op(op: str) -> list[str]:
    """List the backends that can run on this machine and implement an op, fastest first.

    Args:
        op: A name, as `get_registry_info()["ops"]` lists them: `"rms_norm_forward"`.

    Raises:
        ValueError: There is no op of this name.
    """
    check_name("op", op, OPS)
    return [name for name in get_available_backends() if op in _implemented_ops(name)]


def get_registry_info() -> dict[str, Any]:
    """Report the known ops and backends, the backend in effect, and for each backend whether it is usable or why not.

    Returns:
        A dictionary with the keys `ops`, `auto_order`, `current` and `backends`. The last has for each backend
        `usable`, `reason` and `remedy` (None where it is usable), `implementation` and `loaded_ops`.
    """
    backends = {}
    for name in AUTO_ORDER:
        probe, unusable = _probe(name), why_unusable(name)
        backends[name] = {
            "usable": unusable is None,
            "reason": unusable.reason if unusable else None,
            "remedy": unusable.remedy if unusable else None,
            "implementation": probe.IMPLEMENTATION,
            "loaded_ops": [op for op in OPS if (op, name) in _impls],
        }
    return {
        "ops": list(OPS),
        "auto_order": list(AUTO_ORDER),
        "current": get_current_backend(),
        "backends": backends,
    }


def _choose(op: str, request: Request, name: str) -> Function:
    settings.kernel_limits()  # raises for an invalid environment; known calls (known_calls.py) do not come here
    settings.warn_of_unknown_variables()
    check_name("op", op, OPS)
    check_name("backend", name, NAMES)
    backend, passed_over = _first_usable(op, request) if name == "auto" else (_usable(op, request, name), "")
    if op not in _implemented_ops(backend):
        raise BackendUnavailableError(
            f"backend {backend!r} has no {op}; it implements {_implemented_ops(backend)}"
        )
    function = _impls[op, backend]
    _tell(op, request, name, f"runs on backend {backend}{passed_over}")
    if is_settled(function, request.device):
        if len(_chosen) >= MOST_CHOICES:
            _chosen.clear()
        _chosen[op, request, name] = function
    return function


def _tell(op: str, request: Request, name: str, what: str) -> None:
    """Log a choice once: choices of interpreters are made anew in each call."""
    if _log.isEnabledFor(logging.INFO) and (op, request, name, what) not in _told:
        if len(_told) >= MOST_CHOICES:
            _told.clear()
        _told.add((op, request, name, what))
        _log.info("%s of %s %s", op, _describe(request), what)


def _usable(op: str, request: Request, backend: str) -> str:
    unusable = why_unusable(backend, request)
    if unusable is None:
        return backend
    raise BackendUnavailableError(
        f"backend {backend!r} was asked for and cannot run {op} here ({_describe(request)}): {unusable.reason}. "
        f"To mend it: {unusable.remedy}. Usable on this machine: {', '.join(get_available_backends())}."
    )


def _first_usable(op: str, request: Request) -> tuple[str, str]:
    """Choose the backend for "auto". Return it, and for the log why not each faster backend."""
    reasons: list[str] = []
    for backend in AUTO_ORDER:
        if request.device.type != "cuda" and backend in _BY_NAME_OFF_CUDA:
            reasons.append(f"{backend}: runs on {request.device.type} by name only")
            continue
        unusable = why_unusable(backend, request)
        if unusable is not None:
            reasons.append(f"{backend}: {unusable.reason} (to mend it: {unusable.remedy})")
        elif op not in _implemented_ops(backend):
            reasons.append(f"{backend}: has no {op}")
        else:
            return backend, "".join(f"; not {reason}" for reason in reasons)
    raise BackendUnavailableError(f"no backend can run {op} ({_describe(request)}). " + "; ".join(reasons))


def _probe(backend: str) -> BackendModule:
    check_name("backend", backend, AUTO_ORDER)
    return _import(BACKEND_MODULES[backend])


def _implemented_ops(backend: str) -> list[str]:
    _import(_probe(backend).IMPLEMENTATION)
    return [op for op in OPS if (op, backend) in _impls]


def _import(name: str) -> Any:
    if name not in _modules:
        _modules[name] = importlib.import_module(name)
    return _modules[name]


def _describe(request: Request) -> str:
    weight = "no weight" if request.weight_dtype is None else f"{request.weight_dtype} weight"
    parts = "".join(f", {part}" for part in request.parts)
    others = "".join(f", {dtype} beside them" for dtype in request.other_dtypes)
    width = "" if request.n is None else f" of {request.n} columns"
    rows = "" if request.is_aligned else ", rows that begin between multiples of 16 bytes"
    level = f", reproducible {name_of(request.reproducible)!r}" if request.reproducible else ""
    casting = f"casting {request.casting!r}{level}"
    return f"{request.dtype} x{width} on {request.device}{rows}, {weight}{parts}{others}, {casting}"
