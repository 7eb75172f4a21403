# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Describe launches of `qk_norm_rope` in Triton to the host (host.py): arrays, constants, grids."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from tilegym_rmsnorm.backends.triton import host, rope
from tilegym_rmsnorm.backends.triton.config_rope import (
    BACKWARD_REGISTERS,
    RopeBackwardConfig,
    RopeForm,
    RopeForwardConfig,
    RopeHeads,
    rope_backward_config,
    rope_form,
    rope_forward_config,
)
from tilegym_rmsnorm.ops.rope.spec import (
    OF_BACKWARD,
    RopeGradients,
    RopeOutputs,
    RopeSpec,
    RopeTensors,
    RopeWanted,
)
from tilegym_rmsnorm.reproducibility import DEVICE

_rope_form = functools.lru_cache(rope_form)


def run_forward(spec: RopeSpec, tensors: RopeTensors, are_alike: bool) -> RopeOutputs:
    host.sms_left(spec.reproducible, tensors[0].device)
    q, k, *_ = tensors = tensors if are_alike else host.alike(tensors)
    config = rope_forward_config(*_form_and_heads(spec, tensors))
    q_out, k_out = _empty_like(q), _empty_like(k)
    programs = sum(
        triton.cdiv(_tokens(x), tile.tokens) * triton.cdiv(x.shape[2], tile.heads)
        for x, tile in zip((x for x in (q, k) if x is not None), config.tiles, strict=True)
    )
    arguments = _arguments("rope_forward", config, spec, tensors, (q_out, k_out))
    options = host.options(config.num_warps, contracts=not config.form.rounds_each)
    host.run(q.device, (rope.rope, (programs,), arguments, options))
    return q_out, k_out


def run_backward(spec: RopeSpec, tensors: Any, wanted: RopeWanted, are_alike: bool) -> RopeGradients:
    own, targets = tensors[:OF_BACKWARD], tensors[OF_BACKWARD:]
    own = own if are_alike else host.alike(own)
    dq_out, dk_out, q, k, *weights, _, _, _ = own
    sms, (form, heads) = host.sm_count(q.device), _form_and_heads(spec, own[2:])
    left, is_fixed = host.sms_left(spec.reproducible, q.device), spec.reproducible & DEVICE > 0
    config = rope_backward_config(form, _tokens(q), heads, sms, left, is_fixed)
    dq, dk = _empty_like(q), _empty_like(k)
    dws = [
        None if dtype is None else _empty_like(weight, dtype) if target is None else target
        for weight, dtype, target in zip(weights, wanted, targets or (None, None), strict=True)
    ]
    # Under a level a frozen weight has the kernel of a trained one, hence the bits of its dx.
    partials = list(map(host.empty_partials, weights if spec.reproducible else dws, (*config.walks, 0)))
    arguments = _arguments("rope_backward", config, spec, own[2:], (dq, dk))
    dys, align = host.rows(spec.reproducible, dq_out=dq_out, dk_out=dk_out)
    arguments |= dys | {"ALIGN": min(arguments["ALIGN"], align), "STAGES": config.num_stages}
    arguments |= {"dq_weight_partial_ptr": partials[0], "dk_weight_partial_ptr": partials[1]}
    arguments["q_programs"] = config.programs[0]
    options = host.options(config.num_warps, most_registers=BACKWARD_REGISTERS)
    launch = rope.rope, (sum(config.programs),), arguments, options
    sums = host.sums(config.dw_width, *zip(partials, dws, strict=True), targets=targets)
    host.run(q.device, launch, *sums)
    return dq, dk, dws[0], dws[1]


def _arguments(
    kernel: str,
    config: RopeForwardConfig | RopeBackwardConfig,
    spec: RopeSpec,
    tensors: RopeTensors,
    results: tuple[Tensor | None, ...],
) -> dict[str, Any]:
    """Return the kernel arguments that forward and backward share."""
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    T, rows_of_tables = q.shape[1], cos.shape[0] if positions is None else positions.numel()
    arguments, align = host.rows(spec.reproducible, q=q, k=k)
    tables, table_align = host.rows(spec.reproducible, cos=cos, sin=sin)
    arguments |= tables | {"positions_ptr": positions, "table_rows": cos.shape[0]}
    arguments |= {"table_batch_stride": 0 if rows_of_tables == T else T, "TABLE_ALIGN": table_align}
    arguments |= {"q_weight_ptr": q_weight, "k_weight_ptr": k_weight, "eps": spec.eps, "offset": spec.offset}
    arguments |= {"q_result_ptr": results[0], "k_result_ptr": results[1], "M": _tokens(q), "T": T}
    arguments |= {"q_H": q.shape[2], "k_H": None if k is None else k.shape[2], "ALIGN": align}
    arguments |= {"Q": config.tiles[0], "K": None if k is None else config.tiles[1]}
    return arguments | {"KERNEL": kernel, "FORM": config.form}


def _form_and_heads(spec: RopeSpec, tensors: RopeTensors) -> tuple[RopeForm, list[RopeHeads]]:
    q, k, q_weight, k_weight, cos, *_ = tensors
    form = _rope_form(
        spec.n,
        spec.rotary_dim,
        is_interleaved=spec.interleaved,
        has_half_tables=cos.shape[1] < spec.rotary_dim,
        rounds_xhat=spec.casting == "llama",
        rounds_n=spec.rope_rounding != "end",
        rounds_each=spec.rope_rounding == "each",
    )
    sides = (q, q_weight), (k, k_weight)
    return form, [RopeHeads(x.shape[2], host.is_per_head(weight)) for x, weight in sides if x is not None]


def _tokens(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def _empty_like(array: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    return None if array is None else host.empty(array, array.shape, dtype or array.dtype)
