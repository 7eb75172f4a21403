# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton's interpreter (TRITON_INTERPRET=1), made to round as GPUs do, to run one launch at a time, and faster.

Triton 3.6 and 3.9 interpret the conversion of float32 to bfloat16 as truncation: errors of up to one unit in the last
place, all towards zero, where the compiled kernel rounds to nearest even. They hold the state of a launch, such as
the number of the program that runs, in globals. And each call of a function inside a kernel replaces all of
triton.language anew, which takes half the time of a launch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_truncating = InterpreterBuilder.cast_impl
_replacing = interpreter._patch_lang
_lock = threading.Lock()


def one_launch_at_a_time() -> contextlib.AbstractContextManager:
    """Return the lock to launch under. The first call changes the interpreter, in this process and for good."""
    InterpreterBuilder.cast_impl = _cast_rounding_to_nearest
    interpreter._patch_lang = _replaced_language
    return _lock


def _replaced_language(function: Callable[..., Any]) -> Any:
    """Replaces what this function knows of triton.language by what is interpreted, where it is not yet. From
    Triton 3.6 on a launch restores it at its end."""
    if any(tl.core.is_builtin(module.load) for module in _languages_of(function)):
        return _replacing(function)
    return SimpleNamespace(restore=lambda: None)


@functools.cache
def _languages_of(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    return tuple(
        module for module in (tl, tl.core) if any(v is module for v in function.__globals__.values())
    )


def _cast_rounding_to_nearest(self: InterpreterBuilder, source: TensorHandle, dtype: Any) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
        return _truncating(self, source, dtype)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
    return TensorHandle(rounded.numpy().reshape(source.data.shape), tl.bfloat16)
