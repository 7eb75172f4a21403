# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of qk_norm_rope as their users make them, by the tensors and the formula of rope_cases.py."""

import functools

import rope_cases
import torch
from helpers import DEVICE, FP32

from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.ops.rope.spec import RopeSpec

EPS = 1e-6
ours = functools.partial(qk_norm_rope, eps=EPS)


def expected(q, k, q_weight, k_weight, cos, sin, position_ids=None, rotary_dim=None, **options):
    """Call `rope_cases.outputs_of` with four-dimensional arguments of qk_norm_rope."""
    options = {
        "rope_rounding": "end",
        "casting": "once",
        "interleaved": False,
        "offset": 0.0,
        "eps": EPS,
    } | options
    n, length = q.shape[-1], q.shape[1]
    spec = RopeSpec(n=n, rotary_dim=rotary_dim or n, **options)
    cos, sin = (each.flatten(0, -2) for each in (cos, sin))
    positions = None if position_ids is None else position_ids.reshape(-1, length)
    return rope_cases.outputs_of(spec, (q, k, q_weight, k_weight, cos, sin, positions))


def case(
    *,
    b=2,
    t=5,
    hq=4,
    hk=2,
    d=8,
    r=None,
    dtype=FP32,
    weights="vector",
    tables="T",
    half=False,
    seed=0,
    device=DEVICE,
):
    """Tensors of a call, in the order of its arguments. weights: "vector", "heads", "none", or "float32" vectors.
    tables: "T", "BT", "1T", or "positions", of which the table has 3 rows more than T."""
    made = rope_cases.RopeCase(
        dtype,
        *(b, t, (hq, hk), d, r or d),
        weight=({"float32": "vector"}.get(weights, weights),) * 2,
        weight_dtype=FP32 if weights == "float32" else dtype,
        tables="half" if half else "full",
        has_rows_of_batch=tables == "BT",
        positions="one" if tables == "positions" else None,
    )
    *tensors, cos, sin, _ = rope_cases.make(made, seed=seed).tensors
    if tables in ("BT", "1T"):
        cos, sin = (each.unflatten(0, (-1, t)) for each in (cos, sin))
    return tuple(None if each is None else each.to(device) for each in (*tensors, cos, sin))


def both_passes(function, tensors, seed=1, **options):
    """Outputs, and the gradients of q, k and the weights that are there, for random gradients of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    q, k, q_weight, k_weight, *tables = tensors
    leaves = [None if each is None else each.detach().requires_grad_() for each in (q, k, q_weight, k_weight)]
    outputs = function(*leaves, *tables, **options)
    gradients = [torch.randn(each.shape, generator=generator).to(each) for each in outputs]
    present = [each for each in leaves if each is not None]
    return (*(each.detach() for each in outputs), *torch.autograd.grad(outputs, present, gradients))
