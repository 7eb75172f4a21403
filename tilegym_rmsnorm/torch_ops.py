# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The norm as ops of torch.library, `torch.ops.tilegym_rmsnorm`: what stands for it in graphs.

x has any leading dimensions and `normalized_dims` normalized ones, whose shape weight and bias have, or one dimension
more for heads. rstd has x's shape with an extent of 1 in the place of each normalized dimension, as aten's fused ops
give it: rows that are flattened could not be sharded in a sequence. All arguments are positional, so that autocast
and sharding rules can be registered. `wanted` comes before the other numbers: sharding rules are cached by what follows
the tensors. wanted: 1 dx, 2 dw, 4 db, 8 d_residual, added up; what is not wanted is None.

Which kernel runs is decided when an op runs, not when a graph is made: a graph may serve any number of rows.
backend: a name, "auto", or None for the one in effect then.

The ops can be differentiated, which torch_ops_autograd.py adds. They have no rule for autocast: `rms_norm` casts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import unrecorded
from tilegym_rmsnorm.reference import compute_dtype, sum_of_rows
from tilegym_rmsnorm.registry import check_backend_name
from tilegym_rmsnorm.spec import D_RESIDUAL, DB, DW, DX, Wanted
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_like,
    check_memory,
    check_normalized_shape,
    check_weight,
    checked_dtype,
    checked_eps,
    checked_residual_dtype,
)

NAMESPACE = "tilegym_rmsnorm"
_KINDS_OF_NORM = "int normalized_dims, float eps, float offset, str casting"
SCHEMAS = {
    "rms_norm_forward": (
        f"(Tensor x, Tensor? weight, Tensor? bias, {_KINDS_OF_NORM}, ScalarType? out_dtype, str? backend)"
        " -> (Tensor y, Tensor rstd)"
    ),
    "rms_norm_backward": (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, int wanted, int normalized_dims, float offset, str casting,"
        " ScalarType? dw_dtype, ScalarType? db_dtype, str? backend) -> (Tensor dx, Tensor dw, Tensor db)"
    ),
    "add_rms_norm_forward": (
        f"(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, {_KINDS_OF_NORM}, float alpha,"
        " ScalarType? residual_dtype, ScalarType? out_dtype, str? backend)"
        " -> (Tensor y, Tensor residual_out, Tensor rstd)"
    ),
    "add_rms_norm_backward": (
        "(Tensor dy, Tensor? d_residual_out, Tensor residual_out, Tensor? weight, Tensor rstd, int wanted,"
        " int normalized_dims, float offset, str casting, float alpha, ScalarType? dx_dtype,"
        " ScalarType? d_residual_dtype, ScalarType? dw_dtype, ScalarType? db_dtype, str? backend)"
        " -> (Tensor dx, Tensor d_residual, Tensor dw, Tensor db)"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)


def op(name: str) -> Any:
    """The overload of an op: `op("rms_norm_forward")(x, None, None, 1, 1e-6, 0.0, "once", None, None)`."""
    return getattr(torch.ops.tilegym_rmsnorm, name).default


# What runs where real tensors are given.


def _rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_dims: int,
    eps: float,
    offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    check_dims(x, normalized_dims)
    checked = unrecorded.checked_forward(
        x,
        normalized_dims,
        weight,
        bias,
        None,
        eps=eps,
        offset=offset,
        residual_alpha=1.0,
        residual_dtype=None,
        out_dtype=out_dtype,
        casting=casting,
    )
    y, _, rstd = checked.run(backend)
    return y, rstd.view(shape_of_rstd(x, normalized_dims))


def _add_rms_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_dims: int,
    eps: float,
    offset: float,
    casting: str,
    alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    check_dims(x, normalized_dims)
    checked = unrecorded.checked_forward(
        x,
        normalized_dims,
        weight,
        bias,
        residual,
        eps=eps,
        offset=offset,
        residual_alpha=alpha,
        residual_dtype=residual_dtype,
        out_dtype=out_dtype,
        casting=casting,
    )
    y, residual_out, rstd = checked.run(backend)
    return y, residual_out, rstd.view(shape_of_rstd(x, normalized_dims))


def _rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    wanted: int,
    normalized_dims: int,
    offset: float,
    casting: str,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    check_dims(x, normalized_dims)
    check_backward(x, rstd, normalized_dims, wanted, 7, casting, (dw_dtype, db_dtype), backend)
    of = functools.partial(wanted_gradients, wanted, x.dtype, None, dw_dtype, db_dtype)
    given = x, dy, normalized_dims, weight, rstd.reshape(-1), None, of
    checked = unrecorded.checked_backward(*given, offset=offset, casting=casting)
    if wanted == DB:
        return None, None, _sum_of_rows(checked)
    dx, _, dw, db = checked.run(backend)
    return dx if wanted & DX else None, dw, db


def _add_rms_norm_backward(
    dy: Tensor,
    d_residual_out: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    wanted: int,
    normalized_dims: int,
    offset: float,
    casting: str,
    alpha: float,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    check_dims(residual_out, normalized_dims)
    dtypes = dx_dtype, d_residual_dtype, dw_dtype, db_dtype
    check_backward(residual_out, rstd, normalized_dims, wanted, 15, casting, dtypes, backend)
    of = functools.partial(wanted_gradients, wanted, *dtypes)
    given = residual_out, dy, normalized_dims, weight, rstd.reshape(-1), d_residual_out, of
    checked = unrecorded.checked_backward(*given, offset=offset, casting=casting, alpha=alpha)
    if wanted == DB:
        return None, None, None, _sum_of_rows(checked)
    dx, d_residual, dw, db = checked.run(backend)
    if d_residual is not None and d_residual.untyped_storage().data_ptr() == dx.untyped_storage().data_ptr():
        d_residual = d_residual.clone()  # results of an op may not share memory
    return dx if wanted & DX else None, d_residual, dw, db


def _sum_of_rows(checked: unrecorded.Backward) -> Tensor:
    """db, where no kernel need run: the bits that an eager backward of it has."""
    dy, weight = checked.dy, checked.weight
    check_memory(dy=dy)
    shape = checked.shape if weight is None else weight.shape
    return sum_of_rows(dy, shape, compute_dtype(dy.dtype), checked.wanted.db)


def wanted_gradients(
    wanted: int,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    x: Tensor,
    weight: Tensor | None,
) -> Wanted:
    """The dtypes of what `wanted` names; of dw and db weight's, x's without one, where none is given. dx is among them
    even where it is not wanted: kernels always write it."""
    of_vectors = x.dtype if weight is None else weight.dtype
    return Wanted(
        dx_dtype or x.dtype,
        (d_residual_dtype or x.dtype) if wanted & D_RESIDUAL else None,
        (dw_dtype or of_vectors) if wanted & DW and weight is not None else None,
        (db_dtype or of_vectors) if wanted & DB else None,
    )


# What stands for the results where a graph is made.


def _fake_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_dims: int,
    eps: float,
    offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    check_forward(x, weight, bias, normalized_dims, eps, casting, out_dtype, backend)
    rstd = x.new_empty(shape_of_rstd(x, normalized_dims), dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), rstd


def _fake_add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_dims: int,
    eps: float,
    offset: float,
    casting: str,
    alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_forward(x, weight, bias, normalized_dims, eps, casting, out_dtype, backend)
    residual_out = x.new_empty(x.shape, dtype=checked_residual_dtype(x, residual, alpha, residual_dtype))
    rstd = x.new_empty(shape_of_rstd(x, normalized_dims), dtype=compute_dtype(residual_out.dtype))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), residual_out, rstd


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    wanted: int,
    normalized_dims: int,
    offset: float,
    casting: str,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    check_dims(x, normalized_dims)
    check_backward(x, rstd, normalized_dims, wanted, 7, casting, (dw_dtype, db_dtype), backend)
    dtypes = wanted_gradients(wanted, None, None, dw_dtype, db_dtype, x, weight)
    dx, _, dw, db = _fake_gradients(dy, x, weight, normalized_dims, dtypes)
    return dx if wanted & DX else None, dw, db


def _fake_add_backward(
    dy: Tensor,
    d_residual_out: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    wanted: int,
    normalized_dims: int,
    offset: float,
    casting: str,
    alpha: float,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, residual_out, "residual_out")
    check_dims(residual_out, normalized_dims)
    given = dx_dtype, d_residual_dtype, dw_dtype, db_dtype
    check_backward(residual_out, rstd, normalized_dims, wanted, 15, casting, given, backend)
    dtypes = wanted_gradients(wanted, *given, residual_out, weight)
    dx, d_residual, dw, db = _fake_gradients(dy, residual_out, weight, normalized_dims, dtypes)
    return dx if wanted & DX else None, d_residual, dw, db


def _fake_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, dims: int, dtypes: Wanted
) -> tuple[Tensor | None, ...]:
    check_weight(weight, None, x, check_normalized_shape(x, x.shape[-dims:])[1])
    check_like("dy", dy, x)
    of_vectors = x.shape[-dims:] if weight is None else weight.shape
    shapes = x.shape, x.shape, of_vectors, of_vectors
    pairs = zip(shapes, dtypes, strict=True)
    return tuple(None if dtype is None else x.new_empty(shape, dtype=dtype) for shape, dtype in pairs)


def check_dims(x: Tensor, dims: int) -> None:
    check_input("x", x)
    if not 0 < dims <= x.ndim:
        raise ValueError(f"normalized_dims: expected 1 to {x.ndim} for x of {x.ndim} dimensions, got {dims}")


def check_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: int,
    eps: float,
    casting: str,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> None:
    """What a forward is checked for when it runs, where it does not run: eps unless it is a symbol."""
    check_dims(x, dims)
    check_weight(weight, bias, x, check_normalized_shape(x, x.shape[-dims:])[1])
    if isinstance(eps, float):
        checked_eps(eps, x.dtype)
    check_casting(casting)
    checked_dtype("out_dtype", out_dtype)
    _check_backend(backend)


def check_backward(
    x: Tensor,
    rstd: Tensor,
    dims: int,
    wanted: int,
    most: int,
    casting: str,
    dtypes: tuple[torch.dtype | None, ...],
    backend: str | None,
) -> None:
    """What is not checked of a backward elsewhere. most: what `wanted` can be."""
    shape = shape_of_rstd(x, dims)
    if tuple(rstd.shape) != shape:
        raise ValueError(f"rstd: expected shape {shape}, got {tuple(rstd.shape)}")
    if rstd.dtype != compute_dtype(x.dtype):
        raise TypeError(f"rstd: expected {compute_dtype(x.dtype)} for {x.dtype} x, got {rstd.dtype}")
    if rstd.device != x.device:
        raise ValueError(f"rstd: expected the device of x, {x.device}, got {rstd.device}")
    if not 0 <= wanted <= most:
        raise ValueError(f"wanted: expected 0 to {most}, got {wanted}")
    check_casting(casting)
    for dtype in dtypes:
        checked_dtype("a gradient's dtype", dtype)
    _check_backend(backend)


def _check_backend(backend: str | None) -> None:
    if backend is not None:
        check_backend_name(backend)


def shape_of_rstd(x: Tensor, dims: int) -> tuple[int, ...]:
    return (*x.shape[:-dims], *(1,) * dims)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm_forward": (_rms_norm_forward, _fake_forward),
    "rms_norm_backward": (_rms_norm_backward, _fake_backward),
    "add_rms_norm_forward": (_add_rms_norm_forward, _fake_add_forward),
    "add_rms_norm_backward": (_add_rms_norm_backward, _fake_add_backward),
}
for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)
