# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The inputs of the benchmark and the check against float64 that every provider passes before it is timed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import tilegym_rmsnorm as tr
from bench.providers import EPS, Provider
from bench.shapes import Shape

CHUNK_ELEMENTS = 1 << 25  # of x per step in float64: bounds the check's memory to a few GB at any shape
OUTPUTS = ("y", "rstd", "dx", "dw")
FLOAT32_STEP = 2.0**-23

Outputs = dict[str, Tensor]
Errors = dict[str, float]


@dataclass(frozen=True)
class Inputs:
    """One set: x and dy (M, N), weight (N,), rstd (M,) of x, and leaves of x and weight for autograd."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    rstd: Tensor
    x_leaf: Tensor
    weight_leaf: Tensor


def make_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, sets: int, seed: int = 0
) -> list[Inputs]:
    """`sets` distinct sets that tell wrong results from right ones, none overlapping in memory.

    Rows differ in scale, one column is an outlier, weights are away from 1. Every tensor starts at a multiple of 512
    bytes, as the allocator of torch does it, so that all sets meet the same compiled kernels.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return [_make_set(shape, dtype, device, generator) for _ in range(sets)]


def _make_set(shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, cols = shape

    def normal(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, dtype=of, device=device, generator=generator)

    x = normal(rows, cols)
    x *= normal(rows, 1, of=torch.float32).exp().to(dtype)
    x[:, cols // 3] *= 8
    weight = normal(cols) * 0.5 + 1.5
    rstd = tr.compute_rms_norm_rstd_torch(x, EPS)
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return Inputs(x, normal(rows, cols), weight, rstd, *leaves)


def run_all(provider: Provider, inputs: Inputs) -> Outputs:
    """What `run_op` gives for every op that the provider offers, and by autograd."""
    outputs: Outputs = {}
    for op in checked_ops(provider):
        outputs |= run_op(provider, op, inputs)
    return outputs


def checked_ops(provider: Provider) -> tuple[str, ...]:
    """The provider's ops, with "both" wherever it can be differentiated."""
    return provider.ops if provider.norm is None else tuple(dict.fromkeys((*provider.ops, "both")))


def run_op(provider: Provider, op: str, inputs: Inputs) -> Outputs:
    """What the provider computes from one set by an op: y and rstd, dx and dw, "alone_dx", or "both" by eager autograd.

    The first call of what is timed later, so it also compiles. Freed memory is poisoned before, so that an element
    which a kernel fails to write is NaN and not the right answer of the provider before it.
    """
    x, weight = inputs.x, inputs.weight
    rstd, dy = rstd_for(provider, inputs), dy_for(provider, inputs)
    _poison(x, copies=3)
    if op == "forward":
        outputs = dict(zip(("y", "rstd"), provider.forward(x, weight), strict=True))
    elif op == "backward":
        outputs = dict(zip(("dx", "dw"), provider.backward(x, dy, weight, rstd), strict=True))
    elif op == "dx":
        outputs = {"alone_dx": provider.backward_dx(x, dy, weight, rstd)}
    elif provider.norm is None:
        return {}  # forward, then backward: compiled and checked by now
    else:
        results = provider.autograd(inputs.x_leaf, dy, inputs.weight_leaf)
        outputs = dict(zip(("autograd_y", "autograd_dx", "autograd_dw"), results, strict=True))
    like = {"y": x, "rstd": inputs.rstd, "dx": x, "dw": weight}
    for name, tensor in outputs.items():
        expected = like[name.rpartition("_")[2]]
        if tensor.numel() != expected.numel() or tensor.dtype != expected.dtype:
            raise ValueError(
                f"{name}: expected {expected.numel()} elements of {expected.dtype}, "
                f"got {tensor.numel()} of {tensor.dtype}"
            )
    return {name: tensor.detach() for name, tensor in outputs.items()}


def rstd_for(provider: Provider, inputs: Inputs) -> Tensor:
    return inputs.rstd.unsqueeze(1) if provider.rstd_is_column else inputs.rstd


def dy_for(provider: Provider, inputs: Inputs) -> Tensor:
    """dy, or a copy of it for a provider that writes dx over it."""
    return inputs.dy.clone() if provider.overwrites_dy else inputs.dy


def errors_of(outputs: dict[str, Outputs], inputs: Inputs) -> tuple[dict[str, Errors], Errors]:
    """For each provider the largest relative error of each output against float64, and the errors allowed.

    An error is relative to the sum of the magnitudes of the terms that the element is made of, of which dx has
    g * rstd and one for each column, and dw, whose terms are random, takes the root of the sum of their squares; y and
    dx to no less than 1/256 of the largest such scale in their row.

    Allowed is three times the error of rounding the float64 result itself to the output's dtype, and the error of
    float32 arithmetic: 32 steps of 2^-23, for dw 4 sqrt(M) steps where that is more.
    """
    rows, cols = inputs.x.shape
    weight = inputs.weight.double()
    chunk = max(1, CHUNK_ELEMENTS // cols)
    dw, dw_squares = (torch.zeros(cols, dtype=torch.float64, device=weight.device) for _ in range(2))
    worst = {name: _Worst() for name in outputs}
    rounding = _Worst()
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        x, dy = inputs.x[part].double(), inputs.dy[part].double()
        y, rstd = tr.rms_norm_forward(x, weight, EPS, backend="torch")
        dx, part_dw = tr.rms_norm_backward_torch(x, dy, weight, rstd)
        dw += part_dw
        xhat, g = x * rstd.unsqueeze(1), dy * weight
        dw_squares += (dy * xhat).square().sum(dim=0)
        dx_scale = g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)
        expected = {
            "y": (y, _row_scale(y.abs())),
            "rstd": (rstd, rstd),
            "dx": (dx, _row_scale(dx_scale * rstd.unsqueeze(1))),
        }
        for kind, (reference, scale) in expected.items():
            dtype = torch.float32 if kind == "rstd" else inputs.x.dtype
            rounding.meet(kind, reference.to(dtype), reference, scale)
            for name, tensors in outputs.items():
                for tensor in _of_kind(kind, tensors):
                    actual = tensor.reshape(rows, -1)[part].view(reference.shape)
                    worst[name].meet(kind, actual, reference, scale)
    scale = torch.maximum(dw.abs(), dw_squares.sqrt())
    rounding.meet("dw", dw.to(inputs.weight.dtype), dw, scale)
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


def _of_kind(kind: str, outputs: Outputs) -> list[Tensor]:
    """y, rstd, dx or dw, however they were computed."""
    return [tensor for name, tensor in outputs.items() if name.rpartition("_")[2] == kind]


class _Worst:
    """The largest relative error of each output so far; NaN once one was met."""

    def __init__(self) -> None:
        self.errors: Errors = {}

    def meet(self, kind: str, actual: Tensor, reference: Tensor, scale: Tensor) -> None:
        nonzero = scale.clamp(min=torch.finfo(torch.float64).tiny)
        error = ((actual.double() - reference).abs() / nonzero).max().item()
        before = self.errors.get(kind, 0.0)
        self.errors[kind] = error if error > before or math.isnan(error) else before


def _row_scale(scale: Tensor) -> Tensor:
    # Below this a half type may be subnormal, and its rounding error no longer relative.
    return torch.maximum(scale, scale.amax(dim=1, keepdim=True) / 256)


def _poison(like: Tensor, copies: int) -> None:
    freed: list[Tensor] = [torch.full_like(like, math.nan) for _ in range(copies)]
    freed.clear()
