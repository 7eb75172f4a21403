# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The check against float64 that whatever is measured or tuned passes first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilegym_rmsnorm.reference import rms_norm_backward_torch, rms_norm_forward_torch

CHUNK_ELEMENTS = 1 << 25  # of x per step in float64: bounds the check's memory to a few GB at any shape
OUTPUTS = ("y", "rstd", "dx", "dw")
FLOAT32_STEP = 2.0**-23

Outputs = dict[str, Tensor]
Errors = dict[str, float]


def errors_of(
    outputs: dict[str, Outputs], x: Tensor, dy: Tensor, weight: Tensor, eps: float
) -> tuple[dict[str, Errors], Errors]:
    """For each of several results the largest relative error of each output against float64, and the errors allowed.

    x, dy (M, N), weight (N,). A result names its outputs y, rstd, dx and dw, with any prefix that ends in "_".

    An error is relative to the sum of the magnitudes of the terms that the element is made of, of which dx has
    g * rstd and one for each column, and dw, whose terms are random, takes the root of the sum of their squares; of y,
    dx and dw to no less than 1/256 of the largest such scale in the row.

    Allowed is three times the error of rounding the float64 result itself to the output's dtype, and the error of
    float32 arithmetic: 32 steps of 2^-23, for dw 4 sqrt(M) steps where that is more.
    """
    rows, cols = x.shape
    wide_weight = weight.double()
    chunk = max(1, CHUNK_ELEMENTS // cols)
    dw, dw_squares = (torch.zeros(cols, dtype=torch.float64, device=weight.device) for _ in range(2))
    worst = {name: Worst() for name in outputs}
    rounding = Worst()
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        expected, part_dw, part_squares = _in_float64(x[part], dy[part], wide_weight, eps)
        dw += part_dw
        dw_squares += part_squares
        for kind, (reference, scale) in expected.items():
            dtype = torch.float32 if kind == "rstd" else x.dtype
            rounding.meet(kind, reference.to(dtype), reference, scale)
            for name, tensors in outputs.items():
                for tensor in _of_kind(kind, tensors):
                    actual = tensor.reshape(rows, -1)[part].view(reference.shape)
                    worst[name].meet(kind, actual, reference, scale)
    scale = row_scale(torch.maximum(dw.abs(), dw_squares.sqrt()))
    rounding.meet("dw", dw.to(weight.dtype), dw, scale)
    for name, tensors in outputs.items():
        for tensor in _of_kind("dw", tensors):
            worst[name].meet("dw", tensor, dw, scale)
    steps = dict.fromkeys(OUTPUTS, 32.0) | {"dw": max(32.0, 4 * math.sqrt(rows))}
    allowed = {kind: 3 * rounding.errors[kind] + steps[kind] * FLOAT32_STEP for kind in OUTPUTS}
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
    x: Tensor, dy: Tensor, weight: Tensor, eps: float
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]:
    """y, rstd and dx of some rows, each with the scale of its errors; their part of dw and of its squared terms."""
    x, dy = x.double(), dy.double()
    y, rstd = rms_norm_forward_torch(x, weight, eps)
    dx, dw = rms_norm_backward_torch(x, dy, weight, rstd)
    assert dw is not None, "there is a weight"
    xhat, g = x * rstd.unsqueeze(1), dy * weight
    dx_scale = g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)
    expected = {
        "y": (y, row_scale(y.abs())),
        "rstd": (rstd, rstd),
        "dx": (dx, row_scale(dx_scale * rstd.unsqueeze(1))),
    }
    return expected, dw, (dy * xhat).square().sum(dim=0)


def _of_kind(kind: str, outputs: Outputs) -> list[Tensor]:
    """y, rstd, dx or dw, however they were computed."""
    return [tensor for name, tensor in outputs.items() if name.rpartition("_")[2] == kind]


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
