# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Set how far the bits of a result are reproducible: for a process, for a `with` block, by environment.

A level is a sum of flags: an op's Spec, the keys of known calls and the arguments of library ops hold that number.
docs/reproducibility.md says what each level promises.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import torch
from torch import Tensor

from tilegym_rmsnorm.scopes import (
    WHEN_CHANGED,
    ProcessBlock,
    ProcessWide,
    TracedBlock,
    check_ended,
    forget_left,
)

REPRODUCIBLE_VARIABLE = "TILEGYM_RMSNORM_REPRODUCIBLE"
BATCH, DEVICE, VLLM = 1, 2, 4
# "device" includes "batch", and so does vLLM's order: each row is added alone.
LEVELS = {
    "run": 0,
    "batch": BATCH,
    "device": BATCH | DEVICE,
    "vllm": BATCH | VLLM,
    "device,vllm": BATCH | DEVICE | VLLM,
}
LevelName = Literal["run", "batch", "device", "vllm", "device,vllm"]
_NAMES = {flags: name for name, flags in LEVELS.items()}

traced_levels: list[int] = []  # see TracedBlock
_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[Any, ...]] = set()


def _checked(level: object, order: object = None, what: str = "level") -> int:
    if level not in tuple(LEVELS):
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    if order is not None and order != "vllm":
        raise ValueError(f"order: expected 'vllm' or None, got {order!r}")
    return LEVELS[level] | (LEVELS["vllm"] if order else 0)


def check_flags(flags: int) -> int:
    """Return the flags of a library op's argument, or raise ValueError where they are no level."""
    if flags not in _NAMES:
        raise ValueError(f"reproducible: expected one of {', '.join(map(str, _NAMES))}, got {flags}")
    return flags


def _by_environment() -> int:
    name = os.environ.get(REPRODUCIBLE_VARIABLE, "").strip()
    return _checked(name or "run", what=REPRODUCIBLE_VARIABLE)


_LEVEL = ProcessWide(_by_environment)
# The flags that were set, below 0 where the environment says them. Dynamo guards on this number, so that a change
# recompiles. It stays where the environment is read, since that may be while Dynamo traces; `set_reproducible(None)`,
# after which the environment is read again, makes it another one.
_said = -1
_readings = 1


def _keep_said() -> None:
    global _said
    said = _LEVEL.said
    _said = -_readings if said is None else said


WHEN_CHANGED.append(_keep_said)


def flags() -> int:
    """Return the flags of the level in effect. Raises as `get_reproducible`."""
    if traced_levels:
        check_ended("reproducible")
        return traced_levels[-1]
    said = _said  # read once: another thread may set it meanwhile
    return _read() if said < 0 else said


def _read() -> int:
    return _LEVEL.get()


# As torch.compiler.assume_constant_result does, which would import Dynamo with this module.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def name_of(flags: int) -> str:
    """Name a level by its flags."""
    return _NAMES[flags]


def get_reproducible() -> str:
    """Return the level in effect: `"run"`, `"batch"`, `"device"`, `"vllm"` or `"device,vllm"`, see `reproducible`.

    Raises:
        ValueError: No level was set, and TILEGYM_RMSNORM_REPRODUCIBLE names none.
        RuntimeError: A compiled function has begun a block and not ended it.
    """
    return _NAMES[flags()]


def set_reproducible(level: LevelName | None = "batch", *, order: Literal["vllm"] | None = None) -> None:
    """Set the level of reproducibility of this process, in all threads, from now on: see `reproducible`.

    Args:
        level: As for `reproducible`. None: follow the environment variable TILEGYM_RMSNORM_REPRODUCIBLE again (`"run"`
            where it is not set).
        order: As for `reproducible`; None where level is None.

    Raises:
        ValueError: level or order is not known.
    """
    global _readings
    forget_left(reproducible)
    if level is None and order is None:
        _readings += 1
        _LEVEL.set(None)
    else:
        if level is None:
            raise ValueError(f"order: expected None beside level None, got {order!r}")
        _LEVEL.set(_checked(level, order))


class reproducible(TracedBlock, ProcessBlock):  # in lower case, since callers use it as a function
    """Make the bits of results reproducible inside a `with` block, or a decorated function, as `set_reproducible` does,
    and undo that at the end.

    `"run"`, the default of a process, promises that the same call has the same bits, run after run. `"batch"` promises
    too that a row of y, rstd and dx has the same bits whatever rows are around it. `"device"` promises what `"batch"`
    does, and that dw and db have the same bits on GPUs with another number of SMs.

    The block holds for the whole process, not for this thread alone. Of nested blocks, and of blocks of several
    threads, the block that began last holds, whole: inside `reproducible("device")` a block `reproducible("run")`
    promises what `"run"` does. A backward has the level of its forward, wherever and whenever it runs; but
    torch.utils.checkpoint runs the forward again, under the level in effect in the backward.

    torch.compile compiles a function again where it runs under another level. A block inside a compiled function holds
    for the calls that are traced in it, and has to end there. An exported graph keeps the level that it was exported
    under, and follows the level in effect too where it runs.

    Args:
        level: `"run"`, `"batch"` or `"device"`, or a name that `get_reproducible` returns.
        order: `"vllm"`: what `"batch"` promises, with sums in the order of vLLM's `rms_norm_batch_invariant`. Backend
            "triton" alone has that order.

    Raises:
        ValueError: level or order is not known.
    """

    __module__ = "tilegym_rmsnorm"
    _setting = _LEVEL
    traced = traced_levels

    def __init__(self, level: LevelName = "batch", *, order: Literal["vllm"] | None = None) -> None:
        super().__init__(_checked(level, order))

    def _recreate_cm(self) -> reproducible:
        return reproducible(_NAMES[self._value])  # type: ignore[arg-type] # a block for each call of the function


def tell_of_operations(op: str, spec: Any, x: Tensor) -> None:
    """Log once for each kind of call that PyTorch's operations compute it: only what "run" says is promised for it."""
    if spec.reproducible:
        _tell(op, spec.reproducible, x.dtype)


def _tell(op: str, level: int, dtype: torch.dtype) -> None:
    if _log.isEnabledFor(logging.INFO) and (kind := (op, level, dtype)) not in _told:
        _told.add(kind)
        what = "by PyTorch's operations, for which it promises nothing"
        _log.info("%s of %s under reproducible %r runs %s", op, dtype, _NAMES[level], what)


_tell._dynamo_marked_constant = True  # type: ignore[attr-defined] # Dynamo cannot trace logging: it calls this as it traces
