# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the records of a checked call of `qk_norm_rope`, and the order of its tensors.

`RopeSpec` has the numbers, `RopeWanted` the dtypes of the gradients of weights. `rms_norm_rope` is a call without k.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import Facts, Maybe, dtype_of

RopeRounding = Literal["end", "norm", "each"]  # see `qk_norm_rope`
# q, k, q_weight, k_weight, cos, sin, positions
RopeTensors = tuple[Tensor, Maybe, Maybe, Maybe, Tensor, Tensor, Maybe]
# dq_out, dk_out, and the forward's
RopeBackwardTensors = tuple[Tensor, Maybe, Tensor, Maybe, Maybe, Maybe, Tensor, Tensor, Maybe]
RopeOutputs = tuple[Tensor, Maybe]  # q_out, k_out
RopeGradients = tuple[Tensor, Maybe, Maybe, Maybe]  # dq, dk, dq_weight, dk_weight


ROPE_OPS = "qk_norm_rope_forward", "qk_norm_rope_backward"  # as the registry names a backend's functions


class RopeSpec(NamedTuple):
    """Numbers of a call: each head of n elements is normalized, then its first `rotary_dim` elements are rotated. Those
    behind n are the numbers of the library ops, in their order."""

    n: int  # elements of a head, D
    eps: float
    offset: float  # added to both weights
    rotary_dim: int  # R, even
    interleaved: bool  # pairs are elements 2i and 2i + 1; else i and i + R / 2
    casting: str
    rope_rounding: str  # "end", "norm" or "each"

    @property
    def ops(self) -> tuple[str, str]:
        """Names, as `Spec.ops`."""
        return ROPE_OPS

    def facts(self, tensors: Any, wanted: RopeWanted | None = None) -> Facts:
        """Return what `Spec.facts` returns."""
        *gradients, q, k, q_weight, k_weight, cos, _, _ = tensors
        others = [dtype_of(each) for each in (k, k_weight, cos, *gradients)]
        return (q.dtype, dtype_of(q_weight), *others), (q, k, *gradients), ("rotary embedding",)

    def dtype_of_rows(self, tensors: Any) -> torch.dtype:
        """Return q's dtype, see `Spec.dtype_of_rows`."""
        return tensors[0].dtype


ROPE_OPTIONS = RopeSpec._fields[1:]


class RopeWanted(NamedTuple):
    """Dtypes of the gradients of weights, None for one that is not wanted. dq and dk are always computed."""

    dq_weight: torch.dtype | None = None
    dk_weight: torch.dtype | None = None

    @property
    def why_no_backend(self) -> None:
        """None: a backend is asked, see `Wanted.why_no_backend`."""
