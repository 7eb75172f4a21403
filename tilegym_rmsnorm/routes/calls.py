# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run checked calls on a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.backends.registry import is_reference
from tilegym_rmsnorm.call.watched import count_modes, without_modes

_NOTHING_HIDDEN = contextlib.nullcontext()


def unseen(function: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a block that hides dispatch modes while a kernel runs: a mode could wrap or replace the memory that the
    kernel is about to fill. `run_forward` and `run_backward` are called in it. The reference is PyTorch's operations,
    which a mode may count, save or replace: for it modes stay."""
    if count_modes() == 0 or is_reference(function):
        return _NOTHING_HIDDEN
    return without_modes()
