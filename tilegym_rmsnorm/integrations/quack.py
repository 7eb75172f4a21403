# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run quack's RMSNorm, by quack's names and signatures, on these kernels. quack is not imported.

Written against quack 0.6.5. Goes further than quack: `prenorm=True` without a residual keeps the gradient of its second
result, a bias needs no weight, float32 rows of any width have a backward, float64 and CPU tensors run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call.validation import check_tensor, checked_dtype, checked_sizes_of_weight
from tilegym_rmsnorm.nn import module
from tilegym_rmsnorm.ops.norm import op
from tilegym_rmsnorm.ops.norm.spec import D_RESIDUAL, DB, DW, DX
from tilegym_rmsnorm.reproducibility import flags


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
    """Normalize x, or `x + residual`, over the last dimension, by `quack.rmsnorm`'s signature; differentiable.

    The sum is rounded to residual_dtype and then normalized; quack normalizes the sum before it is rounded.

    Args:
        x: Shape `(*, N)`, or `(*, H, N)` beside a weight for each head.
        weight: Shape `(N,)`, or `(H, N)`: a row for each head. None: a factor of 1.
        bias: weight's shape, or `(N,)` without a weight. None: no bias.
        residual: x's shape, any floating dtype.
        out_dtype: y's dtype. None: x's.
        residual_dtype: The sum's dtype. None: residual's.
        eps: Added to the mean of squares.
        prenorm: Return the sum, or x, too.
        weight_offset: Added to weight: 1 for Gemma.

    Returns:
        y, of x's shape. With prenorm `(y, x + residual)`; without a residual `(y, x)`, x in residual_dtype.

    Raises:
        ValueError: A shape, a device or a number does not fit; there is a weight_offset without a weight.
        TypeError: A dtype, a layout or a type does not fit.
    """
    options = _options(x, weight, bias, residual, out_dtype, residual_dtype, weight_offset)
    result = functional.rms_norm(x, x.shape[-1:], weight, eps, **options)
    if residual is not None:
        return result if prenorm else result[0]
    return (result, x if residual_dtype is None else x.to(residual_dtype)) if prenorm else result


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the forward without autograd, by `quack.rmsnorm.rmsnorm_fwd`'s signature. store_rstd: return rstd too. All
    else, and the errors, are as for `rmsnorm`.

    Returns:
        `(y, residual_out, rstd)`: the first two as by `rmsnorm` with prenorm. rstd has x's shape without the last
        dimension, and dtype float32 (float64 where the sum, or x, is float64); None without store_rstd.
    """
    options = _options(x, weight, bias, residual, out_dtype, residual_dtype, weight_offset)
    y, *sums, rstd = functional.rms_norm_forward(x, weight, eps, **options)
    residual_out = sums[0] if sums else x if residual_dtype is None else x.to(residual_dtype)
    return y, residual_out, rstd.view(x.shape[:-1]) if store_rstd else None


def rmsnorm_bwd(
    x: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: Tensor | None = None,
    has_bias: bool = False,
    has_residual: bool = False,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Run the backward of `rmsnorm_fwd` without autograd, by `quack.rmsnorm.rmsnorm_bwd`'s signature.

    Args:
        x: The forward's x, or with a residual the sum that the forward returned. Shape `(*, N)`.
        weight: The forward's weight.
        dout: The gradient of y, of x's shape.
        rstd: The forward's rstd, of x's shape without the last dimension.
        dresidual_out: The gradient of residual_out, of x's shape, which is added to dx. None: 0.
        has_bias: Return db.
        has_residual: Whether the forward had a residual.
        weight_offset: The forward's weight_offset.

    Returns:
        `(dx, dw, db, dresidual)`. dx has x's shape and dtype; dw and db have weight's, and are None where there is no
        weight or bias. dresidual is dx where the forward had a residual. If dresidual_out has another dtype than x,
        dresidual has that dtype, is rounded separately, and is returned also without a residual, as by quack.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    check_tensor("x", x)
    check_tensor("rstd", rstd)
    if dresidual_out is not None:
        check_tensor("dresidual_out", dresidual_out)
    _check_offset(weight, weight_offset)
    if rstd.shape != x.shape[:-1]:
        raise ValueError(f"rstd: expected shape {tuple(x.shape[:-1])}, got {tuple(rstd.shape)}")
    if dresidual_out is None or dresidual_out.dtype == x.dtype:
        options: dict[str, Any] = {"offset": weight_offset, "d_residual_out": dresidual_out}
        options["needs_db"] = bool(has_bias)
        dx, dw, *db = functional.rms_norm_backward(x, dout, weight, rstd.reshape(-1), **options)
        return dx, dw, db[0] if has_bias else None, dx if has_residual else None
    wanted = DX + D_RESIDUAL + DW * (weight is not None) + DB * bool(has_bias)
    numbers = wanted, 1, weight_offset, "once", 1.0
    dtypes = None, dresidual_out.dtype, None, None
    given = dout, x, weight, rstd.unsqueeze(-1), dresidual_out
    dx, dw, db, dresidual = op.BACKWARD(*given, *numbers, *dtypes, None, flags())
    return dx, dw, db, dresidual


def _options(
    x: Tensor, weight: Any, bias: Any, residual: Any, out_dtype: Any, residual_dtype: Any, offset: float
) -> dict[str, Any]:
    """Check what functional.py knows by other names, and name the options of a forward as it does."""
    check_tensor("x", x)
    _check_offset(weight, offset)
    options = {"bias": bias, "offset": offset, "out_dtype": out_dtype}
    if residual is None:
        checked_dtype("residual_dtype", residual_dtype)
        return options
    check_tensor("residual", residual)
    return options | {"residual": residual, "residual_dtype": residual_dtype or residual.dtype}


def _check_offset(weight: Tensor | None, weight_offset: float) -> None:
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset: expected 0 without a weight, got {weight_offset}")


class QuackRMSNorm(module.RMSNorm):
    """`quack.QuackRMSNorm`: a `torch.nn.RMSNorm` over one dimension, with the same state dict.

    Args:
        dim: Elements of a row.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight.
        device: The weight's device.
        dtype: The weight's dtype.
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
