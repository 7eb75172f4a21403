# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe launches of `rms_norm` in Triton to the host (host.py): arrays, constants, grids."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.backends.triton import backward, forward, host
from tilegym_rmsnorm.backends.triton.config import (
    FORWARD_LIMITED,
    FORWARD_REGISTERS,
    BackwardConfig,
    Form,
    ForwardConfig,
    backward_config,
    forward_config,
)
from tilegym_rmsnorm.call.layout import as_rows
from tilegym_rmsnorm.ops.norm.spec import ForwardTensors, Gradients, Outputs, Spec, Wanted
from tilegym_rmsnorm.reproducibility import DEVICE, VLLM

_form = functools.lru_cache(Form)
_forward_config = functools.lru_cache(forward_config)


def run_forward(spec: Spec, tensors: ForwardTensors, are_alike: bool = False) -> Outputs:
    host.sms_left(spec.reproducible, tensors[0].device)
    if spec.reproducible & VLLM:
        return _run_as_vllm(spec, tensors, are_alike)
    return launch_forward(_forward_config(spec.n), spec, tensors, are_alike)


def _run_as_vllm(spec: Spec, tensors: ForwardTensors, are_alike: bool) -> Outputs:
    """Add the residual by PyTorch, and take ones where there is no weight, as vLLM does: all that the kernel loads and
    stores has a part in the order of its sums."""
    x, weight, bias, residual = tensors
    normalized = spec.residual_dtype or x.dtype
    for name, expected, got in (
        ("offset", 0.0, spec.offset),
        ("casting", "once", spec.casting),
        ("bias", None, None if bias is None else tuple(bias.shape)),
        ("weight", (spec.n,), (spec.n,) if weight is None else tuple(weight.shape)),
        ("out_dtype", normalized, spec.y_dtype or x.dtype),
    ):
        if got != expected:
            raise ValueError(f'{name}: expected {expected!r} with reproducible(order="vllm"), got {got!r}')
    if residual is not None:
        return around_kernels.forward(run_forward, spec, tensors)
    if weight is None:
        weight = torch.ones(spec.n, dtype=x.dtype, device=x.device)
    return launch_forward(_forward_config(spec.n, is_vllms=True), spec, (x, weight, None, None), are_alike)


def run_backward(spec: Spec, tensors: Any, wanted: Wanted, are_alike: bool = False) -> Gradients:
    x, _, weight, *_ = tensors
    heads, sms = _heads(weight), host.sm_count(x.device)
    left, is_fixed = host.sms_left(spec.reproducible, x.device), spec.reproducible & DEVICE > 0
    config = backward_config(_count(x) // heads, spec.n, sms, heads, left, is_fixed)
    return launch_backward(config, spec, tensors, wanted, are_alike)


def launch_forward(
    config: ForwardConfig, spec: Spec, tensors: ForwardTensors, are_alike: bool = False
) -> Outputs:
    """A forward (spec.py of the op) by these tiles."""
    shape = tensors[0].shape
    x, weight, bias, residual = tensors = tensors if are_alike else _alike(spec, tensors, tensors[1])
    M, heads, residual_out = _count(x), _heads(weight), None
    y, rstd = host.empty(x, shape, spec.y_dtype or x.dtype), host.empty(x, (M,), torch.float32)
    arguments = _arguments(config, spec, weight, x=x, residual=residual)
    arguments |= {"y_ptr": y, "rstd_ptr": rstd, "bias_ptr": bias, "eps": spec.eps}
    if config.kernel == "forward_rows":
        arguments["M"] = M
    if config.kernel == "forward_vllm":
        arguments["n"] = spec.n
    if residual is not None:
        residual_out = host.empty(x, shape, spec.residual_dtype)
        arguments |= {"residual_out_ptr": residual_out, "alpha": spec.alpha}
    grid = (triton.cdiv(M // heads, config.tile.rows) * heads,)
    limit = _most_registers(config, spec, tensors, arguments["ALIGN"])
    options = host.options(config.num_warps, most_registers=limit)
    host.run(x.device, (forward.forward, grid, arguments, options))
    return y, rstd, residual_out


def _most_registers(config: ForwardConfig, spec: Spec, tensors: ForwardTensors, align: int) -> int | None:
    """Limit the registers of a forward's thread, where it spills nothing by that on any GPU. Arrays in float32, biases,
    places of heads and rows that begin anywhere take more. Rows of several tiles take 32 by themselves."""
    x, _, bias, _ = tensors
    dtypes = [each.dtype for each in tensors if each is not None]
    dtypes += [each for each in (spec.y_dtype, spec.residual_dtype) if each is not None]
    is_narrow = all(each.itemsize == 2 for each in dtypes)
    is_one_tile = (
        config.kernel == "forward_rows" and config.tile.tiles == 1 and x.shape[-1] <= FORWARD_LIMITED
    )
    is_simple = bias is None and x.ndim == 2 and x.shape[-1] % 8 == align % 8 == 0
    return FORWARD_REGISTERS if is_narrow and is_one_tile and is_simple else None


def launch_backward(
    config: BackwardConfig, spec: Spec, tensors: Any, wanted: Wanted, are_alike: bool = False
) -> Gradients:
    """A backward (spec.py of the op) by these tiles. The config of per-head weights is that of a head."""
    shape, own, target = tensors[0].shape, tensors[:5], tensors[5:]
    x, dy, weight, rstd, d_residual_out = own if are_alike else _alike(spec, own, tensors[2])
    vector = (spec.n,) if weight is None else tuple(weight.shape)
    dx, d_residual = host.empty(x, shape, wanted.dx), host.empty(x, shape, wanted.d_residual)
    dw = target[0] if target else host.empty(x, vector, None if weight is None else wanted.dw)
    db = host.empty(x, vector, wanted.db)
    # Under a level a frozen weight has the kernel of a trained one, hence the bits of its dx.
    dw_partial = host.empty_partials(weight if spec.reproducible else dw, config.walks)
    db_partial = host.empty_partials(db, config.walks)
    arguments = _arguments(config, spec, weight, x=x, dy=dy)
    arguments["rstd_ptr"] = rstd
    options = host.options(config.num_warps)
    launches = []
    if config.c_tile is not None:
        arguments["c_ptr"] = torch.empty_like(rstd)
        if dx is not None or d_residual is not None:  # else nobody reads c
            of_c = arguments | {"KERNEL": "backward_c", "TILE": config.c_tile}
            launches.append((backward.backward, (_count(x),), of_c, options))
    added, align = host.rows(spec.reproducible, d_residual_out=d_residual_out)
    arguments |= added | {"ALIGN": min(arguments["ALIGN"], align), "M": _count(x)}
    arguments |= {"dx_ptr": dx, "d_residual_ptr": d_residual, "dw_partial_ptr": dw_partial}
    arguments |= {"db_partial_ptr": db_partial, "alpha": None if spec.alpha == 1 else spec.alpha}
    grid = (config.walks * _heads(weight) * config.tile.strips,)
    launches.append((backward.backward, grid, arguments, options))
    pairs = (dw_partial, dw), (db_partial, db)
    host.run(x.device, *launches, *host.sums(config.dw_width, *pairs, targets=target))
    return dx, d_residual, dw, db


def _arguments(
    config: ForwardConfig | BackwardConfig, spec: Spec, weight: Tensor | None, **arrays: Tensor | None
) -> dict[str, Any]:
    """Return the kernel arguments that forward and backward share."""
    arguments, align = host.rows(spec.reproducible, **arrays)
    if config.kernel == "forward_vllm" and align < host.LARGEST_ALIGNMENT:
        align = 1  # Triton knows as much of vLLM's stride: that 16 divides it, or nothing
    form = _form(spec.n, spec.casting == "llama", host.is_per_head(weight))
    arguments |= {"KERNEL": config.kernel, "TILE": config.tile, "FORM": form, "ALIGN": align}
    arguments |= {"weight_ptr": weight, "offset": spec.offset}
    shape = arguments["x_ptr"].shape
    return arguments if len(shape) == 2 else arguments | {"T": shape[1], "H": shape[2]}


def _alike(spec: Spec, tensors: Any, weight: Tensor | None) -> Any:
    """Under a level make the tensors `host.alike`, and all rows (M, N): how T, H and strides fall would else decide
    between two kernels. Rows of heads that each have a weight have one kernel."""
    if not spec.reproducible:
        return tensors
    if not host.is_per_head(weight):
        tensors = [as_rows(each, spec.n) if each is not None and each.ndim > 2 else each for each in tensors]
    return host.alike(tensors)


def are_alike(spec: Spec, tensors: Any, *wanted: Wanted) -> bool:
    """Whether `_alike` returns tensors like these as they are."""
    is_flat = tensors[0].ndim == 2 or host.is_per_head(tensors[2 if wanted else 1])
    return not spec.reproducible or (is_flat and host.are_alike(spec, tensors))


def _count(rows: Tensor) -> int:
    return math.prod(rows.shape[:-1])


def _heads(weight: Tensor | None) -> int:
    """Count heads with a weight of their own."""
    return 1 if weight is None or weight.ndim == 1 else weight.shape[0]
