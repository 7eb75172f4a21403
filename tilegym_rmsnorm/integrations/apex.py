# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run Apex's RMSNorm, by Apex's names and signatures, on these kernels. Apex is not imported.

Written against `apex/normalization/fused_layer_norm.py` of July 2026. On CUDA, Apex rounds `x * rstd` to y's dtype
before the weight; these functions do so on any device. `memory_efficient` has no effect: x is saved, not y.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call.options import checked_eps, refuse_torch_jit_script
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.validation import check_tensor, checked_sizes_of_weight


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute `apex.normalization.fused_layer_norm.fused_rms_norm_affine`; differentiable.

    Returns y, of input's shape and dtype. Under `torch.autocast("cuda")` casts input and weight to autocast's dtype
    first, as Apex does.

    Args:
        input: Shape `(*, *normalized_shape)`.
        weight: Shape `normalized_shape`.
        normalized_shape: The last dimensions.
        eps: Added to the mean of squares.
        memory_efficient: No effect.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    check_tensor("weight", weight)
    return _rms_norm(input, weight, normalized_shape, eps, None)


def fused_rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Compute `fused_rms_norm_affine`, with its errors, without a weight.

    Args:
        input: Shape `(*, *normalized_shape)`.
        normalized_shape: The last dimensions.
        eps: Added to the mean of squares.
        memory_efficient: No effect.
    """
    return _rms_norm(input, None, normalized_shape, eps, None)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute `fused_rms_norm_affine`, with its errors, and y in weight's dtype.

    Args:
        input: Shape `(*, *normalized_shape)`.
        weight: Shape `normalized_shape`.
        normalized_shape: The last dimensions.
        eps: Added to the mean of squares.
        memory_efficient: No effect.
    """
    check_tensor("weight", weight)
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


def _rms_norm(
    input: Tensor, weight: Tensor | None, normalized_shape: Any, eps: float, out_dtype: torch.dtype | None
) -> Tensor:
    """Compute y as Apex does. out_dtype: y's dtype; None: input's."""
    check_tensor("input", input)
    if torch.is_autocast_enabled("cuda") and input.is_cuda:
        dtype = torch.get_autocast_dtype("cuda")
        input, weight = _cast(input, dtype), None if weight is None else _cast(weight, dtype)
        out_dtype = None if out_dtype is None or weight is None else weight.dtype
        with torch.autocast("cuda", enabled=False):
            return _rms_norm(input, weight, normalized_shape, eps, out_dtype)
    # Apex rounds `x * rstd` to y's dtype. Casting "llama" rounds to x's: where these differ, no casting does it.
    casting: Casting = "llama" if out_dtype in (None, input.dtype) else "once"
    return functional.rms_norm(input, normalized_shape, weight, eps, casting=casting, out_dtype=out_dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor as autocast does: float64 stays. So do tensors that are not floating; they are refused later."""
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_cast else tensor


class FusedRMSNorm(nn.Module):
    """`apex.normalization.FusedRMSNorm`, with the same parameters, attributes and state dict. y has input's dtype.

    Args:
        normalized_shape: The last dimensions of input.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight, which starts at 1.
        memory_efficient: No effect.

    Raises:
        ValueError: A size or eps is out of range.
        TypeError: A size or eps is not a number.
    """

    weight: Tensor | None

    __prepare_scriptable__ = refuse_torch_jit_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        checked_eps(eps)
        self.normalized_shape = torch.Size(checked_sizes_of_weight(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        weight = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.weight is None:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class MixedFusedRMSNorm(FusedRMSNorm):
    """`apex.normalization.MixedFusedRMSNorm`, which Megatron uses: `FusedRMSNorm` with y in weight's dtype.

    Args:
        normalized_shape: The last dimensions of input.
        eps: Added to the mean of squares.
        memory_efficient: No effect.
        **kwargs: Only `elementwise_affine=True`, with a warning.

    Raises:
        RuntimeError: elementwise_affine is False.
        TypeError: Another argument is given.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        if "elementwise_affine" in kwargs:
            warnings.warn("MixedFusedRMSNorm does not take elementwise_affine", stacklevel=2)
            if not kwargs.pop("elementwise_affine"):
                raise RuntimeError(
                    "MixedFusedRMSNorm has a weight; elementwise_affine=False is not supported"
                )
        if kwargs:
            raise TypeError(f"MixedFusedRMSNorm: unexpected arguments {', '.join(kwargs)}")
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        assert self.weight is not None
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)
