# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Define `rms_norm`, and its forward and backward alone: check the arguments, choose a route (routes/), take it.

Eager calls on small tensors are bound by the host: a call like an earlier one skips the checks (routes/known_calls.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from tilegym_rmsnorm.call.options import checked_bool, checked_eps, refuse_torch_jit_script
from tilegym_rmsnorm.call.spec import Casting
from tilegym_rmsnorm.call.tensors import check_memory
from tilegym_rmsnorm.call.validation import check_input, check_normalized_shape, checked_dtype
from tilegym_rmsnorm.call.watched import has_torch_function, is_traced, untraced
from tilegym_rmsnorm.ops.norm import checks, operations, passes, reference
from tilegym_rmsnorm.ops.norm.op import CALLS, norm_in_graph
from tilegym_rmsnorm.ops.norm.passes import KNOWN, NUMBERS, norm_call
from tilegym_rmsnorm.ops.norm.spec import Wanted, shape_of_rstd
from tilegym_rmsnorm.routes import library_op
from tilegym_rmsnorm.routes.choose import KERNELS, OP, UNTRACED, route_of
from tilegym_rmsnorm.routes.known_calls import Run, run_and_remember, shared
from tilegym_rmsnorm.routes.public_calls import run_checked
from tilegym_rmsnorm.settings import BackendName

_FORWARDS, _BACKWARDS = shared(), shared()  # calls of `rms_norm_forward` and `rms_norm_backward`


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: None = None,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: BackendName | None = None,
) -> Tensor: ...


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: Tensor,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    residual: Tensor | None = None,
    residual_alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    casting: Casting = "once",
    backend: BackendName | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `torch.nn.functional.rms_norm`, differentiable (twice), on the selected backend.

    `y = input * rstd * (weight + offset) + bias` over the last `len(normalized_shape)` dimensions, which hold N
    elements, with `rstd = 1 / sqrt(mean(input^2) + eps)`. Computed in float32, in float64 for float64 tensors.

    With a residual, `residual_out = residual_alpha * input + residual` is computed in the same precision, rounded once
    to residual_dtype, and normalized: the sum that a transformer block passes on, and its norm.

    The backward runs on the backend of the forward; under `create_graph` it runs through the reference, which is
    differentiable again. Saved for it are weight, rstd, and input or, with a residual, residual_out; a tensor made
    under `torch.inference_mode` is copied. Under `torch.autocast("cuda")` the call casts as `F.rms_norm` of the
    installed torch does. From torch 2.12 on, half inputs are normalized, and y returned, in float32, unless out_dtype
    says otherwise; residual_out is not cast. Before, and under autocast of CPUs, nothing is cast.

    Args:
        input: Shape `(*, *normalized_shape)`; float16, bfloat16, float32 or float64; any strides. A DTensor, whose
            local tensor the kernels take. Or one that only `F.rms_norm` takes, and no kernel: complex, jagged nested,
            or with rows without elements.
        normalized_shape: The last dimensions of input, as an int or a sequence of ints.
        weight: Shape `normalized_shape`, or `(H, *normalized_shape)`, a row for each head, where input's dimension
            before the normalized ones is H; any of these dtypes. None: a factor of 1, whatever the offset.
        eps: None: the machine epsilon of float32, of float64 where the normalized tensor is float64.
        bias: weight's shape, `normalized_shape` without a weight; any of these dtypes. None: nothing is added.
        offset: Added to weight in float32, in float64 for float64 tensors: 1 for Gemma, whose weights are stored
            minus 1.
        residual: input's shape and device, any of these dtypes.
        residual_alpha: Multiplies input, the branch, before the residual is added.
        residual_dtype: The dtype of residual_out. None: that of `input + residual`.
        out_dtype: The dtype of y. None: input's.
        casting: `"once"`: only y is rounded. `"llama"`: the normalized tensor times rstd is rounded too, to the dtype
            of the normalized tensor, before it is multiplied by the weight.
        backend: A name or `"auto"`. None: the backend in effect, see `use_backend`.

    Returns:
        y, of input's shape; `(y, residual_out)` where a residual is given. Both are contiguous.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    tensors = input, weight, bias, residual
    numbers = normalized_shape, eps, offset, casting, residual_alpha, residual_dtype, out_dtype
    if is_traced():
        result = norm_in_graph(tensors, numbers, backend, True)
        return checked_norm(tensors, numbers, backend) if result is None else result
    return norm_of(tensors, numbers, backend)


rms_norm.__prepare_scriptable__ = refuse_torch_jit_script


def norm_of(tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: Any) -> Any:
    """Compute `rms_norm` of input, weight, bias and residual in an eager call. Modules call this: to pass arguments by
    name takes half a microsecond. numbers: NUMBERS."""
    described = norm_call(tensors, numbers, backend)
    known = KNOWN.find(described)
    return checked_norm(tensors, numbers, backend, described) if known is None else known(tensors)


def checked_norm(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: Any, described: Any = None
) -> Any:
    """Compute `rms_norm` with all checks; Dynamo traces this. described: the call, to be known from now on."""
    if has_torch_function(*tensors):
        input, weight, bias, residual = tensors
        # Their __torch_function__ accepts only PyTorch's functions; `norm_by_operations` calls F.rms_norm.
        if not (isinstance(input, Tensor) and input.is_nested):
            shape, eps, *others = numbers
            options = dict(zip(NUMBERS[2:], others, strict=True)) | {"bias": bias, "residual": residual}
            return handle_torch_function(
                rms_norm, tensors, input, shape, weight, eps, **options, backend=backend
            )
    checked = checks.checked_forward(*tensors, *numbers)
    return run_checked(CALLS, tensors, numbers, backend, described, checked, _untraced_norm)


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
    casting: Casting = "once",
    backend: BackendName | None = None,
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
    casting: Casting = "once",
    backend: BackendName | None = None,
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
    casting: Casting = "once",
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Compute y and rstd of rows of x, without autograd; with a residual `(y, residual_out, rstd)`. M is the product of
    x's leading dimensions, N its last.

    Args:
        x: Shape `(*, N)`; float16, bfloat16, float32 or float64; any strides.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        eps: As for `rms_norm`.
        bias: weight's shape, `(N,)` without a weight, or None.
        offset: As for `rms_norm`.
        residual: As for `rms_norm`.
        residual_alpha: As for `rms_norm`.
        residual_dtype: As for `rms_norm`.
        out_dtype: As for `rms_norm`.
        casting: As for `rms_norm`.
        backend: As for `rms_norm`.

    Returns:
        y, of x's shape and out_dtype, and rstd, of shape `(M,)`, float32 (float64 where the normalized tensor is
        float64); `(y, residual_out, rstd)` where a residual is given.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    numbers = eps, offset, casting, residual_alpha, residual_dtype, out_dtype
    return _forward((x, weight, bias, residual), numbers, backend)


def _forward(tensors: tuple[Any, ...], numbers: tuple[Any, ...], backend: str | None) -> Any:
    described = None if is_traced() else norm_call(tensors, (1, *numbers), backend)
    if (known := _FORWARDS.find(described)) is not None:
        return known(tensors)
    checked = checks.checked_forward(*tensors, (), *numbers, dims=1)
    route = route_of(checked, backend)
    if route.name == UNTRACED:
        return _untraced_forward(tensors, numbers, route.call.backend)
    if route.name == KERNELS:

        def bind(_: bool) -> Run:
            run = passes.bind_forward(checked.tensors, route.call)
            return lambda tensors: _results(*run(tensors))

        return run_and_remember(_FORWARDS, described, tensors, checked.tensors, route.call.forward, bind)
    if route.name == OP:
        given = passes.arguments_of_forward(checked, route.call.backend)
        y, rstd, residual_out = library_op.call(CALLS.forward, (*_detached(given[:4]), *given[4:]))
    else:
        with torch.no_grad():
            results = reference.forward_torch(checked.tensors, checked.spec)
            y, rstd, residual_out = map(operations.packed, results)
    return _results(y, rstd if rstd.ndim == 1 else rstd.reshape(-1), residual_out)


def _results(y: Tensor, rstd: Tensor, residual_out: Tensor | None) -> tuple[Tensor, ...]:
    return (y, rstd) if residual_out is None else (y, residual_out, rstd)


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[False] = False,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[True],
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Compute dx and dw of `rms_norm_forward`, without autograd; with needs_db also db. If the forward had a residual,
    pass its residual_out as x.

    Args:
        x: The normalized tensor: the forward's x, or the residual_out that it returned. Shape `(*, N)`.
        dy: The gradient of y, of x's shape and device; any floating dtype, any strides.
        weight: The forward's: shape `(N,)`, or `(H, N)`, or None.
        rstd: The forward's: shape `(M,)`.
        offset: The forward's.
        casting: The forward's.
        d_residual_out: The gradient of residual_out, which is added to dx; shape and dtypes as for dy. None: nothing is
            added.
        dw_dtype: The dtype of dw and db: `torch.float32` where main gradients are accumulated. None: weight's, without
            a weight x's.
        needs_db: Whether to return db too.
        backend: As for `rms_norm`.

    Returns:
        dx, of x's shape and dtype: the gradient of the normalized tensor. With a residual that is the gradient of the
        residual; the gradient of the forward's x is residual_alpha * dx, cast to the dtype of that x. dw, of weight's
        shape, None without a weight. With needs_db also db, of weight's shape, `(N,)` without a weight.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    tensors, described = (x, dy, weight, rstd, d_residual_out), None
    # A number of another type may equal one of these as a key, but must raise an error.
    if not is_traced() and type(offset) is float and type(needs_db) is bool:
        described = passes.backward_call(tensors, (offset, casting, dw_dtype, needs_db), backend)
        if (known := _BACKWARDS.find(described)) is not None:
            return known(tensors)
    checked = checks.checked_backward(*tensors, offset=offset, casting=casting)
    wanted = _wanted(x, weight, dw_dtype, needs_db)
    route = route_of(checked, backend, wanted)
    if route.name == UNTRACED:
        options: dict[str, Any] = {"offset": offset, "casting": casting, "d_residual_out": d_residual_out}
        options |= {"dw_dtype": dw_dtype, "needs_db": needs_db, "backend": route.call.backend}
        return _untraced_backward(x, dy, weight, rstd, **options)
    if route.name == KERNELS:
        shape = checked.shape if weight is None else weight.shape

        def bind(_: bool) -> Run:
            run = passes.bind_backward(checked.tensors, route.call, wanted)

            def gradients(tensors: Any) -> Any:
                dx, _, dw, db = run(tensors)
                return (dx, dw) if db is None else (dx, dw, db.view(shape))

            return gradients

        return run_and_remember(_BACKWARDS, described, tensors, checked.tensors, route.call.backward, bind)
    if route.name == OP:
        x, dy, weight, rstd, d_residual_out = _detached(checked.tensors)
        given = x, dy, weight, rstd.reshape(shape_of_rstd(x, 1)), d_residual_out
        dx, _, dw, db = passes.call_backward(given, 1, route.call, wanted)
    else:
        with torch.no_grad():
            results = operations.gradients_by_operations(checked.tensors, 1, checked.spec, wanted)
            dx, _, dw, db = map(operations.packed, results)
    return (dx, dw, db) if needs_db else (dx, dw)


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """Compute `1 / sqrt(mean(x^2) + eps)` over the last dimension by the reference: differentiable.

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
    return reference.compute_rms_norm_rstd_torch(x, checked_eps(eps))


@overload
def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: Casting = "once",
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
    casting: Casting = "once",
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
    casting: Casting = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Compute `rms_norm_backward` by the reference: differentiable, also with respect to rstd.

    Args:
        x: The normalized tensor. Shape `(*, N)`.
        dy: x's shape and device; any floating dtype.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        rstd: Shape `(M,)`, as `compute_rms_norm_rstd_torch` gives it.
        offset: As for `rms_norm`.
        casting: As for `rms_norm`.
        d_residual_out: As for `rms_norm_backward`.
        dw_dtype: As for `rms_norm_backward`.
        needs_db: As for `rms_norm_backward`.

    Returns:
        dx and dw as `rms_norm_backward` returns them, with needs_db also db.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    checked = checks.checked_backward(x, dy, weight, rstd, d_residual_out, offset=offset, casting=casting)
    wanted = _wanted(x, weight, dw_dtype, needs_db)
    check_memory(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    dx, _, dw, db = reference.gradients_torch((x, dy, weight, rstd, d_residual_out), checked.spec, wanted)
    return (dx, dw, db) if needs_db else (dx, dw)


_untraced_norm, _untraced_forward, _untraced_backward = map(untraced, (norm_of, _forward, rms_norm_backward))


def _detached(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.detach() for tensor in tensors)


def _wanted(x: Tensor, weight: Tensor | None, dw_dtype: torch.dtype | None, needs_db: bool) -> Wanted:
    """Want dx, dw with a weight, and db with needs_db; dw and db in dw_dtype, else weight's dtype, else x's."""
    checked_bool("needs_db", needs_db)
    dw_dtype = checked_dtype("dw_dtype", dw_dtype) or (x.dtype if weight is None else weight.dtype)
    return Wanted(x.dtype, None, None if weight is None else dw_dtype, dw_dtype if needs_db else None)
