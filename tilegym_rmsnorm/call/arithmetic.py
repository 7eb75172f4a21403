# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute what the formulas of several ops share: dtypes of computation, rstd, roundings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilegym_rmsnorm.call.watched import counts_without_grad, is_compiled, is_translated


def default_eps(dtype: torch.dtype) -> float:
    """Return the eps for eps=None: the machine epsilon of the dtype of computation, as in `F.rms_norm`."""
    is_wide = dtype.itemsize == (16 if dtype.is_complex else 8)
    return 2.0**-52 if is_wide else 2.0**-23  # torch.finfo would be three more guards of Dynamo


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are computed."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def joint_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which these tensors are computed together: that of the widest, complex if any is complex."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = promoted(dtype, tensor.dtype)
    return dtype


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return `torch.promote_types` of two floating or complex dtypes.

    It compares dtypes: torch.export would record a call of torch.promote_types as a node that cannot run, and in
    torch.compiler.nested_compile_region Dynamo cannot guard on a dictionary that has dtypes as keys.
    """
    if dtype == other:
        return dtype
    is_wide = torch.float64 in (compute_dtype(dtype), compute_dtype(other))
    if dtype.is_complex or other.is_complex:
        return torch.complex128 if is_wide else torch.complex64
    return torch.float64 if is_wide else torch.float32


def rstd_torch(x: Tensor, eps: float | None, dims: int) -> Tensor:
    """Compute rstd over the last `dims` dimensions, with an extent of 1 for each of them."""
    return rstd_of_wide(x.to(compute_dtype(x.dtype)), eps, dims)


def rstd_of_wide(wide: Tensor, eps: float | None, dims: int) -> Tensor:
    mean_square = wide.square().mean(dim=last_dimensions(dims), keepdim=True)
    return torch.rsqrt(mean_square + (default_eps(wide.dtype) if eps is None else eps))


def last_dimensions(dims: int) -> tuple[int, ...]:
    return tuple(range(-dims, 0))


def round_xhat(xhat: Tensor, dtype: torch.dtype, casting: str) -> Tensor:
    """Round xhat to `dtype` (x's) with casting="llama", but keep its own dtype. Gradients ignore the rounding."""
    return rounded_value(xhat, dtype) if casting == "llama" else xhat


def rounded_value(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `value` to `dtype` but keep its own dtype. Gradients ignore the rounding."""
    if dtype == value.dtype:
        return value
    if is_translated():  # other runtimes have neither these gradients nor views of bits
        return value.to(dtype).to(value.dtype)
    fixed = value.detach()
    rounded = fixed.to(dtype)
    if dtype.itemsize == 2 and is_compiled():
        # torch.compile drops a rounding before a widening, through views too, but not through arithmetic on its bits.
        rounded = (~~rounded.view(torch.int16)).view(dtype)
    rounded = rounded.to(value.dtype)
    if not (torch.is_grad_enabled() or counts_without_grad()):
        return rounded
    # Difference and sum are exact. PyTorch's gradient of a cast is rounded too, and can overflow. The difference of two
    # infinities is NaN, hence 0; a value that rounds to an infinity stays infinite.
    return value + (rounded - fixed).nan_to_num(0.0, math.inf, -math.inf)
