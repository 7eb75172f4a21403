# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Parsers of command line options, for argparse's `type`: of `tune` and of the benchmark's commands.

Each raises argparse's own error, which the command prints with the option's name. None takes an empty text, which an
unset variable of a shell leaves.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """A finite number of at least 0: nothing is above a NaN, and a comparison with one would let all pass."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def path(text: str) -> Path:
    """A path, which need not exist. As a Path, an empty text would be the working directory."""
    if not text:
        raise ArgumentTypeError("expected a path, got ''")
    return Path(text)


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names out of `known`, each once."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        if wrong := [name for name in chosen if name not in known]:
            raise ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(wrong)}")
        return chosen

    return parse
