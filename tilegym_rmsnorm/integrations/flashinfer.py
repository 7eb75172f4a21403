# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""flashinfer's RMSNorm by its names and signatures, on these kernels. It does not import flashinfer.

Written against `flashinfer.norm` 0.7.2. flashinfer normalizes the sum of input and residual before it is rounded; so do
these, which ask for a sum that is not. `enable_pdl` has no effect.
"""

from __future__ import annotations

from torch import Tensor

from tilegym_rmsnorm import api
from tilegym_rmsnorm.reference import joint_dtype
from tilegym_rmsnorm.validation import check_like, check_tensor


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """`flashinfer.norm.rmsnorm`: y in input's dtype; differentiable.

    Args:
        input: Shape `(*, N)`.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        out: Of input's shape: y is written into it, rounded to its dtype, and it is returned.
        enable_pdl: No effect.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    return _rmsnorm(input, weight, eps, out, 0.0)


def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """`rmsnorm` with 1 added to weight.

    Args:
        input: Shape `(*, N)`.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        out: As for `rmsnorm`.
        enable_pdl: No effect.

    Raises:
        ValueError: As by `rmsnorm`.
        TypeError: As by `rmsnorm`.
    """
    return _rmsnorm(input, weight, eps, out, 1.0)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """`flashinfer.norm.fused_add_rmsnorm`: residual becomes input + residual, and input the norm of that sum before it
    is rounded. The sum is held in float32 on the way.

    Args:
        input: Shape `(*, N)`; changed in place.
        residual: Shape of input; changed in place.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        enable_pdl: No effect.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """`fused_add_rmsnorm` with 1 added to weight.

    Args:
        input: Shape `(*, N)`; changed in place.
        residual: Shape of input; changed in place.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        enable_pdl: No effect.

    Raises:
        ValueError: As by `fused_add_rmsnorm`.
        TypeError: As by `fused_add_rmsnorm`.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, 1.0)


def _rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None, offset: float) -> Tensor:
    for name, tensor in (("input", input), ("weight", weight)):
        check_tensor(name, tensor)
    if out is not None:
        check_like("out", out, input, "input")
    dtype = input.dtype if out is None else out.dtype  # under autocast too
    y = api.rms_norm(input, input.shape[-1:], weight, eps, offset=offset, out_dtype=dtype)
    return y if out is None else out.copy_(y)


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    for name, tensor in (("input", input), ("residual", residual), ("weight", weight)):
        check_tensor(name, tensor)
    y, total = api.rms_norm(
        input,
        input.shape[-1:],
        weight,
        eps,
        offset=offset,
        residual=residual,
        residual_dtype=joint_dtype(input, residual),
        out_dtype=input.dtype,
    )
    input.copy_(y)
    residual.copy_(total)
