# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run any call of `qk_norm_rope` by a backend's kernels of RMSNorm and, around them, PyTorch's operations for rotation.

Normalized heads are float32 between them (float64 beside float64), so that each result is rounded once, as by a kernel
that does everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.call.arithmetic import joint_dtype
from tilegym_rmsnorm.ops.norm.spec import BackwardFunction, ForwardFunction, Spec, Wanted
from tilegym_rmsnorm.ops.rope.reference import rotated, rotated_back, tables_at
from tilegym_rmsnorm.ops.rope.spec import RopeGradients, RopeOutputs, RopeSpec, RopeTensors, RopeWanted


@torch.no_grad()
def forward(kernel: ForwardFunction, spec: RopeSpec, tensors: RopeTensors) -> RopeOutputs:
    """Run any forward of contract.py, around a `kernel` forward of rms_norm."""
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    tables = tables_at(cos, sin, positions, spec, q.shape[:2])

    def normalized_and_rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        dtype = joint_dtype(x, weight, tables.first_cos)
        n, _, _ = kernel(_spec_of(spec, weight)._replace(y_dtype=dtype), (x, weight, None, None))
        return rotated(n, tables, spec, x.dtype).to(x.dtype)

    return normalized_and_rotated(q, q_weight), None if k is None else normalized_and_rotated(k, k_weight)


@torch.no_grad()
def backward(
    forward_kernel: ForwardFunction,
    kernel: BackwardFunction,
    spec: RopeSpec,
    tensors: Any,
    wanted: RopeWanted,
) -> RopeGradients:
    """Run any backward of contract.py, around a `kernel` backward of rms_norm. rstd is that of its forward, since under
    a level no operation of PyTorch's may sum a row."""
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, *targets = tensors
    q_target, k_target = targets or (None, None)
    tables = tables_at(cos, sin, positions, spec, q.shape[:2])

    def gradients(
        dy: Tensor, x: Tensor, weight: Tensor | None, dw_dtype: torch.dtype | None, target: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        dn = rotated_back(dy.to(joint_dtype(x, weight, dy, tables.first_cos)), tables, spec).contiguous()
        of_norm = _spec_of(spec, weight)
        in_forward = of_norm._replace(y_dtype=joint_dtype(x, weight, tables.first_cos))
        _, rstd, _ = forward_kernel(in_forward, (x, weight, None, None))
        given = x, dn, weight, rstd, None, *(() if target is None else (target,))
        dx, _, dw, _ = kernel(of_norm, given, Wanted(x.dtype, dw=dw_dtype))
        return dx, dw

    dq, dq_weight = gradients(dq_out, q, q_weight, wanted.dq_weight, q_target)
    if k is None or dk_out is None:
        return dq, None, dq_weight, None
    dk, dk_weight = gradients(dk_out, k, k_weight, wanted.dk_weight, k_target)
    return dq, dk, dq_weight, dk_weight


def _spec_of(spec: RopeSpec, weight: Tensor | None) -> Spec:
    heads = weight.shape[0] if weight is not None and weight.ndim == 2 else 0
    return Spec(spec.n, spec.eps, spec.offset, spec.casting, heads=heads, reproducible=spec.reproducible)
