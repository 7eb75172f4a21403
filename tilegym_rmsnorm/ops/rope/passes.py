# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe, bind and record the forward and the backward of `qk_norm_rope`, as ops/norm/passes.py does for a norm.

Tensors are in the order of spec.py, heads (B, T, H, D) or (T, H, D). Nothing is checked here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.layout import View, arranged, in_shape_of, is_packed, packed
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.tensors import check_memory, savable
from tilegym_rmsnorm.ops.rope.checks import names_of
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import (
    OF_BACKWARD,
    OF_K,
    OF_Q,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeWanted,
)
from tilegym_rmsnorm.routes.autograd import Recording, Tensors
from tilegym_rmsnorm.routes.known_calls import call_of
from tilegym_rmsnorm.routes.main_grad import IN_USE, adds, gradient_of, is_marked, target_of


def known_call(tensors: Tensors, numbers: tuple[Any, ...], backend: Any, wanted: Any = 0) -> Any:
    """Describe a forward or a backward for known calls; None where it cannot be known. numbers: `ROPE_OPTIONS`; of an
    op all behind them too. wanted: of a backward."""
    eps, offset, rotary_dim, interleaved = numbers[:4]
    # A number of another type may equal one of these as a key, but must raise an error, or be cast by the dispatcher.
    is_usual = (eps is None or type(eps) is float) and type(offset) is float and type(interleaved) is bool
    if not is_usual or not (rotary_dim is None or type(rotary_dim) is int):
        return None
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    rows = *[each for each in heads if each is not None], cos, sin
    marks = len(IN_USE) and (is_marked(q_weight), is_marked(k_weight))
    vectors, types = (q_weight, k_weight, positions), tuple(map(type, tensors))
    return call_of(rows, vectors, types, (wanted, numbers, marks), backend)


def bind_forward(tensors: Tensors, call: Call) -> Callable[[Tensors], RopeOutputs]:
    """Return a function of tensors like these that computes q_out and k_out."""
    return _bind(call.forward, rope_by_operations, tensors, call.spec)


def bind_backward(tensors: Tensors, call: Call, wanted: RopeWanted) -> Callable[[Tensors], RopeGradients]:
    return _bind(call.backward, rope_gradients_by_operations, tensors, call.spec, wanted)


def _bind(
    function: Any, by_operations: Callable[..., Any], tensors: Tensors, spec: RopeSpec, *wanted: RopeWanted
) -> Callable[[Tensors], Any]:
    own, targets = tensors[:OF_BACKWARD], tensors[OF_BACKWARD:]  # all of a forward's are its own
    if any(each is not None and each.numel() == 0 for each in own[:-5]):  # heads without elements: 0 is added
        return torch.no_grad()(lambda tensors: _copies(by_operations(tensors[:OF_BACKWARD], spec, *wanted)))
    views = rope_views(own) + [None] * len(targets)
    return arranged(function, spec, tensors, views, _shaped(tensors), *wanted)


def rope_by_operations(tensors: Tensors, spec: RopeSpec) -> RopeOutputs:
    """Compute q_out and k_out by PyTorch's differentiable operations; contiguous. Raises ValueError where the memory of
    a tensor was freed."""
    check_memory(**dict(zip(names_of(tensors), tensors, strict=True)))
    outputs = rope_forward_torch(_in_batches(tensors), spec)
    return tuple(_packed_as(each, tensors[0]) for each in outputs)  # type: ignore[return-value]


def rope_gradients_by_operations(tensors: Tensors, spec: RopeSpec, wanted: RopeWanted) -> RopeGradients:
    """Compute the gradients so that they can be differentiated again."""
    check_memory(**dict(zip(names_of(tensors), tensors, strict=True)))
    dq, dk, *of_weights = rope_gradients_torch(_in_batches(tensors), spec, wanted)
    return _packed_as(dq, tensors[0]), _packed_as(dk, tensors[0]), *of_weights  # type: ignore[return-value]


def _copies(results: Tensors) -> Any:
    """Copy results that may be views, which autograd would not let anyone change in place."""
    return tuple(None if each is None else packed(each) for each in results)


def _in_batches(tensors: Tensors) -> Any:
    if tensors[0].ndim == 4:
        return tensors
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    return *(None if each is None else each[None] for each in heads), q_weight, k_weight, cos, sin, positions


def _packed_as(result: Tensor | None, heads: Tensor) -> Tensor | None:
    if result is None:
        return None
    return (result if heads.ndim == 4 else result[0]).contiguous()


def _shaped(tensors: Tensors) -> Callable[[Tensors, Tensors], Tensors] | None:
    """Return a function that gives the first two results three dimensions, where the heads have three."""
    if tensors[0].ndim == 4:
        return None

    def shaped(tensors: Tensors, results: Tensors) -> Tensors:
        first, second, *others = results
        heads = zip((first, second), tensors, strict=False)
        return *(None if each is None else in_shape_of(like, each) for each, like in heads), *others

    return shaped


def rope_views(tensors: tuple[Any, ...]) -> list[View]:
    """Arrange the checked tensors of a forward or of a backward: heads, (B, T, H, D) or (T, H, D), and behind them
    q_weight, k_weight, cos, sin and position_ids."""
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    views = [None if each is None else _view_of_heads(each) for each in heads]
    views += [None if each is None or is_packed(each) else packed for each in (q_weight, k_weight)]
    # Together: a backend asks one of them how many rows there are.
    is_shared = positions is None and cos.ndim == 3 and _is_shared(cos) and _is_shared(sin)
    views += [_view_of_table(each, is_shared) for each in (cos, sin)]
    return [*views, None if positions is None else _view_of_positions(positions)]


def _view_of_heads(x: Tensor) -> View:
    n, strides = x.shape[-1], x.stride()
    is_readable = strides[-1] == 1 and all(
        extent == 1 or stride >= n for extent, stride in zip(x.shape[:-1], strides[:-1], strict=True)
    )
    if x.ndim == 4:
        return None if is_readable else packed
    return (lambda x: x[None]) if is_readable else lambda x: packed(x)[None]


def _view_of_table(table: Tensor, is_shared: bool) -> View:
    columns = table.shape[-1]

    def view(table: Tensor) -> Tensor:
        rows = table[0] if is_shared else table.reshape(-1, columns)
        return rows if rows.stride(-1) == 1 and rows.stride(0) >= columns else packed(rows)

    is_as_taken = table.ndim == 2 and table.stride(-1) == 1 and table.stride(0) >= columns
    return None if is_as_taken else view


def _is_shared(tensor: Tensor) -> bool:
    """Whether all batches have the same rows."""
    return tensor.shape[0] == 1 or tensor.stride(0) == 0


def _view_of_positions(positions: Tensor) -> View:
    is_flat, is_shared = positions.ndim == 1, positions.ndim == 2 and _is_shared(positions)

    def view(positions: Tensor) -> Tensor:
        rows = positions[None] if is_flat else positions[:1] if is_shared else positions
        return rows if is_packed(rows) else packed(rows)

    return None if not is_flat and not is_shared and is_packed(positions) else view


def recording(
    run: Callable[[Tensors], Tensors], gradients: Callable[..., RopeGradients], tensors: Tensors | None = None
) -> Recording:
    """Record a call that `run` computes, and whose backward `gradients` computes from its tensors, the bits of the
    weights whose gradients are wanted, and what is added to. tensors: The call's; None: nothing is added."""
    owners = () if tensors is None else tuple([each if adds(each) else None for each in tensors[2:4]])
    return Recording(run, _saved, functools.partial(_gradients_of_results, gradients, owners))


def _saved(tensors: Tensors, _: Tensors) -> Tensors:
    return tuple(map(savable, tensors))


def _gradients_of_results(
    gradients: Callable[..., RopeGradients],
    owners: Tensors,
    saved: Callable[[], Tensors],
    results: Tensors,
    needs: tuple[bool, ...],
) -> Tensors:
    dq_out, dk_out = results
    if dq_out is None and dk_out is None:
        return (None,) * 7
    of_heads = (dq_out, dk_out) * 2  # of q, k and their weights
    needs_dq, needs_dk, *needs_of_weights = [
        is_needed and each is not None for is_needed, each in zip(needs[:4], of_heads, strict=True)
    ]
    tensors = saved()
    q, k, *_ = tensors
    dq_out = torch.zeros_like(q) if dq_out is None else dq_out
    dk_out = torch.zeros_like(k) if dk_out is None and k is not None else dk_out
    bits = OF_Q * needs_of_weights[0] + OF_K * needs_of_weights[1]
    if not owners:
        dq, dk, *of_weights = gradients((dq_out, dk_out, *tensors), bits)
    else:
        targets = [
            target_of(owner) if owner is not None and is_needed else None
            for owner, is_needed in zip(owners, needs_of_weights, strict=True)
        ]
        dq, dk, *of_weights = gradients((dq_out, dk_out, *tensors), bits, tuple(targets))
        of_weights = [
            returned if target is None else gradient_of(owner)
            for returned, target, owner in zip(of_weights, targets, owners, strict=True)
        ]
    return dq if needs_dq else None, dk if needs_dk else None, *of_weights, None, None, None
