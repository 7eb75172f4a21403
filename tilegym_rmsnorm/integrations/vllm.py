# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A provider of vLLM's op `vllm.ir.ops.rms_norm`, by its contract of vLLM 0.33. `register` imports vLLM."""

# No `from __future__ import annotations`: vLLM reads the schema of the op from annotations that are types.
import importlib
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import api, registry
from tilegym_rmsnorm.validation import check_tensor

PROVIDER = "tilegym_rmsnorm"
OPS = "vllm.ir.ops"


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """What the op of vLLM means: `x * rstd` rounded to weight's dtype, times weight, rounded to x's.

    Args:
        x: Shape `(*, N)`.
        weight: Shape `(N,)`, of x's dtype or float32; or None.
        epsilon: Added to the mean of squares.
        variance_size: None: the mean is that of the whole row.

    Returns:
        y, of x's shape and dtype; contiguous.

    Raises:
        ValueError: The mean is asked for of a part of a row; a shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    if variance_size is not None:
        raise ValueError(f"variance_size: expected None, got {variance_size}")
    check_tensor("x", x)
    if weight is not None:
        check_tensor("weight", weight)
    rounds_first = weight is not None and weight.dtype is x.dtype
    return api.rms_norm(x, x.shape[-1:], weight, epsilon, casting="llama" if rounds_first else "once")


def supports_args(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether `rms_norm` has the roundings that vLLM's native code has: not beside a weight narrower than x."""
    return variance_size is None and (weight is None or weight.dtype in (x.dtype, torch.float32))


def register(provider: str = PROVIDER) -> Any:
    """Register `rms_norm` as a provider of `vllm.ir.ops.rms_norm`.

    vLLM calls it where its priority says so: `vllm.ir.ops.rms_norm.set_default(["tilegym_rmsnorm", "native"])`. It is
    not supported, as vLLM calls it, where neither backend "cutile" nor "triton" can run.

    Args:
        provider: The name that vLLM's priorities have.

    Returns:
        vLLM's record of it, `vllm.ir.ops.rms_norm.impls[provider]`. Of a second call, that of the first.

    Raises:
        TypeError: provider is no str.
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
    usable = any(registry.why_unusable(backend, None) is None for backend in ("cutile", "triton"))
    return add(provider, supported=usable, supports_args=supports_args)(rms_norm)
