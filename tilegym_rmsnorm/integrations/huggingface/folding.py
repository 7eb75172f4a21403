# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the norms of q and k and the rotary embedding behind them in one call. Where the tensors of a call are not what
it takes, the norms and the rotary embedding run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.rope_spec import RopeRounding
from tilegym_rmsnorm.integrations.huggingface.arithmetic import Call, Match
from tilegym_rmsnorm.integrations.huggingface.norms import NormPatch, has_hooks, is_watched, patch_of
from tilegym_rmsnorm.rope import qk_norm_rope


def folded(
    known: Any, is_partial: bool, is_handed_on: bool, q_turned: bool, k_turned: bool
) -> Callable[..., tuple[Any, Any]]:
    """Make the function that takes the place of a rotary embedding.

    Args:
        known: The function of the rotary embedding that was read. A call is not folded where another one replaced it.
        is_partial: Whether it may rotate the first elements of a head alone.
        is_handed_on: Whether attention hands its results to functions, and uses them in no other way.
        q_turned: Whether what the norm of q returns is transposed before it is rotated.
        k_turned: The same of k.
    """

    def run(
        q_norm: Any, k_norm: Any, rotary: Any, q: Any, k: Any, cos: Any, sin: Any, *given: Any, **named: Any
    ) -> tuple[Any, Any]:
        """Return what `rotary` returns for normalized q and k, (B, H, T, D)."""
        call = _call_of(q_norm, k_norm, q, k, cos, sin, is_handed_on) if _is_same(rotary, known) else None
        if call is None or not (cos.shape[2] == q.shape[3] or (is_partial and cos.shape[2] < q.shape[3])):
            q, k = _normalized(q_norm, q, q_turned), _normalized(k_norm, k, k_turned)
            return rotary(q, k, cos, sin, *given, **named)
        match, (q_weight, eps, plan), (k_weight, _, _), rounding, backend = call
        q_out, k_out = qk_norm_rope(
            q.transpose(1, 2),
            k.transpose(1, 2),
            q_weight,
            k_weight,
            cos,
            sin,
            eps=eps,
            offset=match.offset,
            rotary_dim=cos.shape[2],
            casting=plan.casting,
            rope_rounding=rounding,
            backend=backend,
        )
        return q_out.transpose(1, 2), k_out.transpose(1, 2)

    return run


def _is_same(rotary: Any, known: Any) -> bool:
    """Return whether the function of a call is still the one that was read."""
    return rotary is known and not (isinstance(rotary, torch.nn.Module) and has_hooks(rotary))


def _normalized(norm: Any, x: Any, is_turned: bool) -> Any:
    return norm(x.transpose(1, 2)).transpose(1, 2) if is_turned else norm(x)


class _FoldedCall(NamedTuple):
    match: Match
    q: Call
    k: Call
    rounding: RopeRounding
    backend: str | None


def _call_of(
    q_norm: Any, k_norm: Any, q: Any, k: Any, cos: Any, sin: Any, is_handed_on: bool
) -> _FoldedCall | None:
    """Return how both norms are computed; None where the norms are watched or differ in more than their weights, the
    tensors are not (B, H, T, D), and (B or 1, T, R), or their dtypes are such that no call has the original's bits."""
    patch = patch_of(type(q_norm))
    if (
        not isinstance(patch, NormPatch)
        or patch_of(type(k_norm)) is not patch
        or is_watched(q_norm)
        or is_watched(k_norm)
        or not all(isinstance(each, Tensor) for each in (q, k, cos, sin))
        or k.dtype is not q.dtype
        or sin.dtype is not cos.dtype
        or not q.dim() == k.dim() == cos.dim() + 1 == 4
        or cos.shape != sin.shape
        or not q.shape[2] == k.shape[2] == cos.shape[1]
        or not (q.shape[0] == k.shape[0] and cos.shape[0] in (1, q.shape[0]))
        or q.shape[3] != k.shape[3]
        or cos.shape[2] % 2
        or cos.shape[2] == 0
        or cos.requires_grad
        or sin.requires_grad
        or (patch.match.arithmetic == "torch" and torch.is_autocast_enabled(q.device.type))
    ):
        return None
    q_call, k_call = (patch.match.call(norm, x.shape, x.dtype) for norm, x in ((q_norm, q), (k_norm, k)))
    if q_call is None or k_call is None or q_call[1:] != k_call[1:]:
        return None
    rounding = _rounding_of(q, cos, q_call.plan.out_dtype, is_handed_on)
    return None if rounding is None else _FoldedCall(patch.match, q_call, k_call, rounding, patch.backend)


def _rounding_of(q: Tensor, cos: Tensor, norm_dtype: torch.dtype, is_handed_on: bool) -> RopeRounding | None:
    """Return where the one call has to round. norm_dtype: of what the norms return.

    Autocast makes q of 16 bits, and float32 weights make it float32 again, until it casts the arguments of attention's
    products. Those casts are the only roundings, so the one call may round its results instead."""
    if norm_dtype is q.dtype:
        return "each" if cos.dtype is q.dtype else None
    device = q.device.type
    is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is q.dtype
    if is_handed_on and is_cast and norm_dtype is torch.float32 and cos.dtype in (q.dtype, torch.float32):
        return "end"
    return None
