# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Note the level of reproducibility that backends get."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.routes import known_calls
from tilegym_rmsnorm.settings import AUTO_ORDER

LEVELS = (("run", 0), ("batch", 1), ("device", 3), ("vllm", 5), ("device,vllm", 7))


class NotedLevels:
    """Note from now on the flags of each Spec that a backend gets, of forwards and of backwards."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self.backends: list[str] = []
        for backend in AUTO_ORDER:
            with contextlib.suppress(ImportError):
                registry._implemented_ops(backend)
        noted = {
            (op, backend): self._noting(op, backend, run)
            for (op, backend), run in list(registry._impls.items())
        }
        patch.setattr(registry, "_impls", noted)
        patch.setattr(registry, "_chosen", {})
        known_calls.forget()

    def _noting(self, op: str, backend: str, run: Callable[..., Any]) -> Callable[..., Any]:
        seen = self._forwards if op.endswith("forward") else self._backwards

        def noted(spec: Any, *given: Any) -> Any:
            seen.append(spec.reproducible)
            self.backends.append(backend)
            return run(spec, *given)

        return noted

    def take(self) -> tuple[list[int], list[int]]:
        """Return the flags of the forwards, and of the backwards, since this was last called."""
        found = list(self._forwards), list(self._backwards)
        self._forwards.clear()
        self._backwards.clear()
        return found
