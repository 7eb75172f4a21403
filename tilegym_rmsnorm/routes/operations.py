# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compute a call by PyTorch's differentiable operations, for tensors that no kernel can be given (choose.py).

PyTorch derives the gradients, so that these calls can be transformed by torch.func, recorded by tracers, differentiated
in forward mode, or computed by a tensor subclass. No dimensions are flattened: a DTensor that is sharded in the middle
could not be. `gradients_by_operations` is the backward of calls on kernels where it must be differentiable again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_rmsnorm import reference
from tilegym_rmsnorm.call.spec import BackwardTensors, ForwardTensors, Gradients, Spec, Wanted
from tilegym_rmsnorm.call.tensors import check_memory, has_own_operations, splits_rows
from tilegym_rmsnorm.call.watched import is_symbol
from tilegym_rmsnorm.reference import (
    compute_dtype,
    joint_dtype,
    promoted,
    round_xhat,
    rounded_value,
    wide_sum,
)


def norm_by_operations(
    tensors: ForwardTensors, normalized_shape: Sequence[int], spec: Spec
) -> Tensor | tuple[Tensor, Tensor]:
    """y of x's shape, or with a residual y and residual_out; contiguous, unless nested. weight and bias have
    `normalized_shape`, the last dimensions of x, or one more for heads, and any floating dtypes, as has the residual.
    spec: all else that `tilegym_rmsnorm.rms_norm` was given, and has checked.

    x may also be complex, a jagged nested tensor, or have rows of no elements, as F.rms_norm's may. What a subclass
    cannot compute is its own error.
    """
    dims = len(normalized_shape)
    if _is_for_f_rms_norm(tensors, dims, spec) or 0 in normalized_shape:
        y, residual_out = _by_f_rms_norm(tensors, list(normalized_shape), spec)
    else:
        y, _, residual_out = reference.forward_torch(tensors, spec, dims)
    return _packed(y) if residual_out is None else (_packed(y), _packed(residual_out))


def gradients_by_operations(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    dims: int,
    spec: Spec,
    wanted: Wanted,
) -> Gradients:
    """The gradients over x's last `dims` dimensions, of the shapes of their tensors, differentiable again.

    tensors: those of a backward; rstd None computes it again, so that its dependence on x counts. Raises ValueError
    where the memory of one was freed.
    """
    x, dy, weight, rstd, d_residual_out = tensors
    check_memory(x=x, weight=weight, dy=dy, d_residual_out=d_residual_out)
    rstd = reference.rstd_torch(x, spec.eps, dims) if rstd is None else rstd
    return reference.gradients_torch((x, dy, weight, rstd, d_residual_out), spec, wanted, dims)


def gradients_on_rows(
    tensors: BackwardTensors, spec: Spec, wanted: Wanted, keeps_rstd: bool = False
) -> Gradients:
    """`gradients_by_operations` of an eager call, of tensors flattened to rows; db is flat. keeps_rstd: rstd is taken
    as it is."""
    x, dy, weight, rstd, d_residual_out = tensors
    shape = (-1, spec.heads, spec.n) if spec.heads else (-1, spec.n)
    rows = (
        x.reshape(shape),
        dy.reshape(shape),
        None if weight is None else weight.reshape(shape[1:]),
        rstd if keeps_rstd else None,
        None if d_residual_out is None else d_residual_out.reshape(shape),
    )
    dx, d_residual, dw, db = gradients_by_operations(rows, 1, spec, wanted)
    d_residual = None if d_residual is None else d_residual.view(x.shape)
    return dx.view(x.shape), d_residual, None if dw is None or weight is None else dw.view(weight.shape), db


def gradients_of_sum(
    d_residual_out: Tensor | None,
    alpha: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dx and d_residual where residual_out alone is used. dtypes, needs: of x and residual."""
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


def db_by_operations(dy: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """db where nothing else is needed: dy summed over the dimensions before its last ones, which are `shape`."""
    check_memory(dy=dy)
    return reference.sum_of_rows(dy, shape, compute_dtype(dy.dtype), dtype)


def _packed(result: Tensor) -> Tensor:
    """PyTorch's operations keep the order of strides that they are given. A nested tensor has its own."""
    return result if result.is_nested else result.contiguous()


def _is_for_f_rms_norm(tensors: ForwardTensors, dims: int, spec: Spec) -> bool:
    """Whether F.rms_norm computes a call, and not the formula: of tensors that it alone takes, and of subclasses, all
    of which know it. A DTensor that is sharded in its rows it would gather, or on a CPU fail. Of the formula the mean
    alone communicates: one number a row, where the shards are even."""
    x, _, _, residual = tensors
    if x.is_complex() or x.is_nested:
        return True
    has_subclass = any(tensor is not None and has_own_operations(tensor) for tensor in tensors)
    if not has_subclass or is_symbol(spec.eps):  # which F.rms_norm would ask for its value
        return False
    return not (splits_rows(x, dims) or splits_rows(residual, dims))


def _by_f_rms_norm(
    tensors: ForwardTensors, normalized_shape: list[int], spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """y and residual_out by the operation that every subclass knows: DTensor shards it without communication. Where it
    is not F.rms_norm itself, it is F.rms_norm with the weight applied behind it, or in the wider dtype. Without a
    weight neither casting nor offset has anything to act on, unless y is wider than x."""
    x, weight, bias, residual = tensors
    y_dtype, residual_out, wide = x.dtype if spec.y_dtype is None else spec.y_dtype, None, None
    if residual is not None:
        joint, dtype = promoted(x.dtype, residual.dtype), spec.residual_dtype
        total = wide_sum(x, residual, spec.alpha)
        x = residual_out = total.to(dtype)
        if not joint.is_complex and promoted(joint, dtype) != dtype:
            # Of a narrower dtype: the gradient would be rounded to it, and in float16 overflow.
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
