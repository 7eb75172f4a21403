# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Register the formulas in PyTorch as backend "torch": it runs on any device and floating dtypes, slowly, by many
kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.contract import Request, Unusable
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.call.tensors import add_to
from tilegym_rmsnorm.ops.norm.reference import forward_torch, gradients_torch
from tilegym_rmsnorm.ops.norm.spec import ForwardTensors, Outputs, Spec
from tilegym_rmsnorm.ops.rope.reference import rope_forward_torch, rope_gradients_torch
from tilegym_rmsnorm.ops.rope.spec import OF_BACKWARD

IMPLEMENTATION = __name__


def unusable(request: Request | None) -> Unusable | None:
    """Return None always: PyTorch's operations run wherever torch does."""
    return None


def _norm_forward(tensors: ForwardTensors, spec: Spec) -> Outputs:
    y, rstd, residual_out = forward_torch(tensors, spec)
    return y, rstd.reshape(-1), residual_out


def _registered(op: Any, formula: Callable[..., Any], count: int | None = None) -> Any:
    """Register and return the function of an op. formula: of tensors, a spec, and of a backward what is wanted. count:
    of a backward's tensors; behind them are those that gradients are added to."""

    @torch.no_grad()
    def run(spec: Any, tensors: Any, *wanted: Any) -> Any:
        results = formula(tensors[:count], spec, *wanted)
        if count is not None:
            add_to(tensors[count:], results)
        # PyTorch's operations keep the order of their input's strides.
        if isinstance(results, Tensor):
            return results.contiguous()
        return tuple([None if each is None else each.contiguous() for each in results])

    run.__name__ = run.__qualname__ = op
    return register_impl(op, "torch")(run)


rms_norm_forward = _registered("rms_norm_forward", _norm_forward)
rms_norm_backward = _registered("rms_norm_backward", gradients_torch, 5)
qk_norm_rope_forward = _registered("qk_norm_rope_forward", rope_forward_torch)
qk_norm_rope_backward = _registered("qk_norm_rope_backward", rope_gradients_torch, OF_BACKWARD)
