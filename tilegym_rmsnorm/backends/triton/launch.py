# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": allocates, chooses the grid and launches on the tensors' own device and its current stream.

With TRITON_INTERPRET=1 the same calls run the kernels in Triton's interpreter, over CPU tensors or copies of CUDA ones.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import around_rope
from tilegym_rmsnorm.backends.registry import register_impl
from tilegym_rmsnorm.backends.triton import backward, forward, interpreting, reduce, reread, rope
from tilegym_rmsnorm.backends.triton.config import (
    BACKWARD_HELD,
    BACKWARD_REGISTERS,
    DW_TILE,
    DW_WARPS,
    BackwardConfig,
    ForwardConfig,
    RopeBackwardConfig,
    RopeForm,
    RopeForwardConfig,
    RopeHeads,
    backward_config,
    forward_config,
    rope_backward_config,
    rope_form,
    rope_forward_config,
)
from tilegym_rmsnorm.backends.triton.rows import DIMENSIONS
from tilegym_rmsnorm.ops.norm.spec import (
    NORM_BACKWARD,
    NORM_FORWARD,
    BackwardTensors,
    ForwardTensors,
    Gradients,
    Outputs,
    Spec,
    Wanted,
)
from tilegym_rmsnorm.ops.rope.spec import (
    ROPE_BACKWARD,
    ROPE_FORWARD,
    RopeBackwardTensors,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)

LARGEST_ALIGNMENT = 16  # elements: as far as the width of vector loads goes
INTERPRETED_SM_COUNT = 2  # programs run one after another: few, each with several steps, reach every branch


@register_impl(NORM_FORWARD, "triton")
def rms_norm_forward(spec: Spec, tensors: ForwardTensors) -> Outputs:
    settings.sms_left(_sm_count(tensors[0].device))  # refuses what the backward cannot do
    return launch_forward(forward_config(spec.n), spec, tensors)


@register_impl(NORM_BACKWARD, "triton")
def rms_norm_backward(spec: Spec, tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    x, _, weight, *_ = tensors
    heads, sm_count = _heads(weight), _sm_count(x.device)
    config = backward_config(_count(x) // heads, spec.n, sm_count, heads, settings.sms_left(sm_count))
    return launch_backward(config, spec, tensors, wanted)


@register_impl(ROPE_FORWARD, "triton")
def qk_norm_rope_forward(spec: RopeSpec, tensors: RopeTensors) -> RopeOutputs:
    if spec.n > BACKWARD_HELD:
        return around_rope.forward(rms_norm_forward, spec, tensors)
    q, k, q_weight, k_weight, cos, *_ = tensors
    settings.sms_left(_sm_count(q.device))
    config = rope_forward_config(_rope_form(spec, cos), _rope_heads((q, q_weight), (k, k_weight)))
    return launch_rope_forward(config, spec, tensors)


@register_impl(ROPE_BACKWARD, "triton")
def qk_norm_rope_backward(spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted) -> RopeGradients:
    if spec.n > BACKWARD_HELD:
        return around_rope.backward(rms_norm_backward, spec, tensors, wanted)
    _, _, q, k, q_weight, k_weight, cos, *_ = tensors
    form, heads = _rope_form(spec, cos), _rope_heads((q, q_weight), (k, k_weight))
    sm_count = _sm_count(q.device)
    config = rope_backward_config(form, _tokens(q), heads, sm_count, settings.sms_left(sm_count))
    return launch_rope_backward(config, spec, tensors, wanted)


def launch_forward(config: ForwardConfig, spec: Spec, tensors: ForwardTensors) -> Outputs:
    """A forward (spec.py of the op) by these tiles."""
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
    """A backward (spec.py of the op) by these tiles. The config of per-head weights is that of a head."""
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


def launch_rope_forward(config: RopeForwardConfig, spec: RopeSpec, tensors: RopeTensors) -> RopeOutputs:
    """A forward of `qk_norm_rope` (spec.py of the op) by these tiles."""
    q, k, q_weight, k_weight, *_ = tensors
    q_out, k_out = _empty_like(q), _empty_like(k)
    programs = sum(
        triton.cdiv(_tokens(x), tile.tokens) * triton.cdiv(x.shape[2], tile.heads)
        for x, tile in zip((x for x in (q, k) if x is not None), config.tiles, strict=True)
    )
    chosen = _rope_arguments(config, spec, tensors)
    chosen |= _options(config.num_warps, contracts=not config.form.rounds_each)
    with _ready(q.device):
        rope.rope_forward[(programs,)](*(q, q_weight, q_out), *(k, k_weight, k_out), **chosen)
    return q_out, k_out


def launch_rope_backward(
    config: RopeBackwardConfig, spec: RopeSpec, tensors: RopeBackwardTensors, wanted: RopeWanted
) -> RopeGradients:
    """A backward of `qk_norm_rope` (spec.py of the op) by these tiles."""
    dq_out, dk_out, q, k, q_weight, k_weight, *_ = tensors
    dq, dk = _empty_like(q), _empty_like(k)
    dws = [
        None if dtype is None else _empty_like(weight, dtype)
        for weight, dtype in zip((q_weight, k_weight), wanted, strict=True)
    ]
    partials = [
        None if dw is None else torch.empty((walks, dw.numel()), dtype=torch.float32, device=q.device)
        for dw, walks in itertools.zip_longest(dws, config.walks)
    ]
    chosen = _rope_arguments(config, spec, tensors[2:], dq_out=dq_out, dk_out=dk_out)
    chosen |= {"q_programs": config.programs[0], "STAGES": config.num_stages}
    chosen |= _options(config.num_warps, most_registers=BACKWARD_REGISTERS)
    with _ready(q.device):
        rope.rope_backward[(sum(config.programs),)](
            *(q, dq_out, q_weight, dq, partials[0]), *(k, dk_out, k_weight, dk, partials[1]), **chosen
        )
        sums: list[Any] = [each for each in zip(partials, dws, strict=True) if each[1] is not None]
        if sums:
            _launch_sums(config, *sums)
    return dq, dk, dws[0], dws[1]


def _rope_arguments(
    config: RopeForwardConfig | RopeBackwardConfig,
    spec: RopeSpec,
    tensors: RopeTensors,
    **gradients: Tensor | None,
) -> dict[str, Any]:
    """Return the kernel arguments that forward and backward share, all but arrays of heads and weights."""
    q, k, _, _, cos, sin, positions = tensors
    T = q.shape[1]
    strides, align = _strides(q=q, k=k, **gradients)
    table_strides, table_align = _strides(cos=cos, sin=sin)
    rows = cos.shape[0] if positions is None else positions.numel()
    tables = {"cos_ptr": cos, "sin_ptr": sin, "positions_ptr": positions, "table_rows": cos.shape[0]}
    counts = {"M": _tokens(q), "T": T, "q_H": q.shape[2], "k_H": None if k is None else k.shape[2]}
    chosen = {"FORM": config.form, "Q": config.tiles[0], "K": None if k is None else config.tiles[1]}
    chosen |= {"ALIGN": align, "TABLE_ALIGN": table_align, "eps": spec.eps, "offset": spec.offset}
    chosen |= {"table_batch_stride": 0 if rows == T else T}
    return strides | table_strides | tables | counts | chosen


def _launch_sums(
    config: BackwardConfig | RopeBackwardConfig, first: tuple[Tensor, Tensor], *second: tuple[Tensor, Tensor]
) -> None:
    """Sums the rows of one or two partial arrays, each into its array."""
    partial, total = first
    columns = max(total.numel() for _, total in (first, *second))
    grid = (triton.cdiv(columns, config.dw_width), 1 + len(second))
    chosen = {"ROWS": DW_TILE // config.dw_width, "WIDTH": config.dw_width, **_options(DW_WARPS)}
    for other, other_total in second:
        chosen |= {"second_partial_ptr": other, "second_sum_ptr": other_total}
        chosen |= {"second_P": other.shape[0], "SECOND_N": other_total.numel()}
    reduce.sum_partials[grid](partial, total, partial.shape[0], total.numel(), **chosen)


def _count(rows: Tensor) -> int:
    return math.prod(rows.shape[:-1])


def _heads(weight: Tensor | None) -> int:
    """Count heads with a weight of their own."""
    return 1 if weight is None or weight.ndim == 1 else weight.shape[0]


def _tokens(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def _rope_form(spec: RopeSpec, cos: Tensor) -> RopeForm:
    return rope_form(
        spec.n,
        spec.rotary_dim,
        is_interleaved=spec.interleaved,
        has_half_tables=cos.shape[1] < spec.rotary_dim,
        rounds_xhat=spec.casting == "llama",
        rounds_n=spec.rope_rounding != "end",
        rounds_each=spec.rope_rounding == "each",
    )


def _rope_heads(*sides: tuple[Tensor | None, Tensor | None]) -> list[RopeHeads]:
    """Make RopeHeads of q and k with their weights."""
    return [
        RopeHeads(x.shape[2], weight is not None and weight.ndim > 1) for x, weight in sides if x is not None
    ]


def _empty_like(array: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    if array is None:
        return None
    return torch.empty(array.shape, dtype=dtype or array.dtype, device=array.device)


def _layout(weight: Tensor | None, **arrays: Tensor | None) -> dict[str, Any]:
    """Return the kernel arguments for where the rows of these arrays lie, all of one shape."""
    strides, align = _strides(**arrays)
    layout = strides | {"ALIGN": align, "PER_HEAD": weight is not None and weight.ndim > 1}
    _, *heads, _ = next(array.shape for array in arrays.values() if array is not None)
    return layout | {"T": heads[0], "H": heads[1]} if heads else layout


def _strides(**arrays: Tensor | None) -> tuple[dict[str, int], int]:
    """Return the strides of the rows of these arrays, and the power of two that divides them all."""
    strides, align = {}, LARGEST_ALIGNMENT
    for name, array in arrays.items():
        if array is None:
            continue
        *extents, N = array.shape
        for dimension, extent, stride in zip(
            DIMENSIONS[-len(extents) :], extents, array.stride(), strict=False
        ):
            # The stride of an extent of 1 means nothing and may be anything; it must not decide what is compiled.
            strides[f"{name}_{dimension}_stride"] = stride if extent > 1 else N
            align = math.gcd(align, stride if extent > 1 else N)
    return strides, align


def _options(num_warps: int, contracts: bool = True, most_registers: int | None = None) -> dict[str, Any]:
    """Return Triton's compile options. Contracting a * b + c is Triton's default up to 3.9, and announced to change.

    Products that are rounded to 16 bits and then added must not be contracted: LLVM narrows product and sum to 16 bits,
    fuses them, and so drops a rounding. most_registers: per thread. Triton's compiler for AMD has no such option, and
    refuses what it does not know.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": contracts}
    if most_registers is not None and torch.version.hip is None:
        options["maxnreg"] = most_registers
    return options


def _ready(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context to launch kernels on `device` in: Triton launches on the current device."""
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
