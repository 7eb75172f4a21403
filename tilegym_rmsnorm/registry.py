# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which backend runs an op.

Selection: the `backend=` argument, then `use_backend`, then `set_backend`, then the environment variable
TILEGYM_RMSNORM_BACKEND, then "auto". "auto" takes the first backend of AUTO_ORDER that can run these tensors on this
machine; a backend asked for by name runs or raises `BackendUnavailableError`, it never falls back to another.

A backend is a module (named in BACKEND_MODULES) that imports nothing optional and offers

    unusable(request)   why it cannot run the request (None as request: on this machine at all), or None if it can
    IMPLEMENTATION      the module that registers its functions (spec.py) with `register_impl`, imported on first use;
                        the reference's by api.py, since torch.compile traces its calls, and no import

One that has an interpreter stands in _BY_NAME_OFF_CUDA too, or "auto" takes it for CPU tensors.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import policy
from tilegym_rmsnorm.validation import check_plain_function

OPS = ("rms_norm_forward", "rms_norm_backward")
AUTO_ORDER = ("cutile", "triton", "torch")  # fastest first
BACKEND_MODULES = {
    "cutile": "tilegym_rmsnorm.backends.cutile",
    "triton": "tilegym_rmsnorm.backends.triton",
    "torch": "tilegym_rmsnorm.backends.torch_reference",
}
ENVIRONMENT_VARIABLE = "TILEGYM_RMSNORM_BACKEND"
_NAMES = (*AUTO_ORDER, "auto")
_INSTEAD_OF_INDUCTOR = ', which is gone: use torch.compile around calls with backend="torch"'
_Function = TypeVar("_Function", bound=Callable[..., Any])
_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[Any, ...]] = set()
_ENVIRONMENT_KEY = os.environ.encodekey(ENVIRONMENT_VARIABLE)
# "auto" does not take these for other tensors than CUDA's, such as the CPU's: there they run in interpreters, by name
# and while the environment asks for them, which may change from call to call.
_BY_NAME_OFF_CUDA = ("cutile", "triton")


class Request(NamedTuple):
    """All that the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    casting: str
    other_dtypes: tuple[torch.dtype, ...] = ()  # of all else that the call reads and writes, see `request_of`
    obstacle: str | None = None  # why no kernel can be given these tensors here, see `gate.obstacle`
    parts: tuple[str, ...] = ()  # what else the call has: `spec.parts_of`, for the log


def request_of(
    device: torch.device,
    casting: str,
    obstacle: str | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    *rest: torch.dtype | None,
    parts: tuple[str, ...] = (),
) -> Request:
    """rest: the dtypes of bias, residual, dy and the results, None where there is none. Those that x or weight have,
    too, change nothing, and neither does their order."""
    found = {each for each in rest if each and each is not dtype and each is not weight_dtype}
    other_dtypes = tuple(sorted(found, key=str)) if found else ()
    return Request(device, dtype, weight_dtype, casting, other_dtypes, obstacle, parts)


class Unusable(NamedTuple):
    """Why a backend cannot run, and the command or change that mends it."""

    reason: str
    remedy: str


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot run here, or not on these tensors."""


_modules: dict[str, ModuleType] = {}
_impls: dict[tuple[str, str], Callable[..., Any]] = {}
_chosen: dict[tuple[str, Request, str], Callable[..., Any]] = {}
_process_backend: str | None = None
# The names of the `use_backend` blocks that this thread or task is in, the innermost last.
_context_backends: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "tilegym_rmsnorm_backends", default=()
)
_traced_backends: list[str] = []  # of the blocks that Dynamo is tracing, and empty whenever it is not


def register_impl(op: str, backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a function the backend's implementation of `op`; a second registration is a ValueError."""
    _check_name("op", op, OPS)
    _check_name("backend", backend, AUTO_ORDER)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if (op, backend) in _impls:
            raise ValueError(
                f"{op} of backend {backend!r} is registered already, by {_impls[op, backend].__module__}"
            )
        _impls[op, backend] = function
        return function

    return register


def load(backend: str) -> None:
    """Import what `backend` needs, which else its first call does: torch.compile traces calls, but no imports."""
    _implemented_ops(backend)


def dispatch(op: str, request: Request, backend: str | None = None) -> Callable[..., Any]:
    """The function that runs `op` on tensors like `request`, by the backend named or the one in effect."""
    name = get_current_backend() if backend is None else backend
    # The reference alone is traced (graphs.py), and a graph that reads _chosen is compiled again whenever that grows.
    if is_dynamo_compiling():
        return _impls[op, name]
    try:
        function = _chosen.get((op, request, name))
    except TypeError:  # a name that is not even hashable; _choose says so in the words of every unknown name
        function = None
    return function or _choose(op, request, name)


def is_reference(function: Callable[..., Any]) -> bool:
    """Whether an implementation that `dispatch` returned is the reference's: operations of PyTorch's, no kernels."""
    return any(function is _impls.get((op, "torch")) for op in OPS)


def is_settled(op: str, request: Request, backend: str) -> bool:
    """Whether `dispatch` will give the same function for these arguments from now on, whatever the environment says."""
    return (op, request, backend) in _chosen


def get_current_backend() -> str:
    """The name in effect where no `backend=` is given: a backend's, or `"auto"`.

    Raises:
        ValueError: TILEGYM_RMSNORM_BACKEND holds no such name.
    """
    names = _context_backends.get()
    name = names[-1] if names else _process_backend or _environment_backend() or "auto"
    if name not in _NAMES:
        _check_name(ENVIRONMENT_VARIABLE, name, _NAMES)
    return name


def set_backend(backend: str | None) -> None:
    """Make a backend the default of this process.

    Args:
        backend: A name or `"auto"`. None leaves it to the environment variable TILEGYM_RMSNORM_BACKEND again.

    Raises:
        ValueError: There is no backend of this name.
    """
    global _process_backend
    if backend is not None:
        _check_name("backend", backend, _NAMES)
    _process_backend = backend


class use_backend(contextlib.ContextDecorator):  # named as the function that it is to its callers
    """Use a backend inside a `with` block, or a decorated function, in this thread or task only.

    It comes before `set_backend`, and that before the variable TILEGYM_RMSNORM_BACKEND; the argument `backend=` of a
    call comes before all of them.

    A backward pass runs on the backend that its forward ran on, wherever it is called. But torch.utils.checkpoint runs
    the forward once more, when the backward is called, on what is in effect then: with it, name the backend by
    `backend=` or `set_backend`.

    Inside a function that torch.compile compiles it holds for the calls that are traced in its block. Before PyTorch
    2.14 the block has to be made there. Around that function it is not seen.

    Args:
        backend: A name or `"auto"`.

    Raises:
        ValueError: There is no backend of this name.
    """

    def __init__(self, backend: str) -> None:
        _check_name("backend", backend, _NAMES)
        self.backend = backend

    def __call__(self, function: _Function) -> _Function:
        """Decorator: the block is each call of `function`, which may be no coroutine and no generator."""
        check_plain_function("use_backend", function)
        return super().__call__(function)

    def _recreate_cm(self) -> use_backend:
        return use_backend(self.backend)  # in the decorated function, where Dynamo can see it made

    def __enter__(self) -> None:
        if is_dynamo_compiling():  # it traces no context variables
            _traced_backends.append(self.backend)
        else:
            _context_backends.set((*_context_backends.get(), self.backend))

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            _traced_backends.pop()
        else:
            names = list(_context_backends.get())
            # Its own name, should blocks end in another order. It is not there where a block is left in another context
            # than it was entered in, as pytest leaves those of async fixtures.
            if self.backend in names:
                del names[len(names) - 1 - names[::-1].index(self.backend)]
                _context_backends.set(tuple(names))


def traced_backend() -> str | None:
    """What `use_backend` says where Dynamo traces it; None outside of its blocks."""
    return _traced_backends[-1] if _traced_backends else None


def check_backend_name(backend: str, with_auto: bool = True) -> None:
    """Raise the ValueError that lists the known names unless `backend` is one of them, or "auto" where that may be."""
    _check_name("backend", backend, _NAMES if with_auto else AUTO_ORDER)


def why_unusable(backend: str, request: Request | None = None) -> Unusable | None:
    """Why `backend` cannot run the request (None: on this machine at all), or None if it can."""
    return _probe(backend).unusable(request)


def is_backend_available(backend: str) -> bool:
    """Whether a backend can run on this machine.

    Args:
        backend: A name.

    Raises:
        ValueError: There is no backend of this name.
    """
    return why_unusable(backend) is None


def get_available_backends() -> list[str]:
    """The backends that can run on this machine, fastest first."""
    return [name for name in AUTO_ORDER if is_backend_available(name)]


def get_available_backends_for_op(op: str) -> list[str]:
    """The backends that can run on this machine and implement an op, fastest first.

    Args:
        op: `"rms_norm_forward"` or `"rms_norm_backward"`.

    Raises:
        ValueError: There is no op of this name.
    """
    _check_name("op", op, OPS)
    return [name for name in get_available_backends() if op in _implemented_ops(name)]


def get_registry_info() -> dict[str, Any]:
    """What is known, what is in effect, and for each backend whether it is usable or why not.

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


def _environment_backend() -> str | None:
    # os.environ takes 0.7 us to say that a variable is not set, the dictionary behind it 0.03; it is CPython's own.
    if _ENVIRONMENT_KEY not in getattr(os.environ, "_data", (_ENVIRONMENT_KEY,)):
        return None
    return os.environ.get(ENVIRONMENT_VARIABLE, "").strip() or None


def _choose(op: str, request: Request, name: str) -> Callable[..., Any]:
    policy.check_environment()  # here, where the fast path does not pass
    _check_name("op", op, OPS)
    _check_name("backend", name, _NAMES)
    backend, passed_over = _first_usable(op, request) if name == "auto" else (_usable(op, request, name), "")
    if op not in _implemented_ops(backend):
        raise BackendUnavailableError(
            f"backend {backend!r} has no {op}; it implements {_implemented_ops(backend)}"
        )
    function = _impls[op, backend]
    _tell(op, request, name, f"runs on backend {backend}{passed_over}")
    if request.device.type == "cuda" or backend not in _BY_NAME_OFF_CUDA:
        _chosen[op, request, name] = function
    return function


def _tell(op: str, request: Request, name: str, what: str) -> None:
    """Logs a choice that was not made before; those of interpreters are made anew in each call."""
    if _log.isEnabledFor(logging.INFO) and (op, request, name, what) not in _told:
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
    """The backend that "auto" takes, and for the log why not those before it."""
    reasons: list[str] = []
    for backend in AUTO_ORDER:
        if request.device.type != "cuda" and backend in _BY_NAME_OFF_CUDA:
            reasons.append(f"{backend}: runs on {request.device.type} by name only")
            continue
        unusable = why_unusable(backend, request)
        if unusable is None:
            return backend, "".join(f"; not {reason}" for reason in reasons)
        reasons.append(f"{backend}: {unusable.reason} (to mend it: {unusable.remedy})")
    raise BackendUnavailableError(f"no backend can run {op} ({_describe(request)}). " + "; ".join(reasons))


def _probe(backend: str) -> ModuleType:
    _check_name("backend", backend, AUTO_ORDER)
    return _import(BACKEND_MODULES[backend])


def _implemented_ops(backend: str) -> list[str]:
    _import(_probe(backend).IMPLEMENTATION)
    return [op for op in OPS if (op, backend) in _impls]


def _import(name: str) -> ModuleType:
    if name not in _modules:
        _modules[name] = importlib.import_module(name)
    return _modules[name]


def _describe(request: Request) -> str:
    weight = "no weight" if request.weight_dtype is None else f"{request.weight_dtype} weight"
    parts = "".join(f", {part}" for part in request.parts)
    others = "".join(f", {dtype} beside them" for dtype in request.other_dtypes)
    return f"{request.dtype} x on {request.device}, {weight}{parts}{others}, casting {request.casting!r}"


def _check_name(what: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        # "inductor" was a backend: environments, code and pickled modules may still name it.
        hint = _INSTEAD_OF_INDUCTOR if str(name).strip().lower() == "inductor" and "torch" in known else ""
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, known))}, got {name!r}{hint}")
