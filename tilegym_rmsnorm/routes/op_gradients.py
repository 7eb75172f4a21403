# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Differentiate the ops of op.py, and map them over batches for vmap.

The forward op has an autograd.Function at the dispatch key Autograd: half the host time of register_autograd. Its
backward is the backward op, or, under create_graph, PyTorch's operations, which are differentiable again. A gradient
through the backward op itself also runs PyTorch's operations. So do both ops inside a transform of torch.func and on
tensors with a tangent, since PyTorch can transform its own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.call import watched
from tilegym_rmsnorm.call.spec import DX, Call, Spec, as_needed, dtype_of, wanted_of
from tilegym_rmsnorm.call.tensors import check_memory, is_plain, savable
from tilegym_rmsnorm.call.validation import check_weight, last_dims
from tilegym_rmsnorm.routes import choose, op, operations
from tilegym_rmsnorm.settings import get_current_backend

below_autograd = torch._C._AutoDispatchBelowAutograd


class _ForwardOfOp(torch.autograd.Function):
    """Forward op with a gradient. Saves weight, rstd and the normalized tensor: x, or with a residual residual_out."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, options):
        with below_autograd():
            y, rstd, residual_out = op.FORWARD(x, residual, weight, bias, *options)
        ctx.save_for_backward(savable(x) if residual is None else residual_out, savable(weight), rstd)
        ctx.dtypes = tuple(map(dtype_of, (x, residual, weight, bias)))
        ctx.bias_shape = () if bias is None else bias.shape
        ctx.options = with_backend_in_effect(options, x)
        ctx.set_materialize_grads(False)
        needs_sum = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        fixed = [rstd] if residual_out is None or needs_sum else [rstd, residual_out]
        ctx.mark_non_differentiable(*fixed)
        return y, rstd, residual_out

    @staticmethod
    def backward(ctx, dy, _, d_residual_out):
        dims, eps, offset, casting, alpha, _, _, backend = ctx.options
        needs = ctx.needs_input_grad[:4]
        if dy is None:
            dx, d_residual = operations.gradients_of_sum(d_residual_out, alpha, ctx.dtypes, needs)
            return dx, d_residual, None, None, None
        alpha, wanted = wanted_of(needs, alpha, ctx.dtypes)
        call = Call(Spec(0, eps, offset, casting, alpha), backend)
        x, weight, rstd = ctx.saved_tensors
        tensors = x, dy, weight, rstd, d_residual_out
        if choose.why_create_graph() is None:
            results = op.call_backward(tensors, dims, call, wanted, needs_dx=needs[0] or needs[1])
        elif wanted.dx is None:
            results = None, None, None, operations.db_by_operations(dy, ctx.bias_shape, wanted)
        else:
            results = operations.gradients_of_saved(tensors, dims, call, wanted)
        return *as_needed(needs, results, ctx.bias_shape), None


def _differentiate_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> Any:
    tensors = x, residual, weight, bias
    op.prepare(x)
    if choose.why_transformed(*tensors) is not None:
        return _transformed_forward(*tensors, *options)
    if is_differentiated(*tensors):
        return _ForwardOfOp.apply(*tensors, options)
    # Not below autograd: the next call like this one looks for it with the dispatch keys of here.
    if are_for_kernels(*tensors):
        return op.run_forward(*tensors, *options)
    with below_autograd():
        return op.FORWARD(*tensors, *options)


def _differentiate_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, d_residual_out: Tensor | None, *options: Any
) -> Any:
    tensors = dy, x, weight, rstd, d_residual_out
    op.prepare(x)
    if choose.why_transformed(*tensors) is not None or is_differentiated(*tensors):
        return _transformed_backward(*tensors, *options)
    if are_for_kernels(*tensors):
        return op.run_backward(*tensors, *options)
    with below_autograd():
        return op.BACKWARD(*tensors, *options)


def _transformed_forward(x: Tensor, *rest: Any) -> Any:
    checked, dims, _ = op.arguments_of_forward(x, *rest)
    check_memory(**dict(zip(checked.names, checked.tensors, strict=True)))
    y, rstd, residual_out = reference.forward_torch(checked.tensors, checked.spec, dims)
    residual_out = None if residual_out is None else residual_out.contiguous()
    return y.contiguous(), rstd.detach(), residual_out


def _transformed_backward(dy: Tensor, x: Tensor, *rest: Any) -> Any:
    """Compute gradients by PyTorch's operations. rstd is differentiated like the other inputs."""
    checked, dims, bits, wanted, _ = op.arguments_of_backward(dy, x, *rest)
    results = operations.gradients_by_operations(checked.tensors, dims, checked.spec, wanted)
    dx, d_residual, dw, db = (None if each is None else each.contiguous() for each in results)
    return dx if bits & DX else x.new_empty(0), dw, db, d_residual


def _map_forward(info: Any, in_dims: tuple[int | None, ...], x: Tensor, residual: Any, *rest: Any) -> Any:
    """Map the forward op over a batch, for vmap. A batch of x or residual is one more leading dimension. Where weight
    or bias is batched, the op is called once for each."""
    if any(dim is not None for dim in in_dims[2:]) or info.batch_size == 0:
        return one_by_one(op.FORWARD, info, in_dims, x, residual, *rest)
    rows = (
        each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in ((x, in_dims[0]), (residual, in_dims[1]))
        if each is not None
    )
    x, residual = next(rows), next(rows, None)
    weight, bias, dims = rest[:3]
    check_weight(weight, bias, x[0], last_dims(x[0], dims))  # on x[0]: the batch dimension is not of heads
    results = op.FORWARD(x, residual, *rest)
    return results, tuple(None if each is None else 0 for each in results)


def one_by_one(function: Any, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """Call an op once for each element of a batch, for vmap: each has a weight, or a dw, of its own."""

    def of_batch(i: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [each if dim is None else each.select(dim, i) for each, dim in pairs]

    if info.batch_size == 0:  # the shapes of the results come from one call on zeros
        pairs = zip(arguments, in_dims, strict=True)
        moved = [(each if dim is None else each.movedim(dim, 0), dim) for each, dim in pairs]
        one = [each if dim is None else each.new_zeros(each.shape[1:]) for each, dim in moved]
        results = tuple(None if each is None else each.new_empty(0, *each.shape) for each in function(*one))
    else:
        each_results = [function(*of_batch(i)) for i in range(info.batch_size)]
        columns = zip(*each_results, strict=True)
        results = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    return results, tuple(None if each is None else 0 for each in results)


def is_differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def are_for_kernels(*tensors: Tensor | None) -> bool:
    """Whether no mode and no subclass stands between this rule and the op's own implementation: then the rule runs that
    itself, past a kernel that somebody else registered for a device."""
    return not watched.is_watched() and all(each is None or is_plain(each) for each in tensors)


def with_backend_in_effect(options: tuple[Any, ...], x: Tensor) -> tuple[Any, ...]:
    """Put the backend in effect into options, as the last one: autograd's threads do not see `use_backend`. In a graph
    that is being made None stays, for the backend in effect at each run."""
    if options[-1] is not None or watched.makes_graph() or choose.why_recorded({"x": x}) is not None:
        return options
    return *options[:-1], get_current_backend()


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm_forward": (_differentiate_forward, _map_forward),
    "rms_norm_backward": (_differentiate_backward, functools.partial(one_by_one, op.BACKWARD)),
}
for _name, (_differentiated, _mapped) in _RULES.items():
    op.library.impl(_name, _differentiated, "Autograd")
    torch.library.register_vmap(f"{op.NAMESPACE}::{_name}", _mapped, lib=op.library)
# PyTorch's operations for each op; rope_op.py adds its own.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    op.FORWARD: _transformed_forward,
    op.BACKWARD: _transformed_backward,
}
# torch.jit.trace cannot take an op whose results may be None. Neither can the older vmap, by which
# autograd.grad(is_grads_batched=True) maps a backward.
for _key in ("Tracer", "Batched"):
    op.library.impl("rms_norm_forward", _transformed_forward, _key)
    op.library.impl("rms_norm_backward", _transformed_backward, _key)
