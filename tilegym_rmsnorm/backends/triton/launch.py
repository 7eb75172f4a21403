# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": allocates, chooses the grid and launches on the tensors' own device and its current stream.

With TRITON_INTERPRET=1 the same calls run the kernels in Triton's interpreter, over CPU tensors or copies of CUDA ones.
"""

from __future__ import annotations

import contextlib
import functools
import math

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm.backends.triton import backward, forward, interpreting
from tilegym_rmsnorm.backends.triton.config import (
    BackwardConfig,
    ForwardConfig,
    backward_config,
    forward_config,
)
from tilegym_rmsnorm.registry import register_impl
from tilegym_rmsnorm.spec import Gradients, Outputs, Spec, Tensors, Wanted

LARGEST_ALIGNMENT = 16  # elements: as far as the width of vector loads goes
INTERPRETED_SM_COUNT = 2  # programs run one after another: few, each with several steps, reach every branch


@register_impl("rms_norm_forward", "triton")
def rms_norm_forward(spec: Spec, tensors: Tensors) -> Outputs:
    x, weight, *_ = tensors  # `unusable` has refused a bias
    y, rstd = launch_forward(forward_config(spec.n), x, weight, spec.eps, spec.offset, spec.casting)
    return y, rstd, None


@register_impl("rms_norm_backward", "triton")
def rms_norm_backward(spec: Spec, tensors: Tensors, wanted: Wanted) -> Gradients:
    x = tensors[0]
    config = backward_config(*x.shape, _sm_count(x.device))
    dx, dw = launch_backward(config, *tensors[:4], spec.offset, spec.casting, wanted.dw is not None)
    return dx, None, dw, None


def launch_forward(
    config: ForwardConfig, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """y (M, N) of x's dtype and rstd (M,) float32."""
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    x_row_stride = _row_stride(x)
    common = {"N": N, "ALIGN": math.gcd(LARGEST_ALIGNMENT, x_row_stride), **_options(config.num_warps)}
    common |= {"ROUND_XHAT": casting == "llama", "WIDTH": config.width}

    with _ready(x.device):
        if config.is_held:
            grid = (triton.cdiv(M, config.rows),)
            tiles = {"ROWS": config.rows, "TILES": config.tiles}
            forward.forward_rows[grid](x, weight, y, rstd, M, x_row_stride, eps, offset, **tiles, **common)
        else:
            chunks = {"CHUNKS": config.tiles}
            forward.forward_reread[(M,)](x, weight, y, rstd, x_row_stride, eps, offset, **chunks, **common)
    return y, rstd


def launch_backward(
    config: BackwardConfig,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_dw: bool,
) -> tuple[Tensor, Tensor | None]:
    """dx (M, N) of x's dtype and dw (N,) of weight's dtype, or None where there is no weight or no need."""
    N = x.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = dw_partial = None
    if needs_dw and weight is not None:
        dw_partial = torch.empty((config.walks, N), dtype=torch.float32, device=x.device)
        dw = torch.empty_like(weight)

    with _ready(x.device):
        _launch_dx(config, x, dy, weight, rstd, dx, dw_partial, offset, casting)
        if dw is not None:
            grid = (triton.cdiv(N, config.dw_width),)
            tile = {"ROWS": config.dw_rows, "WIDTH": config.dw_width}
            backward.backward_dw[grid](
                dw_partial, dw, config.walks, N, **tile, **_options(config.dw_num_warps)
            )
    return dx, dw


def _launch_dx(
    config: BackwardConfig,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dw_partial: Tensor | None,
    offset: float,
    casting: str,
) -> None:
    """Fills dx and, where it is given, dw_partial (walks, N)."""
    M, N = x.shape
    strides = (_row_stride(x), _row_stride(dy))
    common = {"N": N, "ALIGN": math.gcd(LARGEST_ALIGNMENT, *strides), **_options(config.num_warps)}
    chosen = {"ROUND_XHAT": casting == "llama", "WIDTH": config.width, "STAGES": config.num_stages, **common}

    if config.plan == "reread":
        backward.backward_dx_reread[(config.walks,)](
            x, dy, weight, rstd, dx, dw_partial, M, *strides, offset, TILES=config.tiles, **chosen
        )
        return
    c, tiles, strips = None, config.tiles, 1
    if config.plan == "strips":
        c, tiles, strips = torch.empty_like(rstd), 1, config.tiles
        width = config.rows * config.width
        chunks = {"WIDTH": width, "CHUNKS": triton.cdiv(N, width)}
        backward.backward_c[(M,)](x, dy, weight, rstd, c, *strides, offset, **chunks, **common)
    chosen |= {"ROWS": config.rows, "TILES": tiles, "STRIPS": strips}
    backward.backward_dx[(config.walks * strips,)](
        x, dy, weight, rstd, c, dx, dw_partial, M, *strides, offset, **chosen
    )


def _row_stride(rows: Tensor) -> int:
    """The stride of a single row means nothing and may be anything; it must not decide what is compiled."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _options(num_warps: int) -> dict[str, int | bool]:
    """What Triton compiles with. Contracting a * b + c is its default up to 3.9, and announced to change."""
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
