# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the two library ops of `qk_norm_rope`, and how they are differentiated, mapped over batches and sharded.

As op.py does for the norm. q and k have three or four dimensions; cos, sin and position_ids are as the caller gave
them. The backward computes dq and dk always, and the gradients of weights where `wanted` has their bits. Nothing is
saved but what the forward was given.

DTensors: q and k may be sharded in all dimensions but the last, both alike. Sharded by heads, weights (D,) are
replicated and per-head weights sharded; cos and sin are sharded along the sequence as q is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arguments import Checked
from tilegym_rmsnorm.call.rope import checked_rope, checked_rope_backward
from tilegym_rmsnorm.call.rope_spec import ROPE_OPS, ROPE_OPTIONS, RopeGradients, RopeOutputs, RopeWanted
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.tensors import is_dtensor, savable
from tilegym_rmsnorm.call.watched import is_traced
from tilegym_rmsnorm.routes import choose, known_calls, op, op_gradients
from tilegym_rmsnorm.routes.rope_kernels import (
    bind_rope,
    bind_rope_backward,
    rope_by_operations,
    rope_gradients_by_operations,
    run_rope,
    run_rope_backward,
)
from tilegym_rmsnorm.settings import check_backend_name

OF_Q, OF_K = 1, 2  # bits of `wanted`: the gradients of which weights
_FORWARD_TENSORS = (
    "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? position_ids"
)
_NUMBERS = (
    "float eps, float offset, int rotary_dim, bool interleaved, str casting, str rope_rounding, str? backend"
)
SCHEMAS = {
    ROPE_OPS[0]: f"({_FORWARD_TENSORS}, {_NUMBERS}) -> (Tensor q_out, Tensor? k_out)",
    ROPE_OPS[1]: (
        f"(Tensor dq_out, Tensor? dk_out, {_FORWARD_TENSORS}, int wanted, {_NUMBERS})"
        " -> (Tensor dq, Tensor? dk, Tensor? dq_weight, Tensor? dk_weight)"
    ),
}
for _name, _schema in SCHEMAS.items():
    op.library.define(_name + _schema)
FORWARD = torch.ops.tilegym_rmsnorm.qk_norm_rope_forward.default
BACKWARD = torch.ops.tilegym_rmsnorm.qk_norm_rope_backward.default


def call_rope(tensors: tuple[Any, ...], call: Call) -> RopeOutputs:
    """Call the forward op on the tensors of a checked forward."""
    prepare(tensors)
    return FORWARD(*tensors, *call.spec[1:], call.backend)


def call_rope_backward(tensors: tuple[Any, ...], call: Call, wanted: RopeWanted) -> RopeGradients:
    """Call the backward op on the tensors of a checked backward. Gradients of weights have the weights' dtypes."""
    prepare(tensors)
    return BACKWARD(*tensors, bits_of(wanted), *call.spec[1:], call.backend)


def bits_of(wanted: RopeWanted) -> int:
    return OF_Q * (wanted.dq_weight is not None) + OF_K * (wanted.dk_weight is not None)


def wanted_of(bits: int, q_weight: Tensor | None, k_weight: Tensor | None) -> RopeWanted:
    of_q = q_weight.dtype if q_weight is not None and bits & OF_Q else None
    return RopeWanted(of_q, k_weight.dtype if k_weight is not None and bits & OF_K else None)


def prepare(tensors: tuple[Any, ...]) -> None:
    """Register the sharding rules of the ops if one of the tensors is a DTensor, before the first call with one."""
    if not is_traced() and any(map(is_dtensor, tensors)):
        _register_sharding()


def _split_forward(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return arguments[:7], arguments[7:]


def _split_backward(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], int, tuple[Any, ...]]:
    return arguments[:9], arguments[9], arguments[10:]


def _checked_forward(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Checked:
    *numbers, backend = options
    check_backend_name(backend)
    return checked_rope(*tensors, **dict(zip(ROPE_OPTIONS, numbers, strict=True)))


def _checked_backward(
    tensors: tuple[Any, ...], bits: int, options: tuple[Any, ...]
) -> tuple[Checked, RopeWanted]:
    *numbers, backend = options
    check_backend_name(backend)
    checked = checked_rope_backward(*tensors, **dict(zip(ROPE_OPTIONS, numbers, strict=True)))
    if not 0 <= bits <= OF_Q + OF_K:
        raise ValueError(f"wanted: expected 0 to {OF_Q + OF_K}, got {bits}")
    _, _, _, _, q_weight, k_weight, *_ = checked.tensors
    return checked, wanted_of(bits, q_weight, k_weight)


def _known_call(tensors: tuple[Any, ...], options: tuple[Any, ...], wanted: int = 0) -> Any:
    *numbers, backend = options
    eps, offset, rotary_dim, interleaved, *_ = numbers
    # A number of another type may equal one of these as a key. The dispatcher casts or refuses it.
    if not (type(eps) is float and type(offset) is float and type(rotary_dim) is int and type(wanted) is int):
        return None
    if type(interleaved) is not bool:
        return None
    return known_calls.rope_call(tensors, (wanted, *numbers), backend)


def run_known_rope(*arguments: Any) -> RopeOutputs | None:
    """Run the forward op like an earlier one, without checks; None: none was like it."""
    tensors, options = _split_forward(arguments)
    run = known_calls.ROPE_FORWARD_OP.find(_known_call(tensors, options))
    return None if run is None else run(tensors)


def run_known_rope_backward(*arguments: Any) -> RopeGradients | None:
    """Run the backward op like an earlier one, without checks; None: none was like it."""
    tensors, bits, options = _split_backward(arguments)
    run = known_calls.ROPE_BACKWARD_OP.find(_known_call(tensors, options, bits))
    return None if run is None else run(tensors)


def run_forward(*arguments: Any) -> RopeOutputs:
    """Run the forward op, on real tensors."""
    if (known := run_known_rope(*arguments)) is not None:
        return known
    tensors, options = _split_forward(arguments)
    checked = _checked_forward(tensors, options)
    call = choose.call_of_op(checked, options[-1])
    outputs = run_rope(checked, call)
    if known_calls.may_remember(tensors, checked.tensors, call.forward):
        known_call = _known_call(tensors, options)
        known_calls.ROPE_FORWARD_OP.remember(known_call, lambda: bind_rope(tensors, call))
    return outputs


def run_backward(*arguments: Any) -> RopeGradients:
    """Run the backward op, on real tensors."""
    if (known := run_known_rope_backward(*arguments)) is not None:
        return known
    tensors, bits, options = _split_backward(arguments)
    checked, wanted = _checked_backward(tensors, bits, options)
    call = choose.call_of_op(checked, options[-1], wanted)
    gradients = run_rope_backward(checked, call, wanted)
    if known_calls.may_remember(tensors, checked.tensors, call.backward):
        known_call = _known_call(tensors, options, bits)
        known_calls.ROPE_BACKWARD_OP.remember(known_call, lambda: bind_rope_backward(tensors, call, wanted))
    return gradients


def _forward_of_fakes(*arguments: Any) -> RopeOutputs:
    q, k, *_ = _checked_forward(*_split_forward(arguments)).tensors
    return q.new_empty(q.shape), None if k is None else k.new_empty(k.shape)


def _backward_of_fakes(*arguments: Any) -> RopeGradients:
    checked, wanted = _checked_backward(*_split_backward(arguments))
    _, _, q, k, *weights = checked.tensors[:6]
    of_weights = (
        None if dtype is None else q.new_empty(weight.shape, dtype=dtype)
        for weight, dtype in zip(weights, wanted, strict=True)
    )
    return q.new_empty(q.shape), None if k is None else k.new_empty(k.shape), *of_weights


class RopeFunction(torch.autograd.Function):
    """Forward with a gradient. `run` computes it; `gradients` computes the gradients of the tensors saved."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, position_ids, run, gradients):
        tensors = q, k, q_weight, k_weight, cos, sin, position_ids
        ctx.save_for_backward(*map(savable, tensors))
        # The gradient of an unused result is None, and so are those that it leads to. Zeros would be no DTensor.
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return run(tensors)

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        if dq_out is None and dk_out is None:
            return (None,) * 9
        of_heads = (dq_out, dk_out) * 2  # of q, k and their weights
        pairs = zip(ctx.needs_input_grad[:4], of_heads, strict=True)
        needs_dq, needs_dk, *needs_of_weights = [is_needed and each is not None for is_needed, each in pairs]
        q, k, q_weight, k_weight, *tables = ctx.saved_tensors
        dq_out = torch.zeros_like(q) if dq_out is None else dq_out
        dk_out = torch.zeros_like(k) if dk_out is None and k is not None else dk_out
        bits = OF_Q * needs_of_weights[0] + OF_K * needs_of_weights[1]
        given = dq_out, dk_out, q, k, q_weight, k_weight, *tables
        dq, dk, *of_weights = ctx.gradients(given, wanted_of(bits, q_weight, k_weight))
        return dq if needs_dq else None, dk if needs_dk else None, *of_weights, *[None] * 5


def _differentiate_forward(*arguments: Any) -> Any:
    tensors, options = _split_forward(arguments)
    prepare(tensors)
    if choose.why_transformed(*tensors) is not None:
        return _transformed_forward(*tensors, *options)
    if op_gradients.is_differentiated(*tensors):
        spec = _checked_forward(tensors, options).spec
        call = Call(spec, op_gradients.with_backend_in_effect(options, tensors[0])[-1])

        def run(tensors: tuple[Any, ...]) -> RopeOutputs:
            with op_gradients.below_autograd():
                return FORWARD(*tensors, *options)

        return RopeFunction.apply(*tensors, run, functools.partial(_gradients_of_op, call))
    if op_gradients.are_for_kernels(*tensors):
        return run_forward(*tensors, *options)
    with op_gradients.below_autograd():
        return FORWARD(*tensors, *options)


def _gradients_of_op(call: Call, tensors: tuple[Any, ...], wanted: RopeWanted) -> RopeGradients:
    if choose.why_create_graph() is None:
        return call_rope_backward(tensors, call, wanted)
    return rope_gradients_by_operations(tensors, call.spec, wanted)


def _differentiate_backward(*arguments: Any) -> Any:
    tensors, bits, options = _split_backward(arguments)
    prepare(tensors)
    if choose.why_transformed(*tensors) is not None or op_gradients.is_differentiated(*tensors):
        return _transformed_backward(*tensors, bits, *options)
    if op_gradients.are_for_kernels(*tensors):
        return run_backward(*tensors, bits, *options)
    with op_gradients.below_autograd():
        return BACKWARD(*tensors, bits, *options)


def _transformed_forward(*arguments: Any) -> RopeOutputs:
    checked = _checked_forward(*_split_forward(arguments))
    return rope_by_operations(checked.tensors, checked.spec)


def _transformed_backward(*arguments: Any) -> RopeGradients:
    checked, wanted = _checked_backward(*_split_backward(arguments))
    return rope_gradients_by_operations(checked.tensors, checked.spec, wanted)


@functools.cache
def _register_sharding() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(FORWARD)(lambda *arguments: _sharding_rules(2, arguments))
    register_sharding(BACKWARD)(lambda *arguments: _sharding_rules(4, arguments))


def _sharding_rules(count: int, arguments: tuple[Any, ...]) -> list[tuple[list[Any], list[Any]]]:
    """List the placements of results and arguments on one dimension of a mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    heads, (q_weight, k_weight, cos, _, positions) = arguments[:count], arguments[count : count + 5]
    rest, q = len(arguments) - count - 5, arguments[count - 2]
    weights, batches = (q_weight, k_weight), q.ndim - 3
    rules = []
    for placement in (Replicate(), *(Shard(dim) for dim in range(q.ndim - 1))):
        dim = getattr(placement, "dim", None)
        of_tables = of_positions = Replicate()
        if dim is not None and dim < q.ndim - 2:  # along a batch or the sequence
            if positions is None:
                of_tables = _along(cos, cos.ndim - 1, dim, batches)
            else:
                of_positions = _along(positions, positions.ndim, dim, batches)
        is_by_heads = dim == q.ndim - 2
        of_weights, of_sums = [], []
        for weight in weights:
            is_sharded = weight is not None and weight.ndim == 2 and is_by_heads
            of_weights.append(None if weight is None else Shard(0) if is_sharded else Replicate())
            of_sums.append(of_weights[-1] if dim is None or is_sharded or weight is None else Partial())
        given = [None if each is None else placement for each in heads] + of_weights
        given += [of_tables, of_tables, None if positions is None else of_positions, *[None] * rest]
        results = [placement, None if arguments[count - 1] is None else placement]
        if count == 4:
            bits = arguments[count + 5]
            results += [
                of_sum if bits & bit else None for bit, of_sum in zip((OF_Q, OF_K), of_sums, strict=True)
            ]
        rules.append((results, given))
    return rules


def _along(tensor: Any, leading: int, dim: int, batches: int) -> Any:
    """Place tables or positions, of so many leading dimensions, beside heads that are sharded in `dim`."""
    from torch.distributed.tensor import Replicate, Shard

    own = dim - batches + leading - 1  # dim counted from the sequence, which is the last leading dimension
    return Shard(own) if own >= 0 and tensor.shape[own] > 1 else Replicate()


op.find_known_first(FORWARD, run_known_rope)
op.find_known_first(BACKWARD, run_known_rope_backward)
for _name, _op, _run, _fake, _differentiated, _transformed in (
    (ROPE_OPS[0], FORWARD, run_forward, _forward_of_fakes, _differentiate_forward, _transformed_forward),
    (ROPE_OPS[1], BACKWARD, run_backward, _backward_of_fakes, _differentiate_backward, _transformed_backward),
):
    op.library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{op.NAMESPACE}::{_name}", _fake, lib=op.library)
    op.library.impl(_name, _differentiated, "Autograd")
    _map = functools.partial(op_gradients.one_by_one, _op)
    torch.library.register_vmap(f"{op.NAMESPACE}::{_name}", _map, lib=op.library)
    op_gradients.DECOMPOSITIONS[_op] = _transformed
    for _key in ("Tracer", "Batched"):  # as in op_gradients.py
        op.library.impl(_name, _transformed, _key)
