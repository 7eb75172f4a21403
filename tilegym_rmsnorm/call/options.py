# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Check single arguments that are no tensors: numbers, names and flags. validation.py checks tensors."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from numbers import Rational, Real
from typing import Any, NoReturn, get_args

from torch import Tensor

from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.validation import fail, shown
from tilegym_rmsnorm.call.watched import is_symbol

CASTINGS = get_args(Casting)
_INF, _MOST = math.inf, sys.float_info.max


def checked_bool(name: str, value: bool) -> bool:
    """Check and return a bool: a text such as "no", or a tensor, would count as True."""
    if not isinstance(value, bool):
        fail(TypeError, name, "a bool", shown(value))
    return value


def checked_heads(heads: int | None, name: str = "heads") -> int | None:
    return None if heads is None else checked_int(name, heads, 1, ", or None")


def checked_int(name: str, value: int, lowest: int, or_else: str = "") -> int:
    """Return `value` as an int that is at least `lowest`. or_else: other accepted values, for the error text."""
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        fail(TypeError, name, f"an int{or_else.replace(',', '')}", shown(value))
    if (value := operator.index(value)) < lowest:
        fail(ValueError, name, f"at least {lowest}{or_else}", value)
    return value


def checked_eps(eps: float | None, hint: str = "; a residual is given by name: residual=") -> float | None:
    """Check and return eps as a float, or None. A torch.SymFloat without a known value is not checked. hint: where eps
    is a tensor: other libraries take the residual in this position."""
    if eps is None or (not isinstance(eps, Tensor) and is_symbol(eps)):
        return eps
    expected = "a finite number, at least 0, or None"
    if isinstance(eps, Tensor) and eps.ndim:
        fail(TypeError, "eps", expected, f"{shown(eps)}{hint}")
    return checked_number("eps", eps, 0.0, expected)


def checked_number(
    name: str, value: float, lowest: float = -_INF, expected: str = "a finite number"
) -> float:
    """Return `value` as a finite float that is at least `lowest`."""
    if type(value) is not float:
        if not isinstance(value, Real) or isinstance(value, bool):
            fail(TypeError, name, expected, shown(value))
        # Compare ints and fractions alone: for a narrow float beside _MOST NumPy warns of an overflow.
        if isinstance(value, Rational) and not -_MOST <= value <= _MOST:
            fail(ValueError, name, expected, "a number beyond the range of floats")
        value = float(value)
    if not (lowest <= value < _INF) or value == -_INF:
        value = float(value)  # of a symbol, which Dynamo cannot show
        fail(ValueError, name, expected, value)
    return value


def check_casting(casting: str) -> None:
    is_gemma = isinstance(casting, str) and casting == "gemma"
    check_one_of(
        "casting", casting, CASTINGS, "; Gemma's norms have 'once' and offset=1.0" if is_gemma else ""
    )


def check_one_of(name: str, value: Any, known: Iterable[str | None], hint: str = "") -> None:
    if not isinstance(value, (str, type(None))) or value not in known:
        fail(ValueError, name, f"one of {', '.join(map(repr, known))}", f"{shown(value)}{hint}")


def refuse_torch_jit_script(*_: Any) -> NoReturn:
    """Refuse torch.jit.script, which calls `__prepare_scriptable__` of each module and function that it compiles."""
    raise RuntimeError(
        "torch.jit.script does not take norms of tilegym_rmsnorm: use torch.export.export, which keeps the kernels"
    )
