# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Check all arguments of a forward or a backward: once, for the public functions and for the library ops.

Tensors are made plain first where possible (tensors.py). No result is allocated and nothing launched before all checks
have passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import compute_dtype, default_eps, promoted
from tilegym_rmsnorm.call.options import check_casting, checked_eps, checked_number
from tilegym_rmsnorm.call.spec import Call, Checked
from tilegym_rmsnorm.call.tensors import check_memory, made_plain
from tilegym_rmsnorm.call.validation import (
    COMPLEX_DTYPES,
    DTYPES,
    STRIDED,
    are_equal,
    check_dtensors,
    check_input,
    check_like,
    check_normalized_shape,
    check_residual,
    check_vector,
    check_weight,
    checked_dtype,
    fail,
    last_dims,
)
from tilegym_rmsnorm.call.watched import get_trace, outside_of_trace
from tilegym_rmsnorm.ops.norm.spec import BackwardTensors, Spec, Wanted, shape_of_rstd
from tilegym_rmsnorm.reproducibility import check_flags, flags

# Whether autocast on CUDA devices casts the inputs of this torch's F.rms_norm.
HAS_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


_PUBLIC, _FORWARD = ("input", "weight", "bias", "residual"), ("x", "weight", "bias", "residual")
_BACKWARD = ("x", "dy", "weight", "rstd", "d_residual_out")


def checked_forward(
    x: Tensor,
    weight: Any,
    bias: Any,
    residual: Any,
    normalized_shape: int | Sequence[int],
    eps: float | None,
    offset: float,
    casting: str,
    residual_alpha: float,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    *,
    dims: int | None = None,
    level: int | None = None,
) -> Checked:
    """Check a forward over x's last `dims` dimensions. Without dims, over `normalized_shape` as `rms_norm` does: it
    names x "input", takes complex and nested tensors and empty rows, and casts as autocast does for F.rms_norm. level:
    flags of reproducibility.py; None: of the level in effect."""
    is_public = dims is None
    names = _PUBLIC if is_public else _FORWARD
    name = names[0]
    are_plain, given = made_plain(x, weight, bias, residual)
    if not are_plain:
        check_dtensors(names, given)
    x, weight, bias, residual = given
    check_input(name, x, is_any_kind=is_public)
    if dims is not None:
        normalized_shape = last_dims(x, dims)
    n, shape = check_normalized_shape(x, normalized_shape, may_be_empty=is_public)
    heads = check_weight(weight, bias, x, shape, name)
    check_casting(casting)
    alpha = checked_number("residual_alpha", residual_alpha)
    check_residual(x, residual, alpha, residual_dtype, name)
    if out_dtype is not None:
        checked_dtype("out_dtype", out_dtype, COMPLEX_DTYPES if x.is_complex() else DTYPES)
    eps, offset = checked_eps(eps), checked_number("offset", offset)
    tensors, (casting, residual_dtype, out_dtype) = filled_in(
        x, weight, bias, residual, casting, residual_dtype, out_dtype, is_public
    )
    eps = default_eps(residual_dtype or tensors[0].dtype) if eps is None else eps
    level = flags() if level is None else check_flags(level)
    spec = Spec(n, eps, offset, casting, alpha, out_dtype, residual_dtype, heads, level)
    return Checked(names, tensors, shape, spec, are_plain)


def checked_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    *,
    offset: float,
    casting: str,
    alpha: float = 1.0,
    dims: int | None = None,
    level: int | None = None,
) -> Checked:
    """Check a backward over x's last dimension, with rstd (M,), or over x's last `dims` dimensions, with rstd of the
    shape that the library ops give it. x: the tensor that the forward normalized. level: as for `checked_forward`."""
    are_plain, given = made_plain(x, dy, weight, rstd, d_residual_out)
    if not are_plain:
        check_dtensors(_BACKWARD, given)
    x, dy, weight, rstd, d_residual_out = given
    check_input("x", x)
    n, shape = check_normalized_shape(x, last_dims(x, 1 if dims is None else dims))
    heads = check_weight(weight, None, x, shape)
    check_like("dy", dy, x)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_rstd(rstd, x, n, dims)
    check_casting(casting)
    alpha = checked_number("residual_alpha", alpha)
    level = flags() if level is None else check_flags(level)
    spec = Spec(n, 0.0, checked_number("offset", offset), casting, alpha, heads=heads, reproducible=level)
    return Checked(_BACKWARD, given, shape, spec, are_plain)


def checked_saved(tensors: BackwardTensors, call: Call, wanted: Wanted) -> Checked:
    """Check the tensors that autograd saved in the forward of `call`, and the gradients that it passes. The shape of
    the normalized dimensions is not known: they are taken as one."""
    are_plain, shape = False, torch.Size((call.spec.n,))
    if wanted.dx is None:  # db alone is a sum of dy
        check_memory(dy=tensors[1])
    else:
        are_plain, tensors = made_plain(*tensors)
        check_saved(*tensors, call)
    return Checked(_BACKWARD, tensors, shape, call.spec, are_plain)


def filled_in(
    x: Tensor,
    weight: Any,
    bias: Any,
    residual: Any,
    casting: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    follows_autocast: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the tensors, and casting, residual_dtype and out_dtype with what the caller left out. follows_autocast: as
    autocast has them for F.rms_norm."""
    y_dtype = x.dtype
    if follows_autocast and x.is_cuda and torch.is_autocast_enabled("cuda") and HAS_AUTOCAST:
        y_dtype = _autocast_dtype(y_dtype)
        if residual is None:
            x, weight, bias = _autocast(x), _autocast(weight), _autocast(bias)
        else:  # autocast leaves the sum, but its norm is as of float32: casting="llama" would have nothing to round
            casting = "once"
    if residual is None:
        out_dtype = None if out_dtype is y_dtype else out_dtype
    else:
        out_dtype = out_dtype or y_dtype
        if residual_dtype is None:
            is_one = x.dtype == residual.dtype  # `promoted` would be one more guard of Dynamo
            residual_dtype = x.dtype if is_one else promoted(x.dtype, residual.dtype)
    return (x, weight, bias, residual), (casting, residual_dtype, out_dtype)


def _autocast_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else compute_dtype(dtype)


def _autocast(tensor: Any) -> Any:
    return None if tensor is None else tensor.to(_autocast_dtype(tensor.dtype))


def check_rstd(rstd: Tensor, x: Tensor, n: int, dims: int | None) -> None:
    """Check that rstd has x's device, the precision in which x is computed, and shape (M,), or where dims is given the
    shape of the library ops."""
    if not isinstance(rstd, Tensor):
        fail(TypeError, "rstd", "a torch.Tensor", type(rstd).__name__)
    if get_trace() is not None:
        return outside_of_trace(check_rstd, rstd, x, n, dims)
    shape = (x.numel() // n,) if dims is None else shape_of_rstd(x, dims)
    if not are_equal(rstd.shape, shape):
        fail(ValueError, "rstd", f"shape {shape}, one element per row of x", tuple(rstd.shape))
    if rstd.dtype != compute_dtype(x.dtype):
        fail(TypeError, "rstd", f"{compute_dtype(x.dtype)} for {x.dtype} x", rstd.dtype)
    if rstd.device != x.device:
        fail(ValueError, "rstd", f"the device of x, {x.device}", rstd.device)
    if rstd.layout is not STRIDED:
        fail(TypeError, "rstd", f"layout {STRIDED}", rstd.layout)


def check_saved(
    x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, d_residual_out: Tensor | None, call: Call
) -> None:
    """Check that gradients match the outputs and that saved tensors are unchanged: hooks
    (`torch.autograd.graph.saved_tensors_hooks`) or `tensor.data = ...` can change them."""
    n, heads = call.spec.n, call.spec.heads
    for name, gradient in (("dy", dy), ("d_residual_out", d_residual_out)):
        if gradient is not None and gradient.layout is not STRIDED:
            fail(TypeError, name, f"layout {STRIDED}", gradient.layout)
    name = "x, as unpacked for the backward"
    check_like(name, x, dy, "dy")
    if x.dtype != call.dtype:
        fail(TypeError, name, f"the dtype of the forward's, {call.dtype}", x.dtype)
    if d_residual_out is not None:
        check_like("d_residual_out", d_residual_out, x)
    check_memory(x=x, weight=weight, rstd=rstd, dy=dy, d_residual_out=d_residual_out)
    if weight is not None:
        name = "weight, as unpacked for the backward"
        if weight.numel() != n * max(1, heads) and not (weight.numel() == 0 == x.numel()):  # H = 0
            fail(ValueError, name, f"{n * max(1, heads)} elements", tuple(weight.shape))
        check_vector(name, weight, x, weight.shape)
    m = x.numel() // n
    found = rstd.shape, rstd.dtype, rstd.device, rstd.layout
    if found != ((m,), compute_dtype(x.dtype), x.device, STRIDED):
        expected = f"shape ({m},), {compute_dtype(x.dtype)}, on {x.device}, {STRIDED}"
        got = f"{tuple(rstd.shape)}, {rstd.dtype}, on {rstd.device}, {rstd.layout}"
        fail(ValueError, "rstd, as unpacked for the backward", expected, got)
