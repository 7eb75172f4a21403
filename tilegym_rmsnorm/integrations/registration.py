# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Count who asked for a change to another library, so that the last one to end takes it back."""

from __future__ import annotations

import importlib
import threading
from typing import Any

_lock = threading.RLock()


class Change:
    """Change to another library, made while at least one registration holds it. Subclasses say how."""

    function = "register"  # makes registrations; for errors
    _holders = 0

    def make(self) -> None:
        """Make the change where it is not in effect. Each registration calls this."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Restore the library. The end of the last registration calls this."""
        raise NotImplementedError

    def hold(self) -> Registration:
        with _lock:
            self.make()
            self._holders += 1
            return Registration(self)

    def release(self) -> None:
        with _lock:
            self._holders -= 1
            if not self._holders:
                self.take_back()


class Registration:
    """Change to another library, in effect until `undo` or the end of the `with` block."""

    def __init__(self, change: Change) -> None:
        self._function = change.function
        self._change: Change | None = change

    def undo(self) -> None:
        """End the registration. After the last one of a change has ended, the library is as before, but for what others
        have put into it since then. A second call does nothing."""
        with _lock:
            change, self._change = self._change, None
            if change is not None:
                change.release()

    def __enter__(self) -> Registration:
        if self._change is None:
            raise RuntimeError(f"this registration was undone; call {self._function}() for another one")
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def imported(module: str, name: str, needs: str) -> Any:
    """Import a module of another library, and return its attribute. Raise an ImportError with the text `needs` where
    the library is missing, or has no such module or attribute. Errors inside the library's own imports stay."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(needs) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise ImportError(needs) from error
