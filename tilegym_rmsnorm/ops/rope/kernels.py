# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run a checked call of `qk_norm_rope` on a backend, or by PyTorch's operations. Nothing is checked or recorded here.

Tensors are in the order of ops/rope/spec.py, heads (B, T, H, D) or (T, H, D). `bind_rope` and `bind_rope_backward`
decide all that shapes, strides and dtypes decide, as ops/norm/kernels.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.contract import bound
from tilegym_rmsnorm.backends.layout import View, in_shape_of, packed, viewed
from tilegym_rmsnorm.backends.rope_layout import rope_views
from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.tensors import check_memory
from tilegym_rmsnorm.ops.rope.checks import names_of
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import RopeGradients, RopeOutputs, RopeSpec, RopeWanted
from tilegym_rmsnorm.routes import known_calls
from tilegym_rmsnorm.routes.calls import unseen

RunRope = Callable[[tuple[Any, ...]], Any]


def known_call(tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: Any, wanted: Any = 0) -> Any:
    """Describe a forward or a backward for known calls; None where it cannot be known. numbers: `ROPE_OPTIONS`. wanted:
    of a backward."""
    eps, offset, rotary_dim, interleaved, *_ = numbers
    # A number of another type may equal one of these as a key, but must raise an error, or be cast by the dispatcher.
    is_usual = (eps is None or type(eps) is float) and type(offset) is float and type(interleaved) is bool
    if not is_usual or not (rotary_dim is None or type(rotary_dim) is int):
        return None
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    rows = *[each for each in heads if each is not None], cos, sin
    vectors, types = (q_weight, k_weight, positions), tuple(map(type, tensors))
    return known_calls.call_of(rows, vectors, types, (wanted, numbers), backend)


def bind_rope(tensors: tuple[Any, ...], call: Call) -> RunRope:
    """Return a function of tensors with the metadata of these, which holds none of them: it computes q_out and
    k_out."""
    if _has_no_elements(tensors):
        return torch.no_grad()(lambda tensors: _copies(rope_by_operations(tensors, call.spec)))
    views = rope_views(tensors)
    return _arranged(bound(call.forward, call.spec, viewed(tensors, views)), tensors, views)


def bind_rope_backward(tensors: tuple[Any, ...], call: Call, wanted: RopeWanted) -> RunRope:
    if _has_no_elements(tensors):
        return torch.no_grad()(
            lambda tensors: _copies(rope_gradients_by_operations(tensors, call.spec, wanted))
        )
    views = rope_views(tensors)
    return _arranged(bound(call.backward, call.spec, viewed(tensors, views), wanted), tensors, views)


def run_rope(checked: Checked, call: Call) -> RopeOutputs:
    """Run a forward by itself, which autograd does not record."""
    with unseen(call.forward):  # type: ignore[arg-type]
        return bind_rope(checked.tensors, call)(checked.tensors)


def run_rope_backward(checked: Checked, call: Call, wanted: RopeWanted) -> RopeGradients:
    with unseen(call.backward):  # type: ignore[arg-type]
        return bind_rope_backward(checked.tensors, call, wanted)(checked.tensors)


def rope_by_operations(tensors: tuple[Any, ...], spec: RopeSpec) -> RopeOutputs:
    """Compute q_out and k_out by PyTorch's differentiable operations; contiguous. Raises ValueError where the memory of
    a tensor was freed."""
    check_memory(**dict(zip(names_of(tensors), tensors, strict=True)))
    outputs = rope_forward_torch(_in_batches(tensors), spec)
    return tuple(_packed_as(each, tensors[0]) for each in outputs)  # type: ignore[return-value]


def rope_gradients_by_operations(
    tensors: tuple[Any, ...], spec: RopeSpec, wanted: RopeWanted
) -> RopeGradients:
    """Compute the gradients so that they can be differentiated again."""
    check_memory(**dict(zip(names_of(tensors), tensors, strict=True)))
    dq, dk, *of_weights = rope_gradients_torch(_in_batches(tensors), spec, wanted)
    return _packed_as(dq, tensors[0]), _packed_as(dk, tensors[0]), *of_weights  # type: ignore[return-value]


def _has_no_elements(tensors: tuple[Any, ...]) -> bool:
    """Whether there is a tensor of heads without elements."""
    return any(each is not None and each.numel() == 0 for each in tensors[:-5])


def _arranged(run: RunRope, tensors: tuple[Any, ...], views: list[View]) -> RunRope:
    """Arrange tensors like these for a backend's function, and give its first two results three dimensions where the
    heads have three."""
    if not any(views):
        return run
    if tensors[0].ndim == 4:
        return lambda tensors: run(viewed(tensors, views))

    def run_arranged(tensors: tuple[Any, ...]) -> Any:
        first, second, *others = run(viewed(tensors, views))
        heads = zip((first, second), tensors, strict=False)
        return *(None if each is None else in_shape_of(like, each) for each, like in heads), *others

    return run_arranged


def _copies(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy results that may be views, which autograd would not let anyone change in place."""
    return tuple(None if each is None else packed(each) for each in results)


def _in_batches(tensors: tuple[Any, ...]) -> Any:
    if tensors[0].ndim == 4:
        return tensors
    *heads, q_weight, k_weight, cos, sin, positions = tensors
    return *(None if each is None else each[None] for each in heads), q_weight, k_weight, cos, sin, positions


def _packed_as(result: Tensor | None, heads: Tensor) -> Tensor | None:
    if result is None:
        return None
    return (result if heads.ndim == 4 else result[0]).contiguous()
