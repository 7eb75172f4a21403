# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The inputs of the benchmark and the check against float64 that every provider passes before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tilegym_rmsnorm as tr
from bench.measure.shapes import Shape
from bench.providers.ours import EPS, Provider
from tilegym_rmsnorm.measure import accuracy
from tilegym_rmsnorm.measure.accuracy import Errors, Outputs


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


def checked_ops(provider: Provider) -> tuple[str, ...]:
    """The provider's ops, with "both" wherever it can be differentiated."""
    return provider.ops if provider.norm is None else tuple(dict.fromkeys((*provider.ops, "both")))


def run_op(provider: Provider, op: str, inputs: Inputs, poisons: bool = True) -> Outputs:
    """Run an op of the provider on one set: y and rstd, dx and dw, "alone_dx", or "both" by eager autograd.

    The first call of what is timed later, so it also compiles. Freed memory is poisoned before, so that an element
    which a kernel fails to write is NaN and not the right answer of the provider before it.
    """
    x, weight = inputs.x, inputs.weight
    rstd, dy = rstd_for(provider, inputs), dy_for(provider, inputs)
    if poisons:
        poison(x, copies=3)
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
    check_form(outputs, lambda name: like[name.rpartition("_")[2]])
    return {name: tensor.detach() for name, tensor in outputs.items()}


def check_form(outputs: Outputs, like: Callable[[str], Tensor]) -> None:
    """ValueError for an output of another dtype or size than the tensor that it should be like."""
    for name, tensor in outputs.items():
        expected = like(name)
        if tensor.numel() != expected.numel() or tensor.dtype != expected.dtype:
            text = f"{name}: expected {expected.numel()} elements of {expected.dtype}, "
            raise ValueError(f"{text}got {tensor.numel()} of {tensor.dtype}")


def rstd_for(provider: Provider, inputs: Inputs) -> Tensor:
    return inputs.rstd.unsqueeze(1) if provider.rstd_is_column else inputs.rstd


def dy_for(provider: Provider, inputs: Inputs) -> Tensor:
    """dy, or a copy of it for a provider that writes dx over it."""
    return inputs.dy.clone() if provider.overwrites_dy else inputs.dy


def errors_of(outputs: dict[str, Outputs], inputs: Inputs) -> tuple[dict[str, Errors], Errors]:
    """Find each provider's largest relative error of each output against float64, and the errors allowed."""
    return accuracy.errors_of(outputs, inputs.x, inputs.dy, inputs.weight, EPS)


def poison(like: Tensor, copies: int) -> None:
    freed: list[Tensor] = [torch.full_like(like, math.nan) for _ in range(copies)]
    freed.clear()
