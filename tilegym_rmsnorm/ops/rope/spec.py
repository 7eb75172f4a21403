# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the records of a checked call of `qk_norm_rope`, and the order of its tensors.

`RopeSpec` has the numbers, `RopeWanted` the dtypes of the gradients of weights. `rms_norm_rope` is a call without k.

A backend receives q (B, T, Hq, D), and k (B, T, Hk, D) or None, with a last stride of 1 and any other
strides but 0; so are dq_out and dk_out, each with its own dtype and strides. Weights are contiguous, (D,) or (H, D), or
None. cos and sin have one shape, (rows, R) or (rows, R / 2), one dtype, and a last stride of 1. positions is int64
or int32, (1, T) or (B, T), contiguous; None: the tables have T rows, or B * T. q_out, k_out, dq and dk are new and
contiguous, in the dtypes of q and k; the gradients of weights have their shapes. There are elements in all of them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.spec import Facts, Maybe, dtype_of

RopeRounding = Literal["end", "norm", "each"]  # see `qk_norm_rope`
# q, k, q_weight, k_weight, cos, sin, positions
RopeTensors = tuple[Tensor, Maybe, Maybe, Maybe, Tensor, Tensor, Maybe]
# dq_out, dk_out, and the forward's. Behind them may be two more, to which dq_weight and dk_weight are added in place;
# None where one is returned.
RopeBackwardTensors = tuple[Tensor, Maybe, Tensor, Maybe, Maybe, Maybe, Tensor, Tensor, Maybe]
OF_BACKWARD = 9  # tensors, without the last two
RopeOutputs = tuple[Tensor, Maybe]  # q_out, k_out
RopeGradients = tuple[Tensor, Maybe, Maybe, Maybe]  # dq, dk, dq_weight, dk_weight


class RopeSpec(NamedTuple):
    """Numbers of a call: each head of n elements is normalized, then its first `rotary_dim` elements are rotated. Those
    between n and reproducible are the numbers of the library ops, in their order."""

    n: int  # elements of a head, D
    eps: float
    offset: float  # added to both weights
    rotary_dim: int  # R, even
    interleaved: bool  # pairs are elements 2i and 2i + 1; else i and i + R / 2
    casting: str
    rope_rounding: str  # "end", "norm" or "each"
    reproducible: int = 0  # flags of the level, see reproducibility.py

    @property
    def ops(self) -> tuple[str, str]:
        """Names, as `Spec.ops`."""
        return ROPE_OPS

    def facts(self, tensors: Any, wanted: RopeWanted | None = None) -> Facts:
        """Return what `Spec.facts` returns."""
        *gradients, q, k, q_weight, k_weight, cos, _, _ = tensors
        others = [dtype_of(each) for each in (k, k_weight, cos, *gradients)]
        return (q.dtype, dtype_of(q_weight), *others), (q, k, *gradients), ("rotary embedding",)


ROPE_OPTIONS = RopeSpec._fields[1:-1]


class RopeWanted(NamedTuple):
    """Dtypes of the gradients of weights, None for one that is not wanted. dq and dk are always computed."""

    dq_weight: torch.dtype | None = None
    dk_weight: torch.dtype | None = None

    def added_to(self, targets: tuple[Any, ...]) -> RopeWanted:
        """Return the dtypes of gradients that are added to these, where they are not None."""
        return RopeWanted(
            *(own if each is None else each.dtype for own, each in zip(self, targets, strict=True))
        )

    @property
    def why_no_backend(self) -> None:
        """None: a backend is asked, see `Wanted.why_no_backend`."""


OF_Q, OF_K = 1, 2  # bits by which the backward op is told which gradients of weights are wanted


def wanted_of(bits: int, q_weight: Tensor | None, k_weight: Tensor | None) -> RopeWanted:
    of_q = q_weight.dtype if q_weight is not None and bits & OF_Q else None
    return RopeWanted(of_q, k_weight.dtype if k_weight is not None and bits & OF_K else None)


ROPE_OPS = "qk_norm_rope_forward", "qk_norm_rope_backward"
