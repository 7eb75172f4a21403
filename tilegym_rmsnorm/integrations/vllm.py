# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Provide vLLM's op `vllm.ir.ops.rms_norm`, and its layers `RMSNorm` and `GemmaRMSNorm`, by the contracts of vLLM 0.33.
Only `register` and `register_layers` import vLLM."""

# No `from __future__ import annotations`: vLLM reads the schema of the op from annotations, as types, not as text.
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.call.validation import check_tensor
from tilegym_rmsnorm.integrations.registration import Change, Registration, imported
from tilegym_rmsnorm.reproducibility import VLLM, flags
from tilegym_rmsnorm.settings import KERNEL_BACKENDS

PROVIDER = "tilegym_rmsnorm"
OPS = "vllm.ir.ops"
LAYERS = "vllm.model_executor.layers.layernorm"
OUT_OF_TREE = "vllm.model_executor.custom_op"  # the module with vLLM's registry of classes, `op_registry_oot`
OFFSETS = {"RMSNorm": 0.0, "GemmaRMSNorm": 1.0}


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
    needs = "register needs vLLM with vllm.ir.ops.rms_norm, such as 0.33. To mend it: pip install vllm"
    op = imported(OPS, "rms_norm", needs)
    if not hasattr(op, "register_impl"):
        raise ImportError(needs)
    found = op.impls.get(provider)
    if found is not None and found.impl_fn is rms_norm:
        return found
    usable = any(registry.why_unusable(backend, None) is None for backend in KERNEL_BACKENDS)
    return op.register_impl(provider, supported=usable, supports_args=supports_args)(rms_norm)


def register_layers() -> Registration:
    """Register out-of-tree classes for vLLM's layers `RMSNorm` and `GemmaRMSNorm`, with its `register_oot`.

    Layers that vLLM builds from then on run these kernels where vLLM enables the custom ops "rms_norm" and
    "gemma_rms_norm": not by default under torch.compile, whose setting is `custom_ops=["none"]`. A layer computes the
    norm as vLLM's CUDA kernels round: `x + residual` to x's dtype, then the norm of that, once. It returns new tensors,
    as vLLM's native code does, and leaves x and residual as they are. vLLM's own forward runs where the layer has a
    `var_hidden_size`, for dtypes that `supports_args` declines, and with VLLM_BATCH_INVARIANT, but not under
    `reproducible(order="vllm")`: then `RMSNorm` runs here, with the bits of that mode, and `GemmaRMSNorm` does not.

    Returns:
        A context manager with `undo()`, after which vLLM builds its own classes. Layers that were built stay.
        Registrations may be nested and end in any order.

    Raises:
        ImportError: vLLM is not installed, or has no such layer.
        RuntimeError: Another library has registered a class for one of these layers. Nothing is registered.
    """
    return _layers.hold()


class _Layers(Change):
    function = "register_layers"

    def __init__(self) -> None:
        self.ours: dict[str, Any] = {}

    def make(self) -> None:
        registered = _imported_for_layers(OUT_OF_TREE, "op_registry_oot")
        theirs = {name: _imported_for_layers(LAYERS, name) for name in OFFSETS}
        for name in theirs:
            found = registered.get(name)
            if found is not None and found is not self.ours.get(name):
                got = f"{found.__module__}.{found.__qualname__}"
                raise RuntimeError(f"register_layers: expected no out-of-tree {name} in vLLM, got {got}")
        for name, cls in theirs.items():
            if name not in registered:
                self.ours[name] = _layer(cls, OFFSETS[name])
                cls.register_oot(self.ours[name])
                # register_oot set another name; by this one vLLM's custom_ops switches the layer on and off as before.
                self.ours[name].name = cls.name

    def take_back(self) -> None:
        registered = _imported_for_layers(OUT_OF_TREE, "op_registry_oot")
        while self.ours:
            name, ours = self.ours.popitem()
            if registered.get(name) is ours:
                del registered[name]


_layers = _Layers()


def _imported_for_layers(module: str, name: str) -> Any:
    needs = f"register_layers needs vLLM with {module}.{name}, such as 0.33. To mend it: pip install vllm"
    return imported(module, name, needs)


def _layer(theirs: Any, offset: float) -> type:
    """Return a subclass of vLLM's layer whose forwards on CUDA devices, and on platforms that are plugins, run here."""
    envs = _imported_for_layers("vllm", "envs")

    def computed(layer: Any, x: Tensor, residual: Tensor | None) -> Any:
        """Return None where vLLM's own forward has to run."""
        weight = layer.weight.data if getattr(layer, "has_weight", True) else None
        part = getattr(layer, "variance_size_override", None)
        # Gemma's formula makes the weight float32, whatever its dtype.
        fits = part is None and (bool(offset) or supports_args(x, weight, layer.variance_epsilon))
        has_vllms_bits = flags() & VLLM > 0
        is_left = bool(offset) if has_vllms_bits else envs.VLLM_BATCH_INVARIANT
        if is_left or not fits or x.dtype not in KERNEL_DTYPES:
            return None
        others: dict[str, Any] = {} if residual is None else {"residual": residual, "residual_dtype": x.dtype}
        return functional.rms_norm(x, x.shape[-1:], weight, layer.variance_epsilon, offset=offset, **others)

    class Layer(theirs):
        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            found = computed(self, x, residual)
            return super().forward_cuda(x, residual) if found is None else found

        def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
            found = computed(self, x, residual)
            return super().forward_oot(x, residual) if found is None else found

    Layer.__name__ = Layer.__qualname__ = f"TileGym{theirs.__name__}"
    return Layer
