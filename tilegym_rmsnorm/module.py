# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`RMSNorm`, a drop-in for `torch.nn.RMSNorm` on the selected backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilegym_rmsnorm.ops import rms_norm
from tilegym_rmsnorm.registry import check_backend_name
from tilegym_rmsnorm.validation import check_casting, checked_eps, checked_number


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimensions; the first five parameters and the state dict are `torch.nn.RMSNorm`'s.

    offset      added to the weight: 1 for Gemma. The weight starts at 1 - offset, so that the factor starts at 1
    bias        learn an additive bias too, started at 0; as in `torch.nn.LayerNorm`, only with elementwise_affine
    casting     "once" or "llama", see `tilegym_rmsnorm.rms_norm`
    backend     a name or "auto"; None: the one in effect when the module is called
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        bias: bool = False,
        casting: str = "once",
        backend: str | None = None,
    ) -> None:
        check_casting(casting)
        checked_eps(eps, torch.float32)  # kept as it was given: None depends on the dtype of a call
        if backend is not None:
            check_backend_name(backend)
        self.offset = checked_number("offset", offset)  # before the base class, which resets the parameters
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.casting = casting
        self.backend = backend
        has_bias = bias and elementwise_affine
        self.register_parameter("bias", Parameter(torch.zeros_like(self.weight)) if has_bias else None)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)
        if getattr(self, "bias", None) is not None:  # absent while the base class initializes
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y, or (y, x + residual) where a residual is given."""
        # Module.__getattr__ takes 0.6 us for each; what is no parameter any more (parametrized, say) is left to it.
        parameters = self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight
        bias = parameters["bias"] if "bias" in parameters else self.bias
        return rms_norm(
            x,
            self.normalized_shape,
            weight,
            self.eps,
            bias=bias,
            offset=self.offset,
            residual=residual,
            casting=self.casting,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, offset={self.offset}, bias={self.bias is not None}, "
            f"casting={self.casting!r}, backend={self.backend!r}"
        )
