# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls that an op of torch_ops.py stands for: those of which a graph is made, by torch.compile, torch.export or
make_fx; those of DTensors, whose engine runs the op on local tensors; and those that a dispatch mode watches.

With backend="torch" it is the reference, PyTorch's own operations, which Inductor compiles with their neighbours. So it
is for what the ops do not take: complex and nested tensors, rows of no elements, calls that torch.func transforms. And
before PyTorch 2.14 for DTensors with fewer rows than shards, unless a kernel is asked for by name or a residual is
placed otherwise: the op would gather them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.torch_version import TorchVersion

import tilegym_rmsnorm.torch_ops_autograd  # noqa: F401, which registers how they are differentiated
from tilegym_rmsnorm import gate, placements, registry, sharding, torch_ops
from tilegym_rmsnorm.registry import get_current_backend
from tilegym_rmsnorm.spec import DB, DW, DX, Spec, Wanted

_FORWARD, _ADD_FORWARD = map(torch_ops.op, ("rms_norm_forward", "add_rms_norm_forward"))
_BACKWARD, _ADD_BACKWARD = map(torch_ops.op, ("rms_norm_backward", "add_rms_norm_backward"))
# F.rms_norm of a DTensor with fewer rows than shards, in the backward twice as often as the op.
_PYTORCH_GATHERS = TorchVersion(torch.__version__) >= "2.14"


def backend_of_graph(backend: str | None) -> str | None:
    """The backend that a graph is made with, where it is told of one: by name, or by `use_backend` in the function that
    Dynamo traces. Else None: each run of the graph has the one in effect then, or, where it is not Dynamo that makes
    it, the reference if that is in effect here."""
    if backend is not None:
        registry.check_backend_name(backend)  # Dynamo and DTensor's engine would wrap what the op says
        return backend
    if is_dynamo_compiling():
        return registry.traced_backend()
    return "torch" if get_current_backend() == "torch" else None


def takes_op(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether an op stands for a call on `backend_of_graph`'s backend."""
    if backend == "torch" or gate.is_in_torch_func():
        return False
    if any(placements.is_dtensor(tensor) for tensor in tensors):
        return _takes_dtensors(*tensors)
    if is_dynamo_compiling():
        return all(t is None or (type(t) in gate.PLAIN_TYPES and not t.is_complex()) for t in tensors)
    return gate.is_recorded(*tensors) or _is_seen_by_modes(*tensors)


def would_gather(backend: str | None, x: Tensor, residual: Tensor | None) -> bool:
    """Whether an op would gather DTensors that PyTorch's operations leave where they are: those sharded in a
    dimension with fewer elements than shards. Beside a residual that is placed otherwise their sum is moved anyhow, and
    of a sum that is Partial then F.rms_norm can raise an error. Where a kernel is asked for by name it may."""
    is_alike = residual is None or getattr(residual, "placements", None) == getattr(x, "placements", None)
    return not _PYTORCH_GATHERS and _is_auto(backend) and is_alike and placements.has_too_many_shards(x)


def _is_auto(backend: str | None) -> bool:
    """Whether no backend is asked for by name: in the call, or by what is in effect, which Dynamo does not see."""
    if backend is None and not is_dynamo_compiling():
        backend = get_current_backend()
    return backend in (None, "auto")


def _takes_dtensors(*tensors: Tensor | None) -> bool:
    """A tensor beside them that is none is refused by their engine."""
    if any(tensor is not None and (tensor.is_complex() or tensor.is_nested) for tensor in tensors):
        return False
    if is_dynamo_compiling():
        return True
    sharding.prepare(*tensors)
    return not gate.is_transformed()


def _is_seen_by_modes(*tensors: Tensor | None) -> bool:
    """Whether dispatch modes, such as selective checkpointing's, see this call and may be shown an op in it."""
    return (
        gate.count_modes() != 0
        and not gate.is_transformed()
        and all(t is None or (gate.is_plain(t) and not t.is_complex()) for t in tensors)
    )


def leaves_graph(backend: str | None) -> bool:
    """Whether Dynamo leaves out a call that no op stands for: a kernel was asked for by name, and refuses it."""
    return is_dynamo_compiling() and backend not in (None, "auto", "torch")


@torch._disable_dynamo  # torch.compiler.disable would import Dynamo here and now
def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch.compile calls and does not look into."""
    return function(*args, **kwargs)


# What Dynamo says where it may not break the graph (fullgraph=True, strict export), as torch.compiler.disable sets it.
untraced._torchdynamo_disable = True
untraced._torchdynamo_disable_msg = (
    "a kernel of tilegym_rmsnorm was asked for by name and cannot run this call in a graph: its tensors, an eps that "
    "the graph computes, or a transform of torch.func, are for PyTorch's own operations. To mend it: "
    'backend="torch"'
)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    dims: int,
    spec: Spec,
    backend: str | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, residual_out and rstd of x's leading shape, by an op."""
    numbers: tuple[Any, ...] = dims, spec.eps, spec.offset, spec.casting
    if residual is None:
        y, rstd = _FORWARD(x, weight, bias, *numbers, spec.y_dtype, backend)
        return y, None, rstd
    dtypes = spec.residual_dtype, spec.y_dtype
    return _ADD_FORWARD(x, residual, weight, bias, *numbers, spec.alpha, *dtypes, backend)


def backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    wanted: Wanted,
    spec: Spec,
    backend: str | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dw and db over the last dimension, by an op. rstd is (M,)."""
    bits = DX + DW * (wanted.dw is not None) + DB * (wanted.db is not None)
    rstd = rstd.reshape(torch_ops.shape_of_rstd(x, 1))
    numbers: tuple[Any, ...] = bits, 1, spec.offset, spec.casting
    if d_residual_out is None:
        return _BACKWARD(dy, x, weight, rstd, *numbers, wanted.dw, wanted.db, backend)
    dtypes = None, None, wanted.dw, wanted.db
    given = dy, d_residual_out, x, weight, rstd
    dx, _, dw, db = _ADD_BACKWARD(*given, *numbers, 1.0, *dtypes, backend)
    return dx, dw, db
