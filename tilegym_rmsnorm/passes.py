# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The forward and the backward, each by itself and without autograd, on any backend; and by the reference, which can be
differentiated. They take rows of the last dimension alone."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.arguments import as_plain, checked_spec, dtype_of, obstacle_to
from tilegym_rmsnorm.autograd import Call, run_add_forward, run_backward, run_forward, unseen
from tilegym_rmsnorm.graphs import break_graph, traced
from tilegym_rmsnorm.registry import dispatch, get_current_backend, request_of
from tilegym_rmsnorm.spec import Spec, Wanted, parts_of
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_like,
    check_memory,
    check_normalized_shape,
    check_rstd,
    check_weight,
    checked_bool,
    checked_dtype,
    checked_eps,
    checked_number,
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
    casting: str = "once",
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
    casting: str = "once",
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
    casting: str = "once",
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
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options: dict[str, Any] = {
            "bias": bias,
            "offset": offset,
            "residual": residual,
            "residual_alpha": residual_alpha,
        }
        options |= {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
        return break_graph(rms_norm_forward, x, weight, eps, **options, casting=casting, backend=backend)
    are_plain, (x, weight, bias, residual) = as_plain(x, weight, bias, residual)
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    heads = check_weight(weight, bias, x, shape)
    check_casting(casting)
    spec = checked_spec(
        n,
        x,
        residual,
        eps=eps,
        offset=offset,
        residual_alpha=residual_alpha,
        residual_dtype=residual_dtype,
        out_dtype=out_dtype,
        casting=casting,
        y_dtype=x.dtype,
    )
    obstacle = None if are_plain else obstacle_to(x=x, weight=weight, bias=bias, residual=residual)
    dtypes = x.dtype, dtype_of(weight), dtype_of(bias), dtype_of(residual), spec.y_dtype, spec.residual_dtype
    parts = parts_of(residual is not None, bias is not None, heads > 0)
    request = request_of(x.device, casting, obstacle, *dtypes, parts=parts)
    backend = get_current_backend() if backend is None else backend
    forward = dispatch("rms_norm_forward", request, backend)
    if obstacle is not None:  # the reference's, which takes rows of any leading dimensions
        y, rstd, residual_out = forward(spec, (x, weight, bias, residual))
        return (y, rstd) if residual is None else (y, residual_out, rstd)
    call = Call(spec, forward, None, backend, heads)
    with unseen(forward):
        if residual is None:
            return run_forward(x, weight, bias, call)
        return run_add_forward(x, residual, weight, bias, call)


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
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
    casting: str = "once",
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
    casting: str = "once",
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
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options: dict[str, Any] = {"offset": offset, "casting": casting, "d_residual_out": d_residual_out}
        options |= {"dw_dtype": dw_dtype, "needs_db": needs_db, "backend": backend}
        return break_graph(rms_norm_backward, x, dy, weight, rstd, **options)
    are_plain, given = as_plain(x, dy, weight, rstd, d_residual_out)
    x, dy, weight, rstd, d_residual_out = given
    spec, heads, wanted = _checked_backward_spec(
        x, dy, weight, rstd, d_residual_out, offset, casting, dw_dtype, needs_db
    )
    obstacle = None
    if not are_plain:
        obstacle = obstacle_to(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    dtypes = x.dtype, dtype_of(weight), dy.dtype, dtype_of(d_residual_out), *wanted
    parts = parts_of(d_residual_out is not None, needs_db, heads > 0)
    request = request_of(x.device, casting, obstacle, *dtypes, parts=parts)
    backend = get_current_backend() if backend is None else backend
    backward = dispatch("rms_norm_backward", request, backend)
    if obstacle is not None:
        dx, _, dw, db = backward(spec, given, wanted)
    else:
        call = Call(spec, None, backward, backend, heads)
        with unseen(backward):
            dx, _, dw, db = run_backward((x, dy, weight, rstd.contiguous(), d_residual_out), call, wanted)
    if not needs_db:
        return dx, dw
    return dx, dw, db if weight is None else db.view(weight.shape)


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
    casting: str = "once",
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
    casting: str = "once",
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
    casting: str = "once",
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
    spec, _, wanted = _checked_backward_spec(
        x, dy, weight, rstd, d_residual_out, offset, casting, dw_dtype, needs_db
    )
    check_memory(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    dx, _, dw, db = reference.gradients_torch(
        x, dy, weight, rstd, d_residual_out, wanted, offset=spec.offset, casting=casting
    )
    return (dx, dw, db) if needs_db else (dx, dw)


def _checked_backward_spec(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    offset: float,
    casting: str,
    dw_dtype: torch.dtype | None,
    needs_db: bool,
) -> tuple[Spec, int, Wanted]:
    """What a backward is asked for, with an eps that it does not need; the number of heads; and what it returns."""
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    heads = check_weight(weight, None, x, shape)
    check_like("dy", dy, x)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_rstd(rstd, x, x.numel() // n)
    check_casting(casting)
    spec = Spec(n, 0.0, checked_number("offset", offset), casting)
    checked_bool("needs_db", needs_db)
    dw_dtype = checked_dtype("dw_dtype", dw_dtype) or (x.dtype if weight is None else weight.dtype)
    wanted = Wanted(x.dtype, None, None if weight is None else dw_dtype, dw_dtype if needs_db else None)
    return spec, heads, wanted
