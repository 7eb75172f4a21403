# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Differentiates the ops of torch_ops.py, and maps them over batches.

The forwards have an autograd.Function of our own at the key Autograd: half the host time of register_autograd. Its
backward is the backward op, or, under create_graph, the reference, which is differentiable again. The backward ops,
called by themselves, are differentiated as the reference is. Inside a transform of torch.func, and where there are
tangents, all of them are the reference: PyTorch's operations, which it knows how to transform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import composite, gate, placements, reference, sharding, torch_ops
from tilegym_rmsnorm.autograd import (
    Call,
    differentiable_backward,
    gradients_of_the_sum,
    savable,
    sum_of_rows_by_op,
)
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import get_current_backend
from tilegym_rmsnorm.spec import D_RESIDUAL, DB, DW, DX, Gradients, Spec, Wanted
from tilegym_rmsnorm.torch_ops import library, op
from tilegym_rmsnorm.validation import check_like, check_weight

_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Forward(torch.autograd.Function):
    """Saves x, weight and rstd."""

    @staticmethod
    def forward(ctx, x, weight, bias, options):
        with _below_autograd():
            y, rstd = op("rms_norm_forward")(x, weight, bias, *options)
        ctx.save_for_backward(savable(x), savable(weight), rstd)
        ctx.bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.options = _with_backend_in_effect(options, x)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx, dy, _):
        if dy is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        dims, eps, offset, casting, _, backend = ctx.options
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        db_dtype = ctx.bias[0] if needs_db else None
        if not (needs_dx or needs_dw or placements.is_dtensor(x)):
            return None, None, _sum_of_rows(dy, weight, rstd, dims, ctx.bias), None
        if torch.is_grad_enabled():
            wanted = Wanted(x.dtype, None, weight.dtype if needs_dw else None, db_dtype)
            spec = Spec(0, eps, offset, casting)
            dx, _, dw, db = _differentiable((x, dy, weight, None, None), dims, spec, wanted)
        else:
            wanted = DX * needs_dx + DW * needs_dw + DB * needs_db
            more = dims, offset, casting, None, db_dtype, backend
            dx, dw, db = op("rms_norm_backward")(dy, x, weight, rstd, wanted, *more)
        return dx if needs_dx else None, dw, None if db is None else db.view(ctx.bias[1]), None


class _AddForward(torch.autograd.Function):
    """Saves residual_out, weight and rstd: neither x nor residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, options):
        with _below_autograd():
            y, residual_out, rstd = op("add_rms_norm_forward")(x, residual, weight, bias, *options)
        ctx.save_for_backward(residual_out, savable(weight), rstd)
        ctx.bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.dtypes, ctx.options = (x.dtype, residual.dtype), _with_backend_in_effect(options, x)
        fixed = [rstd] if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else [rstd, residual_out]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return y, residual_out, rstd

    @staticmethod
    def backward(ctx, dy, d_residual_out, _):
        dims, eps, offset, casting, alpha, _, _, backend = ctx.options
        needs_dx, needs_d_residual, needs_dw, needs_db, _ = ctx.needs_input_grad
        needed = needs_dx, needs_d_residual
        if dy is None:
            dx, d_residual = gradients_of_the_sum(d_residual_out, alpha, ctx.dtypes, needed)
            return dx, d_residual, None, None, None
        x, weight, rstd = ctx.saved_tensors
        db_dtype = ctx.bias[0] if needs_db else None
        if not (needs_dx or needs_d_residual or needs_dw or placements.is_dtensor(x)):
            return None, None, None, _sum_of_rows(dy, weight, rstd, dims, ctx.bias), None
        x_dtype, residual_dtype = ctx.dtypes
        has_two = needs_dx and needs_d_residual and (alpha != 1.0 or x_dtype != residual_dtype)
        if (
            not needs_dx
        ):  # the gradient of the residual alone takes the place of dx: it is that where alpha is 1
            alpha, x_dtype = 1.0, residual_dtype if needs_d_residual else x_dtype
        if torch.is_grad_enabled():
            dw_dtype = weight.dtype if needs_dw else None
            wanted = Wanted(x_dtype, residual_dtype if has_two else None, dw_dtype, db_dtype)
            given = x, dy, weight, None, d_residual_out
            results = _differentiable(given, dims, Spec(0, eps, offset, casting, alpha), wanted)
        else:
            bits = DX * (needs_dx or needs_d_residual) + D_RESIDUAL * has_two + DW * needs_dw + DB * needs_db
            dtypes = x_dtype, residual_dtype if has_two else None, None, db_dtype
            given = dy, d_residual_out, x, weight, rstd, bits, dims, offset, casting, alpha, *dtypes
            results = op("add_rms_norm_backward")(*given, backend)
        dx, d_residual, dw, db = results
        if needs_d_residual and not has_two:
            d_residual = dx
        db = None if db is None else db.view(ctx.bias[1])
        return dx if needs_dx else None, d_residual if needs_d_residual else None, dw, db, None


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Any:
    sharding.prepare(x)
    if _is_transformed(x, weight, bias):
        return _reference_forward(x, weight, bias, *options)
    if _is_differentiated(x, weight, bias):
        return _Forward.apply(x, weight, bias, options)
    with _below_autograd():
        return op("rms_norm_forward")(x, weight, bias, *options)


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> Any:
    sharding.prepare(x)
    if _is_transformed(x, residual, weight, bias):
        return _reference_add_forward(x, residual, weight, bias, *options)
    if _is_differentiated(x, residual, weight, bias):
        return _AddForward.apply(x, residual, weight, bias, options)
    with _below_autograd():
        return op("add_rms_norm_forward")(x, residual, weight, bias, *options)


def _backward(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, *options: Any) -> Any:
    sharding.prepare(x)
    if _is_transformed(dy, x, weight, rstd) or _is_differentiated(dy, x, weight, rstd):
        return _reference_backward(dy, x, weight, rstd, *options)
    with _below_autograd():
        return op("rms_norm_backward")(dy, x, weight, rstd, *options)


def _add_backward(
    dy: Tensor,
    d_residual_out: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *options: Any,
) -> Any:
    sharding.prepare(residual_out)
    tensors = dy, d_residual_out, residual_out, weight, rstd
    if _is_transformed(*tensors) or _is_differentiated(*tensors):
        return _reference_add_backward(*tensors, *options)
    with _below_autograd():
        return op("add_rms_norm_backward")(*tensors, *options)


# The same by the reference. It takes the last dimension, and rows of heads; so the normalized ones become one.


def _reference_forward(x, weight, bias, dims, eps, offset, casting, out_dtype, backend):
    torch_ops.check_forward(x, weight, bias, dims, eps, casting, out_dtype, backend)
    rows, weight_row, bias_row = x.flatten(-dims), _flat(weight, dims), _flat(bias, dims)
    options = {"bias": bias_row, "offset": offset, "casting": casting, "out_dtype": out_dtype}
    y, rstd = reference.rms_norm_forward_torch(rows, weight_row, eps, **options)
    return y.reshape(x.shape).contiguous(), rstd.reshape(torch_ops.shape_of_rstd(x, dims)).detach()


def _reference_add_forward(
    x, residual, weight, bias, dims, eps, offset, casting, alpha, residual_dtype, out_dtype, backend
):
    torch_ops.check_forward(x, weight, bias, dims, eps, casting, out_dtype, backend)
    check_like("residual", residual, x)
    y, residual_out, rstd = reference.add_rms_norm_torch(
        x.flatten(-dims),
        residual.flatten(-dims),
        _flat(weight, dims),
        eps,
        alpha=alpha,
        residual_dtype=residual_dtype or reference.promoted(x.dtype, residual.dtype),
        bias=_flat(bias, dims),
        offset=offset,
        casting=casting,
        out_dtype=out_dtype,
    )
    rstd = rstd.reshape(torch_ops.shape_of_rstd(x, dims)).detach()
    return y.reshape(x.shape).contiguous(), residual_out.reshape(x.shape).contiguous(), rstd


def _reference_backward(dy, x, weight, rstd, wanted, dims, offset, casting, dw_dtype, db_dtype, backend):
    dtypes = torch_ops.wanted_gradients(wanted, None, None, dw_dtype, db_dtype, x, weight)
    dx, _, dw, db = _reference_gradients(
        dy, None, x, weight, rstd, dims, dtypes, offset=offset, casting=casting
    )
    return dx if wanted & DX else None, dw, db


def _reference_add_backward(
    dy,
    d_residual_out,
    residual_out,
    weight,
    rstd,
    wanted,
    dims,
    offset,
    casting,
    alpha,
    dx_dtype,
    d_residual_dtype,
    dw_dtype,
    db_dtype,
    backend,
):
    dtypes = torch_ops.wanted_gradients(
        wanted, dx_dtype, d_residual_dtype, dw_dtype, db_dtype, residual_out, weight
    )
    options = {"offset": offset, "casting": casting, "alpha": alpha}
    given = dy, d_residual_out, residual_out, weight, rstd, dims, dtypes
    dx, *others = _reference_gradients(*given, **options)
    return dx if wanted & DX else None, *others


def _reference_gradients(
    dy: Tensor,
    d_residual_out: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dims: int,
    dtypes: Wanted,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """rstd is an input like the others."""
    _check_vectors(x, weight, None, dims)
    check_like("dy", dy, x)
    results = reference.gradients_torch(
        x.flatten(-dims),
        dy.flatten(-dims),
        _flat(weight, dims),
        rstd.reshape(-1),
        None if d_residual_out is None else d_residual_out.flatten(-dims),
        dtypes,
        **options,
    )
    of_vectors = x.shape[-dims:] if weight is None else weight.shape
    shapes = x.shape, x.shape, of_vectors, of_vectors
    pairs = zip(results, shapes, strict=True)
    return tuple(None if each is None else each.reshape(shape).contiguous() for each, shape in pairs)


def _map_forward(name: str, arrays: int) -> Callable[..., Any]:
    """vmap's rule of a forward, whose first `arrays` arguments are x, and residual. A batch of these is one more
    leading dimension. Where weight or bias has a batch, its calls are made one by one."""

    def run(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        if any(dim is not None for dim in in_dims[arrays:]) or info.batch_size == 0:
            return _one_by_one(name, info, in_dims, *arguments)
        given = [
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(arguments[:arrays], in_dims, strict=False)
        ]
        weight, bias, dims = arguments[arrays : arrays + 3]
        _check_vectors(given[0][0], weight, bias, dims)  # the batch is no dimension of x
        results = op(name)(*given, *arguments[arrays:])
        return results, (0,) * len(results)

    return run


def _one_by_one(name: str, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """vmap's rule of calls of which each has a weight, or a dw, of its own."""

    def of_batch(i: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [each if dim is None else each.select(dim, i) for each, dim in pairs]

    if info.batch_size == 0:  # as many results, of the shapes that those of one call have
        pairs = zip(arguments, in_dims, strict=True)
        one = [
            each if dim is None else each.movedim(dim, 0).new_zeros(_rest(each, dim)) for each, dim in pairs
        ]
        results = tuple(None if each is None else each.new_empty(0, *each.shape) for each in op(name)(*one))
    else:
        each_results = [op(name)(*of_batch(i)) for i in range(info.batch_size)]
        columns = zip(*each_results, strict=True)
        results = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    return results, tuple(None if each is None else 0 for each in results)


def _rest(tensor: Tensor, dim: int) -> list[int]:
    """The shape without one dimension."""
    sizes = list(tensor.shape)
    del sizes[dim]
    return sizes


def _check_vectors(x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int) -> None:
    torch_ops.check_dims(x, dims)
    check_weight(weight, bias, x, x.shape[-dims:])


def _is_transformed(*tensors: Tensor | None) -> bool:
    return gate.is_in_torch_func() or any(t is not None and gate.has_tangent(t) for t in tensors)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _with_backend_in_effect(options: tuple[Any, ...], x: Tensor) -> tuple[Any, ...]:
    """options, of which the backend is the last: in autograd's threads no `use_backend` is in effect. In a graph that
    is being made None stays: each run of it has its own."""
    if options[-1] is not None or gate.makes_graph() or gate.is_recorded(x):
        return options
    return *options[:-1], get_current_backend()


def _differentiable(tensors: tuple[Any, ...], dims: int, spec: Spec, wanted: Wanted) -> Gradients:
    """What a backward gives for x, dy, weight, rstd and d_residual_out, differentiable again."""
    x, dy, weight, _, d_residual_out = tensors
    if placements.is_dtensor(x):  # whose rows could not be flattened
        return composite.gradients(x, dy, weight, d_residual_out, dims, spec, wanted)
    return differentiable_backward(tensors, _call(x, weight, dims, spec), wanted)


def _call(x: Tensor, weight: Tensor | None, dims: int, spec: Spec) -> Call:
    heads = weight.shape[0] if weight is not None and weight.ndim > dims else 0
    return Call(spec._replace(n=x.shape[-dims:].numel()), None, None, "torch", heads)


def _flat(vector: Tensor | None, dims: int) -> Tensor | None:
    return None if vector is None else vector.flatten(-dims)


def _sum_of_rows(
    dy: Tensor, weight: Tensor | None, rstd: Tensor, dims: int, bias: tuple[torch.dtype, torch.Size]
) -> Tensor:
    """db where nothing else is needed."""
    if torch.is_grad_enabled():
        return reference.sum_of_rows(dy, bias[1], compute_dtype(dy.dtype), bias[0])
    return sum_of_rows_by_op(dy, weight, rstd, dims, bias[0]).view(bias[1])


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm_forward": (_forward, _map_forward("rms_norm_forward", 1)),
    "rms_norm_backward": (_backward, functools.partial(_one_by_one, "rms_norm_backward")),
    "add_rms_norm_forward": (_add_forward, _map_forward("add_rms_norm_forward", 2)),
    "add_rms_norm_backward": (_add_backward, functools.partial(_one_by_one, "add_rms_norm_backward")),
}
for _name, (_differentiated, _mapped) in _RULES.items():
    library.impl(_name, _differentiated, "Autograd")
    torch.library.register_vmap(f"{torch_ops.NAMESPACE}::{_name}", _mapped, lib=library)
