# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`rms_norm`, the differentiable op: it validates, chooses the backend and runs it. passes.py has the forward and the
backward each by itself; autograd.py flattens and differentiates.

Eager calls of small tensors are bound by the host, so the path of a correct call asks no device, reads no property
twice and builds no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from tilegym_rmsnorm import composite, fastpath, graphs, registry
from tilegym_rmsnorm.arguments import as_plain, checked_spec, dtype_of, obstacle_to
from tilegym_rmsnorm.autograd import (
    Call,
    RMSNormFunction,
    record,
    record_add,
    run_add_forward,
    run_forward,
    savable,
    unseen,
)
from tilegym_rmsnorm.gate import is_watched
from tilegym_rmsnorm.reference import compute_dtype
from tilegym_rmsnorm.registry import dispatch, get_current_backend, request_of
from tilegym_rmsnorm.spec import Casting, parts_of
from tilegym_rmsnorm.validation import (
    check_casting,
    check_input,
    check_normalized_shape,
    check_weight,
    is_symbol,
    refuse_torch_jit_script,
)

__all__ = ["rms_norm"]


registry.load("torch")  # the one backend whose calls torch.compile traces
_len_torch_function_stack = torch._C._len_torch_function_stack  # of the modes that see function calls
_is_in_inference_mode = torch.is_inference_mode_enabled  # where enable_grad() records nothing either
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
    casting: Casting = "once",
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
    casting: Casting = "once",
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
    casting: Casting = "once",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.functional.rms_norm`, differentiable (twice), on the selected backend.

    `y = input * rstd * (weight + offset) + bias` over the last `len(normalized_shape)` dimensions, which hold N
    elements, with `rstd = 1 / sqrt(mean(input^2) + eps)`. Computed in float32, in float64 for float64 tensors.

    With a residual, `residual_out = residual_alpha * input + residual` is formed in the same precision, rounded once to
    its dtype, and that value is normalized: what a transformer block hands on, and the norm of it.

    The backward runs on the backend of the forward; under `create_graph` it runs through the reference, which is
    differentiable again. Saved for it are input (a copy of one made under `torch.inference_mode`), or residual_out in
    its place, weight and rstd. Under `torch.autocast("cuda")` the call does as `F.rms_norm` of the installed torch
    does: from torch 2.12 on, half inputs are normalized, and y returned, in float32, unless out_dtype says otherwise;
    residual_out is not cast. Before, and under autocast of CPUs, nothing is cast.

    Args:
        input: Shape `(*, *normalized_shape)`; float16, bfloat16, float32 or float64; any strides. Also what
            `F.rms_norm` takes and no kernel does: complex, jagged nested, rows of no elements. A DTensor, whose local
            tensor the kernels take.
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
    is_traced = is_dynamo_compiling()
    if not is_traced:
        is_cast = _HAS_AUTOCAST and torch.is_autocast_enabled()  # of CUDA devices; to name them takes 0.2 us
        is_short = bias is None and residual is None and out_dtype is None and residual_dtype is None
        if (
            is_short
            and (residual_alpha is _ALPHA or (type(residual_alpha) is float and residual_alpha == 1.0))
            and not (is_cast or _len_torch_function_stack() or is_watched())
        ):
            call = fastpath.find(input, normalized_shape, weight, eps, offset, casting, backend)
            if call is not None:
                if not _is_differentiated(input, weight) or _is_in_inference_mode():
                    return run_forward(input, weight, None, call)[0]
                if call.backward is not None:
                    if input.is_inference() or (weight is not None and weight.is_inference()):
                        input, weight = savable(input), savable(weight)
                    return record(input, weight, None, call)
    arguments = (input, normalized_shape, weight, eps)
    options = {"bias": bias, "offset": offset, "residual": residual, "residual_alpha": residual_alpha}
    options |= {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
    options |= {"casting": casting, "backend": backend}
    # The __torch_function__ of nested tensors takes PyTorch's own functions alone; composite.py calls F.rms_norm.
    if (
        not is_traced
        and has_torch_function_variadic(input, weight, bias, residual)
        and not (isinstance(input, Tensor) and input.is_nested)
    ):
        return handle_torch_function(rms_norm, (input, weight, bias, residual), *arguments, **options)
    return _checked_rms_norm(*arguments, **options)


rms_norm.__prepare_scriptable__ = refuse_torch_jit_script
_ALPHA = rms_norm.__kwdefaults__["residual_alpha"]  # known without a comparison, which a tensor would answer


def _checked_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    bias: Tensor | None,
    casting: str,
    residual: Tensor | None,
    backend: str | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm`, by all checks, which Dynamo traces too. options: those of `checked_spec`."""
    are_plain, (input, weight, bias, residual) = as_plain(input, weight, bias, residual)
    check_input("input", input, is_any_kind=True)
    n, shape = check_normalized_shape(input, normalized_shape, may_be_empty=True)
    heads = check_weight(weight, bias, input, shape, "input")
    check_casting(casting)
    dtypes, y_dtype = (input.dtype, dtype_of(weight), dtype_of(bias)), input.dtype
    is_autocast = _HAS_AUTOCAST and input.is_cuda and torch.is_autocast_enabled("cuda")
    if is_autocast:
        y_dtype = _autocast_dtype(y_dtype)
        if residual is None:
            dtypes = tuple(map(_autocast_dtype, dtypes))
        else:  # the sum is not cast, but its norm is that of a float32 tensor, which "llama" has nothing to round of
            casting = "once"
    spec = checked_spec(
        n, input, residual, eps=eps, casting=casting, y_dtype=y_dtype, x_name="input", **options
    )

    is_symbolic = not are_plain and is_symbol(spec.eps)  # which no op takes
    if not are_plain:
        of_graph = graphs.backend_of_graph(backend)
        is_for_op = n != 0 and not is_symbolic and graphs.takes_op(of_graph, input, weight, bias, residual)
        if is_for_op and not graphs.would_gather(of_graph, input, residual):
            if is_autocast and residual is None:
                input, weight, bias = map(_autocast, (input, weight, bias))
            y, residual_out, _ = graphs.forward(input, weight, bias, residual, len(shape), spec, of_graph)
            return y if residual_out is None else (y, residual_out)
        if graphs.leaves_graph(of_graph):
            arguments = input, normalized_shape, weight, eps
            given = {"bias": bias, "casting": casting, "residual": residual, "backend": of_graph}
            return graphs.untraced(rms_norm, *arguments, **given, **options)
        backend = "torch" if is_dynamo_compiling() else backend

    obstacle = None
    if not are_plain or input.is_complex():
        obstacle = obstacle_to(input=input, weight=weight, bias=bias, residual=residual)
    if obstacle is None and n == 0:
        obstacle = "rows of input have no elements"
    dtypes = *dtypes, dtype_of(residual), spec.y_dtype, spec.residual_dtype
    parts = parts_of(residual is not None, bias is not None, heads > 0)
    request = request_of(input.device, spec.casting, obstacle, *dtypes, parts=parts)
    backend = get_current_backend() if backend is None else backend
    forward = dispatch("rms_norm_forward", request, backend)

    is_composed = obstacle is not None or is_symbolic
    is_composed = is_composed or composite.is_needed_in_graph(input, weight, bias, residual)
    # Of a kernel's call the casts, too, are made where no mode puts other tensors in their place.
    with contextlib.nullcontext() if is_composed else unseen(forward):
        if is_autocast and residual is None:
            input, weight, bias = map(_autocast, (input, weight, bias))
        if is_composed:
            return composite.rms_norm(input, shape, weight, bias, residual, spec)
        backward = None
        is_recorded = _is_differentiated(input, weight, bias, residual)
        if is_recorded and not is_dynamo_compiling():  # which knows neither inference mode nor its tensors
            is_recorded = not _is_in_inference_mode()
            if is_recorded:  # with a residual the sum is saved in the place of input
                input, weight = savable(input) if residual is None else input, savable(weight)
        if is_recorded:  # chosen now: what is in effect may be another later
            backward = dispatch("rms_norm_backward", request, backend)
        normalized_dtype = None if spec.y_dtype is None else spec.residual_dtype or dtypes[0]
        call = Call(spec, forward, backward, backend, heads, normalized_dtype)
        results = _run(input, weight, bias, residual, call)
        is_plain_call = residual is None and not is_autocast
        if is_plain_call and not is_dynamo_compiling():  # whose graph would guard on all that is remembered
            fastpath.remember(request, backend, forward, backward)
    return results


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor | tuple[Tensor, Tensor]:
    """y, or y and residual_out, recorded by autograd where the call has a backward."""
    if residual is not None:
        if call.backward is None:
            return run_add_forward(x, residual, weight, bias, call)[:2]
        return record_add(x, residual, weight, bias, call)
    if call.backward is None:
        return run_forward(x, weight, bias, call)[0]
    apply = RMSNormFunction.apply if is_dynamo_compiling() else record
    return apply(x, weight, bias, call)


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
