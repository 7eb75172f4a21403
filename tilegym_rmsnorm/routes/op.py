# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define the two library ops, `torch.ops.tilegym_rmsnorm`, which represent a forward and a backward in graphs.

x has any leading dimensions, then `normalized_dims` normalized ones. weight and bias have the shape of these, or one
dimension more for heads. rstd has x's shape with an extent of 1 for each normalized dimension, as in aten's fused ops:
flattened, it could not be sharded along a sequence. wanted: the sum of 1 for dx, 2 for dw, 4 for db, 8 for d_residual.
It comes before the other numbers, since sharding rules are cached by the arguments after the tensors. Gradients that
are not wanted, and residual_out without a residual, are None, as AOTInductor accepts where the schema says `Tensor?`.
But dx that is not wanted is a tensor without elements: if the first result is no `Tensor`, DTensor's engine wraps none
of the results. All arguments are positional, as sharding rules need them; integrations/fx.py and quack.py write them
out in this order.

The kernel is chosen when an op runs, not when a graph is made: a graph may serve any number of rows. backend: a name,
"auto", or None for the backend in effect when the op runs.

op_gradients.py differentiates the ops, op_sharding.py shards them. They have no rule for autocast: `rms_norm` casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from tilegym_rmsnorm.call import arguments
from tilegym_rmsnorm.call.arguments import Checked
from tilegym_rmsnorm.call.spec import (
    D_RESIDUAL,
    DB,
    DW,
    DX,
    BackwardTensors,
    Call,
    ForwardTensors,
    Gradients,
    Outputs,
    Wanted,
    WantedGradients,
    shape_of_rstd,
)
from tilegym_rmsnorm.call.validation import checked_dtype
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.routes import choose, kernels, known_calls, op_sharding, operations
from tilegym_rmsnorm.settings import check_backend_name

NAMESPACE = "tilegym_rmsnorm"
SCHEMAS = {
    "rms_norm_forward": (
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_dims, float eps, float offset,"
        " str casting, float alpha, ScalarType? residual_dtype, ScalarType? out_dtype, str? backend)"
        " -> (Tensor y, Tensor rstd, Tensor? residual_out)"
    ),
    "rms_norm_backward": (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? d_residual_out, int wanted, int normalized_dims,"
        " float offset, str casting, float alpha, ScalarType? dx_dtype, ScalarType? d_residual_dtype,"
        " ScalarType? dw_dtype, ScalarType? db_dtype, str? backend)"
        " -> (Tensor dx, Tensor? dw, Tensor? db, Tensor? d_residual)"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)
FORWARD = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
BACKWARD = torch.ops.tilegym_rmsnorm.rms_norm_backward.default


def run_known_forward(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *options: Any
) -> Outputs | None:
    """Run the forward op like an earlier one, without checks; None: none was like it."""
    dims, eps, offset, _, alpha, *_ = options
    # A number of another type may equal one of these as a key. The dispatcher casts or refuses it.
    if not (type(dims) is int and type(eps) is float and type(offset) is float and type(alpha) is float):
        return None
    tensors = x, weight, bias, residual
    run = known_calls.FORWARD_OP.find(known_calls.forward_call(tensors, options[:-1], options[-1]))
    return None if run is None else run(tensors)


def run_known_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, d_residual_out: Any, *options: Any
) -> tuple[Tensor | None, ...] | None:
    """Run the backward op like an earlier one, without checks; None: none was like it."""
    wanted, dims, offset, _, alpha, *_ = options
    if not (type(wanted) is int and type(dims) is int and type(offset) is float and type(alpha) is float):
        return None
    tensors = x, dy, weight, rstd, d_residual_out
    run = known_calls.BACKWARD_OP.find(known_calls.backward_call(tensors, options[:-1], options[-1]))
    return None if run is None else run(tensors)


def find_known_first(op: Any, run_known: Callable[..., Any]) -> None:
    """Let a call of the op from Python, as compiled graphs and DTensors make it, look for a known call before PyTorch's
    dispatcher, which takes as long as all else: it boxes each argument. Under a profiler the dispatcher is called, so
    that the profiler sees the op; an `ExecutionTraceObserver` alone does not."""
    dispatch, count = op._op, len(op._schema.arguments)

    def call(*given: Any, **named: Any) -> Any:
        if len(given) == count and not (profiler._is_profiler_enabled or torch.autograd._profiler_enabled()):
            if (known := run_known(*given)) is not None:
                return known
        return dispatch(*given, **named)

    op._op = call  # An op's hash is that of `_op`: replace it before any table holds the op.


find_known_first(FORWARD, run_known_forward)
find_known_first(BACKWARD, run_known_backward)


def call_forward(tensors: ForwardTensors, dims: int, call: Call) -> Outputs:
    """Call the forward op on x, weight, bias, residual. Return y, rstd of the op's shape, residual_out."""
    x, weight, bias, residual = tensors
    prepare(*tensors)
    _, eps, offset, casting, alpha, y_dtype, residual_dtype, _ = call.spec
    numbers = dims, eps, offset, casting, alpha
    return FORWARD(x, residual, weight, bias, *numbers, residual_dtype, y_dtype, call.backend)


def call_backward(
    tensors: BackwardTensors, dims: int, call: Call, wanted: Wanted, needs_dx: bool = True
) -> WantedGradients:
    """Call the backward op on x, dy, weight, rstd of the op's shape, d_residual_out. needs_dx: whether the op returns
    dx, which kernels write in any case."""
    x, dy, weight, rstd, d_residual_out = tensors
    prepare(*tensors)
    if wanted.dx is None:
        # db alone. Of a plain sum Inductor would make a kernel that adds in another order than eager calls. dy is
        # passed as x too, or the graph would keep x for the op.
        rstd = rstd.reshape(shape_of_rstd(dy, dims)).to(compute_dtype(dy.dtype))
        x = dy
    bits = DX * (needs_dx and wanted.dx is not None) + D_RESIDUAL * (wanted.d_residual is not None)
    bits += DW * (wanted.dw is not None) + DB * (wanted.db is not None)
    numbers = bits, dims, call.spec.offset, call.spec.casting, call.spec.alpha
    dx, dw, db, d_residual = BACKWARD(dy, x, weight, rstd, d_residual_out, *numbers, *wanted, call.backend)
    return dx if bits & DX else None, d_residual, dw, db


def prepare(*tensors: Tensor | None) -> None:
    """Register the sharding rules of the ops if one of the tensors is a DTensor, before the first call with one."""
    op_sharding.register_if_needed(FORWARD, BACKWARD, tensors)


def run_forward(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *options: Any) -> Outputs:
    """Run the forward op, on real tensors."""
    # Not every call comes by `find_known_first`: AOTInductor's come from C++.
    if (known := run_known_forward(x, residual, weight, bias, *options)) is not None:
        return known
    checked, dims, backend = arguments_of_forward(x, residual, weight, bias, *options)
    call, shape = choose.call_of_op(checked, backend), shape_of_rstd(x, dims)
    y, rstd, residual_out = kernels.forward(checked, call)
    given = x, weight, bias, residual
    if known_calls.may_remember(given, checked.tensors, call.forward):
        known_call = known_calls.forward_call(given, options[:-1], options[-1])
        known_calls.FORWARD_OP.remember(known_call, lambda: bind_op_forward(given, call, shape))
    return y, rstd.view(shape), residual_out


def bind_op_forward(
    tensors: ForwardTensors, call: Call, shape: tuple[int, ...]
) -> Callable[[ForwardTensors], Outputs]:
    """Bind the forward for tensors with the metadata of these, as `kernels.bind_forward`. shape: rstd's."""
    run = kernels.bind_forward(tensors, call)

    def run_known(tensors: ForwardTensors) -> Outputs:
        y, rstd, residual_out = run(tensors)
        return y, rstd.resize_(*shape), residual_out  # 0.6 us; view takes 1.3, and 2.1 with one argument

    return run_known


def _forward_of_fakes(x: Tensor, residual: Tensor | None, *rest: Any) -> Outputs:
    checked, dims, _ = arguments_of_forward(x, residual, *rest)
    spec = checked.spec
    residual_out = None if residual is None else x.new_empty(x.shape, dtype=spec.residual_dtype)
    rstd = x.new_empty(shape_of_rstd(x, dims), dtype=compute_dtype(spec.residual_dtype or x.dtype))
    return x.new_empty(x.shape, dtype=spec.y_dtype or x.dtype), rstd, residual_out


def run_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, d_residual_out: Any, *options: Any
) -> tuple[Tensor | None, ...]:
    """Run the backward op, on real tensors."""
    if (known := run_known_backward(dy, x, weight, rstd, d_residual_out, *options)) is not None:
        return known
    checked, _, bits, wanted, backend = arguments_of_backward(dy, x, weight, rstd, d_residual_out, *options)
    shape = checked.shape if weight is None else weight.shape
    if wanted.dx is None:  # a sum without a kernel, which gives the same bits as an eager backward
        return x.new_empty(0), None, operations.db_by_operations(checked.tensors[1], shape, wanted), None
    call = choose.call_of_op(checked, backend, wanted)

    x_dtype = x.dtype

    def results_of(gradients: Gradients) -> tuple[Tensor | None, ...]:
        d, d_residual, dw, db = gradients
        if (
            d_residual is not None
            and d_residual.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
        ):
            d_residual = d_residual.clone()  # the results of a library op may not share memory
        return (
            d if bits & DX else d.new_empty(0, dtype=x_dtype),
            dw,
            None if db is None else db.view(shape),
            d_residual,
        )

    def bind() -> Callable[[BackwardTensors], tuple[Tensor | None, ...]]:
        run = kernels.bind_backward(kernels.with_flat_rstd(given), call, wanted)
        return lambda tensors: results_of(run(kernels.with_flat_rstd(tensors)))

    results = results_of(kernels.backward(checked, call, wanted))
    given = x, dy, weight, rstd, d_residual_out
    if known_calls.may_remember(given, checked.tensors, call.backward):
        known_call = known_calls.backward_call(given, options[:-1], options[-1])
        known_calls.BACKWARD_OP.remember(known_call, bind)
    return results


def _backward_of_fakes(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    checked, _, bits, wanted, _ = arguments_of_backward(dy, x, *rest)
    weight = checked.tensors[2]
    of_vectors = checked.shape if weight is None else weight.shape
    dx = x.new_empty(x.shape, dtype=wanted.dx) if bits & DX else x.new_empty(0)
    others = (of_vectors, wanted.dw), (of_vectors, wanted.db), (x.shape, wanted.d_residual)
    return dx, *(None if dtype is None else x.new_empty(shape, dtype=dtype) for shape, dtype in others)


def arguments_of_forward(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *options: Any
) -> tuple[Checked, int, str | None]:
    """Check the arguments of the forward op. Return them, normalized_dims and backend."""
    dims, *numbers, backend = options
    names = "eps", "offset", "casting", "residual_alpha", "residual_dtype", "out_dtype"
    named = dict(zip(names, numbers, strict=True))
    checked = arguments.checked_forward(x, (), weight, bias, residual, **named, dims=dims)
    check_backend_name(backend)
    return checked, dims, backend


def arguments_of_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, d_residual_out: Any, *options: Any
) -> tuple[Checked, int, int, Wanted, str | None]:
    """Check the arguments of the backward op. Return them, normalized_dims, the bits of `wanted`, the dtypes that it
    stands for, and backend. Where no dtype is given, dw and db have weight's dtype, without a weight x's. dx has a
    dtype unless db alone is wanted: kernels always write it."""
    bits, dims, offset, casting, alpha, *dtypes, backend = options
    given = x, dy, weight, rstd, d_residual_out
    checked = arguments.checked_backward(*given, offset=offset, casting=casting, alpha=alpha, dims=dims)
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
    return checked, dims, bits, wanted, backend


for _name, _run, _fake in (
    ("rms_norm_forward", run_forward, _forward_of_fakes),
    ("rms_norm_backward", run_backward, _backward_of_fakes),
):
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)
