# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward and the backward, each by itself and without autograd, on any backend; and by the reference, which can be
differentiated. They take rows of the last dimension alone."""

from __future__ import annotations

import functools
from typing import Literal, overload

import torch
from torch import Tensor

from tilegym_rmsnorm import graphs, reference, unrecorded
from tilegym_rmsnorm.spec import Casting, Wanted
from tilegym_rmsnorm.validation import (
    check_input,
    check_memory,
    check_normalized_shape,
    checked_bool,
    checked_dtype,
    checked_eps,
    is_symbol,
)

__all__ = [
    "compute_rms_norm_rstd_torch",
    "rms_norm_backward",
    "rms_norm_backward_torch",
    "rms_norm_forward",
]


@overload
def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: None = None,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: Tensor,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: Tensor | None = None,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """y and rstd of rows of x, without autograd; with a residual `(y, residual_out, rstd)`. M is the product of x's
    leading dimensions, N its last.

    Args:
        x: Shape `(*, N)`; float16, bfloat16, float32 or float64; any strides.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        eps: As for `rms_norm`.
        bias: Weight's shape, `(N,)` without one, or None.
        offset: As for `rms_norm`.
        residual: As for `rms_norm`.
        residual_alpha: As for `rms_norm`.
        residual_dtype: As for `rms_norm`.
        out_dtype: As for `rms_norm`.
        casting: As for `rms_norm`.
        backend: As for `rms_norm`.

    Returns:
        y, of x's shape and out_dtype, and rstd, of shape `(M,)`, float32 (float64 where what is normalized is float64);
        `(y, residual_out, rstd)` where a residual is given.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    checked = unrecorded.checked_forward(
        x,
        1,
        weight,
        bias,
        residual,
        eps=eps,
        offset=offset,
        residual_alpha=residual_alpha,
        residual_dtype=residual_dtype,
        out_dtype=out_dtype,
        casting=casting,
    )
    of_graph = None if checked.are_plain else graphs.backend_of_graph(backend)
    is_in_graph = not (checked.are_plain or is_symbol(checked.spec.eps))
    if is_in_graph and graphs.takes_op(of_graph, *checked[:4]):
        weight, bias, residual = map(_detached, (checked.weight, checked.bias, checked.residual))
        given = checked.x.detach(), weight, bias, residual, 1, checked.spec, of_graph
        y, residual_out, rstd = graphs.forward(*given)
        rstd = rstd.reshape(-1)
    elif graphs.leaves_graph(of_graph):
        y, residual_out, rstd = graphs.untraced(checked.run, of_graph)
    else:
        y, residual_out, rstd = checked.run(backend)
    return (y, rstd) if residual_out is None else (y, residual_out, rstd)


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[False] = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """dx and dw of `rms_norm_forward`, without autograd; with needs_db also db. After a residual x is residual_out,
    what was normalized.

    Args:
        x: What was normalized: what the forward was given, or the residual_out that it returned. Shape `(*, N)`.
        dy: The gradient of y, of x's shape and device; any floating dtype, any strides.
        weight: What the forward was given: shape `(N,)`, or `(H, N)`, or None.
        rstd: What the forward returned: shape `(M,)`.
        offset: What the forward was given.
        casting: What the forward was given.
        d_residual_out: The gradient of residual_out, which is added to dx; like dy. None: there is none.
        dw_dtype: Of dw and db: `torch.float32` where main gradients are accumulated. None: weight's, x's without one.
        needs_db: Whether db is returned too.
        backend: As for `rms_norm`.

    Returns:
        dx, of x's shape and dtype: the gradient of what was normalized. With a residual that is the gradient of the
        residual; the gradient of the forward's x is residual_alpha * dx, cast to its dtype. dw, of weight's shape, None
        without a weight. Where needs_db, db too, of weight's shape, `(N,)` without one.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    wanted = functools.partial(_wanted, dw_dtype, needs_db)
    checked = unrecorded.checked_backward(
        x, dy, 1, weight, rstd, d_residual_out, wanted, offset=offset, casting=casting
    )
    of_graph = None if checked.are_plain else graphs.backend_of_graph(backend)
    if not checked.are_plain and graphs.takes_op(of_graph, *checked[:5]):
        weight, d_residual_out = map(_detached, (checked.weight, checked.d_residual_out))
        given = checked.x.detach(), checked.dy.detach(), weight, checked.rstd.detach(), d_residual_out
        dx, dw, db = graphs.backward(*given, checked.wanted, checked.spec, of_graph)
    elif graphs.leaves_graph(of_graph):
        dx, _, dw, db = graphs.untraced(checked.run, of_graph)
    else:
        dx, _, dw, db = checked.run(backend)
    return (dx, dw, db) if needs_db else (dx, dw)


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last dimension, by the reference: differentiable.

    Args:
        x: Shape `(*, N)`; float16, bfloat16, float32 or float64.
        eps: As for `rms_norm`.

    Returns:
        rstd, of shape `(M,)`, M the product of x's leading dimensions; float32 (float64 for float64 x).

    Raises:
        ValueError: A shape or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    check_input("x", x)
    check_memory(x=x)
    check_normalized_shape(x, x.shape[-1:])
    return reference.compute_rms_norm_rstd_torch(x, checked_eps(eps, x.dtype))


@overload
def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[False] = False,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[True],
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`rms_norm_backward` by the reference: differentiable, with rstd an input like the others.

    Args:
        x: What was normalized. Shape `(*, N)`.
        dy: Of x's shape and device; any floating dtype.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        rstd: Shape `(M,)`, as `compute_rms_norm_rstd_torch` gives it.
        offset: As for `rms_norm`.
        casting: As for `rms_norm`.
        d_residual_out: As for `rms_norm_backward`.
        dw_dtype: As for `rms_norm_backward`.
        needs_db: As for `rms_norm_backward`.

    Returns:
        As `rms_norm_backward`: dx and dw, with needs_db also db.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    wanted = functools.partial(_wanted, dw_dtype, needs_db)
    checked = unrecorded.checked_backward(
        x, dy, 1, weight, rstd, d_residual_out, wanted, offset=offset, casting=casting
    )
    check_memory(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    dx, _, dw, db = reference.gradients_torch(
        x, dy, weight, rstd, d_residual_out, checked.wanted, offset=checked.spec.offset, casting=casting
    )
    return (dx, dw, db) if needs_db else (dx, dw)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _wanted(dw_dtype: torch.dtype | None, needs_db: bool, x: Tensor, weight: Tensor | None) -> Wanted:
    """dx, dw where there is a weight, and db where it is asked for: in dw_dtype, or weight's, or x's."""
    checked_bool("needs_db", needs_db)
    dw_dtype = checked_dtype("dw_dtype", dw_dtype) or (x.dtype if weight is None else weight.dtype)
    return Wanted(x.dtype, None, None if weight is None else dw_dtype, dw_dtype if needs_db else None)
