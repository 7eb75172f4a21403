# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The shapes and the inputs of studies/rope.py."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Sizes of a call: q is (B, T, Hq, D), k (B, T, Hk, D), and the first R of D elements are rotated.

    as_qwen3: with what transformers' Qwen3 computes, casting="llama" and rope_rounding="each", and what it passes, cos
    and sin in q's dtype, for each sequence."""

    b: int
    t: int
    hq: int
    hk: int
    d: int
    r: int
    as_qwen3: bool = False

    def __str__(self) -> str:
        partial = f" R {self.r}" if self.r != self.d else ""
        style = ", as Qwen3" if self.as_qwen3 else ""
        return f"{self.b}x{self.t}x({self.hq}+{self.hk})x{self.d}{partial}{style}"

    def bytes_of(self, op: str, dtype: torch.dtype) -> int:
        """Bytes that must move: two arrays of a forward, three of a backward."""
        heads = self.b * self.t * (self.hq + self.hk) * self.d
        return (2 if op == "forward" else 3) * heads * dtype.itemsize


SHAPES = (
    Shape(4, 4096, 32, 8, 128, 128),
    Shape(1, 28520, 32, 8, 128, 128),
    Shape(2, 8192, 16, 16, 64, 64),
    Shape(4, 4096, 16, 2, 256, 256),
    Shape(4, 4096, 16, 2, 256, 64),
    Shape(4, 4096, 32, 8, 80, 80),
    Shape(4, 4096, 32, 8, 128, 128, as_qwen3=True),
)
# One token of each of so many sequences, so many tokens of one, and more heads.
DECODING = (
    *(Shape(b, 1, 32, 8, 128, 128) for b in (1, 4, 16, 64)),
    *(Shape(1, t, 32, 8, 128, 128) for t in (4, 16, 64)),
    Shape(64, 1, 64, 8, 128, 128),
)
CPU_SHAPES = (Shape(2, 6, 4, 2, 16, 16, as_qwen3=True), Shape(1, 5, 2, 1, 16, 8))


class Inputs(NamedTuple):
    """One set, in the order of the backward's tensors."""

    dq_out: Tensor
    dk_out: Tensor
    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    b, t, hq, hk, d, r, as_qwen3 = shape
    normal = functools.partial(torch.randn, device=device, generator=generator)
    packed = normal(b, t, hq + 2 * hk, d).to(dtype)
    gradients = (normal(b, heads, t, d).to(dtype).transpose(1, 2) for heads in (hq, hk))
    weights = ((normal(d) * 0.5 + 1.5).to(dtype) for _ in range(2))
    angles = torch.arange(t, device=device)[:, None] * 1e4 ** (-torch.arange(0, r, 2, device=device) / r)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    if as_qwen3:
        cos, sin = (each.to(dtype).repeat(b, 1, 1) for each in (cos, sin))
    return Inputs(*gradients, packed[:, :, :hq], packed[:, :, hq : hq + hk], *weights, cos, sin)
