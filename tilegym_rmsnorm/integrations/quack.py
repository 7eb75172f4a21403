# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""quack's RMSNorm by its names and signatures, on these kernels. It does not import quack.

Written against quack 0.6.5. Where quack stops, this goes on: `prenorm=True` without a residual keeps the gradient of
its second result, a bias needs no weight, float32 rows of any width have a backward, float64 and CPU tensors run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import api, module
from tilegym_rmsnorm.validation import check_tensor, checked_dtype, checked_sizes_of_weight


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`quack.rmsnorm`: the norm of x, or of `x + residual`, over the last dimension; differentiable.

    The sum is rounded to residual_dtype, and that value is normalized; quack normalizes the sum that is not rounded.

    Args:
        x: Shape `(*, N)`, or `(*, H, N)` beside a weight for each head.
        weight: Shape `(N,)`, or `(H, N)`: a row for each head. None: a factor of 1.
        bias: Shape of weight, `(N,)` without one, or None.
        residual: Of x's shape, any floating dtype.
        out_dtype: Of y. None: that of x.
        residual_dtype: Of the sum. None: that of residual.
        eps: Added to the mean of squares.
        prenorm: Return what was normalized too.
        weight_offset: Added to weight: 1 for Gemma.

    Returns:
        y, of x's shape. With prenorm `(y, x + residual)`; without a residual `(y, x)`, x in residual_dtype.

    Raises:
        ValueError: A shape, a device or a number does not fit; there is a weight_offset without a weight.
        TypeError: A dtype, a layout or a type does not fit.
    """
    check_tensor("x", x)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset: expected 0 without a weight, got {weight_offset}")
    options: dict[str, Any] = {"bias": bias, "offset": weight_offset, "out_dtype": out_dtype}
    if residual is None:
        checked_dtype("residual_dtype", residual_dtype)
        y = api.rms_norm(x, x.shape[-1:], weight, eps, **options)
        return (y, x if residual_dtype is None else x.to(residual_dtype)) if prenorm else y
    check_tensor("residual", residual)
    dtype = residual.dtype if residual_dtype is None else residual_dtype
    y, residual_out = api.rms_norm(
        x, x.shape[-1:], weight, eps, residual=residual, residual_dtype=dtype, **options
    )
    return (y, residual_out) if prenorm else y


class QuackRMSNorm(module.RMSNorm):
    """`quack.QuackRMSNorm`: a `torch.nn.RMSNorm` of one dimension; the same state dict.

    Args:
        dim: Elements of a row.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checked_dtype("dtype", dtype)
        shape = torch.Size(checked_sizes_of_weight(dim, "dim"))
        super().__init__(shape, eps, elementwise_affine, device, dtype)
