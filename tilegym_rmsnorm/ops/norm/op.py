# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe the two library ops of the norm, forward and backward, and call them.

x has any leading dimensions, then `normalized_dims` normalized ones. weight and bias have the shape of these, or one
dimension more for heads. rstd has x's shape with an extent of 1 for each normalized dimension, as in aten's fused ops:
flattened, it could not be sharded along a sequence. wanted: the sum of 1 for dx, 2 for dw, 4 for db, 8 for d_residual.
It comes before the other numbers, since sharding rules are cached by the arguments after the tensors. Gradients that
are not wanted, and residual_out without a residual, are None, as AOTInductor accepts where the schema says `Tensor?`.
But dx that is not wanted is a tensor without elements: if the first result is no `Tensor`, DTensor's engine wraps none
of the results. integrations/fx.py and quack.py write the arguments out in this order.

library_op.py defines both ops, sharding.py has their placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import compute_dtype, default_eps
from tilegym_rmsnorm.call.spec import Call, dtype_of
from tilegym_rmsnorm.call.tensors import check_memory
from tilegym_rmsnorm.call.validation import are_equal_in_graph, check_weight, checked_dtype, last_dims
from tilegym_rmsnorm.call.watched import count_modes
from tilegym_rmsnorm.ops.norm import checks, eager, operations, passes, reference, sharding
from tilegym_rmsnorm.ops.norm.checks import filled_in
from tilegym_rmsnorm.ops.norm.spec import (
    D_RESIDUAL,
    DB,
    DW,
    DX,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
    WantedGradients,
    as_needed,
    shape_of_rstd,
    wanted_of,
)
from tilegym_rmsnorm.reproducibility import flags
from tilegym_rmsnorm.routes import choose, library_op
from tilegym_rmsnorm.routes.autograd import RecordedFunction, Recording
from tilegym_rmsnorm.routes.known_calls import Run, shared
from tilegym_rmsnorm.routes.library_op import CheckedCall, LibraryOp, Options
from tilegym_rmsnorm.routes.main_grad import IN_USE, adds
from tilegym_rmsnorm.routes.public_calls import PublicCalls
from tilegym_rmsnorm.routes.traced import is_usual
from tilegym_rmsnorm.scopes import check_ended
from tilegym_rmsnorm.settings import check_backend_name, traced_backends

KNOWN_FORWARDS, KNOWN_BACKWARDS = shared(), shared()
SCHEMAS = {
    "rms_norm_forward": (
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_dims, float eps, float offset,"
        " str casting, float alpha, ScalarType? residual_dtype, ScalarType? out_dtype, str? backend,"
        " int reproducible=0)"
        " -> (Tensor y, Tensor rstd, Tensor? residual_out)"
    ),
    "rms_norm_backward": (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? d_residual_out, int wanted, int normalized_dims,"
        " float offset, str casting, float alpha, ScalarType? dx_dtype, ScalarType? d_residual_dtype,"
        " ScalarType? dw_dtype, ScalarType? db_dtype, str? backend, int reproducible=0)"
        " -> (Tensor dx, Tensor? dw, Tensor? db, Tensor? d_residual)"
    ),
}


def _known_forward(tensors: ForwardTensors, options: Options) -> Any:
    dims, eps, offset, _, alpha, _, _, backend, level = options
    # A number of another type may equal one of these as a key. The dispatcher casts or refuses it.
    if not (type(dims) is int and type(eps) is float and type(offset) is float and type(alpha) is float):
        return None
    return passes.forward_call(tensors, options, backend) if type(level) is int else None


def _known_backward(tensors: BackwardTensors, options: Options) -> Any:
    wanted, dims, offset, _, alpha, _, _, _, _, backend, level = options
    if not (type(wanted) is int and type(dims) is int and type(offset) is float and type(alpha) is float):
        return None
    return passes.backward_call(tensors, options, backend) if type(level) is int else None


def _check_forward(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *options: Any) -> CheckedCall:
    """Check the arguments of the forward op. `own` is normalized_dims."""
    dims, *numbers, backend, level = options
    checked = checks.checked_forward(x, weight, bias, residual, (), *numbers, dims=dims, level=level)
    check_backend_name(backend)
    return CheckedCall(checked, backend, own=dims)


def _check_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, d_residual_out: Any, *options: Any
) -> CheckedCall:
    """Check the arguments of the backward op. `own` is normalized_dims, and whether dx is wanted. Where no dtype is
    given, dw and db have weight's dtype, without a weight x's. dx has a dtype unless db alone is wanted: kernels always
    write it."""
    bits, dims, offset, casting, alpha, *dtypes, backend, level = options
    numbers = {"offset": offset, "casting": casting, "alpha": alpha, "dims": dims, "level": level}
    checked = checks.checked_backward(x, dy, weight, rstd, d_residual_out, **numbers)
    if not 0 <= bits <= DX + DW + DB + D_RESIDUAL:
        raise ValueError(f"wanted: expected 0 to {DX + DW + DB + D_RESIDUAL}, got {bits}")
    dx, d_residual, dw, db = (checked_dtype("a gradient's dtype", dtype) for dtype in dtypes)
    check_backend_name(backend)
    of_vectors = x.dtype if weight is None else weight.dtype
    wanted = Wanted(
        None if bits == DB else dx or x.dtype,
        (d_residual or x.dtype) if bits & D_RESIDUAL else None,
        (dw or of_vectors) if bits & DW and weight is not None else None,
        (db or of_vectors) if bits & DB else None,
    )
    return CheckedCall(checked, backend, wanted, own=(dims, bool(bits & DX)))


def bind_op_forward(
    tensors: ForwardTensors, call: Call, shape: tuple[int, ...]
) -> Callable[[ForwardTensors], Outputs]:
    """Bind the forward for tensors with the metadata of these, as `passes.bind_forward`. shape: rstd's."""
    run = passes.bind_forward(tensors, call)

    def run_known(tensors: ForwardTensors) -> Outputs:
        y, rstd, residual_out = run(tensors)
        # 0.6 us; view takes 1.3, and 2.1 with one argument. A dispatch mode may have kept rstd.
        return y, rstd.view(shape) if count_modes() else rstd.resize_(*shape), residual_out

    return run_known


def _db_alone(asked: CheckedCall) -> tuple[Tensor | None, ...] | None:
    """Compute db where nothing else is wanted: a sum without a kernel, with the bits of an eager backward."""
    if asked.wanted.dx is not None:
        return None
    x, dy, *_ = asked.checked.tensors
    db = operations.db_by_operations(dy, _shape_of_vectors(asked), asked.checked.spec, asked.wanted)
    return x.new_empty(0), None, db, None


def _bind_backward(
    tensors: BackwardTensors, call: Call, asked: CheckedCall
) -> Callable[[BackwardTensors], tuple[Tensor | None, ...]]:
    run, results_of = passes.bind_backward(tensors, call, asked.wanted), _results_of(asked)
    return lambda tensors: results_of(run(tensors))


def _results_of(asked: CheckedCall) -> Callable[[Gradients], tuple[Tensor | None, ...]]:
    """Return a function that puts the gradients of such a call in the op's order. It holds no tensor."""
    (_, needs_dx), shape, x_dtype = asked.own, _shape_of_vectors(asked), asked.checked.tensors[0].dtype

    def results_of(gradients: Gradients) -> tuple[Tensor | None, ...]:
        d, d_residual, dw, db = gradients
        if (
            d_residual is not None
            and d_residual.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
        ):
            d_residual = d_residual.clone()  # the results of a library op may not share memory
        dx = d if needs_dx else d.new_empty(0, dtype=x_dtype)
        return dx, dw, None if db is None else db.view(shape), d_residual

    return results_of


def _shape_of_vectors(asked: CheckedCall) -> tuple[int, ...]:
    weight = asked.checked.tensors[2]
    return asked.checked.shape if weight is None else weight.shape


def _outputs_for_fakes(asked: CheckedCall) -> Outputs:
    x, _, _, residual = asked.checked.tensors
    spec = asked.checked.spec
    residual_out = None if residual is None else x.new_empty(x.shape, dtype=spec.residual_dtype)
    rstd = x.new_empty(shape_of_rstd(x, asked.own), dtype=compute_dtype(spec.residual_dtype or x.dtype))
    return x.new_empty(x.shape, dtype=spec.y_dtype or x.dtype), rstd, residual_out


def _gradients_for_fakes(asked: CheckedCall) -> tuple[Tensor | None, ...]:
    x, wanted, of_vectors = asked.checked.tensors[0], asked.wanted, _shape_of_vectors(asked)
    dx = x.new_empty(x.shape, dtype=wanted.dx) if asked.own[1] else x.new_empty(0)
    others = (of_vectors, wanted.dw), (of_vectors, wanted.db), (x.shape, wanted.d_residual)
    return dx, *(None if dtype is None else x.new_empty(shape, dtype=dtype) for shape, dtype in others)


def _outputs_by_operations(asked: CheckedCall) -> Outputs:
    names, tensors, _, spec, _ = asked.checked
    check_memory(**dict(zip(names, tensors, strict=True)))
    y, rstd, residual_out = reference.forward_torch(tensors, spec, asked.own)
    residual_out = None if residual_out is None else residual_out.contiguous()
    return y.contiguous(), rstd.detach(), residual_out


def _gradients_by_operations(asked: CheckedCall) -> tuple[Tensor | None, ...]:
    """Compute gradients by PyTorch's operations. rstd is differentiated like the other inputs."""
    (dims, needs_dx), tensors = asked.own, asked.checked.tensors
    results = operations.gradients_by_operations(tensors, dims, asked.checked.spec, asked.wanted)
    dx, d_residual, dw, db = (None if each is None else each.contiguous() for each in results)
    return dx if needs_dx else tensors[0].new_empty(0), dw, db, d_residual


class _ForwardOfOp(RecordedFunction):
    """Forward op with a gradient: the backward op, or, under create_graph, PyTorch's operations, which are
    differentiable again."""


def _recording(run: Run, tensors: tuple[Any, ...], options: Options) -> Recording:
    x, residual, weight, bias = tensors
    dims, eps, offset, casting, alpha, *_, backend, level = options
    call = Call(Spec(0, eps, offset, casting, alpha, reproducible=level), backend)
    dtypes, bias_shape = tuple(map(dtype_of, tensors)), () if bias is None else bias.shape
    gradients = functools.partial(_gradients_of_op, call, dims, dtypes, bias_shape)
    given = x, weight, bias, residual
    return passes.recording(run, given, alpha, gradients, without_gradient=_without_gradient)


def _without_gradient(outputs: Outputs, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    return outputs[1], *passes.sum_without_gradient(outputs, needs)


def _gradients_of_op(
    call: Call,
    dims: int,
    dtypes: tuple[torch.dtype | None, ...],
    bias_shape: tuple[int, ...],
    tensors: BackwardTensors,
    needs: tuple[bool, ...],
) -> WantedGradients:
    alpha, wanted = wanted_of(needs, call.spec.alpha, dtypes)
    call = call._replace(spec=call.spec._replace(alpha=alpha))
    if choose.why_create_graph() is None:
        found = passes.call_backward(tensors, dims, call, wanted, needs_dx=needs[0] or needs[1])
    elif wanted.dx is None:
        found = None, None, None, operations.db_by_operations(tensors[1], bias_shape, call.spec, wanted)
    else:
        found = operations.gradients_of_saved(tensors, dims, call, wanted)
    return as_needed(needs, found, bias_shape)


def _map_forward(info: Any, in_dims: tuple[int | None, ...], x: Tensor, residual: Any, *rest: Any) -> Any:
    """Map the forward op over a batch, for vmap. A batch of x or residual is one more leading dimension. Where weight
    or bias is batched, the op is called once for each."""
    if any(dim is not None for dim in in_dims[2:]) or info.batch_size == 0:
        return library_op.one_by_one(FORWARD, info, in_dims, x, residual, *rest)
    rows = (
        each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in ((x, in_dims[0]), (residual, in_dims[1]))
        if each is not None
    )
    x, residual = next(rows), next(rows, None)
    weight, bias, dims = rest[:3]
    check_weight(weight, bias, x[0], last_dims(x[0], dims))  # on x[0]: the batch dimension is not of heads
    results = FORWARD(x, residual, *rest)
    return results, tuple(None if each is None else 0 for each in results)


FORWARD_OP = LibraryOp(
    name="rms_norm_forward",
    schema=SCHEMAS["rms_norm_forward"],
    count=4,
    for_backend=itemgetter(0, 2, 3, 1),
    known=KNOWN_FORWARDS,
    known_call=_known_forward,
    check=_check_forward,
    bind=lambda tensors, call, asked: bind_op_forward(tensors, call, shape_of_rstd(tensors[0], asked.own)),
    for_fakes=_outputs_for_fakes,
    by_operations=_outputs_by_operations,
    rules=sharding.rules_of_forward,
    recording=_recording,
    node=_ForwardOfOp,
    map=_map_forward,
)
FORWARD = library_op.define(FORWARD_OP)
BACKWARD = library_op.define(
    LibraryOp(
        name="rms_norm_backward",
        schema=SCHEMAS["rms_norm_backward"],
        count=5,
        for_backend=itemgetter(1, 0, 2, 3, 4),
        known=KNOWN_BACKWARDS,
        known_call=_known_backward,
        check=_check_backward,
        without_backend=_db_alone,
        bind=_bind_backward,
        for_fakes=_gradients_for_fakes,
        by_operations=_gradients_by_operations,
        rules=sharding.rules_of_backward,
    )
)


CALLS = PublicCalls(
    forward=FORWARD_OP,
    known=passes.KNOWN,
    arguments=passes.arguments_of_forward,
    in_order=itemgetter(0, 3, 1, 2),
    returned=passes.returned_of,
    by_operations=lambda checked: operations.norm_by_operations(checked.tensors, checked.shape, checked.spec),
    bind=lambda checked, call, is_kept: eager.bind(checked.tensors, call, is_kept),
    weights=slice(1, 2),
)


def norm_in_graph(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: Any, follows_autocast: bool
) -> Any:
    """Call the forward op for a usual call of `rms_norm`: what that returns. numbers: `passes.NUMBERS`.
    follows_autocast: as F.rms_norm does."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    x, weight, bias, residual = tensors
    normalized_shape, eps, offset, casting, alpha, residual_dtype, out_dtype = numbers
    if backend is None and traced_backends:
        check_ended("use_backend")
        backend = traced_backends[-1]
    if not is_usual(tensors, (alpha, offset, eps), casting, backend) or (IN_USE and adds(weight)):
        return None
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    elif not isinstance(normalized_shape, tuple) and not isinstance(normalized_shape, list):
        return None
    dims = len(normalized_shape)
    shape = x.shape[-dims:]
    if not 0 < dims <= x.ndim or not are_equal_in_graph(normalized_shape, shape):
        return None
    for size in normalized_shape:
        if not isinstance(size, int) or size is True or guard_or_false(size == 0):
            return None
    like = bias if weight is None else weight
    for vector in (weight, bias):
        if vector is not None and (
            not dims <= vector.ndim <= dims + 1
            or vector.ndim != like.ndim
            or not are_equal_in_graph(vector.shape, x.shape[-vector.ndim :])
        ):
            return None
    for dtype in (residual_dtype, out_dtype):
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            return None
    if residual is None:
        if alpha != 1.0 or residual_dtype is not None:
            return None
    elif not are_equal_in_graph(residual.shape, x.shape):
        return None
    given = *tensors, casting, residual_dtype, out_dtype, follows_autocast
    (x, weight, bias, residual), (casting, residual_dtype, out_dtype) = filled_in(*given)
    eps = default_eps(residual_dtype or x.dtype) if eps is None else eps
    numbers = dims, eps, offset, casting, alpha, residual_dtype, out_dtype
    y, _, residual_out = FORWARD(x, residual, weight, bias, *numbers, backend, flags())
    return y if residual is None else (y, residual_out)
