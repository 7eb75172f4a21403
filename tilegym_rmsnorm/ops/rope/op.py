# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe the two library ops of `qk_norm_rope`, forward and backward, and call them.

As ops/norm/op.py does for the norm. q and k have three or four dimensions; cos, sin and position_ids are as the caller
gave them. The backward computes dq and dk always, and the gradients of weights where `wanted` has their bits. Nothing
is saved but what the forward was given.

DTensors: q and k may be sharded in all dimensions but the last, both alike. Sharded by heads, weights (D,) are
replicated and per-head weights sharded; cos and sin are sharded along the sequence as q is.
"""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any

from tilegym_rmsnorm.call.arithmetic import default_eps
from tilegym_rmsnorm.call.spec import Checked
from tilegym_rmsnorm.call.tensors import OfPlainType
from tilegym_rmsnorm.call.validation import are_equal_in_graph
from tilegym_rmsnorm.ops.rope import passes
from tilegym_rmsnorm.ops.rope.checks import ROUNDINGS, check_tables, checked_rope, checked_rope_backward
from tilegym_rmsnorm.ops.rope.spec import OF_K, OF_Q, ROPE_OPS, RopeGradients, RopeOutputs, wanted_of
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.routes import by_library_ops, known_calls, library_op
from tilegym_rmsnorm.routes.autograd import RecordedFunction, Recording
from tilegym_rmsnorm.routes.known_calls import Run
from tilegym_rmsnorm.routes.library_op import CheckedCall, LibraryOp, Options, Tensors
from tilegym_rmsnorm.routes.main_grad import IN_USE, adds
from tilegym_rmsnorm.routes.public_calls import PublicCalls
from tilegym_rmsnorm.routes.traced import is_usual
from tilegym_rmsnorm.scopes import check_ended
from tilegym_rmsnorm.settings import check_backend_name, traced_backends

_FORWARD_TENSORS = (
    "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? position_ids"
)
_NUMBERS = (
    "float eps, float offset, int rotary_dim, bool interleaved, str casting, str rope_rounding,"
    " str? backend, int reproducible=0"
)
SCHEMAS = {
    ROPE_OPS[0]: f"({_FORWARD_TENSORS}, {_NUMBERS}) -> (Tensor q_out, Tensor? k_out)",
    ROPE_OPS[1]: (
        f"(Tensor dq_out, Tensor? dk_out, {_FORWARD_TENSORS}, int wanted, {_NUMBERS})"
        " -> (Tensor dq, Tensor? dk, Tensor? dq_weight, Tensor? dk_weight)"
    ),
}


def _known_forward(tensors: Tensors, options: Options, wanted: Any = 0) -> Any:
    return passes.known_call(tensors, options, options[-2], wanted) if type(options[-1]) is int else None


def _known_backward(tensors: Tensors, options: Options) -> Any:
    wanted = options[0]
    return _known_forward(tensors, options[1:], wanted) if type(wanted) is int else None


def _check_forward(*arguments: Any) -> CheckedCall:
    *numbers, backend, level = arguments[7:]
    check_backend_name(backend)
    return CheckedCall(checked_rope(arguments[:7], numbers, level), backend)


def _check_backward(*arguments: Any) -> CheckedCall:
    bits, *numbers, backend, level = arguments[9:]
    check_backend_name(backend)
    checked = checked_rope_backward(arguments[:9], numbers, level)
    if not 0 <= bits <= OF_Q + OF_K:
        raise ValueError(f"wanted: expected 0 to {OF_Q + OF_K}, got {bits}")
    return CheckedCall(checked, backend, wanted_of(bits, *checked.tensors[4:6]))


def _outputs_for_fakes(asked: CheckedCall) -> RopeOutputs:
    q, k, *_ = asked.checked.tensors
    return q.new_empty(q.shape), None if k is None else k.new_empty(k.shape)


def _gradients_for_fakes(asked: CheckedCall) -> RopeGradients:
    _, _, q, k, *weights = asked.checked.tensors[:6]
    of_weights = (
        None if dtype is None else q.new_empty(weight.shape, dtype=dtype)
        for weight, dtype in zip(weights, asked.wanted, strict=True)
    )
    return q.new_empty(q.shape), None if k is None else k.new_empty(k.shape), *of_weights


def _by_operations(checked: Checked) -> RopeOutputs:
    return passes.rope_by_operations(checked.tensors, checked.spec)


def _same(tensors: Tensors) -> Tensors:
    return tensors


class RopeFunction(RecordedFunction):
    """Normalized and rotated heads, with a gradient."""


def _recording(run: Run, tensors: Tensors, options: Options) -> Recording:
    _check_forward(*tensors, *options)  # here grad is on, and tables that require grad are refused
    return passes.recording(
        run, lambda tensors, wanted: by_library_ops.gradients_of_op(BACKWARD_OP, tensors, (wanted, *options))
    )


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


FORWARD_OP = LibraryOp(
    name=ROPE_OPS[0],
    schema=SCHEMAS[ROPE_OPS[0]],
    count=7,
    for_backend=itemgetter(slice(7)),
    known=known_calls.shared(),
    known_call=_known_forward,
    check=_check_forward,
    bind=lambda tensors, call, _: passes.bind_forward(tensors, call),
    for_fakes=_outputs_for_fakes,
    by_operations=lambda asked: _by_operations(asked.checked),
    rules=lambda *arguments: _sharding_rules(2, arguments),
    recording=_recording,
    node=RopeFunction,
)
BACKWARD_OP = LibraryOp(
    name=ROPE_OPS[1],
    schema=SCHEMAS[ROPE_OPS[1]],
    count=9,
    for_backend=itemgetter(slice(9)),
    known=known_calls.shared(),
    known_call=_known_backward,
    check=_check_backward,
    bind=lambda tensors, call, asked: passes.bind_backward(tensors, call, asked.wanted),
    for_fakes=_gradients_for_fakes,
    by_operations=lambda asked: passes.rope_gradients_by_operations(
        asked.checked.tensors, asked.checked.spec, asked.wanted
    ),
    rules=lambda *arguments: _sharding_rules(4, arguments),
)
FORWARD, BACKWARD = library_op.define(FORWARD_OP), library_op.define(BACKWARD_OP)
CALLS = PublicCalls(
    forward=FORWARD_OP,
    known=known_calls.shared(),
    arguments=lambda checked, backend: (*checked.tensors, *by_library_ops.options_of(checked.spec, backend)),
    in_order=_same,
    returned=lambda tensors: _same,
    by_operations=_by_operations,
    bind=functools.partial(by_library_ops.bind, FORWARD_OP, BACKWARD_OP, passes.recording),
    weights=slice(2, 4),
)


def rope_in_graph(tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: Any) -> Any:
    """Call the forward op for a usual call of `qk_norm_rope`, as routes/traced.py says: q_out and k_out. numbers:
    `ROPE_OPTIONS`."""
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    eps, offset, rotary_dim, interleaved, casting, rounding = numbers
    if backend is None and traced_backends:
        check_ended("use_backend")
        backend = traced_backends[-1]
    if not is_usual(tensors[:-1], (1.0, offset, eps), casting, backend) or not 3 <= q.ndim <= 4:
        return None
    if IN_USE and (adds(q_weight) or adds(k_weight)):
        return None
    if positions is not None and not isinstance(positions, OfPlainType):
        return None
    n = q.shape[-1]
    if k is not None and not (
        k.dtype == q.dtype
        and k.ndim == q.ndim
        and are_equal_in_graph(k.shape[:-2], q.shape[:-2])
        and are_equal_in_graph(k.shape[-1:], q.shape[-1:])
    ):
        return None
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None and (
            x is None
            or not 1 <= weight.ndim <= 2
            or not are_equal_in_graph(weight.shape, x.shape[-weight.ndim :])
        ):
            return None
    if rotary_dim is None:
        rotary_dim = n
    if not isinstance(rotary_dim, int) or rotary_dim % 2 != 0 or not 0 < rotary_dim <= n:
        return None
    if not isinstance(interleaved, bool) or rounding not in ROUNDINGS:
        return None
    check_tables(cos, sin, positions, q, rotary_dim, "x" if k is None else "q")
    eps = default_eps(q.dtype) if eps is None else eps
    return FORWARD(*tensors, eps, offset, rotary_dim, interleaved, casting, rounding, backend, flags())
