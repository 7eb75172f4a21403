# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of qk_norm_rope with random tensors, and their results in float64, by one matrix for each position."""

from __future__ import annotations

import functools

import torch
from helpers import DEVICE
from torch import Tensor

from tilegym_rmsnorm import qk_norm_rope

EPS = 1e-6
ours = functools.partial(qk_norm_rope, eps=EPS)


def rotation(c: Tensor, s: Tensor, d: int, rotary_dim: int, interleaved: bool) -> Tensor:
    """The matrix (..., D, D) that rotates a head, of rows of cos and sin (..., R) or (..., R / 2)."""
    half = rotary_dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    matrix = torch.eye(d, dtype=c.dtype, device=c.device).expand(*c.shape[:-1], d, d).clone()
    for k, (i, j) in enumerate(pairs):
        of_i, of_j = (k, k) if c.shape[-1] == half else (i, j)
        matrix[..., i, i], matrix[..., i, j] = c[..., of_i], -s[..., of_i]
        matrix[..., j, j], matrix[..., j, i] = c[..., of_j], s[..., of_j]
    return matrix


def expected(q, k, q_weight, k_weight, cos, sin, position_ids=None, offset=0.0, rotary_dim=None, **options):
    """q_out and k_out in float64, not rounded at the end, of tensors with four dimensions. Differentiable with
    casting="once" and rope_rounding="end"; not for "each"."""
    batch, length, _, d = q.shape
    cos, sin = cos.double(), sin.double()
    if position_ids is not None:
        position_ids = position_ids.reshape(-1, length)
        cos, sin = cos[position_ids], sin[position_ids]
    matrix = rotation(cos, sin, d, rotary_dim or d, options.get("interleaved", False))
    matrix = matrix.reshape(-1, length, d, d).expand(batch, length, d, d)
    outputs = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            outputs.append(None)
            continue
        dtype, x = x.dtype, x.double()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + options.get("eps", EPS))
        n = n.to(dtype).double() if options.get("casting") == "llama" else n
        n = n if weight is None else n * (weight.double() + offset)
        n = n.to(dtype).double() if options.get("rope_rounding") == "norm" else n
        outputs.append(torch.einsum("btij,bthj->bthi", matrix, n))
    return tuple(outputs)


def case(
    *,
    b=2,
    t=5,
    hq=4,
    hk=2,
    d=8,
    r=None,
    dtype=torch.float32,
    weights="both",
    tables="T",
    half=False,
    seed=0,
    device=DEVICE,
):
    """Tensors of a call, in the order of its arguments. weights: "both", "heads", "none", "float32". tables: "T", "BT",
    "1T", or "positions", of which the table has 3 rows more than T."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    q, k = draw(b, t, hq, d).to(dtype), draw(b, t, hk, d).to(dtype)
    shapes = {"heads": ((hq, d), (hk, d))}.get(weights, ((d,), (d,)))
    w_dtype = torch.float32 if weights == "float32" else dtype
    pair = [None if weights == "none" else (draw(*shape) * 0.2 + 1).to(w_dtype) for shape in shapes]
    columns = (r or d) // 2 if half else (r or d)
    leading = {"T": (t,), "BT": (b, t), "1T": (1, t), "positions": (t + 3,)}[tables]
    return q, k, *pair, draw(*leading, columns), draw(*leading, columns)


def both_passes(function, tensors, seed=1, **options):
    """Outputs, and the gradients of q, k and the weights that are there, for random gradients of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    q, k, q_weight, k_weight, *tables = tensors
    leaves = [None if each is None else each.detach().requires_grad_() for each in (q, k, q_weight, k_weight)]
    outputs = function(*leaves, *tables, **options)
    gradients = [torch.randn(each.shape, generator=generator).to(each) for each in outputs]
    present = [each for each in leaves if each is not None]
    return (*(each.detach() for each in outputs), *torch.autograd.grad(outputs, present, gradients))
