# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Read and change what a process, or a block of it, chooses: the backend, kernels by teams, SMs that are left free.

`switch` and `parse_switch` read the switches of the environment, for all modules.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tilegym_rmsnorm.call.validation import check_plain_function
from tilegym_rmsnorm.call.watched import is_traced

_Function = TypeVar("_Function", bound=Callable[..., Any])

AUTO_ORDER = ("cutile", "triton", "torch")  # the backends, fastest first
NAMES = (*AUTO_ORDER, "auto")
_INSTEAD_OF_INDUCTOR = ', which is gone: use torch.compile around calls with backend="torch"'

BACKEND_VARIABLE = "TILEGYM_RMSNORM_BACKEND"
_BACKEND_KEY = os.environ.encodekey(BACKEND_VARIABLE)
_process_backend: str | None = None
# The names of the `use_backend` blocks that this thread or task is in, the innermost last.
_context_backends: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "tilegym_rmsnorm_backends", default=()
)
_traced_backends: list[str] = []  # of the blocks that Dynamo is tracing, and empty whenever it is not

TEAMS_VARIABLE = "TILEGYM_RMSNORM_TEAMS"
SM_MARGIN_VARIABLE = "TILEGYM_RMSNORM_SM_MARGIN"
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
_teams: bool | None = None  # what `set_teams` said


@dataclass(eq=False)
class _Margin:
    """What `set_sm_margin` said, or a block of `use_sm_margin` that has begun."""

    sms: int | None


# That of the process, then those of the blocks in the order in which they began, of all threads. The last one holds.
_margins = [_Margin(None)]
_margins_lock = threading.Lock()


def get_current_backend() -> str:
    """The name in effect where no `backend=` is given: a backend's, or `"auto"`.

    Raises:
        ValueError: TILEGYM_RMSNORM_BACKEND holds no such name.
    """
    names = _context_backends.get()
    name = names[-1] if names else _process_backend or _environment_backend() or "auto"
    if name not in NAMES:
        check_name(BACKEND_VARIABLE, name, NAMES)
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
        check_name("backend", backend, NAMES)
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

    __module__ = "tilegym_rmsnorm"

    def __init__(self, backend: str) -> None:
        check_name("backend", backend, NAMES)
        self.backend = backend

    def __call__(self, function: _Function) -> _Function:
        """Decorator: the block is each call of `function`, which may be no coroutine and no generator."""
        check_plain_function("use_backend", function)
        return super().__call__(function)

    def _recreate_cm(self) -> use_backend:
        return use_backend(self.backend)  # in the decorated function, where Dynamo can see it made

    def __enter__(self) -> None:
        if is_traced():  # it traces no context variables
            _traced_backends.append(self.backend)
        else:
            _context_backends.set((*_context_backends.get(), self.backend))

    def __exit__(self, *_: object) -> None:
        if is_traced():
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
    check_name("backend", backend, NAMES if with_auto else AUTO_ORDER)


def _environment_backend() -> str | None:
    # os.environ takes 0.7 us to say that a variable is not set, the dictionary behind it 0.03; it is CPython's own.
    if _BACKEND_KEY not in getattr(os.environ, "_data", (_BACKEND_KEY,)):
        return None
    return os.environ.get(BACKEND_VARIABLE, "").strip() or None


def check_name(what: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        # "inductor" was a backend: environments, code and pickled modules may still name it.
        hint = _INSTEAD_OF_INDUCTOR if str(name).strip().lower() == "inductor" and "torch" in known else ""
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, known))}, got {name!r}{hint}")


def parse_switch(value: str) -> bool | None:
    """Read the value of a switch: True for on, False for off, None where it says neither."""
    word = value.lower()
    return True if word in _ON else False if word in _OFF else None


def switch(variable: str, default: bool) -> bool:
    """Read a switch of the environment: `default` where it is not set, or empty. ValueError where it says neither."""
    value = os.environ.get(variable, "")
    word = value.strip()
    answer = parse_switch(word) if word else default
    if answer is None:
        known = f"{', '.join(_ON)} or {', '.join(_OFF)}"
        raise ValueError(f"{variable}: expected {known}, or nothing, got {value!r}")
    return answer


def set_teams(enabled: bool | None) -> None:
    """Whether kernels may serve whose blocks wait for each other: teams of up to 16 blocks that share a wide row.

    Without teams, calls take kernels whose blocks do not wait, which are slower for rows of more than 16384 elements.
    That is needed where a launch may use fewer of the GPU's SMs than a team has blocks, in a green context or by a
    share of MPS: there such a launch would never end. Also where more than eight calls by teams may run at once.

    Of the cutile backend; others have no such kernels. Holds for this process, in all threads. A backward may take
    another kernel than it would have when its forward ran: both give right values, dw in other bits.

    Args:
        enabled: Whether they may, from now on. None: what the environment variable TILEGYM_RMSNORM_TEAMS says (on or
            off; on where it is not set).

    Raises:
        TypeError: enabled is none of True, False and None.
    """
    global _teams
    if enabled is not None and type(enabled) is not bool:
        raise TypeError(f"enabled: expected True, False or None, got {enabled!r}")
    if enabled is None:
        _teams_by_environment.cache_clear()
    _teams = enabled


def teams() -> bool:
    """Whether kernels may serve whose blocks wait for each other. ValueError where the environment does not say."""
    said = _teams  # once: another thread may set it meanwhile
    return _teams_by_environment() if said is None else said


@functools.cache
def _teams_by_environment() -> bool:
    return switch(TEAMS_VARIABLE, default=True)


def check_environment() -> None:
    """ValueError where a variable of the environment that no function overrides has a value that means nothing."""
    teams()
    get_sm_margin()


def set_sm_margin(sm_margin: int | None) -> None:
    """How many SMs of a GPU the backward leaves free, for communication that runs at the same time.

    A backward that walks over the rows starts as many blocks as fit the GPU's SMs, and keeps them until it ends. With a
    margin it starts as many as fit so many SMs fewer: kernels that are running, such as NCCL's, keep their SMs, and no
    block waits until one of them ends. So do kernels by teams of blocks, whose members are at most an eighth of the SMs
    that are left. All other kernels have a block a row or few blocks, which end soon, and are not limited.

    Of the backends cutile and triton. Holds for this process, in all threads, since a backward runs in threads of
    autograd's; a backward follows what holds when it runs. Results are right for every margin, and have the same bits
    for the same margin. With another one the terms of dw may be added in another order, which gives other bits.

    Args:
        sm_margin: SMs to leave free, from now on: 0 or more, fewer than the GPU has. None: what the environment
            variable TILEGYM_RMSNORM_SM_MARGIN says (0 where it is not set).

    Raises:
        TypeError: sm_margin is neither an integer nor None.
        ValueError: It is negative, or leaves no SM. Where CUDA is not initialized yet, the first call that it concerns
            raises that, before it launches anything.
    """
    _check_sm_margin(sm_margin)
    if sm_margin is None:
        _sm_margin_by_environment.cache_clear()
    with _margins_lock:
        _margins[-1].sms = sm_margin


def get_sm_margin() -> int:
    """How many SMs are left free: see `set_sm_margin`.

    Raises:
        ValueError: Nothing was set, and TILEGYM_RMSNORM_SM_MARGIN is no number.
    """
    said = _margins[-1].sms  # once: another thread may set it meanwhile
    return _sm_margin_by_environment() if said is None else said


class use_sm_margin(contextlib.ContextDecorator):  # named as the function that it is to its callers
    """Leave SMs free inside a `with` block, or a decorated function: `set_sm_margin`, and at its end what was before.

    It holds for the whole process, not for this thread alone: of the blocks of all threads the one that began last. A
    backward follows what holds when it runs, so the call of `backward` belongs into the block.

    Args:
        sm_margin: As for `set_sm_margin`.

    Raises:
        TypeError: As `set_sm_margin`.
        ValueError: As `set_sm_margin`.
    """

    __module__ = "tilegym_rmsnorm"

    def __init__(self, sm_margin: int | None) -> None:
        _check_sm_margin(sm_margin)
        self.sm_margin = sm_margin
        self._begun: list[_Margin] = []  # one object may serve several blocks

    def __call__(self, function: _Function) -> _Function:
        """Decorator: the block is each call of `function`, which may be no coroutine and no generator."""
        check_plain_function("use_sm_margin", function)
        return super().__call__(function)

    def _recreate_cm(self) -> use_sm_margin:
        return use_sm_margin(self.sm_margin)  # each call of the decorated function is a block of its own

    def __enter__(self) -> None:
        _check_sm_margin(self.sm_margin)
        if self.sm_margin is None:
            _sm_margin_by_environment.cache_clear()
        margin = _Margin(self.sm_margin)
        with _margins_lock:
            self._begun.append(margin)
            _margins.append(margin)

    def __exit__(self, *_: object) -> None:
        with _margins_lock:  # its own, wherever it stands: blocks of threads end in any order
            _margins.remove(self._begun.pop())


def sms_left(sm_count: int, sm_margin: int | None = None) -> int:
    """How many of a GPU's SMs are left by the margin in effect, which a caller may have asked for already. ValueError
    where it leaves none."""
    sm_margin = get_sm_margin() if sm_margin is None else sm_margin
    where = SM_MARGIN_VARIABLE if _margins[-1].sms is None else "set_sm_margin or use_sm_margin"
    return _sms_left(sm_count, sm_margin, f", set by {where}")


def _sms_left(sm_count: int, sm_margin: int, where: str = "") -> int:
    if sm_margin >= sm_count:
        raise ValueError(
            f"sm_margin: expected 0 to {sm_count - 1} for a GPU of {sm_count} SMs, got {sm_margin}{where}"
        )
    return sm_count - sm_margin


def _check_sm_margin(sm_margin: int | None) -> None:
    if sm_margin is None:
        return
    if type(sm_margin) is not int:
        raise TypeError(f"sm_margin: expected an integer or None, got {sm_margin!r}")
    if sm_margin < 0:
        raise ValueError(f"sm_margin: expected 0 or more, got {sm_margin}")
    if torch.cuda.is_initialized():  # else to ask would initialize it, and then no child may be forked
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        _sms_left(max(gpu.multi_processor_count for gpu in gpus), sm_margin)


@functools.cache
def _sm_margin_by_environment() -> int:
    value = os.environ.get(SM_MARGIN_VARIABLE, "").strip()
    if not value.isascii() or not (value or "0").isdigit():
        given = os.environ[SM_MARGIN_VARIABLE]
        raise ValueError(
            f"{SM_MARGIN_VARIABLE}: expected a number of SMs, 0 or more, or nothing, got {given!r}"
        )
    return int(value or "0")
