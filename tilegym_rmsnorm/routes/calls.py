# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run a checked call of any op on its backend, and remember it for calls like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.backends.registry import unseen
from tilegym_rmsnorm.routes.known_calls import KnownCalls, Run, may_remember

Tensors = tuple[Any, ...]


def run_and_remember(
    known: KnownCalls | None,
    describe: Callable[[], Any],
    given: Tensors,
    tensors: Tensors,
    function: Callable[..., Any] | None,
    bind: Callable[[bool], Run],
) -> Any:
    """Run a call that passed all checks, remember it, and return its results.

    Args:
        known: Remembers it; None: nothing does.
        describe: Describes the call for `known`.
        given: Its tensors, as the caller gave them.
        tensors: As the checks made them.
        function: The backend's.
        bind: Returns the function to run. It is told whether that is kept for other calls.
    """
    described = None
    if known is not None and may_remember(given, tensors, function):
        described = describe()
    with unseen(function):
        run = bind(described is not None)
        results = run(tensors)
    if known is not None:
        known.remember(described, run)
    return results
