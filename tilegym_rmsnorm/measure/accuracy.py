# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The check against float64 that whatever is measured or tuned passes first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilegym_rmsnorm.ops.norm.reference import gradients_torch, rms_norm_forward_torch
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

CHUNK_ELEMENTS = 1 << 25  # of x per step in float64: bounds the check's memory to a few GB at any shape
OUTPUTS = ("y", "rstd", "dx", "d_residual", "dw", "db")
SUMS = ("dw", "db")
FLOAT32_STEP = 2.0**-23

Outputs = dict[str, Tensor]
Errors = dict[str, float]


def errors_of(
    outputs: dict[str, Outputs],
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    d_residual_out: Tensor | None = None,
    alpha: float = 1.0,
) -> tuple[dict[str, Errors], Errors]:
    """Return each result's largest relative error of each output against float64, and the errors allowed.

    x, which is what was normalized, dy and d_residual_out are (M, N), weight and bias (N,). A result names its outputs
    y, rstd, dx, d_residual, dw and db, with any prefix that ends in "_". dx is alpha times d_residual, the gradient of
    x.

    An error is relative to the sum of the magnitudes of the terms that the element is made of, of which dx has
    g * rstd, one for each column and d_residual_out, and a sum over rows, whose terms are random, takes the root of the
    sum of their squares; but for rstd to no less than 1/256 of the largest such scale in the row.

    Allowed is three times the error of rounding the float64 result itself to the output's dtype, and the error of
    float32 arithmetic: 32 steps of 2^-23, for dw and db 4 sqrt(M) steps where that is more.
    """
    rows, cols = x.shape
    chunk = max(1, CHUNK_ELEMENTS // cols)
    sums, squares = (torch.zeros(2, cols, dtype=torch.float64, device=weight.device) for _ in range(2))
    worst = {name: Worst() for name in outputs}
    rounding = Worst()
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        added = None if d_residual_out is None else d_residual_out[part]
        expected, part_sums, part_squares = _in_float64(x[part], dy[part], weight, eps, bias, added, alpha)
        sums += part_sums
        squares += part_squares
        for kind, (reference, scale) in expected.items():
            dtype = torch.float32 if kind == "rstd" else x.dtype
            rounding.meet(kind, reference.to(dtype), reference, scale)
            for name, tensors in outputs.items():
                for tensor in _of_kind(kind, tensors):
                    actual = tensor.reshape(rows, -1)[part].view(reference.shape)
                    worst[name].meet(kind, actual, reference, scale)
    for kind, total, square in zip(SUMS, sums, squares, strict=True):
        scale = row_scale(torch.maximum(total.abs(), square.sqrt()))
        like = weight if kind == "dw" or bias is None else bias
        rounding.meet(kind, total.to(like.dtype), total, scale)
        for name, tensors in outputs.items():
            for tensor in _of_kind(kind, tensors):
                worst[name].meet(kind, tensor, total, scale)
    steps = dict.fromkeys(OUTPUTS, 32.0) | dict.fromkeys(SUMS, max(32.0, 4 * math.sqrt(rows)))
    allowed = {kind: 3 * error + steps[kind] * FLOAT32_STEP for kind, error in rounding.errors.items()}
    return {name: each.errors for name, each in worst.items()}, allowed


def why_wrong(errors: Errors, allowed: Errors) -> str | None:
    """One line that names every output outside its allowance, None where there is none. A NaN is outside."""
    wrong = [
        f"{kind} has a relative error of {error:.2e} against float64, allowed are {allowed[kind]:.2e}"
        for kind, error in errors.items()
        if not error <= allowed[kind]
    ]
    return "; ".join(wrong) or None


def _in_float64(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    d_residual_out: Tensor | None,
    alpha: float,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Compute the exact outputs of some rows, each with the scale of its errors; these rows' part of SUMS, and of the
    squares of the terms of SUMS."""
    x, dy, weight = x.double(), dy.double(), weight.double()
    bias, added = (None if each is None else each.double() for each in (bias, d_residual_out))
    y, rstd = rms_norm_forward_torch(x, weight, eps, bias=bias)
    every = Wanted(dx=torch.float64, dw=torch.float64, db=torch.float64)
    spec = Spec(x.shape[-1], eps, 0.0, "once")
    d, _, dw, db = gradients_torch((x, dy, weight, rstd, added), spec, every)
    xhat, g = x * rstd.unsqueeze(1), dy * weight
    y_scale = y.abs() if bias is None else (xhat * weight).abs() + bias.abs()
    d_scale = (g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)) * rstd.unsqueeze(1)
    d_scale = row_scale(d_scale if added is None else d_scale + added.abs())
    expected = {"y": (y, row_scale(y_scale)), "rstd": (rstd, rstd), "dx": (alpha * d, abs(alpha) * d_scale)}
    if alpha != 1.0:
        expected["d_residual"] = d, d_scale
    assert dw is not None and db is not None
    squares = torch.stack([(dy * xhat).square().sum(dim=0), dy.square().sum(dim=0)])
    return expected, torch.stack([dw, db]), squares


def _of_kind(kind: str, outputs: Outputs) -> list[Tensor]:
    """Pick tensors of one of OUTPUTS, however computed."""
    return [tensor for name, tensor in outputs.items() if name == kind or name.endswith(f"_{kind}")]


class Worst:
    """The largest relative error of each output so far; NaN once one was met."""

    def __init__(self) -> None:
        self.errors: Errors = {}

    def meet(self, kind: str, actual: Tensor, reference: Tensor, scale: Tensor) -> None:
        nonzero = scale.clamp(min=torch.finfo(torch.float64).tiny)
        error = ((actual.double() - reference).abs() / nonzero).max().item()
        before = self.errors.get(kind, 0.0)
        self.errors[kind] = error if error > before or math.isnan(error) else before


def row_scale(scale: Tensor) -> Tensor:
    # Below this a half type may be subnormal, and its rounding error no longer relative.
    return torch.maximum(scale, scale.amax(dim=-1, keepdim=True) / 256)
