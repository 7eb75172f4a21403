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

# Before torch 2.13 Dynamo loses the gradient of an autograd.Function if its input was computed in the graph: it is 0.
_DYNAMO_TRACES_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"


def is_needed_in_graph(*tensors: Tensor | None) -> bool:
    """Whether Dynamo must trace this module's operations in the place of our autograd function: the call is transformed
    by torch.func or exported, or one of the tensors is complex, or computes its operations itself. False in eager mode,
    where `gate.obstacle` says it."""
    return is_dynamo_compiling() and (
        not _DYNAMO_TRACES_FUNCTIONS
        or is_in_torch_func()
        or is_exporting()
        or any(t is not None and (t.is_complex() or has_own_operations(t)) for t in tensors)
    )


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> Tensor:
    """y of x's shape and dtype. weight and bias have `normalized_shape`, the last dimensions of x, and any floating
    dtypes; eps, offset and casting as for `tilegym_rmsnorm.rms_norm`, which has checked them all.

    x may also be complex, a jagged nested tensor, or have rows of no elements, as F.rms_norm's may. What a subclass
    cannot compute is its own error.
    """
    dims = len(normalized_shape)
    has_subclass = any(t is not None and has_own_operations(t) for t in (x, weight, bias))
    only_f_rms_norm_can = x.is_complex() or x.is_nested or 0 in normalized_shape
    if only_f_rms_norm_can or (has_subclass and not _is_sharded_within_rows(x, dims)):
        return _by_f_rms_norm(x, list(normalized_shape), weight, bias, eps, offset, casting)
    return reference.rms_norm_torch(x, weight, eps, bias=bias, offset=offset, casting=casting, dims=dims)


def _is_sharded_within_rows(x: Tensor, dims: int) -> bool:
    """Whether x is a DTensor sharded in a normalized dimension. F.rms_norm would gather it, or on a CPU fail; of the
    formula only the mean communicates: one number a row, where the shards are even."""
    # By `dim`, which every kind of shard has: is_shard() says no to some.
    sharded = [getattr(placement, "dim", None) for placement in getattr(x, "placements", ())]
    return any(dim is not None and dim % x.ndim >= x.ndim - dims for dim in sharded)


def _by_f_rms_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> Tensor:
    """By the operation that every subclass knows: DTensor shards it without communication. Where it is not F.rms_norm
    itself, it is F.rms_norm with the weight applied behind it, or in the wider dtype. Without a weight neither casting
    nor offset has anything to act on."""
    if bias is None and (weight is None or (casting == "once" and offset == 0.0 and weight.dtype == x.dtype)):
        return F.rms_norm(x, normalized_shape, weight, eps)
    dtype = reference.joint_dtype(x, weight, bias)
    scale = None if weight is None else weight.to(dtype)
    if scale is not None and offset != 0.0:
        scale = scale + offset
    if casting == "llama":
        xhat = F.rms_norm(x.to(dtype), normalized_shape, None, eps)
        y = reference.round_xhat(xhat, x.dtype, casting)
        y = y if scale is None else y * scale
    else:
        y = F.rms_norm(x.to(dtype), normalized_shape, scale, eps)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype)
