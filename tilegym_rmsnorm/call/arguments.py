# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Make plain and check the arguments of a forward or a backward: once, for the public functions and the library ops.

Tensors are made plain first where that can be (tensors.py). Nothing is allocated for the call or launched before all
checks have passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import Spec
from tilegym_rmsnorm.call.tensors import is_plain, resolved
from tilegym_rmsnorm.call.validation import (
    check_casting,
    check_input,
    check_like,
    check_normalized_shape,
    check_residual,
    check_rstd,
    check_weight,
    checked_dtype,
    checked_eps,
    checked_number,
    last_dims,
)
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.reference import compute_dtype, default_eps, promoted

# Whether this torch's F.rms_norm is on autocast's list for CUDA devices.
HAS_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


class Checked(NamedTuple):
    """Arguments that fit. tensors: x, weight, bias, residual of a forward; x, dy, weight, rstd, d_residual_out of a
    backward. are_plain: all of them are (tensors.py)."""

    names: tuple[str, ...]  # of the tensors, in errors
    tensors: tuple[Any, ...]
    shape: torch.Size  # of a row
    spec: Spec
    are_plain: bool


_PUBLIC, _FORWARD = ("input", "weight", "bias", "residual"), ("x", "weight", "bias", "residual")
_BACKWARD = ("x", "dy", "weight", "rstd", "d_residual_out")


def checked_forward(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Any,
    bias: Any,
    residual: Any,
    *,
    eps: float | None,
    offset: float,
    casting: str,
    residual_alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    dims: int | None = None,
    is_public: bool = False,
) -> Checked:
    """The arguments of a forward over `normalized_shape`, or, where dims is given, over x's last `dims` dimensions.

    is_public: as `rms_norm` takes them, whose x is named input. It may be complex, nested or have empty rows, and is
    cast as autocast casts for F.rms_norm.
    """
    names = _PUBLIC if is_public else _FORWARD
    name = names[0]
    are_plain, (x, weight, bias, residual) = _made_plain(x, weight, bias, residual)
    check_input(name, x, is_any_kind=is_public)
    if dims is not None:
        normalized_shape = last_dims(x, dims)
    n, shape = check_normalized_shape(x, normalized_shape, may_be_empty=is_public)
    heads = check_weight(weight, bias, x, shape, name)
    check_casting(casting)
    y_dtype = x.dtype
    if is_public and HAS_AUTOCAST and x.is_cuda and torch.is_autocast_enabled("cuda"):
        y_dtype = _autocast_dtype(x.dtype)
        if residual is None:
            x, weight, bias = map(_autocast, (x, weight, bias))
        else:  # the sum is not cast, but its norm is that of a float32 tensor, which "llama" has nothing to round of
            casting = "once"
    alpha, offset = checked_number("residual_alpha", residual_alpha), checked_number("offset", offset)
    check_residual(x, residual, alpha, residual_dtype, name)
    checked_dtype("out_dtype", out_dtype, x.is_complex())
    eps = checked_eps(eps)
    if residual is not None:
        residual_dtype = residual_dtype or promoted(x.dtype, residual.dtype)
        out_dtype = out_dtype or y_dtype
    elif out_dtype is y_dtype:
        out_dtype = None
    eps = default_eps(residual_dtype or x.dtype) if eps is None else eps
    spec = Spec(n, eps, offset, casting, alpha, out_dtype, residual_dtype, heads)
    return Checked(names, (x, weight, bias, residual), shape, spec, are_plain)


def checked_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    *,
    offset: float,
    casting: str,
    alpha: float = 1.0,
    dims: int | None = None,
) -> Checked:
    """The arguments of a backward over x's last dimension, with rstd (M,); or over x's last `dims` dimensions, with
    rstd as the library ops have it. x is what was normalized."""
    are_plain, given = _made_plain(x, dy, weight, rstd, d_residual_out)
    x, dy, weight, rstd, d_residual_out = given
    check_input("x", x)
    n, shape = check_normalized_shape(x, last_dims(x, dims or 1))
    heads = check_weight(weight, None, x, shape)
    check_like("dy", dy, x)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_rstd(rstd, x, n, dims)
    check_casting(casting)
    alpha = checked_number("residual_alpha", alpha)
    spec = Spec(n, 0.0, checked_number("offset", offset), casting, alpha, heads=heads)
    return Checked(_BACKWARD, given, shape, spec, are_plain)


def _made_plain(*tensors: Any) -> tuple[bool, tuple[Any, ...]]:
    """Whether all of the tensors, or None, are plain, and they, made plain where they can be."""
    if is_traced():
        return False, tensors
    if all(tensor is None or is_plain(tensor) for tensor in tensors):
        return True, tensors
    tensors = tuple(map(resolved, tensors))
    return all(tensor is None or is_plain(tensor) for tensor in tensors), tensors


def _autocast_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else compute_dtype(dtype)


def _autocast(tensor: Any) -> Any:
    return None if tensor is None else tensor.to(_autocast_dtype(tensor.dtype))
