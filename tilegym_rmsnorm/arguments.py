# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the public functions make of their arguments, before a backend is chosen: tensors made plain where they can be,
what stands between the others and a kernel, and all else that a forward is asked for, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import gate
from tilegym_rmsnorm.gate import is_plain, is_watched
from tilegym_rmsnorm.resolve import resolved
from tilegym_rmsnorm.spec import Spec
from tilegym_rmsnorm.validation import (
    check_memory,
    checked_dtype,
    checked_eps,
    checked_number,
    checked_residual_dtype,
)


def as_plain(*tensors: Any) -> tuple[bool, tuple[Any, ...]]:
    """The tensors, or None, made plain where they can be (resolve.py), and whether that is settled: all are plain, in a
    call that nothing watches. No kernel has an obstacle there, unless they are complex."""
    if is_dynamo_compiling():
        return False, tensors
    if not is_watched() and all(tensor is None or is_plain(tensor) for tensor in tensors):
        return True, tensors
    return False, tuple(map(resolved, tensors))


def obstacle_to(**tensors: Tensor | None) -> str | None:
    """`gate.obstacle`, once the memory of all is known to be there."""
    check_memory(**tensors)
    return gate.obstacle(**tensors)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def checked_spec(
    n: int,
    x: Tensor,
    residual: Tensor | None,
    *,
    eps: float | None,
    offset: float,
    residual_alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    casting: str,
    y_dtype: torch.dtype,
    x_name: str = "x",
) -> Spec:
    """What a forward is asked for. y_dtype: of y, where out_dtype does not say it. casting has been checked."""
    alpha = checked_number("residual_alpha", residual_alpha)
    residual_dtype = checked_residual_dtype(x, residual, alpha, residual_dtype, x_name)
    if out_dtype is not None:
        checked_dtype("out_dtype", out_dtype, x.is_complex())
    if residual is not None:
        out_dtype = out_dtype or y_dtype
    elif out_dtype is y_dtype:
        out_dtype = None
    eps = checked_eps(eps, residual_dtype or x.dtype)
    return Spec(n, eps, checked_number("offset", offset), casting, alpha, out_dtype, residual_dtype)
