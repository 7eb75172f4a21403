# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the sharding rules of all library ops, before the first call with a DTensor.

No import registers them: DTensor takes a second to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tilegym_rmsnorm.call.tensors import is_dtensor
from tilegym_rmsnorm.call.watched import is_traced

_RULES: dict[Any, Callable[..., Any]] = {}  # by the overloads of ops


def add_rules(overload: Any, rules: Callable[..., Any]) -> None:
    """Keep the placements of an op, until a DTensor comes."""
    assert not _register_rules.cache_info().currsize, "DTensor's engine would not know the op"
    _RULES[overload] = rules


def register_sharding(tensors: Iterable[Any]) -> None:
    """Register the rules if one of the tensors is a DTensor."""
    if not is_traced() and any(map(is_dtensor, tensors)):
        _register_rules()


@functools.cache
def _register_rules() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for overload, rules in _RULES.items():
        register_sharding(overload)(rules)
