# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What a call asks of a backend, once it has passed all checks.

A backend implements two functions, which `register_impl` names (registry.py):

    forward(spec, tensors) -> (y, rstd)               tensors: x, weight, bias
    backward(spec, tensors, needs_dw) -> (dx, dw)     tensors: x, dy, weight, rstd

x, y, dy and dx are (M, N) of x's dtype, x and dy with a last stride of 1 and any row stride of at least N; weight, bias
and dw are (N,), weight and bias contiguous or None; rstd is (M,), float32 (float64 for float64 x), contiguous. y, rstd,
dx and dw are new and contiguous. dw has weight's dtype; it is None without a weight, and where it is not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Tensors = tuple[Any, ...]


class Spec(NamedTuple):
    n: int  # elements that are normalized together
    eps: float
    offset: float
    casting: str  # "once" or "llama", see `rms_norm`
