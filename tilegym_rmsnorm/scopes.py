# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Let settings hold for a process, a `with` block or a decorated function.

`ProcessWide` is a setting of all threads, and `ProcessBlock` sets one inside a block. `Block` alone is the base of
blocks that hold elsewhere, as `use_backend` (settings.py). A `TracedBlock` may stand inside a compiled function too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tilegym_rmsnorm.call.watched import is_traced

_Function = TypeVar("_Function", bound=Callable[..., Any])

LOCK = threading.Lock()  # of all settings of the process, and of what is kept of them
WHEN_CHANGED: list[Callable[[], None]] = []  # called after each change, while LOCK is held


class Block(contextlib.ContextDecorator):
    """Base of `with` blocks that decorate a function too: each of its calls is a block."""

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`. A coroutine or generator raises TypeError: a block around its call ends before its body
        begins."""
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{type(self).__name__}: expected a plain function, got {function!r}. Put a `with` block into its body"
            )
        return super().__call__(function)

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


_kinds: dict[str, type[TracedBlock]] = {}


class TracedBlock(Block):
    """Block that begins and ends in a list of its class while Dynamo traces, since Dynamo traces no lock and no context
    variable. In a graph the block that began last ends first."""

    traced: ClassVar[list[Any]]  # the values of blocks, as they began; empty but for what graphs have left
    _value: Any

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls

    def __enter__(self) -> None:
        if is_traced():
            self.traced.append(self._value)
        else:
            super().__enter__()

    def __exit__(self, *_: object) -> None:
        if is_traced() and self.traced and self.traced[-1] == self._value:
            self.traced.pop()
        else:
            super().__exit__()  # which Dynamo cannot trace: then eager code runs


def check_ended(kind: str) -> None:
    """Raise RuntimeError where a graph has begun blocks of this kind and not ended them, by `__enter__` alone or in a
    generator that was not run to its end: PyTorch keeps the list as the graph left it, and no later call could tell
    whether it is inside. Where Dynamo traces, the list changes when the graph runs, and it calls this as it traces."""
    if _kinds[kind].traced:
        raise RuntimeError(
            f"{kind}: expected compiled code to end each block that it begins, got one that it has not ended. Put a "
            "`with` statement around the calls, or begin the block outside of the compiled function. To go on without "
            f"that block, call set_{kind.removeprefix('use_')}"
        )


# As torch.compiler.assume_constant_result does, which would import Dynamo with this module.
check_ended._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_left(kind: type[TracedBlock]) -> None:
    """Drop the blocks that graphs have left."""
    if not is_traced():
        kind.traced.clear()


@dataclass(eq=False)
class _Said:
    """Value set for the process, or by a block that has begun. None: the environment says it."""

    value: Any


class ProcessWide:
    """Setting of all threads: of the blocks that have not ended, the one that began last holds."""

    def __init__(self, by_environment: Callable[[], Any]) -> None:
        self._by_environment = functools.cache(by_environment)
        # the process's first, then those of the blocks of all threads, as they began
        self._said = [_Said(None)]

    @property
    def said(self) -> Any:
        """The value that holds, None where the environment says it."""
        return self._said[-1].value

    def get(self) -> Any:
        said = self.said  # read once: another thread may set it meanwhile
        return self._by_environment() if said is None else said

    def set(self, value: Any) -> None:
        """Set what holds: the last block's, until that ends. None: read the environment again."""
        if value is None:
            self._by_environment.cache_clear()
        with LOCK:
            self._said[-1].value = value
            _call_when_changed()

    def begin(self, value: Any) -> _Said:
        """Begin a block. Return what ends it."""
        if value is None:
            self._by_environment.cache_clear()
        said = _Said(value)
        with LOCK:
            self._said.append(said)
            _call_when_changed()
        return said

    def end(self, said: _Said) -> None:
        with LOCK:
            self._said.remove(said)  # at any position: blocks of threads end in any order
            _call_when_changed()


class ProcessBlock(Block):
    """Block that sets a `ProcessWide`."""

    _setting: ClassVar[ProcessWide]

    def __init__(self, value: Any) -> None:
        self._value = value
        self._begun: list[_Said] = []  # one object may serve several blocks

    def _begin(self) -> None:
        self._begun.append(self._setting.begin(self._value))

    def _end(self) -> None:
        if not self._begun:
            raise RuntimeError(
                f"{type(self).__name__}: expected the end of a block that has begun, got another. In compiled code the "
                "block that began last ends first, in the function where it began"
            )
        self._setting.end(self._begun.pop())


def _call_when_changed() -> None:
    for function in WHEN_CHANGED:
        function()
