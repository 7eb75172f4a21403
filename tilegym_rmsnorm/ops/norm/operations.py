# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute a call by PyTorch's differentiable operations, for tensors that no kernel can take (choose.py).

PyTorch derives the gradients, so torch.func can transform these calls, tracers record them, forward mode differentiate
them, and tensor subclasses compute them. Dimensions are not flattened: DTensor cannot flatten a sharded dimension in
the middle. `gradients_by_operations` is the backward of calls on kernels where it must be differentiable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import compute_dtype, joint_dtype, promoted, round_xhat, rounded_value
from tilegym_rmsnorm.call.spec import Call
from tilegym_rmsnorm.call.tensors import check_memory, has_own_operations, splits_rows
from tilegym_rmsnorm.call.validation import is_known
from tilegym_rmsnorm.call.watched import is_symbol, is_transformed, makes_graph
from tilegym_rmsnorm.ops.norm import reference
from tilegym_rmsnorm.ops.norm.reference import wide_sum
from tilegym_rmsnorm.ops.norm.spec import NORM_OPS, BackwardTensors, ForwardTensors, Gradients, Spec, Wanted
from tilegym_rmsnorm.reproducibility import tell_of_operations


def norm_by_operations(
    tensors: ForwardTensors, normalized_shape: Sequence[int], spec: Spec
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute y, of x's shape, or with a residual y and residual_out; contiguous, unless nested. weight and bias have
    `normalized_shape`, the last dimensions of x, or one more for heads. They and the residual have any floating dtypes.
    spec: all other arguments of `rms_norm`, checked.

    x may also be complex, a jagged nested tensor, or have rows without elements, as in F.rms_norm. Where a subclass
    cannot compute the call, its error is raised.
    """
    dims = len(normalized_shape)
    if _is_for_f_rms_norm(tensors, dims, spec) or any([is_known(size, 0) for size in normalized_shape]):
        y, residual_out = _by_f_rms_norm(tensors, list(normalized_shape), spec)
    else:
        y, _, residual_out = reference.forward_torch(tensors, spec, dims)
    return packed(y) if residual_out is None else (packed(y), packed(residual_out))


def gradients_by_operations(tensors: BackwardTensors, dims: int, spec: Spec, wanted: Wanted) -> Gradients:
    """Compute the gradients over x's last `dims` dimensions, each of the shape of its tensor. They can be
    differentiated again, also with respect to rstd. tensors: x, dy, weight, rstd, d_residual_out. Raises ValueError
    where the memory of a tensor was freed."""
    x, dy, weight, _, d_residual_out = tensors
    check_memory(x=x, weight=weight, dy=dy, d_residual_out=d_residual_out)
    return reference.gradients_torch(tensors, spec, wanted, dims)


def gradients_of_saved(tensors: BackwardTensors, dims: int, call: Call, wanted: Wanted) -> Gradients:
    """Compute the gradients that autograd asks for. rstd, which it saved, is computed again where a gradient of these
    gradients may be taken: rstd depends on x."""
    x, dy, weight, rstd, d_residual_out = tensors
    if torch.is_grad_enabled() or is_transformed() or makes_graph():
        check_memory(x=x)
        rstd = reference.rstd_torch(x, call.spec.eps, dims)
    return gradients_by_operations((x, dy, weight, rstd, d_residual_out), dims, call.spec, wanted)


def gradients_of_sum(
    d_residual_out: Tensor | None, alpha: float, dtypes: tuple[Any, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx and d_residual where residual_out is used and y is not. dtypes, needs: of x, residual and more."""
    if d_residual_out is None:
        return None, None
    check_memory(d_residual_out=d_residual_out)
    dx = d_residual = None
    if needs[0]:
        dx = d_residual_out
        if alpha != 1.0:
            dx = alpha * dx.to(compute_dtype(dx.dtype))
        dx = dx.to(dtypes[0])
    if needs[1]:
        d_residual = d_residual_out.to(dtypes[1])
    return dx, d_residual


def db_by_operations(dy: Tensor, shape: tuple[int, ...], spec: Spec, wanted: Wanted) -> Tensor:
    """Compute db where no other gradient is wanted: dy summed over the dimensions before the last ones, `shape`."""
    assert wanted.db is not None
    check_memory(dy=dy)
    tell_of_operations(NORM_OPS[1], spec, dy)
    return reference.sum_of_rows(dy, shape, compute_dtype(dy.dtype), wanted.db)


def packed(result: Any) -> Any:
    """Make a result contiguous: PyTorch's operations keep the order of their input's strides. Not a nested tensor,
    which has a layout of its own."""
    return result if result is None or result.is_nested else result.contiguous()


def _is_for_f_rms_norm(tensors: ForwardTensors, dims: int, spec: Spec) -> bool:
    """Whether F.rms_norm computes a call instead of the formula: on complex and nested tensors, which only F.rms_norm
    takes, and on subclasses, which all implement it. Not on a DTensor that is sharded within rows: F.rms_norm would
    gather it, or on a CPU fail. In the formula only the mean communicates: one number a row, where shards are even."""
    x, _, _, residual = tensors
    if x.is_complex() or x.is_nested:
        return True
    has_subclass = any(tensor is not None and has_own_operations(tensor) for tensor in tensors)
    if not has_subclass or is_symbol(spec.eps):  # F.rms_norm would ask a symbol for its value
        return False
    return not (splits_rows(x, dims) or splits_rows(residual, dims))


def _by_f_rms_norm(
    tensors: ForwardTensors, normalized_shape: list[int], spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Compute y and residual_out by F.rms_norm, which every subclass implements and DTensor shards without
    communication. Where F.rms_norm alone is not this call, the weight is applied after it, or it runs in the wider
    dtype. Without a weight casting and offset have no effect, unless y is wider than x."""
    x, weight, bias, residual = tensors
    tell_of_operations(NORM_OPS[0], spec, x)
    y_dtype, residual_out, wide = x.dtype if spec.y_dtype is None else spec.y_dtype, None, None
    if residual is not None:
        joint, dtype = promoted(x.dtype, residual.dtype), spec.residual_dtype
        total = wide_sum(x, residual, spec.alpha)
        x = residual_out = total.to(dtype)
        if not joint.is_complex and promoted(joint, dtype) != dtype:
            # In a narrower dtype the gradient would be rounded to it, and overflow in float16.
            wide = rounded_value(total, dtype).to(compute_dtype(dtype))
    has_norms_shape = weight is None or weight.ndim == len(normalized_shape)
    is_own_weight = weight is None or (
        spec.casting == "once" and spec.offset == 0.0 and weight.dtype == x.dtype and has_norms_shape
    )
    if wide is None and bias is None and is_own_weight and y_dtype == x.dtype:
        return F.rms_norm(x, normalized_shape, weight, spec.eps), residual_out
    dtype = joint_dtype(x, weight, bias)
    values = (x if wide is None else wide).to(dtype)
    scale = None if weight is None else weight.to(dtype)
    if scale is not None and spec.offset != 0.0:
        scale = scale + spec.offset
    if spec.casting == "llama" or not has_norms_shape:
        y = round_xhat(F.rms_norm(values, normalized_shape, None, spec.eps), x.dtype, spec.casting)
        y = y if scale is None else y * scale
    else:
        y = F.rms_norm(values, normalized_shape, scale, spec.eps)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(y_dtype), residual_out
