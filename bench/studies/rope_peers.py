# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norm and rotary embedding of q and k by other libraries, forward, called as their users call them.

- Liger 0.8.5: its norm of q, that of k, and its rotation of both in place: three launches.
- flashinfer 0.7.2: the same three. With 8 + 1 or 64 + 8 heads of 128 elements one launch, which takes the packed
  projection alone and copies v too; that counts. 16 bits alone.
- unsloth 2026.10: one launch for q and k, which writes rstd too. It has a backward for frozen weights alone, so none
  is compared with one that gives dw.

What a model makes once is not timed: cos and sin in the dtype and the layout that the library takes, positions, and
float32 weights for flashinfer's one launch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from bench.providers.ours import EPS
from bench.studies.rope_cases import Inputs, Shape
from tilegym_rmsnorm.backends.cutile.runtime.toolchain import package_version

Forward = Callable[[Inputs], Any]
# Libraries that must be measured in a run of their own, with the reason.
ALONE = {"unsloth": "import unsloth changes the options of torch.compile"}
CAKE_HEADS = ((8, 1), (64, 8))  # for which flashinfer has the one launch
PAGE = 16  # rows of a page of its cache


def why_missing(name: str) -> str | None:
    """Why a peer cannot be measured in this environment; None where it can, or the name is none of a peer."""
    if name not in PEERS or importlib.util.find_spec(PEERS[name][0]) is not None:
        return None
    return f"no module {PEERS[name][0]}"


def versions_of(names: Iterable[str]) -> dict[str, str | None]:
    """The versions of the peers among these names, by the names to install them."""
    return {PEERS[name][1]: package_version(PEERS[name][1]) for name in names if name in PEERS}


def forward_of(name: str, shape: Shape, dtype: torch.dtype) -> Forward | None:
    """How the peer computes q_out and k_out from a set; None where it has no kernels for the shape or the dtype."""
    return PEERS[name][2](shape, dtype)


def _is_rotated_whole(shape: Shape) -> bool:
    """Whether all of a head is rotated, a power of two: unsloth has one launch for these; Liger is timed for them. Not
    with the roundings of Qwen3, which they do not have."""
    return shape.r == shape.d and shape.d & (shape.d - 1) == 0 and not shape.as_qwen3


def _liger(shape: Shape, dtype: torch.dtype) -> Forward | None:
    if not _is_rotated_whole(shape):
        return None
    norm = importlib.import_module("liger_kernel.ops.rms_norm").rms_norm_forward
    rope = importlib.import_module("liger_kernel.ops.rope").rope_forward

    @functools.cache
    def tables(s: Inputs) -> Any:
        return s.cos[None].to(dtype), s.sin[None].to(dtype)

    def forward(s: Inputs) -> Any:
        heads = []
        for x, weight in ((s.q, s.q_weight), (s.k, s.k_weight)):
            y = norm(x.reshape(-1, x.shape[-1]), weight, EPS, 0.0, "gemma", None)[0]
            heads.append(y.view(x.shape).transpose(1, 2))
        q_out, k_out, *_ = rope(*heads, *tables(s))
        return q_out.transpose(1, 2), k_out.transpose(1, 2)

    return forward


def _unsloth(shape: Shape, dtype: torch.dtype) -> Forward | None:
    if not _is_rotated_whole(shape):
        return None
    norm_and_rotate = importlib.import_module("unsloth.kernels.qk_norm_rope").fast_qk_norm_rope

    @functools.cache
    def arguments(s: Inputs) -> Any:
        norms = (SimpleNamespace(weight=weight, variance_epsilon=EPS) for weight in (s.q_weight, s.k_weight))
        return *norms, s.q, s.k, s.cos.to(dtype), s.sin.to(dtype)

    def forward(s: Inputs) -> Any:
        q_out, k_out = norm_and_rotate(*arguments(s))
        return q_out.transpose(1, 2), k_out.transpose(1, 2)

    return forward


def _flashinfer(shape: Shape, dtype: torch.dtype) -> Forward | None:
    # Its rotation has kernels of its own for these D.
    if dtype.itemsize != 2 or shape.as_qwen3 or shape.d not in (64, 128, 256):
        return None
    is_cake = (shape.hq, shape.hk) in CAKE_HEADS and shape.d == shape.r == 128 and dtype == torch.bfloat16
    return _flashinfer_packed(shape) if is_cake else _flashinfer_three(shape)


def _cache(s: Inputs) -> torch.Tensor:
    """(T, R): a column of cos for each pair, then those of sin."""
    half = s.cos.shape[-1] // 2
    return torch.cat((s.cos[:, :half], s.sin[:, :half]), -1)


def _flashinfer_three(shape: Shape) -> Forward:
    norm = importlib.import_module("flashinfer.norm").rmsnorm
    rotate = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace

    @functools.cache
    def prepared(s: Inputs) -> Any:
        return torch.arange(shape.t, device=s.q.device).repeat(shape.b), _cache(s)

    def forward(s: Inputs) -> Any:
        positions, cache = prepared(s)
        q_out, k_out = (
            norm(x.flatten(0, 1), weight, EPS) for x, weight in ((s.q, s.q_weight), (s.k, s.k_weight))
        )
        rotate(positions, q_out.flatten(1), k_out.flatten(1), shape.d, cache, True)
        return q_out.view(s.q.shape), k_out.view(s.k.shape)

    return forward


def _flashinfer_packed(shape: Shape) -> Forward:
    module = importlib.import_module("flashinfer.cake_fused_qk_rope_append")
    norm_and_rotate = module.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache
    b, t, hq, hk, d, *_ = shape

    @functools.cache
    def prepared(s: Inputs) -> Any:
        """The projection that q and k are slices of, the tables, B new sequences and a cache, and the weights."""
        ints = functools.partial(torch.full, dtype=torch.int32, device=s.q.device)
        sequences = ints((b,), t), torch.arange(b + 1, dtype=torch.int32, device=s.q.device) * t
        pages = ints((b, -(-t // PAGE)), 0)
        paged = [torch.empty(1, PAGE, hk, d, dtype=s.q.dtype, device=s.q.device) for _ in range(2)]
        weights = {"q_norm_weight": s.q_weight.float(), "k_norm_weight": s.k_weight.float()}
        return (s.q._base.view(b * t, -1), _cache(s), *sequences, pages, *paged), weights

    def forward(s: Inputs) -> Any:
        arguments, weights = prepared(s)
        k_out, v_out = (torch.empty(b * t, hk, d, dtype=s.q.dtype, device=s.q.device) for _ in range(2))
        q_out = norm_and_rotate(
            *arguments,
            num_q_heads=hq,
            num_kv_heads=hk,
            qk_norm_policy=2,  # the norm, then the rotation
            eps=EPS,
            out_k=k_out,
            out_v=v_out,
            clear_unused_last_page_rows=False,
            **weights,
        )
        return q_out.view(s.q.shape), k_out.view(s.k.shape)

    return forward


# The module that must be there, what installs it, and who makes a forward of a shape and a dtype.
PEERS = {
    "liger": ("liger_kernel", "liger-kernel", _liger),
    "flashinfer": ("flashinfer", "flashinfer-python", _flashinfer),
    "unsloth": ("unsloth", "unsloth", _unsloth),
}
