# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run flashinfer's RMSNorm, by flashinfer's names and signatures, on these kernels. flashinfer is not imported.

Written against `flashinfer.norm` 0.7.2. As in flashinfer, the sum of input and residual is normalized before it is
rounded. `enable_pdl` has no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call.arithmetic import joint_dtype
from tilegym_rmsnorm.call.tensors import is_plain
from tilegym_rmsnorm.call.validation import check_like, check_tensor, check_vector, fail


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Compute `flashinfer.norm.rmsnorm`: y, of input's shape and dtype; differentiable.

    Args:
        input: Shape `(*, N)`.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        out: Of input's shape. y is rounded to out's dtype and written into out, which is returned. out may share memory
            with input where no gradient is recorded.
        enable_pdl: No effect.

    Raises:
        ValueError: A shape, a device or a number does not fit, or out cannot be written in place.
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
    """Compute `rmsnorm`, with its errors and 1 added to weight.

    Args:
        input: Shape `(*, N)`.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        out: As for `rmsnorm`.
        enable_pdl: No effect.
    """
    return _rmsnorm(input, weight, eps, out, 1.0)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Compute `flashinfer.norm.fused_add_rmsnorm`: residual becomes input + residual, and input the norm of that sum
    before it is rounded. The sum is held in float32 on the way.

    Args:
        input: Shape `(*, N)`; changed in place.
        residual: Shape of input; changed in place. Must share no memory with input.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        enable_pdl: No effect.

    Raises:
        ValueError: A shape, a device or a number does not fit, or input or residual cannot be written in place. Neither
            is changed then.
        TypeError: A dtype, a layout or a type does not fit.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Compute `fused_add_rmsnorm`, with its errors and 1 added to weight.

    Args:
        input: Shape `(*, N)`; changed in place.
        residual: Shape of input; changed in place.
        weight: Shape `(N,)`.
        eps: Added to the mean of squares.
        enable_pdl: No effect.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, 1.0)


def _rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None, offset: float) -> Tensor:
    _check_given(input, weight)
    if out is not None:
        check_like("out", out, input, "input")
        _check_can_be_written("out", out)
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            for name, saved in (("input", input), ("weight", weight)):
                _check_apart("out", out, name, saved, "where a gradient is recorded, ")
    dtype = input.dtype if out is None else out.dtype  # given, so that autocast does not choose it
    y = functional.rms_norm(input, input.shape[-1:], weight, eps, offset=offset, out_dtype=dtype)
    return y if out is None else out.copy_(y)


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    _check_given(input, weight)
    check_like("residual", residual, input, "input")
    _check_can_be_written("input", input)
    _check_can_be_written("residual", residual)
    _check_apart("residual", residual, "input", input)
    dtypes: dict[str, Any] = {"residual_dtype": joint_dtype(input, residual), "out_dtype": input.dtype}
    y, total = functional.rms_norm(
        input, input.shape[-1:], weight, eps, offset=offset, residual=residual, **dtypes
    )
    input.copy_(y)
    residual.copy_(total)


def _check_given(input: Tensor, weight: Tensor) -> None:
    """Check input and weight. rms_norm takes a weight with a row per head, flashinfer does not."""
    check_tensor("input", input)
    check_tensor("weight", weight)
    if isinstance(input, Tensor) and isinstance(weight, Tensor) and weight.ndim != 1:
        check_vector("weight", weight, input, input.shape[-1:], "input")


def _check_can_be_written(name: str, tensor: Tensor) -> None:
    """Refuse, before anything is written, a tensor that copy_ would refuse or whose elements share an address."""
    if is_dynamo_compiling():
        return  # Dynamo knows no views, and its graph writes at the end
    extent = 0  # of the inner dimensions, in elements
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= extent and tensor.numel():
            got = f"strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            fail(ValueError, name, "each element at an address of its own", got)
        extent += (size - 1) * stride
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        fail(ValueError, name, "no inference tensor outside of inference mode", "one")
    owner = tensor if tensor._base is None else tensor._base
    if torch.is_grad_enabled() and owner.is_leaf and owner.requires_grad:
        got = "one" if owner is tensor else "a view of one"
        fail(ValueError, name, "no leaf that requires grad, since it is written", got)


def _check_apart(name: str, tensor: Tensor, other_name: str, other: Tensor, where: str = "") -> None:
    """Check that two tensors share no memory. Slices of one tensor whose rows alternate count as shared."""
    if is_dynamo_compiling() or not (is_plain(tensor) and is_plain(other)):
        return
    begin, end = _memory(tensor)
    other_begin, other_end = _memory(other)
    if begin < other_end and other_begin < end:
        fail(ValueError, name, f"{where}memory apart from that of {other_name}", "memory that both share")


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address behind the last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + extent * tensor.itemsize if tensor.numel() else begin
