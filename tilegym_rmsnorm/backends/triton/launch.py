# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": allocates, chooses the grid and launches on the tensors' own device and its current stream.

With TRITON_INTERPRET=1 the same calls run the kernels in Triton's interpreter, over CPU tensors or copies of CUDA ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.backends.triton import backward, forward, interpreting, reduce, reread
from tilegym_rmsnorm.backends.triton.config import (
    BackwardConfig,
    ForwardConfig,
    backward_config,
    forward_config,
)
from tilegym_rmsnorm.backends.triton.rows import DIMENSIONS
from tilegym_rmsnorm.call.spec import BackwardTensors, ForwardTensors, Gradients, Outputs, Spec, Wanted

LARGEST_ALIGNMENT = 16  # elements: as far as the width of vector loads goes
INTERPRETED_SM_COUNT = 2  # programs run one after another: few, each with several steps, reach every branch


@register_impl("rms_norm_forward", "triton")
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    settings.sms_left(_sm_count(tensors[0].device))  # refuses what the backward cannot do
    return launch_forward(forward_config(spec.n), spec, tensors)


@register_impl("rms_norm_backward", "triton")
def rms_norm_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    x, _, weight, *_ = tensors
    heads, sm_count = _heads(weight), _sm_count(x.device)
    config = backward_config(_count(x) // heads, spec.n, sm_count, heads, settings.sms_left(sm_count))
    return launch_backward(config, spec, tensors, wanted)


def launch_forward(config: ForwardConfig, spec: Spec, tensors: ForwardTensors) -> Outputs:
    """A forward (contract.py) by these tiles."""
    x, weight, bias, residual = tensors
    M, heads = _count(x), _heads(weight)
    y = torch.empty(x.shape, dtype=spec.y_dtype or x.dtype, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    residual_out = None
    chosen = _layout(weight, x=x, residual=residual) | _options(config.num_warps)
    chosen |= {"N": spec.n, "ROUND_XHAT": spec.casting == "llama", "WIDTH": config.width, "bias_ptr": bias}
    if residual is not None:
        residual_out = torch.empty(x.shape, dtype=spec.residual_dtype, device=x.device)
        chosen |= {"residual_ptr": residual, "residual_out_ptr": residual_out, "alpha": spec.alpha}

    arrays = (x, weight, y, rstd)
    with _ready(x.device):
        if config.is_held:
            grid = (triton.cdiv(M // heads, config.rows) * heads,)
            tiles = {"ROWS": config.rows, "TILES": config.tiles}
            forward.forward_rows[grid](*arrays, M, eps=spec.eps, offset=spec.offset, **tiles, **chosen)
        else:
            chunks = {"CHUNKS": config.tiles}
            reread.forward_reread[(M,)](*arrays, eps=spec.eps, offset=spec.offset, **chunks, **chosen)
    return y, rstd, residual_out


def launch_backward(
    config: BackwardConfig, spec: Spec, tensors: BackwardTensors, wanted: Wanted
) -> Gradients:
    """A backward (contract.py) by these tiles. The config of per-head weights is that of a head."""
    x, _, weight, *_ = tensors
    vector = (spec.n,) if weight is None else tuple(weight.shape)
    columns = _heads(weight) * spec.n

    def empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device=x.device)

    dx, d_residual = empty(x.shape, wanted.dx), empty(x.shape, wanted.d_residual)
    dw, db = empty(vector, None if weight is None else wanted.dw), empty(vector, wanted.db)
    dw_partial, db_partial = (
        None if each is None else empty((config.walks, columns), torch.float32) for each in (dw, db)
    )
    with _ready(x.device):
        _launch_dx(config, spec, tensors, dx, d_residual, dw_partial, db_partial)
        sums: list[Any] = [each for each in ((dw_partial, dw), (db_partial, db)) if each[1] is not None]
        if sums:
            _launch_sums(config, *sums)
    return dx, d_residual, dw, db


def _launch_dx(
    config: BackwardConfig,
    spec: Spec,
    tensors: BackwardTensors,
    dx: Tensor | None,
    d_residual: Tensor | None,
    dw_partial: Tensor | None,
    db_partial: Tensor | None,
) -> None:
    """Fills those that are given: dx and d_residual of x's shape, dw_partial and db_partial (walks, columns)."""
    x, dy, weight, rstd, d_residual_out = tensors
    programs = config.walks * _heads(weight)
    common = {"N": spec.n, "offset": spec.offset, **_options(config.num_warps)}
    chosen = common | _layout(weight, x=x, dy=dy, d_residual_out=d_residual_out)
    chosen |= {"ROUND_XHAT": spec.casting == "llama", "WIDTH": config.width, "STAGES": config.num_stages}
    chosen |= {"db_partial_ptr": db_partial, "d_residual_ptr": d_residual}
    chosen |= {"d_residual_out_ptr": d_residual_out, "alpha": None if spec.alpha == 1 else spec.alpha}

    if config.plan == "reread":
        reread.backward_dx_reread[(programs,)](
            x, dy, weight, rstd, dx, dw_partial, _count(x), TILES=config.tiles, **chosen
        )
        return
    c, tiles, strips = None, config.tiles, 1
    if config.plan == "strips":
        c, tiles, strips = torch.empty_like(rstd), 1, config.tiles
        width = config.rows * config.width
        chunks = {"WIDTH": width, "CHUNKS": triton.cdiv(spec.n, width)}
        if dx is not None or d_residual is not None:  # else nobody reads c
            layout = _layout(weight, x=x, dy=dy)
            reread.backward_c[(_count(x),)](x, dy, weight, rstd, c, **layout, **chunks, **common)
    chosen |= {"ROWS": config.rows, "TILES": tiles, "STRIPS": strips}
    backward.backward_dx[(programs * strips,)](x, dy, weight, rstd, c, dx, dw_partial, _count(x), **chosen)


def _launch_sums(
    config: BackwardConfig, first: tuple[Tensor, Tensor], *second: tuple[Tensor, Tensor]
) -> None:
    """Sums the rows of one or two partial arrays, each into its array."""
    partial, total = first
    grid = (triton.cdiv(total.numel(), config.dw_width), 1 + len(second))
    tile = {"ROWS": config.dw_rows, "WIDTH": config.dw_width, **_options(config.dw_num_warps)}
    others = {"second_partial_ptr": second[0][0], "second_sum_ptr": second[0][1]} if second else {}
    reduce.sum_partials[grid](partial, total, config.walks, total.numel(), **tile, **others)


def _count(rows: Tensor) -> int:
    return math.prod(rows.shape[:-1])


def _heads(weight: Tensor | None) -> int:
    """How many heads have a weight of their own."""
    return 1 if weight is None or weight.ndim == 1 else weight.shape[0]


def _layout(weight: Tensor | None, **arrays: Tensor | None) -> dict[str, Any]:
    """Return the kernel arguments for where the rows of these arrays lie, and the power of two that divides all their
    strides."""
    layout, align = {}, LARGEST_ALIGNMENT
    for name, array in arrays.items():
        if array is None:
            continue
        *extents, N = array.shape
        for dimension, extent, stride in zip(
            DIMENSIONS[-len(extents) :], extents, array.stride(), strict=False
        ):
            # The stride of an extent of 1 means nothing and may be anything; it must not decide what is compiled.
            layout[f"{name}_{dimension}_stride"] = stride if extent > 1 else N
            align = math.gcd(align, stride if extent > 1 else N)
        if len(extents) > 1:
            layout |= {"T": extents[1], "H": extents[2]}
    return layout | {"ALIGN": align, "PER_HEAD": weight is not None and weight.ndim > 1}


def _options(num_warps: int) -> dict[str, Any]:
    """Return Triton's compile options. Contracting a * b + c is Triton's default up to 3.9, and announced to change."""
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def _ready(device: torch.device) -> contextlib.AbstractContextManager:
    """In which kernels on tensors of `device` may be launched: Triton launches on the current device."""
    if interpreting():
        from tilegym_rmsnorm.backends.triton.interpreter import one_launch_at_a_time  # imports numpy

        return one_launch_at_a_time()
    # Switching costs microseconds of a call of about thirty: only where it is needed.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _sm_count(device: torch.device) -> int:
    if interpreting():
        return INTERPRETED_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count
