# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The public functions: they validate, choose the backend and run it; autograd.py flattens and differentiates.

Eager calls of small tensors are bound by the host, so the path of a correct call asks no device, reads no property
twice and builds no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from tilegym_rmsnorm import composite, fastpath, gate, reference, registry
from tilegym_rmsnorm.autograd import Call, RMSNormFunction, record, run_backward, run_forward, unseen
from tilegym_rmsnorm.gate import is_plain, is_watched
from tilegym_rmsnorm.graphs import break_graph, traced
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import Request, dispatch, get_current_backend
from tilegym_rmsnorm.resolve import resolved
from tilegym_rmsnorm.spec import Spec, Wanted
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_like,
    check_memory,
    check_normalized_shape,
    check_rstd,
    check_vector,
    checked_eps,
    checked_number,
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
    casting: str = "once",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.functional.rms_norm`, differentiable (twice), on the selected backend.

    `y = input * rstd * (weight + offset) + bias` over the last `len(normalized_shape)` dimensions, which hold N
    elements, with `rstd = 1 / sqrt(mean(input^2) + eps)`. Computed in float32, in float64 for float64 tensors.

    The backward runs on the backend of the forward; under `create_graph` it runs through the reference, which is
    differentiable again. Under `torch.autocast("cuda")` the call does as `F.rms_norm` of the installed torch does: from
    torch 2.12 on, half inputs are normalized, and y returned, in float32. Before, and under autocast of CPUs, nothing
    is cast.

    Args:
        input: Shape `(*, *normalized_shape)`; float16, bfloat16, float32 or float64; any strides. Also what
            `F.rms_norm` takes and no kernel does: complex, jagged nested, a DTensor, rows of no elements.
        normalized_shape: The last dimensions of input, as an int or a sequence of ints.
        weight: Shape `normalized_shape`, any of these dtypes. None: a factor of 1, whatever the offset.
        eps: None: the machine epsilon of float32, of float64 for float64 input.
        bias: Shape `normalized_shape`, any of these dtypes. None: nothing is added.
        offset: Added to weight in the precision that computes: 1 for Gemma, whose weights are stored minus 1.
        residual: Of input's shape and dtype. `input + residual` is normalized instead, and returned too.
        casting: `"once"`: only y is rounded. `"llama"`: `input * rstd` is rounded to input's dtype before the weight.
        backend: A name or `"auto"`. None: the one in effect, see `use_backend`.

    Returns:
        y, of input's shape and dtype; `(y, input + residual)` where a residual is given.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling():
        backend = traced(backend)
        options = {"bias": bias, "offset": offset, "residual": residual}
        options |= {"casting": casting, "backend": backend}
        if backend != "torch":
            return break_graph(rms_norm, input, normalized_shape, weight, eps, **options)
        return _checked_rms_norm(input, normalized_shape, weight, eps, **options)
    is_cast = _HAS_AUTOCAST and torch.is_autocast_enabled()  # of CUDA devices; to name them takes 0.2 us
    if bias is None and residual is None and not (is_cast or _len_torch_function_stack() or is_watched()):
        call = fastpath.find(input, normalized_shape, weight, eps, offset, casting, backend)
        if call is not None:
            if not _is_differentiated(input, weight, None):
                return run_forward(input, weight, None, call)[0]
            if call.backward is not None:
                return record(input, weight, None, call)
    tensors = (input, weight, bias, residual)
    options = {"bias": bias, "offset": offset, "residual": residual, "casting": casting, "backend": backend}
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
    casting: str,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm`, by all checks. Dynamo traces it for the reference."""
    are_plain = _are_plain(input, weight, bias, residual)
    if not are_plain:
        input, weight, bias, residual = _handed_over(input, weight, bias, residual)
    check_input("input", input, is_any_kind=True)
    n, shape = check_normalized_shape(input, normalized_shape, may_be_empty=True)
    check_vector("weight", weight, input, shape, "input")
    check_vector("bias", bias, input, shape, "input")
    check_casting(casting)
    eps = checked_eps(eps, input.dtype)
    offset = checked_number("offset", offset)
    spec = Spec(n, eps, offset, casting)
    if residual is not None:
        check_like("residual", residual, input, "input")

    dtype, weight_dtype = input.dtype, _dtype_of(weight)
    is_autocast = _HAS_AUTOCAST and input.is_cuda and torch.is_autocast_enabled("cuda")
    if is_autocast:
        dtype, weight_dtype = _autocast_dtype(dtype), _autocast_dtype(weight_dtype)
    if backend is None:
        backend = get_current_backend()
    obstacle = None
    if not are_plain or input.is_complex():
        obstacle = _obstacle(input=input, weight=weight, bias=bias, residual=residual)
    if obstacle is None and n == 0:
        obstacle = "rows of input have no elements"
    request = Request(input.device, dtype, weight_dtype, casting, bias is not None, obstacle)
    forward = dispatch("rms_norm_forward", request, backend)

    is_composed = obstacle is not None or composite.is_needed_in_graph(input, weight, bias, residual)
    # Of a kernel's call the sum and the casts, too, are made where no mode puts other tensors in their place.
    with contextlib.nullcontext() if is_composed else unseen(forward):
        residual_out = x = input if residual is None else input + residual
        if is_autocast:
            x, weight, bias = map(_autocast, (x, weight, bias))
        if is_composed:
            y = composite.rms_norm(x, shape, weight, bias, eps, offset, casting)
        elif _is_differentiated(x, weight, bias):
            # Now: the choice in effect may be another later.
            backward = dispatch("rms_norm_backward", request, backend)
            apply = RMSNormFunction.apply if is_dynamo_compiling() else record
            y = apply(x, weight, bias, Call(spec, forward, backward, backend))
            _remember(request, backend, forward, backward, is_autocast)
        else:
            y, _ = run_forward(x, weight, bias, Call(spec, forward, None, backend))
            _remember(request, backend, forward, None, is_autocast)
    return y if residual is None else (y, residual_out)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y and rstd of rows of x, without autograd. M is the product of x's leading dimensions, N its last.

    Args:
        x: Shape `(*, N)`; float16, bfloat16, float32 or float64; any strides.
        weight: Shape `(N,)`, or None.
        eps: As for `rms_norm`.
        bias: Shape `(N,)`, or None.
        offset: As for `rms_norm`.
        casting: As for `rms_norm`.
        backend: As for `rms_norm`.

    Returns:
        y, of x's shape and dtype, and rstd, of shape `(M,)`, float32 (float64 for float64 x).

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options = {"offset": offset, "casting": casting, "backend": backend}
        return break_graph(rms_norm_forward, x, weight, eps, bias=bias, **options)
    are_plain = _are_plain(x, weight, bias)
    if not are_plain:
        x, weight, bias = _handed_over(x, weight, bias)
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    check_vector("weight", weight, x, shape)
    check_vector("bias", bias, x, shape)
    check_casting(casting)
    spec = Spec(n, checked_eps(eps, x.dtype), checked_number("offset", offset), casting)
    obstacle = None if are_plain else _obstacle(x=x, weight=weight, bias=bias)
    request = Request(x.device, x.dtype, _dtype_of(weight), casting, bias is not None, obstacle)
    backend = get_current_backend() if backend is None else backend
    forward = dispatch("rms_norm_forward", request, backend)
    if obstacle is not None:  # the reference's, which takes rows of any leading dimensions
        return forward(spec, (x, weight, bias, None))[:2]
    with unseen(forward):
        return run_forward(x, weight, bias, Call(spec, forward, None, backend))


def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dx and dw of `rms_norm_forward`, without autograd.

    Args:
        x: What the forward was given: shape `(*, N)`.
        dy: The gradient of y, of x's shape, dtype and device; any strides.
        weight: What the forward was given: shape `(N,)`, or None.
        rstd: What the forward returned: shape `(M,)`.
        offset: What the forward was given.
        casting: What the forward was given.
        backend: As for `rms_norm`.

    Returns:
        dx, of x's shape and dtype, and dw, of shape `(N,)` and weight's dtype, None without a weight.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
        BackendUnavailableError: The backend that was asked for by name cannot run the call.
    """
    if is_dynamo_compiling() and (backend := traced(backend)) != "torch":
        options = {"offset": offset, "casting": casting, "backend": backend}
        return break_graph(rms_norm_backward, x, dy, weight, rstd, **options)
    are_plain = _are_plain(x, dy, weight, rstd)
    if not are_plain:
        x, dy, weight, rstd = _handed_over(x, dy, weight, rstd)
    spec = Spec(*_checked_backward(x, dy, weight, rstd, offset, casting), casting)
    obstacle = None if are_plain else _obstacle(x=x, dy=dy, weight=weight, rstd=rstd)
    request = Request(x.device, x.dtype, _dtype_of(weight), casting, False, obstacle)
    backend = get_current_backend() if backend is None else backend
    backward = dispatch("rms_norm_backward", request, backend)
    if obstacle is not None:
        wanted = Wanted(x.dtype, dw=_dtype_of(weight))
        dx, _, dw, _ = backward(spec, (x, dy, weight, rstd, None), wanted)
        return dx, dw
    call = Call(spec, None, backward, backend)
    with unseen(backward):
        return run_backward(x, dy, weight, rstd.contiguous(), call, weight is not None)


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


def rms_norm_backward_torch(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    casting: str = "once",
) -> tuple[Tensor, Tensor | None]:
    """`rms_norm_backward` by the reference: differentiable, with rstd an input like the others.

    Args:
        x: Shape `(*, N)`.
        dy: Of x's shape, dtype and device.
        weight: Shape `(N,)`, or None.
        rstd: Shape `(M,)`, as `compute_rms_norm_rstd_torch` gives it.
        offset: As for `rms_norm`.
        casting: As for `rms_norm`.

    Returns:
        dx, of x's shape and dtype, and dw, of shape `(N,)` and weight's dtype, None without a weight.

    Raises:
        ValueError: A shape, a device or a number does not fit.
        TypeError: A dtype, a layout or a type does not fit.
    """
    *_, offset = _checked_backward(x, dy, weight, rstd, offset, casting)
    check_memory(x=x, dy=dy, weight=weight, rstd=rstd)
    return reference.rms_norm_backward_torch(x, dy, weight, rstd, offset=offset, casting=casting)


def _checked_backward(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting: str
) -> tuple[int, float, float]:
    """N, an eps, which no backward needs, and the offset as a float."""
    check_input("x", x)
    n, shape = check_normalized_shape(x, x.shape[-1:])
    check_vector("weight", weight, x, shape)
    check_like("dy", dy, x)
    check_rstd(rstd, x, x.numel() // n)
    check_casting(casting)
    return n, 0.0, checked_number("offset", offset)


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


def _remember(
    request: Request,
    backend: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None,
    is_autocast: bool,
) -> None:
    if not is_autocast and not is_dynamo_compiling():  # whose graph would guard on all that is remembered
        fastpath.remember(request, backend, forward, backward)


def _autocast_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype if dtype is None or dtype.is_complex else compute_dtype(dtype)


def _autocast(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(_autocast_dtype(tensor.dtype))


def _is_differentiated(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
