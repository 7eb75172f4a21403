# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The public functions: they validate, choose the backend and run it; autograd.py flattens and differentiates.

Eager calls of small tensors are bound by the host, so the path of a correct call asks no device, reads no property
twice and builds no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from tilegym_rmsnorm import composite, fastpath, gate, reference, registry
from tilegym_rmsnorm.autograd import (
    Call,
    RMSNormFunction,
    record,
    record_add,
    run_add_forward,
    run_backward,
    run_forward,
    unseen,
)
from tilegym_rmsnorm.gate import is_plain, is_watched
from tilegym_rmsnorm.graphs import break_graph, traced
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import Request, dispatch, get_current_backend, others
from tilegym_rmsnorm.resolve import resolved
from tilegym_rmsnorm.spec import Spec, Wanted
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_like,
    check_memory,
    check_normalized_shape,
    check_rstd,
    check_weight,
    checked_dtype,
    checked_eps,
    checked_number,
    checked_residual_dtype,
)

__all__ = [
    "compute_rms_norm_rstd_torch",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_torch",
    "rms_norm_forward",
]


registry.load("torch")  # the one backend whose calls torch.compile traces
_len_torch_function_stack = torch._C._len_torch_function_stack  # of the modes that see function calls
# Whether this torch's F.rms_norm is on autocast's list for CUDA devices.
_HAS_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


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
    casting: str = "once",
    backend: str | None = None,
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
    casting: str = "once",
    backend: str | None = None,
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
    casting: str = "once",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.functional.rms_norm`, differentiable (twice), on the selected backend.

    `y = input * rstd * (weight + offset) + bias` over the last `len(normalized_shape)` dimensions, which hold N
    elements, with `rstd = 1 / sqrt(mean(input^2) + eps)`. Computed in float32, in float64 for float64 tensors.

    With a residual, `residual_out = residual_alpha * input + residual` is formed in the same precision, rounded once to
    its dtype, and that value is normalized: what a transformer block hands on, and the norm of it.

    The backward runs on the backend of the forward; under `create_graph` it runs through the reference, which is
    differentiable again. Saved for it are input, or residual_out in its place, weight and rstd. Under
    `torch.autocast("cuda")` the call does as `F.rms_norm` of the installed torch does: from torch 2.12 on, half inputs
    are normalized, and y returned, in float32, unless out_dtype says otherwise; residual_out is not cast. Before, and
    under autocast of CPUs, nothing is cast.

    Args:
        input: Shape `(*, *normalized_shape)`; float16, bfloat16, float32 or float64; any strides. Also what
            `F.rms_norm` takes and no kernel does: complex, jagged nested, a DTensor, rows of no elements.
        normalized_shape: The last dimensions of input, as an int or a sequence of ints.
        weight: Shape `normalized_shape`, or `(H, *normalized_shape)`, a row for each head, where input's dimension
            before the normalized ones is H; any of these dtypes. None: a factor of 1, whatever the offset.
        eps: None: the machine epsilon of float32, of float64 where what is normalized is float64.
        bias: Shape of weight, `normalized_shape` without one; any of these dtypes. None: nothing is added.
        offset: Added to weight in the precision that computes: 1 for Gemma, whose weights are stored minus 1.
        residual: Of input's shape and device, any of these dtypes.
        residual_alpha: Multiplies input, the branch, before the residual is added.
        residual_dtype: Of residual_out. None: that of `input + residual`.
        out_dtype: Of y. None: that of input.
        casting: `"once"`: only y is rounded. `"llama"`: what is normalized, times rstd, is rounded to its own dtype
            before the weight.
        backend: A name or `"auto"`. None: the one in effect, see `use_backend`.

    Returns:
        y, of input's shape; `(y, residual_out)` where a residual is given. Both are contiguous.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling():
        backend = traced(backend)
        options = {"bias": bias, "offset": offset, "residual": residual, "residual_alpha": residual_alpha}
        options |= {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
        options |= {"casting": casting, "backend": backend}
        if backend != "torch":
            return break_graph(rms_norm, input, normalized_shape, weight, eps, **options)
        return _checked_rms_norm(input, normalized_shape, weight, eps, **options)
    is_cast = _HAS_AUTOCAST and torch.is_autocast_enabled()  # of CUDA devices; to name them takes 0.2 us
    is_short = bias is None and residual is None and out_dtype is None and residual_dtype is None
    if is_short and residual_alpha == 1.0 and not (is_cast or _len_torch_function_stack() or is_watched()):
        call = fastpath.find(input, normalized_shape, weight, eps, offset, casting, backend)
        if call is not None:
            if not _is_differentiated(input, weight):
                return run_forward(input, weight, None, call)[0]
            if call.backward is not None:
                return record(input, weight, None, call)
    tensors = (input, weight, bias, residual)
    options = {"bias": bias, "offset": offset, "residual": residual, "residual_alpha": residual_alpha}
    options |= {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
    options |= {"casting": casting, "backend": backend}
    # The __torch_function__ of nested tensors takes PyTorch's own functions alone; composite.py calls F.rms_norm.
    if has_torch_function_variadic(*tensors) and not (isinstance(input, Tensor) and input.is_nested):
        arguments = (input, normalized_shape, weight, eps)
        return handle_torch_function(rms_norm, tensors, *arguments, **options)
    return _checked_rms_norm(input, normalized_shape, weight, eps, **options)


def _checked_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    bias: Tensor | None,
    offset: float,
    residual: Tensor | None,
    residual_alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    casting: str,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm`, by all checks. Dynamo traces it for the reference."""
    are_plain = _are_plain(input, weight, bias, residual)
    if not are_plain:
        input, weight, bias, residual = _handed_over(input, weight, bias, residual)
    check_input("input", input, is_any_kind=True)
    n, shape = check_normalized_shape(input, normalized_shape, may_be_empty=True)
    heads = check_weight(weight, bias, input, shape, "input")
    check_casting(casting)
    alpha = checked_number("residual_alpha", residual_alpha)
    residual_dtype = checked_residual_dtype(input, residual, alpha, residual_dtype, "input")
    out_dtype = checked_dtype("out_dtype", out_dtype, input.is_complex())
    y_dtype = checked_dtype("out_dtype", out_dtype, input.is_complex())

    dtype, weight_dtype, bias_dtype = input.dtype, _dtype_of(weight), _dtype_of(bias)
    is_autocast = _HAS_AUTOCAST and input.is_cuda and torch.is_autocast_enabled("cuda")
    if residual is not None:
        # The sum is not cast. Its norm is that of a float32 tensor: y too, and "llama" has nothing to round.
        y_dtype = y_dtype or (_autocast_dtype(dtype) if is_autocast else dtype)
        casting = "once" if is_autocast else casting
    elif is_autocast:
        dtype, weight_dtype, bias_dtype = map(_autocast_dtype, (dtype, weight_dtype, bias_dtype))
    if residual is None and y_dtype is dtype:
        y_dtype = None
    eps = checked_eps(eps, dtype if residual is None else residual_dtype)
    offset = checked_number("offset", offset)
    spec = Spec(n, eps, offset, casting, alpha, y_dtype, residual_dtype)
    if backend is None:
        backend = get_current_backend()
    obstacle = None
    if not are_plain or input.is_complex():
        obstacle = _obstacle(input=input, weight=weight, bias=bias, residual=residual)
    if obstacle is None and n == 0:
        obstacle = "rows of input have no elements"
    other_dtypes = others(dtype, weight_dtype, bias_dtype, _dtype_of(residual), y_dtype, residual_dtype)
    request = Request(input.device, dtype, weight_dtype, casting, other_dtypes, obstacle)
    forward = dispatch("rms_norm_forward", request, backend)

    is_composed = obstacle is not None or composite.is_needed_in_graph(input, weight, bias, residual)
    # Of a kernel's call the casts, too, are made where no mode puts other tensors in their place.
    with contextlib.nullcontext() if is_composed else unseen(forward):
        x = input
        if is_autocast and residual is None:
            x, weight, bias = map(_autocast, (x, weight, bias))
        if is_composed:
            return composite.rms_norm(x, shape, weight, bias, residual, spec)
        is_differentiated = _is_differentiated(x, weight, bias, residual)
        # Now: the choice in effect may be another later.
        backward = dispatch("rms_norm_backward", request, backend) if is_differentiated else None
        normalized_dtype = None if y_dtype is None else residual_dtype or dtype
        call = Call(spec, forward, backward, backend, heads, normalized_dtype)
        if residual is not None:
            if is_differentiated:
                return record_add(x, residual, weight, bias, call)
            return run_add_forward(x, residual, weight, bias, call)[:2]
        if is_differentiated:
            apply = RMSNormFunction.apply if is_dynamo_compiling() else record
            y = apply(x, weight, bias, call)
        else:
            y, _ = run_forward(x, weight, bias, call)
        if not is_autocast and not is_dynamo_compiling():  # whose graph would guard on all that is remembered
            fastpath.remember(request, backend, forward, backward)
    return y


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
    casting: str = "once",
    backend: str | None = None,
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
    casting: str = "once",
    backend: str | None = None,
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
    casting: str = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """y and rstd of rows of x, without autograd. M is the product of x's leading dimensions, N its last.

    Args:
        x: Shape `(*, N)`; float16, bfloat16, float32 or float64; any strides.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        eps: As for `rms_norm`.
        bias: Weight's shape, `(N,)` without one, or None.
        offset: As for `rms_norm`.
        residual: As for `rms_norm`.
        residual_alpha: As for `rms_norm`.
        residual_dtype: As for `rms_norm`.
        out_dtype: As for `rms_norm`.
        casting: As for `rms_norm`.
        backend: As for `rms_norm`.

    Returns:
        y, of x's shape and out_dtype, and rstd, of shape `(M,)`, float32 (float64 where what is normalized is float64);
        `(y, residual_out, rstd)` where a residual is given.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options = {"bias": bias, "offset": offset, "residual": residual, "residual_alpha": residual_alpha}
        options |= {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
        return break_graph(rms_norm_forward, x, weight, eps, **options, casting=casting, backend=backend)
    are_plain = _are_plain(x, weight, bias, residual)
    if not are_plain:
        x, weight, bias, residual = _handed_over(x, weight, bias, residual)
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    heads = check_weight(weight, bias, x, shape)
    check_casting(casting)
    alpha = checked_number("residual_alpha", residual_alpha)
    residual_dtype = checked_residual_dtype(x, residual, alpha, residual_dtype)
    y_dtype = checked_dtype("out_dtype", out_dtype)
    if residual is not None:
        y_dtype = y_dtype or x.dtype
    eps = checked_eps(eps, residual_dtype or x.dtype)
    offset = checked_number("offset", offset)
    spec = Spec(n, eps, offset, casting, alpha, y_dtype, residual_dtype)
    obstacle = None if are_plain else _obstacle(x=x, weight=weight, bias=bias, residual=residual)
    dtypes = x.dtype, _dtype_of(weight), _dtype_of(bias), _dtype_of(residual), y_dtype, residual_dtype
    request = Request(x.device, *dtypes[:2], casting, others(*dtypes), obstacle)
    backend = get_current_backend() if backend is None else backend
    forward = dispatch("rms_norm_forward", request, backend)
    call = Call(spec, forward, None, backend, heads)
    if obstacle is not None:  # the reference's, which takes rows of any leading dimensions
        y, rstd, residual_out = forward(spec, (x, weight, bias, residual))
        return (y, rstd) if residual is None else (y, residual_out, rstd)
    with unseen(forward):
        if residual is None:
            return run_forward(x, weight, bias, call)
        return run_add_forward(x, residual, weight, bias, call)


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[False] = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """dx and dw of `rms_norm_forward`, without autograd.

    Args:
        x: What was normalized: what the forward was given, or the residual_out that it returned. Shape `(*, N)`.
        dy: The gradient of y, of x's shape and device; any floating dtype, any strides.
        weight: What the forward was given: shape `(N,)`, or `(H, N)`, or None.
        rstd: What the forward returned: shape `(M,)`.
        offset: What the forward was given.
        casting: What the forward was given.
        d_residual_out: The gradient of residual_out, which is added to dx; like dy. None: there is none.
        dw_dtype: Of dw and db: `torch.float32` where main gradients are accumulated. None: weight's, x's without one.
        needs_db: Whether db is returned too.
        backend: As for `rms_norm`.

    Returns:
        dx, of x's shape and dtype, the gradient of what was normalized, so that of the residual, and times
        residual_alpha that of the forward's x; dw, of weight's shape, None without a weight; where needs_db, db too, of
        weight's shape, `(N,)` without one.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options = {
            "offset": offset,
            "casting": casting,
            "d_residual_out": d_residual_out,
            "dw_dtype": dw_dtype,
        }
        return break_graph(
            rms_norm_backward, x, dy, weight, rstd, **options, needs_db=needs_db, backend=backend
        )
    are_plain = _are_plain(x, dy, weight, rstd, d_residual_out)
    if not are_plain:
        x, dy, weight, rstd, d_residual_out = _handed_over(x, dy, weight, rstd, d_residual_out)
    arguments = x, dy, weight, rstd, d_residual_out
    spec, heads = _checked_backward(*arguments, offset, casting)
    dw_dtype = checked_dtype("dw_dtype", dw_dtype) or (x.dtype if weight is None else weight.dtype)
    wanted = Wanted(x.dtype, None, None if weight is None else dw_dtype, dw_dtype if needs_db else None)
    obstacle = None
    if not are_plain:
        obstacle = _obstacle(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    other_dtypes = others(x.dtype, _dtype_of(weight), dy.dtype, _dtype_of(d_residual_out), *wanted)
    request = Request(x.device, x.dtype, _dtype_of(weight), casting, other_dtypes, obstacle)
    backend = get_current_backend() if backend is None else backend
    backward = dispatch("rms_norm_backward", request, backend)
    if obstacle is not None:
        dx, _, dw, db = backward(spec, arguments, wanted)
    else:
        call = Call(spec, None, backward, backend, heads)
        with unseen(backward):
            arguments = x, dy, weight, rstd.contiguous(), d_residual_out
            dx, _, dw, db = run_backward(arguments, call, wanted)
    if not needs_db:
        return dx, dw
    return dx, dw, db if weight is None else db.view(weight.shape)


def compute_rms_norm_rstd_torch(x: Tensor, eps: float | None = None) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last dimension, by the reference: differentiable.

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
    return reference.compute_rms_norm_rstd_torch(x, checked_eps(eps, x.dtype))


@overload
def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
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
    casting: str = "once",
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
    casting: str = "once",
    d_residual_out: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    needs_db: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`rms_norm_backward` by the reference: differentiable, with rstd an input like the others.

    Args:
        x: What was normalized. Shape `(*, N)`.
        dy: Of x's shape and device; any floating dtype.
        weight: Shape `(N,)`, or `(H, N)` where x's dimension before the last is H, or None.
        rstd: Shape `(M,)`, as `compute_rms_norm_rstd_torch` gives it.
        offset: As for `rms_norm`.
        casting: As for `rms_norm`.
        d_residual_out: As for `rms_norm_backward`.
        dw_dtype: As for `rms_norm_backward`.
        needs_db: As for `rms_norm_backward`.

    Returns:
        As `rms_norm_backward`: dx and dw, with needs_db also db.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    spec, _ = _checked_backward(x, dy, weight, rstd, d_residual_out, offset, casting)
    check_memory(x=x, dy=dy, weight=weight, rstd=rstd, d_residual_out=d_residual_out)
    return reference.rms_norm_backward_torch(
        x,
        dy,
        weight,
        rstd,
        offset=spec.offset,
        casting=casting,
        d_residual_out=d_residual_out,
        dw_dtype=checked_dtype("dw_dtype", dw_dtype),
        needs_db=needs_db,
    )


def _checked_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    offset: float,
    casting: str,
) -> tuple[Spec, int]:
    """What a backward is asked for, with an eps that it does not need, and the number of heads."""
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    heads = check_weight(weight, None, x, shape)
    check_like("dy", dy, x)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_rstd(rstd, x, x.numel() // n)
    check_casting(casting)
    return Spec(n, 0.0, checked_number("offset", offset), casting), heads


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, or None, in a call that nothing watches: no kernel has an obstacle there, unless
    they are complex, and there is nothing to resolve."""
    if is_dynamo_compiling() or is_watched():
        return False
    return all(tensor is None or is_plain(tensor) for tensor in tensors)


def _handed_over(*tensors: Any) -> tuple[Any, ...]:
    """What was handed over, made plain where it can be; see resolve.py."""
    return tensors if is_dynamo_compiling() else tuple(map(resolved, tensors))


def _obstacle(**tensors: Tensor | None) -> str | None:
    """`gate.obstacle`, once the memory of all is known to be there."""
    check_memory(**tensors)
    return gate.obstacle(**tensors)


def _dtype_of(weight: Tensor | None) -> torch.dtype | None:
    return None if weight is None else weight.dtype


def _autocast_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype if dtype is None or dtype.is_complex else compute_dtype(dtype)


def _autocast(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(_autocast_dtype(tensor.dtype))


def _is_differentiated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None
) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
