# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the norm that Megatron-Core builds from a spec, as it builds its own `WrappedTorchNorm` and `TENorm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.functional import rms_norm
from tilegym_rmsnorm.integrations.megatron.with_input import norm_with_input
from tilegym_rmsnorm.nn import module
from tilegym_rmsnorm.routes import main_grad
from tilegym_rmsnorm.settings import BackendName


class RMSNorm(module.RMSNorm):
    """RMSNorm by Megatron-Core's `LayerNormBuilder`: `RMSNorm(config=config, hidden_size=4096, eps=1e-5)`.

    Its only parameter is `weight`, so that the state dict is that of `WrappedTorchNorm`. A state dict of
    TransformerEngine's norm loads too: its `_extra_state`, which is about quantization, is ignored. y has weight's
    dtype, as in TransformerEngine: a float32 residual stream beside bfloat16 weights gives bfloat16 y.

    Of the config are read: `normalization`; `layernorm_zero_centered_gamma` (the weight starts at 0, and 1 is added to
    it); `params_dtype`; `sequence_parallel`, set on the weight, where Megatron looks for the gradients to sum;
    `gradient_accumulation_fusion`, by which the backward adds dw to a float32 `main_grad`, as `accumulate_main_grad`;
    `use_cpu_initialization` and `init_model_with_meta_device` for the weight's device, without them the current CUDA
    device; `fused_residual_rmsnorm`; `batch_invariant_mode`. `persist_layer_norm` and `memory_efficient_layer_norm` are
    about LayerNorm, and have no effect.

    Args:
        config: A `TransformerConfig`.
        hidden_size: Elements of a row.
        eps: Added to the mean of squares.
        persist_layer_norm: No effect. Older places pass this and the next two.
        zero_centered_gamma: None, or as in the config.
        normalization: None, or as in the config.
        has_residual: Whether a residual connection forks before this norm. With `config.fused_residual_rmsnorm` the
            attribute `returns_residual` is then True, and `forward` returns x beside y.
        backend: A name or `"auto"`. None: the backend in effect when the module is called.

    Raises:
        ValueError: The config asks for another norm than RMSNorm, or for `batch_invariant_mode`; an argument
            contradicts it; a number is out of range.
        TypeError: A number or a dtype has another type.
    """

    __module__ = "tilegym_rmsnorm.integrations.megatron"

    has_residual = False  # default of the argument

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
        has_residual: bool | None = None,
        *,
        backend: BackendName | None = None,
    ) -> None:
        for of, name in (("config.normalization", config.normalization), ("normalization", normalization)):
            if name not in ("RMSNorm", None):
                raise ValueError(f'{of}: expected "RMSNorm", got {name!r}; other norms stay Megatron\'s')
        is_centered = config.layernorm_zero_centered_gamma
        if zero_centered_gamma not in (is_centered, None):
            raise ValueError(
                f"zero_centered_gamma: expected {is_centered}, as in the config, got {zero_centered_gamma}"
            )
        if getattr(config, "batch_invariant_mode", False):
            # The kernel, and with it the order of a sum, depends on the number of rows.
            raise ValueError("config.batch_invariant_mode: expected False, got True")
        # before the base class, which resets the parameters
        self.sequence_parallel = config.sequence_parallel
        self.adds_to_main_grad = (
            getattr(config, "gradient_accumulation_fusion", False) and main_grad.IS_SUPPORTED
        )
        super().__init__(
            hidden_size,
            eps,
            device=_device_of(config),
            dtype=config.params_dtype,
            offset=float(is_centered),
            backend=backend,
        )
        if has_residual is None:
            has_residual = self.has_residual
        self.returns_residual = has_residual and getattr(config, "fused_residual_rmsnorm", False)

    def reset_parameters(self) -> None:
        """Initialize the weight, and mark it for sequence parallelism and for its main_grad: one that leaves the meta
        device is a new one."""
        super().reset_parameters()
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.adds_to_main_grad:
            main_grad.mark(self.weight, True)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """Normalize x.

        Args:
            x: Shape `(*, hidden_size)`; Megatron's is (sequence, batch, hidden_size), for q and k (sequence, batch,
                heads, hidden_size).

        Returns:
            Tensor | tuple[Tensor, Tensor]: y, of x's shape; where `returns_residual` is True `(y, x)`. That x has the
                memory of the argument. Its gradient is added by the backward of the norm, in the kernel.
        """
        weight, eps, offset, backend = self.weight, self.eps, self.offset, self.backend
        if self.returns_residual:
            return norm_with_input(x, weight, eps, offset, weight.dtype, backend)
        return rms_norm(x, weight.shape, weight, eps, offset=offset, out_dtype=weight.dtype, backend=backend)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class RMSNormWithResidual(RMSNorm):
    """`RMSNorm` with `has_residual=True`, for the norms at the head of a branch. A class, since Megatron's
    `build_module` calls nothing else: it returns a function as it is."""

    __module__ = "tilegym_rmsnorm.integrations.megatron"

    has_residual = True


def _device_of(config: Any) -> torch.device | None:
    """Choose the weight's device as Megatron's linear layers do. None: torch's default device."""
    if config.use_cpu_initialization:
        return None
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
