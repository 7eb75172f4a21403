# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward and the backward, each by itself and without autograd: checked, and then run. passes.py offers them of
the last dimension, and torch_ops.py of any number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm.arguments import as_plain, checked_spec, dtype_of, obstacle_to
from tilegym_rmsnorm.autograd import Call, run_add_forward, run_backward, run_forward, unseen
from tilegym_rmsnorm.registry import dispatch, get_current_backend, request_of
from tilegym_rmsnorm.spec import Gradients, Spec, Wanted, parts_of
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_like,
    check_normalized_shape,
    check_rstd,
    check_weight,
    checked_number,
)


class Forward(NamedTuple):
    """A forward that was checked. Rows are x's last `dims` dimensions. are_plain: see `as_plain`."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    dims: int
    spec: Spec
    heads: int
    are_plain: bool

    def run(self, backend: str | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """y and residual_out of x's shape, None without a residual, and rstd (M,)."""
        x, weight, bias, residual, dims, spec, heads, are_plain = self
        obstacle = None if are_plain else obstacle_to(x=x, weight=weight, bias=bias, residual=residual)
        dtypes = x.dtype, dtype_of(weight), dtype_of(bias), dtype_of(residual)
        parts = parts_of(residual is not None, bias is not None, heads > 0)
        written = spec.y_dtype, spec.residual_dtype
        request = request_of(x.device, spec.casting, obstacle, *dtypes, *written, parts=parts)
        backend = _backend(backend)
        run = dispatch("rms_norm_forward", request, backend)
        if obstacle is not None and dims == 1:  # the reference's, which takes rows of any leading dimensions
            y, rstd, residual_out = run(spec, (x, weight, bias, residual))
            return y, residual_out, rstd
        call = Call(spec, run, None, backend, heads)
        with unseen(run):
            if residual is None:
                y, rstd = run_forward(x, weight, bias, call)
                return y, None, rstd
            return run_add_forward(x, residual, weight, bias, call)


class Backward(NamedTuple):
    """A backward that was checked. x is what was normalized, rstd (M,); the spec's eps is not used."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None
    rstd: Tensor
    d_residual_out: Tensor | None
    shape: torch.Size  # of a row
    spec: Spec
    heads: int
    wanted: Wanted
    are_plain: bool

    def run(self, backend: str | None) -> Gradients:
        """Those wanted, of the shapes of their tensors: db has weight's, without one that of a row."""
        x, dy, weight, rstd, d_residual_out, shape, spec, heads, wanted, are_plain = self
        given = x, dy, weight, rstd, d_residual_out
        obstacle = None
        if not are_plain:
            obstacle = obstacle_to(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
        dtypes = x.dtype, dtype_of(weight), dy.dtype, dtype_of(d_residual_out), *wanted
        parts = parts_of(d_residual_out is not None, wanted.db is not None, heads > 0)
        request = request_of(x.device, spec.casting, obstacle, *dtypes, parts=parts)
        backend = _backend(backend)
        run = dispatch("rms_norm_backward", request, backend)
        if obstacle is not None and len(shape) == 1:
            return run(spec, given, wanted)
        call = Call(spec, None, run, backend, heads)
        with unseen(run):
            given = x, dy, weight, rstd.contiguous(), d_residual_out
            dx, d_residual, dw, db = run_backward(given, call, wanted)
        return (
            dx,
            d_residual,
            dw,
            None if db is None else db.view(shape if weight is None else weight.shape),
        )


def checked_forward(
    x: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    casting: str,
    **options: Any,
) -> Forward:
    """options: those of `checked_spec`."""
    are_plain, (x, weight, bias, residual) = as_plain(x, weight, bias, residual)
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-dims:])
    heads = check_weight(weight, bias, x, shape)
    check_casting(casting)
    spec = checked_spec(n, x, residual, casting=casting, y_dtype=x.dtype, **options)
    return Forward(x, weight, bias, residual, dims, spec, heads, are_plain)


def checked_backward(
    x: Tensor,
    dy: Tensor,
    dims: int,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    wanted_of: Callable[[Tensor, Tensor | None], Wanted],
    *,
    offset: float,
    casting: str,
    alpha: float = 1.0,
) -> Backward:
    """wanted_of: what is wanted of x and weight, asked once these are checked."""
    are_plain, given = as_plain(x, dy, weight, rstd, d_residual_out)
    x, dy, weight, rstd, d_residual_out = given
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-dims:])
    heads = check_weight(weight, None, x, shape)
    check_like("dy", dy, x)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_rstd(rstd, x, x.numel() // n)
    check_casting(casting)
    alpha = checked_number("residual_alpha", alpha)
    spec = Spec(n, 0.0, checked_number("offset", offset), casting, alpha)
    wanted = wanted_of(x, weight)
    return Backward(x, dy, weight, rstd, d_residual_out, shape, spec, heads, wanted, are_plain)


def _backend(backend: str | None) -> str:
    """Dynamo traces the reference alone."""
    if is_dynamo_compiling():
        return "torch"
    return get_current_backend() if backend is None else backend
