# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm composed of PyTorch's differentiable operations, for what no kernel can be given (gate.py).

PyTorch derives the gradients, so that these calls can be transformed by torch.func, recorded by tracers, differentiated
in forward mode, or computed by a tensor subclass. No dimensions are flattened: a DTensor that is sharded in the middle
could not be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.gate import has_own_operations, is_exporting, is_in_torch_func
from tilegym_rmsnorm.placements import splits_rows
from tilegym_rmsnorm.spec import Gradients, Spec, Wanted
from tilegym_rmsnorm.validation import is_symbol

# Before torch 2.13 Dynamo loses the gradient of an autograd.Function if its input was computed in the graph: it is 0.
_DYNAMO_TRACES_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"


def is_needed_in_graph(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Whether Dynamo must trace this module's operations in the place of our autograd function: the call is transformed
    by torch.func or exported, or one of the tensors is complex, or computes its operations itself, or there is a
    residual. False in eager mode, where `gate.obstacle` says it."""
    return is_dynamo_compiling() and (
        not _DYNAMO_TRACES_FUNCTIONS
        or residual is not None
        or is_in_torch_func()
        or is_exporting()
        or any(t is not None and (t.is_complex() or has_own_operations(t)) for t in (x, weight, bias))
    )


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    spec: Spec,
) -> Tensor | tuple[Tensor, Tensor]:
    """y of x's shape, or with a residual y and residual_out; contiguous, unless nested. weight and bias have
    `normalized_shape`, the last dimensions of x, or one more for heads, and any floating dtypes, as has the residual.
    spec: all else that `tilegym_rmsnorm.rms_norm` was given, and has checked.

    x may also be complex, a jagged nested tensor, or have rows of no elements, as F.rms_norm's may. What a subclass
    cannot compute is its own error.
    """
    dims = len(normalized_shape)
    has_subclass = any(t is not None and has_own_operations(t) for t in (x, weight, bias, residual))
    has_subclass = has_subclass and not is_symbol(spec.eps)  # which F.rms_norm would ask for its value
    # A DTensor that is sharded in its rows F.rms_norm would gather, or on a CPU fail. Of the formula the mean alone
    # communicates: one number a row, where the shards are even.
    only_f_rms_norm_can = x.is_complex() or x.is_nested or 0 in normalized_shape
    if only_f_rms_norm_can or (has_subclass and not (splits_rows(x, dims) or splits_rows(residual, dims))):
        y_dtype, shape = x.dtype if spec.y_dtype is None else spec.y_dtype, list(normalized_shape)
        if residual is None:
            return _packed(_by_f_rms_norm(x, shape, weight, bias, spec, y_dtype))
        residual_out, wide = _sum_and_wide_sum(x, residual, spec)
        y = _by_f_rms_norm(residual_out, shape, weight, bias, spec, y_dtype, wide)
        return _packed(y), _packed(residual_out)
    options = {"bias": bias, "offset": spec.offset, "casting": spec.casting, "out_dtype": spec.y_dtype}
    if residual is None:
        return _packed(reference.rms_norm_torch(x, weight, spec.eps, **options, dims=dims))
    y, residual_out, _ = reference.add_rms_norm_torch(
        x,
        residual,
        weight,
        spec.eps,
        alpha=spec.alpha,
        residual_dtype=spec.residual_dtype,
        **options,
        dims=dims,
    )
    return _packed(y), _packed(residual_out)


def gradients(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    d_residual_out: Tensor | None,
    dims: int,
    spec: Spec,
    wanted: Wanted,
) -> Gradients:
    """The gradients of the norm of x's last `dims` dimensions, which can be differentiated again: None where x or
    weight needs none. x is what was normalized, and has spec.alpha times the branch in it."""
    y_spec = spec._replace(alpha=1.0, y_dtype=dy.dtype, residual_dtype=None)
    with torch.enable_grad():
        is_split = splits_rows(x, dims)
        # The gradient of x is not rounded on its way to the sum with d_residual_out.
        wide = x if is_split else x.to(reference.compute_dtype(x.dtype))
        leaves = [each for each in (wide, weight) if each is not None and each.requires_grad]
        found = {}
        if leaves:  # autograd refuses to look for none, as where bias alone is learned
            shape = list(x.shape[-dims:])
            if is_split:
                y = rms_norm(x, shape, weight, None, None, y_spec)
            else:
                y = _by_f_rms_norm(x, shape, weight, None, y_spec, dy.dtype, wide)
            found = dict(zip(leaves, torch.autograd.grad(y, leaves, dy, create_graph=True), strict=True))
        total = found.get(wide)
        if d_residual_out is not None and total is not None:
            total = total + d_residual_out
        dx = None if total is None else (total if spec.alpha == 1.0 else spec.alpha * total).to(wanted.dx)
        d_residual = None if total is None or wanted.d_residual is None else total.to(wanted.d_residual)
        dw, db = None if weight is None else found.get(weight), None
        if wanted.db is not None:
            over = list(range(x.ndim - (dims if weight is None else weight.ndim)))
            terms = dy.to(reference.compute_dtype(dy.dtype))
            db = (terms.sum(over) if over else terms).to(wanted.db)
    return dx, d_residual, dw, db


def _packed(result: Tensor) -> Tensor:
    """PyTorch's operations keep the order of strides that they are given. A nested tensor has its own."""
    return result if result.is_nested else result.contiguous()


def _sum_and_wide_sum(x: Tensor, residual: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """residual_out and, where its dtype is narrower than x or residual, the same values in the precision that computes:
    their gradient would be rounded to the narrow dtype, and in float16 overflow."""
    total, dtype = reference.wide_sum(x, residual, spec.alpha), spec.residual_dtype
    residual_out = total.to(dtype)
    joint = reference.promoted(x.dtype, residual.dtype)
    if joint.is_complex or reference.promoted(joint, dtype) == dtype:
        return residual_out, None
    return residual_out, reference.rounded_value(total, dtype).to(reference.compute_dtype(dtype))


def _by_f_rms_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: Spec,
    y_dtype: torch.dtype,
    wide: Tensor | None = None,
) -> Tensor:
    """By the operation that every subclass knows: DTensor shards it without communication. Where it is not F.rms_norm
    itself, it is F.rms_norm with the weight applied behind it, or in the wider dtype. Without a weight neither casting
    nor offset has anything to act on, unless y is wider than x. wide: the values of x in a wider dtype."""
    eps, offset, casting = spec.eps, spec.offset, spec.casting
    is_own_weight = weight is None or (
        casting == "once"
        and offset == 0.0
        and weight.dtype == x.dtype
        and weight.ndim == len(normalized_shape)
    )
    if wide is None and bias is None and is_own_weight and y_dtype == x.dtype:
        return F.rms_norm(x, normalized_shape, weight, eps)
    dtype, values = reference.joint_dtype(x, weight, bias), x if wide is None else wide
    scale = None if weight is None else weight.to(dtype)
    if scale is not None and offset != 0.0:
        scale = scale + offset
    if casting == "llama" or (scale is not None and scale.ndim != len(normalized_shape)):
        xhat = F.rms_norm(values.to(dtype), normalized_shape, None, eps)
        y = reference.round_xhat(xhat, x.dtype, casting)
        y = y if scale is None else y * scale
    else:
        y = F.rms_norm(values.to(dtype), normalized_shape, scale, eps)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(y_dtype)
