# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The check against float64 of what families.py's ops compute, by the tolerances of measure/accuracy.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from bench.block.families import BlockInputs
from bench.providers.ours import EPS
from tilegym_rmsnorm.measure.accuracy import CHUNK_ELEMENTS, FLOAT32_STEP, Errors, Outputs, Worst, row_scale

OF_ROWS = ("y", "plain_y", "rstd", "residual_out", "dx", "d_residual")  # plain_y: without the bias
SUMS = ("dw", "db")
EVERY = (*OF_ROWS, *SUMS)
Expected = dict[str, tuple[Tensor, Tensor]]  # each with the scale of its errors


def kind_of(name: str) -> str:
    """Return NAME of "OP NAME", as y of "residual_forward y"."""
    return name.rpartition(" ")[2]


def errors_of(
    outputs: Mapping[str, Outputs], inputs: BlockInputs, lenient: Collection[str] = ()
) -> tuple[dict[str, Errors], Errors]:
    """Find each provider's largest relative error of each output against float64, and the errors allowed.

    The norm's input is the sum with the residual, rounded to residual_out. Those in `lenient` may normalize the sum
    before it is rounded; of them the smaller error counts.
    """
    found, allowed = _errors_of(outputs, inputs, is_rounded=True)
    if inputs.residual is not None and (others := {name: outputs[name] for name in lenient}):
        unrounded, _ = _errors_of(others, inputs, is_rounded=False)
        for name, errors in unrounded.items():
            found[name] = {kind: min(error, found[name][kind]) for kind, error in errors.items()}
    return found, allowed


def _errors_of(
    outputs: Mapping[str, Outputs], inputs: BlockInputs, is_rounded: bool
) -> tuple[dict[str, Errors], Errors]:
    rows, cols = inputs.packed.shape
    chunk = max(1, CHUNK_ELEMENTS // cols)
    worst, rounding = {name: Worst() for name in outputs}, Worst()
    named = {
        name: {kind: [each for key, each in of.items() if kind_of(key) == kind] for kind in EVERY}
        for name, of in outputs.items()
    }
    flat = {
        name: {kind: [each.reshape(rows, -1) for each in of[kind]] for kind in OF_ROWS}
        for name, of in named.items()
    }
    sums = {kind: torch.zeros(2, cols, dtype=torch.float64, device=inputs.weight.device) for kind in SUMS}
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        expected, terms = _in_float64(inputs, part, is_rounded)
        for kind, of_rows in terms.items():
            sums[kind] += torch.stack((of_rows.sum(dim=0), of_rows.square().sum(dim=0)))
        for kind, (reference, scale) in expected.items():
            dtype = torch.float32 if kind == "rstd" else inputs.x.dtype
            rounding.meet(kind, reference.to(dtype), reference, scale)
            for name, of in flat.items():
                for tensor in of[kind]:
                    worst[name].meet(kind, tensor[part], reference, scale)
    for kind, (total, squares) in sums.items():
        scale = row_scale(torch.maximum(total.abs(), squares.sqrt()))
        rounding.meet(kind, total.to(inputs.weight.dtype), total, scale)
        for name, of in named.items():
            for tensor in of[kind]:
                worst[name].meet(kind, tensor, total, scale)
    steps = dict.fromkeys(OF_ROWS, 32.0) | dict.fromkeys(SUMS, max(32.0, 4 * math.sqrt(rows)))
    allowed = {kind: 3 * error + steps[kind] * FLOAT32_STEP for kind, error in rounding.errors.items()}
    return {name: each.errors for name, each in worst.items()}, allowed


def _in_float64(inputs: BlockInputs, part: slice, is_rounded: bool) -> tuple[Expected, dict[str, Tensor]]:
    """Compute expected results of some rows, and their terms of the sums over all rows."""
    cols = inputs.packed.shape[1]
    x, dy = (tensor.reshape(-1, cols)[part].double() for tensor in (inputs.x, inputs.dy))
    weight, alpha, expected = inputs.weight.double(), inputs.alpha, {}
    normalized, d_out, d_scale = inputs.packed[part].double(), 0.0, 0.0
    if inputs.residual is not None and inputs.d_residual_out is not None:
        residual, d_out = inputs.residual[part].double(), inputs.d_residual_out[part].double()
        total, d_scale = alpha * x + residual, d_out.abs()
        expected["residual_out"] = total, row_scale((alpha * x).abs() + residual.abs())
        normalized = normalized if is_rounded else total
    rstd = (normalized.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
    xhat, g = normalized * rstd, dy * weight
    y = xhat * weight
    bias = 0.0 if inputs.bias is None else inputs.bias.double()
    expected["y"] = y + bias, row_scale(y.abs() + abs(bias))
    expected["plain_y"] = y, row_scale(y.abs())
    expected["rstd"] = rstd, rstd
    d = (g - xhat * (xhat * g).mean(dim=1, keepdim=True)) * rstd + d_out
    scale = g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)
    scale = row_scale(scale * rstd + d_scale)
    expected |= {"d_residual": (d, scale), "dx": (alpha * d, alpha * scale)}
    return expected, {"dw": dy * xhat, "db": dy}
