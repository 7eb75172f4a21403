# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run TransformerEngine's `RMSNorm`, by the same name and signature, on these kernels. The library is not imported.

Written against `transformer_engine/pytorch/module/rmsnorm.py` of TransformerEngine 2.20. The module quantizes nothing,
and takes no part in TransformerEngine's fused operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilegym_rmsnorm import functional
from tilegym_rmsnorm.call.arithmetic import promoted
from tilegym_rmsnorm.call.options import checked_bool, checked_eps, refuse_torch_jit_script
from tilegym_rmsnorm.call.validation import check_input, checked_dtype, checked_sizes_of_weight


class RMSNorm(nn.Module):
    """`transformer_engine.pytorch.RMSNorm`: the same parameters, attributes and state dict, `_extra_state` included.

    Casts input to weight's dtype, and both to autocast's under `torch.autocast("cuda")`. y has that dtype.

    Args:
        normalized_shape: The last dimensions of input.
        eps: Added to the mean of squares.
        sequence_parallel: Kept, and set as an attribute of the weight, where Megatron looks for it.
        params_dtype: The old name of dtype.
        zero_centered_gamma: Start the weight at 0, and add 1 to it.
        hidden_size: The old name of normalized_shape.
        device: The weight's device. None: torch's default device; where that is the CPU, the current CUDA device if
            there is one.
        dtype: The weight's dtype. None: torch's default.
        sm_margin: 0. `tilegym_rmsnorm.set_sm_margin` leaves SMs free, for all calls of the process.

    Raises:
        ValueError: sm_margin is not 0; a size or eps is out of range.
        TypeError: A size or eps is not a number, zero_centered_gamma not a bool, dtype not floating.
        RuntimeError: An argument and its old name are both given, or neither normalized_shape nor hidden_size.
    """

    weight: nn.Parameter

    __prepare_scriptable__ = refuse_torch_jit_script

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            given = "neither" if normalized_shape is None else "both"
            raise RuntimeError(
                f"expected one of normalized_shape and hidden_size, its old name; {given} are given"
            )
        if dtype is not None and params_dtype is not None:
            raise RuntimeError("expected one of dtype and params_dtype, its old name; both are given")
        if any(sm_margin.values()) if isinstance(sm_margin, Mapping) else sm_margin:
            raise ValueError(
                f"sm_margin: expected 0, got {sm_margin}; tilegym_rmsnorm.set_sm_margin leaves SMs free"
            )
        checked_eps(eps)
        checked_bool("zero_centered_gamma", zero_centered_gamma)
        dtype = checked_dtype("dtype", dtype) or checked_dtype("params_dtype", params_dtype)
        if normalized_shape is None:
            shape = checked_sizes_of_weight(hidden_size, "hidden_size")
        else:
            shape = checked_sizes_of_weight(normalized_shape)
        device = _default_device() if device is None else device
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if not self.weight.is_meta:  # one on meta waits for reset_parameters() or the first call
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Initialize the weight. A weight on meta gets memory on the default device first, as in TransformerEngine.
        defer_init: deprecated; True: do nothing."""
        if defer_init is not None:
            warnings.warn('defer_init is deprecated: set device to "meta"', DeprecationWarning, stacklevel=2)
        if defer_init:
            return
        if self.weight.is_meta:
            self.weight = nn.Parameter(torch.empty_like(self.weight, device=_default_device()))
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.sequence_parallel is not None:
            self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """Normalize input, of shape `(*, *normalized_shape)`."""
        check_input("input", input)  # before a cast, which would accept any dtype
        if self.weight.is_meta and not input.is_meta:
            self.reset_parameters()
        if torch.is_autocast_enabled("cuda") and input.is_cuda:
            weight = self.weight.to(torch.get_autocast_dtype("cuda"))
            with torch.autocast("cuda", enabled=False):
                return self._forward(input, weight)
        return self._forward(input, self.weight)

    def _forward(self, input: Tensor, weight: Tensor) -> Tensor:
        dtype = weight.dtype
        if promoted(input.dtype, dtype) is not dtype:
            input = input.to(dtype)  # a wider weight needs no copy: kernels compute in float32
        offset = float(self.zero_centered_gamma)
        return functional.rms_norm(input, weight.shape, weight, self.eps, offset=offset, out_dtype=dtype)

    def get_extra_state(self) -> Tensor:
        """Return the state that TransformerEngine saves for a norm that quantizes nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state: it is about quantization."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # A state dict of torch.nn.RMSNorm has no extra state, and would be refused.
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _default_device() -> torch.device:
    """Return torch's default device; where that is the CPU, the current CUDA device if there is one."""
    try:
        device = torch.get_default_device()
    except AttributeError:  # torch 2.9, once set_default_device(None) was called
        device = torch.device("cpu")
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
