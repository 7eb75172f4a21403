# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Name the keyword of RMSNorm that stands for a keyword of another library's norm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Init = TypeVar("_Init", bound=Callable[..., None])

OURS = {
    "hidden_size": "normalized_shape=",
    "dim": "normalized_shape=",
    "variance_epsilon": "eps=",
    "epsilon": "eps=",
    "with_scale": "elementwise_affine=",
    "params_dtype": "dtype=",
    "casting_mode": 'casting="llama" or "once"',
    "zero_centered_gamma": "offset=1.0",
    "weight_offset": "offset=",
}


def check_keywords(name: str, unknown: Iterable[str]) -> None:
    """Raise the TypeError that names ours, if one of these keywords is another library's."""
    theirs = [each for each in unknown if each in OURS]
    if theirs:
        ours = ", ".join(f"{OURS[each]} for {each}=" for each in theirs)
        raise TypeError(f"{name}: expected {ours}; docs/coming-from.md has more names of other libraries")


def names_ours(init: _Init) -> _Init:
    """Decorate a constructor: keywords of other libraries raise an error that names ours. The signature stays."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        check_keywords(type(self).__name__, (each for each in options if each not in known))
        init(self, *args, **options)

    return __init__  # type: ignore[return-value]
