# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Provide vLLM's op `vllm.ir.ops.rms_norm`, by the contract of vLLM 0.33. Only `register` imports vLLM."""

# No `from __future__ import annotations`: vLLM reads the schema of the op from annotations, as types, not as text.
import importlib
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.call.validation import check_tensor
from tilegym_rmsnorm.settings import KERNEL_BACKENDS

PROVIDER = "tilegym_rmsnorm"
OPS = "vllm.ir.ops"


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Compute vLLM's op: `x * rstd`, rounded to weight's dtype, times weight, rounded to x's dtype.

    Args:
        x: Shape `(*, N)`.
        weight: Shape `(N,)`, of x's dtype or float32; or None.
        epsilon: Added to the mean of squares.
        variance_size: None: the mean is that of the whole row. Nothing else is supported.

    Returns:
        y, of x's shape and dtype; contiguous.

    Raises:
        ValueError: variance_size is given; a shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    if variance_size is not None:
        raise ValueError(f"variance_size: expected None, got {variance_size}")
    check_tensor("x", x)
    if weight is not None:
        check_tensor("weight", weight)
    rounds_first = weight is not None and weight.dtype is x.dtype
    return functional.rms_norm(x, x.shape[-1:], weight, epsilon, casting="llama" if rounds_first else "once")


def supports_args(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether `rms_norm` rounds as vLLM's native code does: not beside a weight narrower than x."""
    return variance_size is None and (weight is None or weight.dtype in (x.dtype, torch.float32))


def register(provider: str = PROVIDER) -> Any:
    """Register `rms_norm` as a provider of `vllm.ir.ops.rms_norm`.

    vLLM calls a provider by its priorities, such as `vllm.ir.ops.rms_norm.set_default(["tilegym_rmsnorm", "native"])`.
    vLLM's record says `supported=False` where neither backend "cutile" nor "triton" can run.

    Args:
        provider: The name in vLLM's priorities.

    Returns:
        vLLM's record of the provider, `vllm.ir.ops.rms_norm.impls[provider]`. A second call returns the same record.

    Raises:
        TypeError: provider is not a str.
        ImportError: vLLM is not installed, or has no `vllm.ir.ops.rms_norm`.
        ValueError: vLLM's op has another signature.
    """
    if not isinstance(provider, str):
        raise TypeError(f"provider: expected a str, got {provider!r}")
    try:
        op = importlib.import_module(OPS).rms_norm
        add = op.register_impl
    except (ModuleNotFoundError, AttributeError) as error:
        name = getattr(error, "name", "") or ""
        if isinstance(error, ModuleNotFoundError) and not f"{OPS}.".startswith(f"{name}."):
            raise
        raise ImportError(
            "register needs vLLM with vllm.ir.ops.rms_norm, such as 0.33. To mend it: pip install vllm"
        ) from error
    found = op.impls.get(provider)
    if found is not None and found.impl_fn is rms_norm:
        return found
    usable = any(registry.why_unusable(backend, None) is None for backend in KERNEL_BACKENDS)
    return add(provider, supported=usable, supports_args=supports_args)(rms_norm)
