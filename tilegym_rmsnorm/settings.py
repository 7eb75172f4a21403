# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Set the backend, kernels by teams of blocks, and SMs left free: for a process, for a `with` block, by environment.

`switch` and `parse_switch` read on/off variables of the environment, for all modules. VARIABLES are all that are read.
"""

from __future__ import annotations

import contextvars
import functools
import os
import warnings
from typing import Literal

import torch

from tilegym_rmsnorm.reproducibility import DEVICE, REPRODUCIBLE_VARIABLE, flags, traced_levels
from tilegym_rmsnorm.scopes import (
    LOCK,
    WHEN_CHANGED,
    ProcessBlock,
    ProcessWide,
    TracedBlock,
    check_ended,
    forget_left,
)

AUTO_ORDER = ("cutile", "triton", "torch")  # the backends, fastest first
KERNEL_BACKENDS = AUTO_ORDER[:-1]  # all but "torch", the last, which runs PyTorch's operations
NAMES = (*AUTO_ORDER, "auto")
BackendName = Literal["auto", "cutile", "triton", "torch"] | str  # for editors; str: names in variables
_INSTEAD_OF_INDUCTOR = ', which is gone: use torch.compile around calls with backend="torch"'

BACKEND_VARIABLE = "TILEGYM_RMSNORM_BACKEND"
CACHE_VARIABLE = "TILEGYM_RMSNORM_CACHE_DIR"
COMMIT_VARIABLE = "TILEGYM_RMSNORM_COMMIT"  # of the benchmark, for copies of the tree without their .git
INTERPRET_VARIABLE = "TILEGYM_RMSNORM_INTERPRET"
SM_MARGIN_VARIABLE = "TILEGYM_RMSNORM_SM_MARGIN"
TEAMS_VARIABLE = "TILEGYM_RMSNORM_TEAMS"
VARIABLES = (
    BACKEND_VARIABLE,
    CACHE_VARIABLE,
    COMMIT_VARIABLE,
    INTERPRET_VARIABLE,
    REPRODUCIBLE_VARIABLE,
    SM_MARGIN_VARIABLE,
    TEAMS_VARIABLE,
)
_PREFIX = "TILEGYM_RMSNORM_"

_BACKEND_KEY = os.environ.encodekey(BACKEND_VARIABLE)
_process_backend: str | None = None
# Names of the `use_backend` blocks around this thread or task, the innermost last.
_context_backends: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "tilegym_rmsnorm_backends", default=()
)
traced_backends: list[str] = []  # see TracedBlock

_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
_kept: tuple[tuple[bool, int], int] | None = None  # see `process_settings`; None after each change


def get_current_backend() -> str:
    """Return the name of the backend in effect where no `backend=` is given, or `"auto"`.

    Raises:
        ValueError: TILEGYM_RMSNORM_BACKEND holds no name of a backend.
    """
    if traced_backends:
        check_ended("use_backend")
        return traced_backends[-1]
    names = _context_backends.get()
    name = names[-1] if names else _process_backend or _environment_backend() or "auto"
    if name not in NAMES:
        check_name(BACKEND_VARIABLE, name, NAMES)
    return name


def set_backend(backend: BackendName | None) -> None:
    """Make a backend the default of this process.

    Args:
        backend: A name or `"auto"`. None: follow the environment variable TILEGYM_RMSNORM_BACKEND again.

    Raises:
        ValueError: There is no backend of this name.
    """
    global _process_backend
    check_backend_name(backend)
    forget_left(use_backend)
    _process_backend = backend


class use_backend(TracedBlock):  # in lower case, since callers use it as a function
    """Use a backend inside a `with` block, or a decorated function, in this thread or task only.

    `use_backend` overrides `set_backend`, which overrides the variable TILEGYM_RMSNORM_BACKEND. The argument `backend=`
    of a call overrides all of them.

    A backward pass runs on the backend of its forward, wherever it is called. But torch.utils.checkpoint runs the
    forward again during the backward, on the backend in effect then: with checkpoint, name the backend by `backend=` or
    `set_backend`.

    Inside a function that torch.compile compiles, the block holds for the calls that are traced in it, and has to end
    there. Before PyTorch 2.14 `use_backend` must be called inside that function. A block around the compiled function
    is not seen.

    Args:
        backend: A name or `"auto"`.

    Raises:
        ValueError: There is no backend of this name.
    """

    __module__ = "tilegym_rmsnorm"
    traced = traced_backends

    def __init__(self, backend: BackendName) -> None:
        check_name("backend", backend, NAMES)
        self._value = backend

    def _recreate_cm(self) -> use_backend:
        return use_backend(self._value)  # made in the decorated function, where Dynamo can trace that

    def _begin(self) -> None:
        _context_backends.set((*_context_backends.get(), self._value))

    def _end(self) -> None:
        names = list(_context_backends.get())
        # Remove its own name, since blocks may end in any order. The name is absent where a block ends in another
        # context than it began in, as pytest ends those of async fixtures.
        if self._value in names:
            del names[len(names) - 1 - names[::-1].index(self._value)]
            _context_backends.set(tuple(names))


def check_backend_name(backend: str | None) -> None:
    """Raise a ValueError that lists the known names, unless `backend` is one, "auto" or None."""
    if backend is not None:
        check_name("backend", backend, NAMES)


def _environment_backend() -> str | None:
    # To find that a variable is not set takes os.environ 0.7 us, its dictionary 0.03. Only CPython's has `_data`.
    if _BACKEND_KEY not in getattr(os.environ, "_data", (_BACKEND_KEY,)):
        return None
    return os.environ.get(BACKEND_VARIABLE, "").strip() or None


def check_name(what: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        # Backend "inductor" is gone, but environments, code and pickled modules may still name it.
        hint = _INSTEAD_OF_INDUCTOR if str(name).strip().lower() == "inductor" and "torch" in known else ""
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, known))}, got {name!r}{hint}")


def unknown_variables() -> str | None:
    """Name the variables that are set, begin as this package's do, and are none of them; None where there are none."""
    unknown = sorted(
        name for name in os.environ if name.upper().startswith(_PREFIX) and name not in VARIABLES
    )
    if not unknown:
        return None
    import difflib

    endings = [each.removeprefix(_PREFIX) for each in VARIABLES]
    got = []
    for name in unknown:
        meant = difflib.get_close_matches(name.upper().removeprefix(_PREFIX), endings, 1)
        got.append(name + "".join(f" ({_PREFIX}{ending}?)" for ending in meant))
    return f"expected {', '.join(VARIABLES)}, got {', '.join(got)}"


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warn, once, of variables that are misspelt or of another release: nothing reads them."""
    if unknown := unknown_variables():
        warnings.warn(f"environment: {unknown}, which changes nothing", stacklevel=2)


def parse_switch(value: str) -> bool | None:
    """Read the value of a switch: True for on, False for off, None for any other word."""
    word = value.lower()
    return True if word in _ON else False if word in _OFF else None


def switch(variable: str, default: bool) -> bool:
    """Read a switch of the environment: `default` where it is not set or empty. ValueError for an unknown word."""
    value = os.environ.get(variable, "")
    word = value.strip()
    answer = parse_switch(word) if word else default
    if answer is None:
        known = f"{', '.join(_ON)} or {', '.join(_OFF)}"
        raise ValueError(f"{variable}: expected {known}, or nothing, got {value!r}")
    return answer


def set_teams(enabled: bool | None) -> None:
    """Allow or forbid kernels whose blocks wait for each other: teams of up to 16 blocks that share a wide row.

    Without teams, calls take kernels whose blocks do not wait, which are slower for rows of more than 16384 elements.
    Forbid teams where a launch may use fewer of the GPU's SMs than a team has blocks, in a green context or with a
    share of MPS: there a launch by teams would never end. Forbid them too where more than eight calls by teams may run
    at once.

    Only the cutile backend has such kernels. The setting holds for this process, in all threads. If it changes between
    a forward and its backward, the backward may take another kernel: values are right, dw has other bits.

    Args:
        enabled: Whether teams are allowed, from now on. None: follow the environment variable TILEGYM_RMSNORM_TEAMS (on
            or off; on where it is not set).

    Raises:
        TypeError: enabled is not True, False or None.
    """
    if enabled is not None and type(enabled) is not bool:
        raise TypeError(f"enabled: expected True, False or None, got {enabled!r}")
    _TEAMS.set(enabled)


def teams() -> bool:
    """Whether kernels by teams are allowed (`set_teams`). ValueError where the variable is neither on nor off."""
    return _TEAMS.get()


_TEAMS = ProcessWide(lambda: switch(TEAMS_VARIABLE, default=True))


def kernel_limits() -> tuple[bool, int]:
    """Return `teams()` and `get_sm_margin()`. Raises as `process_settings`."""
    return process_settings()[0]


def process_settings() -> tuple[tuple[bool, int], int]:
    """Return `kernel_limits()` and the flags of reproducibility.py: kept until one of them is set, since every call
    asks.

    Raises ValueError for an invalid value of an environment variable, unless a function overrides the variable.
    """
    kept = _kept
    return _read_settings() if kept is None or traced_levels else kept


def _read_settings() -> tuple[tuple[bool, int], int]:
    global _kept
    with LOCK:  # or a value read before a change could be kept after it
        _kept = kept = (teams(), get_sm_margin()), flags()
    return kept


def _forget_settings() -> None:
    global _kept
    _kept = None


WHEN_CHANGED.append(_forget_settings)


def set_sm_margin(sm_margin: int | None) -> None:
    """Set how many SMs of a GPU the backward leaves free, for communication that runs at the same time.

    A backward that walks over the rows starts as many blocks as fit the GPU's SMs, and keeps the SMs until it ends.
    With a margin it starts only the blocks that fit the remaining SMs: running kernels, such as NCCL's, keep their SMs,
    and no block waits for one of them to end. Kernels by teams of blocks follow the margin too; their members are at
    most an eighth of the remaining SMs. All other kernels have a block a row, or few blocks, which end soon: the margin
    does not limit them.

    The backends cutile and triton follow the margin. It holds for this process, in all threads, since a backward runs
    in autograd's threads; a backward follows the margin in effect when it runs. Results are right for every margin, and
    have the same bits for the same margin. Another margin may add the terms of dw in another order, which gives other
    bits.

    Args:
        sm_margin: SMs to leave free, from now on: 0 or more, fewer than the GPU has. None: follow the environment
            variable TILEGYM_RMSNORM_SM_MARGIN (0 where it is not set).

    Raises:
        TypeError: sm_margin is neither an integer nor None.
        ValueError: sm_margin is negative, or leaves no SM. Where CUDA is not initialized yet, the first call that
            follows the margin raises this error, before it launches anything.
    """
    _check_sm_margin(sm_margin)
    _MARGIN.set(sm_margin)


def get_sm_margin() -> int:
    """Return the number of SMs that are left free: see `set_sm_margin`.

    Raises:
        ValueError: No margin was set, and TILEGYM_RMSNORM_SM_MARGIN is no number.
    """
    return _MARGIN.get()


def _sm_margin_by_environment() -> int:
    value = os.environ.get(SM_MARGIN_VARIABLE, "").strip()
    if not value.isascii() or not (value or "0").isdigit():
        given = os.environ[SM_MARGIN_VARIABLE]
        raise ValueError(
            f"{SM_MARGIN_VARIABLE}: expected a number of SMs, 0 or more, or nothing, got {given!r}"
        )
    return int(value or "0")


_MARGIN = ProcessWide(_sm_margin_by_environment)


class use_sm_margin(ProcessBlock):  # in lower case, since callers use it as a function
    """Leave SMs free inside a `with` block, or a decorated function, as `set_sm_margin` does, and undo that at the end.

    The block holds for the whole process, not for this thread alone: if several threads are in blocks, the block that
    began last holds. A backward follows the margin in effect when it runs: call `backward` inside the block.

    Args:
        sm_margin: As for `set_sm_margin`.

    Raises:
        TypeError: As `set_sm_margin`.
        ValueError: As `set_sm_margin`.
    """

    __module__ = "tilegym_rmsnorm"
    _setting = _MARGIN

    def __init__(self, sm_margin: int | None) -> None:
        _check_sm_margin(sm_margin)
        self.sm_margin = sm_margin
        super().__init__(sm_margin)

    def _recreate_cm(self) -> use_sm_margin:
        return use_sm_margin(self.sm_margin)  # a block for each call of the decorated function

    def _begin(self) -> None:
        _check_sm_margin(self.sm_margin)  # again: CUDA may be initialized by now
        super()._begin()


def sms_left(sm_count: int, sm_margin: int | None = None) -> int:
    """Return how many of a GPU's SMs the margin in effect leaves; ValueError where it leaves none. sm_margin: that
    margin, if the caller has read it already."""
    sm_margin = get_sm_margin() if sm_margin is None else sm_margin
    where = SM_MARGIN_VARIABLE if _MARGIN.said is None else "set_sm_margin or use_sm_margin"
    return _sms_left(sm_count, sm_margin, f", set by {where}")


def sm_margin_under(level: int) -> int:
    """Return the margin in effect for a call under a level (flags of reproducibility.py); ValueError where the level
    fixes how many blocks a backward has."""
    _, sm_margin = kernel_limits()
    if level & DEVICE and sm_margin:
        raise ValueError(
            f'sm_margin: expected 0 with reproducible("device"), which fixes the blocks of a backward, got {sm_margin}'
        )
    return sm_margin


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
    if torch.cuda.is_initialized():  # else asking would initialize CUDA, and no child may be forked then
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        _sms_left(max(gpu.multi_processor_count for gpu in gpus), sm_margin)
