# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the norms of q and k and the rotary embedding behind them in one call. Where the tensors of a call are not what
it takes, the norms and the rotary embedding run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.call.watched import outside_of_trace
from tilegym_rmsnorm.integrations.huggingface.arithmetic import Call
from tilegym_rmsnorm.integrations.huggingface.norms import (
    NormPatch,
    computes_as_tensor,
    norm_patch,
    order_of_y,
    tell_fallback,
    why_no_call,
    why_watched,
)
from tilegym_rmsnorm.integrations.huggingface.receivers import Receivers
from tilegym_rmsnorm.integrations.huggingface.rotary import Rotary
from tilegym_rmsnorm.integrations.huggingface.strides import in_order
from tilegym_rmsnorm.ops.rope.spec import RopeRounding
from tilegym_rmsnorm.rope import qk_norm_rope

_OTHER_ROUNDINGS = "no one call rounds q and k as the norms and the rotary embedding do"


class _Apart(NamedTuple):
    """The norm that the log names, and why no one call computes both norms and the rotation."""

    norm: Any
    reason: str


def folded(
    norms: Sequence[tuple[str, bool]], known: Rotary, receivers: Receivers | None
) -> Callable[..., tuple[Any, Any]]:
    """Make the function that takes the place of a rotary embedding.

    Args:
        norms: The names of those of q and k, and whether their results are transposed before they are rotated.
        known: The rotary embedding that was read. A call is not folded where another one replaced it.
        receivers: What gets rotated q and k, if they do nothing but to enter attention.
    """
    (q_name, q_turned), (k_name, k_turned) = norms
    is_turned = q_turned, k_turned

    def run(
        module: Any, cache: Any, rotary: Any, q: Any, k: Any, cos: Any, sin: Any, *given: Any, **named: Any
    ) -> tuple[Any, Any]:
        """Return what `rotary` returns for normalized q and k."""
        q_norm, k_norm = getattr(module, q_name), getattr(module, k_name)
        if known.is_current(rotary):
            call: Any = outside_of_trace(_call_of, q_norm, k_norm, q, k, cos, sin, known, is_turned)
        else:
            call = _Apart(q_norm, "its rotary embedding was replaced")
        rounding = None
        if not isinstance(call, _Apart):
            rounding = _rounding_of(q, cos, call[1].plan.out_dtype, known, receivers, module, cache)
        if isinstance(call, _Apart) or rounding is None:
            why = call if isinstance(call, _Apart) else _Apart(q_norm, _OTHER_ROUNDINGS)
            tell_fallback("rotary embedding", *why)
            q, k = _normalized(q_norm, q, q_turned), _normalized(k_norm, k, k_turned)
            return rotary(q, k, cos, sin, *given, **named)
        patch, (q_weight, eps, plan), (k_weight, _, _) = call
        of_call: tuple[int, ...] | None = (0, 2, 1, 3) if known.heads == 1 else None
        orders = [of_call, of_call]
        if receivers is None:  # others may ask for the strides, by view
            orders = [
                _order_of_result(x, turned, patch, known) for x, turned in ((q, q_turned), (k, k_turned))
            ]
        if known.heads == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = qk_norm_rope(
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            eps=eps,
            offset=patch.match.offset,
            rotary_dim=cos.shape[-1],
            casting=plan.casting,
            rope_rounding=rounding,
            backend=patch.backend,
        )
        if known.heads == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if orders[0] != of_call:
            q = in_order(q, orders[0])
        return q, k if orders[1] == of_call else in_order(k, orders[1])

    return run


def _order_of_result(x: Tensor, is_turned: bool, patch: NormPatch, known: Rotary) -> tuple[int, ...] | None:
    """Return the order in memory of the dimensions of rotated x, the slowest first. None: in their order."""
    if known.is_partial:  # torch.cat makes it
        return None
    if not is_turned:
        return order_of_y(x, patch.match)
    order = order_of_y(x.transpose(1, 2), patch.match)
    return (0, 2, 1, 3) if order is None else tuple((0, 2, 1, 3)[dim] for dim in order)


def _normalized(norm: Any, x: Any, is_turned: bool) -> Any:
    return norm(x.transpose(1, 2)).transpose(1, 2) if is_turned else norm(x)


def _call_of(
    q_norm: Any, k_norm: Any, q: Any, k: Any, cos: Any, sin: Any, known: Rotary, is_turned: tuple[bool, bool]
) -> tuple[NormPatch, Call, Call] | _Apart:
    """Return how both norms are computed; or say why no one call does it: where the norms are watched or differ in more
    than their weights, or the shapes of the tensors do not fit."""
    norms = q_norm, k_norm
    patch = norm_patch(q_norm)
    if patch is None or norm_patch(k_norm) is not patch:
        return _Apart(q_norm if patch is None else k_norm, "the norms of q and k are not computed alike")
    for norm in norms:
        if reason := why_watched(norm):
            return _Apart(norm, reason)
    for norm, each in ((q_norm, q), (k_norm, k), (q_norm, cos), (q_norm, sin)):
        if not computes_as_tensor(each):
            return _Apart(norm, f"it takes a {type(each).__name__}")
    if reason := _why_not_rotated(q, k, cos, sin, known, is_turned):
        return _Apart(q_norm, reason)
    if patch.match.arithmetic == "torch" and torch.is_autocast_enabled(q.device.type):
        return _Apart(q_norm, "autocast casts what its norms take")
    q_call, k_call = (patch.match.call(norm, x.shape, x.dtype) for norm, x in ((q_norm, q), (k_norm, k)))
    if q_call is None or k_call is None:
        norm = q_norm if q_call is None else k_norm
        return _Apart(norm, why_no_call(norm, patch.match, q.shape, q.dtype))
    if q_call[1:] != k_call[1:]:
        return _Apart(q_norm, "the norms of q and k differ in eps or in the dtypes of their weights")
    if torch.is_grad_enabled() and _requires_grad(q, q_call) != _requires_grad(k, k_call):
        return _Apart(q_norm, "of q and k one requires grad and the other does not")
    return patch, q_call, k_call


def _requires_grad(x: Tensor, call: Call) -> bool:
    return x.requires_grad or (call.weight is not None and call.weight.requires_grad)


def _why_not_rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, known: Rotary, is_turned: tuple[bool, bool]
) -> str:
    """Say why the one call does not take these tensors; "" if it does."""
    if k.dtype is not q.dtype or sin.dtype is not cos.dtype:
        return "q and k, or cos and sin, differ in dtype"
    # A transposition of three dimensions moves the last, which is normalized.
    dims = (3, 4) if known.heads == -2 and not any(is_turned) else (4,)
    if not q.dim() == k.dim() == cos.dim() + 1 or q.dim() not in dims:
        return "q, k, cos and sin have other dimensions than one call takes"
    time, (*batches, length, columns) = -2 if known.heads == 1 else -3, cos.shape
    if (
        cos.shape != sin.shape
        or not q.shape[time] == k.shape[time] == length
        or (batches and not (q.shape[0] == k.shape[0] and batches[0] in (1, q.shape[0])))
        or q.shape[-1] != k.shape[-1]
        or columns % 2
        or columns == 0
        or not (columns == q.shape[-1] or (known.is_partial and columns < q.shape[-1]))
    ):
        return "q, k, cos and sin have other shapes than one call takes"
    return "cos or sin requires grad" if cos.requires_grad or sin.requires_grad else ""


def _rounding_of(
    q: Tensor,
    cos: Tensor,
    norm_dtype: torch.dtype,
    known: Rotary,
    receivers: Receivers | None,
    module: Any,
    cache: Any,
) -> RopeRounding | None:
    """Return where the one call has to round; None: no call has the original's bits. norm_dtype: of what the norms
    return.

    Autocast makes q of 16 bits, and float32 weights make it float32 again, until attention's products round it. Where
    those are the only roundings, the one call may round its results instead."""
    if norm_dtype is q.dtype:
        if known.is_wide:
            return "norm" if cos.dtype in (q.dtype, torch.float32) else None
        return "each" if cos.dtype is q.dtype else None
    if norm_dtype is not torch.float32 or cos.dtype not in (q.dtype, torch.float32) or receivers is None:
        return None
    device = q.device.type
    is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is q.dtype
    return "end" if is_cast and receivers.round(module, cache, q.dtype) else None
