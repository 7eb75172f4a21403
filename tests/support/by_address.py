# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A backend that reads and writes by address, as a kernel on a GPU does, for tests on a CPU.

PyTorch does not know what it does, and it takes each array for what the host and the kernels take it: x and dy have
any row stride, all else is packed. So a tensor that is no plain memory is wrong here as it would be on a GPU; only
address 0, which ends a CUDA context, is an AssertionError.
"""

import contextlib
import ctypes

import pytest
import torch
from helpers import settle_interpreters

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import around_kernels, refusals, registry
from tilegym_rmsnorm.backends.contract import BackendModule, Request, Unusable
from tilegym_rmsnorm.ops.norm.spec import (
    BackwardFunction,
    BackwardTensors,
    ForwardFunction,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.routes import known_calls

calls: list[str] = []  # the ops that it ran, since `use` or a test cleared this
_MODULE = registry.BACKEND_MODULES["cutile"]


def array(tensor: torch.Tensor, rows: int, columns: int, row_stride: int) -> list[list[float]]:
    """Read the values at the tensor's address, row after row."""
    memory = _memory(tensor, (rows - 1) * row_stride + columns)
    return [memory[row * row_stride : row * row_stride + columns] for row in range(rows)]


def _memory(tensor: torch.Tensor, count: int):
    assert tensor.dtype is torch.float32, "the only dtype that this backend knows"
    address = tensor.data_ptr()
    assert address != 0, (
        f"launched on address 0, for a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    )
    return (ctypes.c_float * count).from_address(address)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    memory = _memory(tensor, values.numel())
    memory[:] = values.flatten().tolist()


def _needs_more(x: torch.Tensor, weight: torch.Tensor | None, *others: torch.Tensor | None) -> bool:
    """Whether a call has a part that this backend does not take. others: bias, residual and d_residual_out."""
    has_others = any(other is not None for other in others)
    return has_others or x.ndim == 4 or (weight is not None and weight.ndim == 2)


def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    x, weight, bias, residual = tensors
    if _needs_more(x, weight, bias, residual):
        return around_kernels.forward(rms_norm_forward, spec, tensors)
    assert spec.casting == "once", "this backend knows no other"
    calls.append("rms_norm_forward")
    m, n = x.shape
    y, rstd = torch.empty((m, n), dtype=torch.float32), torch.empty((m,), dtype=torch.float32)
    tx = torch.tensor(array(x, m, n, x.stride(0)))
    tscale = 1.0 if weight is None else torch.tensor(array(weight, 1, n, n)[0]) + spec.offset
    trstd = torch.rsqrt(tx.square().mean(dim=1) + spec.eps)
    _write(rstd, trstd)
    _write(y, tx * trstd[:, None] * tscale)
    return y, rstd, None


def rms_norm_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    x, dy, weight, rstd, d_residual_out = tensors
    has_more = wanted.d_residual is not None or wanted.db is not None or spec.alpha != 1.0
    if has_more or _needs_more(x, weight, d_residual_out):
        return around_kernels.backward(rms_norm_backward, spec, tensors, wanted)
    calls.append("rms_norm_backward")
    m, n = x.shape
    dx = torch.empty((m, n), dtype=torch.float32)
    dw = torch.empty((n,), dtype=torch.float32) if wanted.dw is not None else None
    tx, tdy = (torch.tensor(array(each, m, n, each.stride(0))) for each in (x, dy))
    trstd = torch.tensor(array(rstd, 1, m, m)[0])[:, None]
    tscale = 1.0 if weight is None else torch.tensor(array(weight, 1, n, n)[0]) + spec.offset
    txhat, tg = tx * trstd, tdy * tscale
    _write(dx, (tg - txhat * (txhat * tg).mean(dim=1, keepdim=True)) * trstd)
    if dw is not None:
        _write(dw, (tdy * txhat).sum(0))
    return dx, None, dw, None


class _Module:
    IMPLEMENTATION = registry.BACKEND_MODULES["torch"]  # nothing to import

    def unusable(self, request: Request | None) -> Unusable | None:
        if request is None:
            return None
        if request.device.type != "cpu":
            return Unusable("it reads a CPU's addresses", 'use backend="torch"')
        return refusals.tensors_unusable(request)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this backend in the place of "cutile": by name, and first of those that "auto" tries, as on a GPU."""
    for backend in settings.AUTO_ORDER:  # now: what is loaded while this lasts would be forgotten with it
        with contextlib.suppress(ImportError):
            registry._implemented_ops(backend)
    module: BackendModule = _Module()
    forward: ForwardFunction = rms_norm_forward
    backward: BackwardFunction = rms_norm_backward
    impls = {("rms_norm_forward", "cutile"): forward, ("rms_norm_backward", "cutile"): backward}
    monkeypatch.setattr(registry, "_modules", {**registry._modules, _MODULE: module})
    monkeypatch.setattr(registry, "_impls", {**registry._impls, **impls})
    settle_interpreters(monkeypatch)
    known_calls.forget()
    calls.clear()
