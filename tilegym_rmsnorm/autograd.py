# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What lies between the checked arguments of the ops and a backend: flattened rows, and the autograd function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.reference import compute_dtype

_unsafe_view = torch.ops.aten._unsafe_view.default


class RMSNormFunction(torch.autograd.Function):
    """Saves x, weight and rstd; y is never needed again.

    What is no tensor comes in one tuple: each argument of `apply` costs host time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, call):  # type: ignore[override]
        n, eps, offset, casting, forward, _ = call
        y, rstd = run_forward(x, weight, bias, n, eps, offset, casting, forward)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = call
        if bias is not None:
            ctx.bias_dtype, ctx.bias_shape = bias.dtype, bias.shape
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        n, eps, offset, casting, _, backward = ctx.call
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_dx or needs_dw:
            if torch.is_grad_enabled():  # create_graph
                dx, dw = _differentiable_backward(x, dy, weight, n, eps, offset, casting)
            else:
                dx, dw = run_backward(x, dy, weight, rstd, n, offset, casting, needs_dw, backward)
        if needs_db:
            db = dy.reshape(-1, n).sum(dim=0, dtype=compute_dtype(dy.dtype))
            db = db.to(ctx.bias_dtype).view(ctx.bias_shape)
        return dx, dw, db, None


def run_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    offset: float,
    casting: str,
    forward: Callable[..., Any],
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return torch.empty_like(x), x.new_empty(0, dtype=compute_dtype(x.dtype))  # nothing to fill
    y, rstd = forward(_as_rows(x, n), _as_vector(weight), _as_vector(bias), eps, offset, casting)
    # A plain view would forbid in-place operations on a custom Function's output.
    return (y if x.ndim == 2 and x.shape[1] == n else _unsafe_view(y, x.shape)), rstd


def run_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    n: int,
    offset: float,
    casting: str,
    needs_dw: bool,
    backward: Callable[..., Any],
) -> tuple[Tensor, Tensor | None]:
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight) if needs_dw else None  # a sum of no rows
    dx, dw = backward(_as_rows(x, n), _as_rows(dy, n), _as_vector(weight), rstd, offset, casting, needs_dw)
    if dx.shape != x.shape:
        dx = dx.view(x.shape)
    if dw is not None and dw.shape != weight.shape:
        dw = dw.view(weight.shape)
    return dx, dw


def _differentiable_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, n: int, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor | None]:
    """By the reference; rstd is computed again, so that its dependence on x counts."""
    rows, vector = x.reshape(-1, n), None if weight is None else weight.reshape(-1)
    rstd = reference.compute_rms_norm_rstd_torch(rows, eps)
    dx, dw = reference.rms_norm_backward_torch(
        rows, dy.reshape(-1, n), vector, rstd, offset=offset, casting=casting
    )
    return dx.view(x.shape), None if weight is None else dw.view(weight.shape)


def _as_rows(x: Tensor, n: int) -> Tensor:
    """x as (M, N) with last stride 1 and a row stride of at least N: a view where one exists, else a copy."""
    rows = x if x.ndim == 2 and x.shape[1] == n else x.reshape(-1, n)
    row_stride, stride = rows.stride()
    if stride == 1 and row_stride >= n:
        return rows
    # clone, since contiguous() returns tensors with a dimension of 1 as they are, whatever its stride
    return rows.clone(memory_format=torch.contiguous_format)


def _as_vector(vector: Tensor | None) -> Tensor | None:
    if vector is None:
        return None
    if vector.ndim != 1:
        vector = vector.reshape(-1)
    return vector if vector.stride(0) == 1 else vector.clone(memory_format=torch.contiguous_format)
