# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Add dw to the `main_grad` of a weight that is marked, in the place of a gradient for autograd.

The mark is an attribute of the parameter. The forward reads it, and its node of autograd's graph holds the parameter,
since hooks may replace the weight that is saved. The backward reads `main_grad`, which trainers set and replace.

A trainer whose weights have `grad_added_to_main_grad`, as Megatron's, drops `.grad` where that is True. Its hooks run
where autograd gets a gradient: so it gets zeros, and `_Watch` adds what else reaches the weight.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tilegym_rmsnorm.call import watched
from tilegym_rmsnorm.call.layout import is_packed
from tilegym_rmsnorm.call.tensors import PLAIN_TYPES, is_plain, overlap
from tilegym_rmsnorm.call.validation import fail

MARK, FLAG = "adds_to_main_grad", "grad_added_to_main_grad"
# Empty until a weight is marked, so that calls of other programs look at no weight. Longer with each change: Dynamo's
# guards see that, and before torch 2.13 no attribute that a weight gets later.
IN_USE: list[bool] = []
# Whether the running backward comes to a node. Nothing public says it. In torch 2.9 to 2.14.
_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)
IS_SUPPORTED = _will_execute is not None


def mark(weight: Tensor, enabled: bool) -> None:
    """Mark a parameter, or take the mark away. Raise RuntimeError where this torch cannot say what a backward runs."""
    if enabled and not IS_SUPPORTED:
        fail(RuntimeError, "accumulate_main_grad", "torch 2.9 to 2.14", torch.__version__)
    if enabled != is_marked(weight) or (enabled and not IN_USE):  # a pickled weight comes with its mark
        IN_USE.append(enabled)
        setattr(weight, MARK, enabled)


def is_marked(weight: Any) -> bool:
    return getattr(weight, MARK, False)


def adds(weight: Any) -> bool:
    """Whether a call records that it adds dw to the weight's main_grad."""
    return is_marked(weight) and weight.requires_grad and torch.is_grad_enabled()


def entered(tensors: tuple[Any, ...], weights: slice) -> tuple[Any, ...]:
    """Replace weights that add by tensors whose gradients are added, for calls that run another way than kernels by
    themselves: weights of 16 bits by float32 copies, so that dw is not rounded. weights: their places."""
    if watched.is_transformed() or watched.makes_graph():
        got = "one in torch.func, forward mode or a tracer: accumulate_main_grad(module, False) before it"
        fail(RuntimeError, "accumulate_main_grad", "an eager call", got)
    given = list(tensors)
    given[weights] = [_Entering.apply(each) if adds(each) else each for each in tensors[weights]]
    return tuple(given)


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.float() if weight.itemsize == 2 else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensor | None:
        if (target := target_of(ctx.weight)) is None:
            return dw.to(ctx.weight.dtype)
        target.add_(dw)
        return gradient_of(ctx.weight)


def target_of(weight: Any) -> Tensor | None:
    """Return the main_grad to which this backward adds; None where it has a gradient for autograd: `autograd.grad`
    wants it, the weight has no main_grad now, or hooks of Megatron's take `.grad` as it is meant to be. These add to a
    main_grad of the weight's dtype, and Megatron-FSDP's overwrite one.

    Raises TypeError or ValueError for a main_grad that dw cannot be added to, RuntimeError where the sum would not be
    all that is asked: under create_graph or compiled autograd, or where hooks of the weight would see no gradient.
    """
    target = getattr(weight, "main_grad", None)
    if target is None or not _is_accumulated(weight):
        return None
    if hasattr(weight, "__fsdp_param__") or getattr(weight, "overwrite_main_grad", False):
        return None
    refuse = functools.partial(_refuse, weight)
    if type(target) not in PLAIN_TYPES:
        refuse(TypeError, "a torch.Tensor", type(target).__name__)
    if target.dtype is not torch.float32:
        if hasattr(weight, FLAG) and target.dtype is weight.dtype:
            return None
        refuse(TypeError, "torch.float32", target.dtype)
    if target.shape != weight.shape:
        refuse(ValueError, f"the shape of the weight, {tuple(weight.shape)}", tuple(target.shape))
    if target.device != weight.device:
        refuse(ValueError, f"the device of the weight, {weight.device}", target.device)
    # A dimension of extent 1 is contiguous with any stride, and a backend would get a copy.
    if target.layout is not torch.strided or not is_packed(target):
        is_strided = target.layout is torch.strided
        refuse(ValueError, "contiguous memory", f"strides {target.stride()}" if is_strided else target.layout)
    if not is_plain(target):
        refuse(ValueError, "memory of its own", "none")
    if target.requires_grad:
        refuse(ValueError, "requires_grad=False", True)
    if overlap(target, weight):
        refuse(ValueError, "memory of its own", "memory of the weight")
    if torch.is_grad_enabled():
        refuse(RuntimeError, "a backward without create_graph", "create_graph=True")
    if watched.is_in_compiled_autograd():  # it does not see `_Watch` in the backward that registers it
        refuse(RuntimeError, "a backward without compiled autograd", "one with it")
    hooks = weight._backward_hooks or {}
    if any(not isinstance(each, _Watch) for each in hooks.values()):
        refuse(
            RuntimeError,
            "no hook on the weight, since it would see no gradient",
            f"{len(hooks)} by register_hook",
        )
    return target


def _refuse(weight: Tensor, error: type[Exception], expected: str, got: object) -> NoReturn:
    shape = tuple(weight.shape)
    fail(error, f"main_grad of a weight of shape {shape}, marked by accumulate_main_grad", expected, got)


def gradient_of(weight: Any) -> Tensor | None:
    """Tell the trainer that dw was added, and return what autograd gets."""
    if not hasattr(weight, FLAG):
        return None
    setattr(weight, FLAG, True)
    hooks = weight._backward_hooks or {}
    found = next((each for each in hooks.values() if isinstance(each, _Watch)), None)
    if found is None:
        weight.register_hook(found := _Watch(weakref.ref(weight)))
    found.zeros = torch.zeros_like(weight)
    return found.zeros


class _Watch:
    """Hook of a weight: adds to main_grad a gradient that the trainer would drop. It holds the last zeros until it
    runs, so autograd adds nothing to them in place: a gradient that something else is part of is another tensor. No
    longer, since a CUDA graph or a pool may own their memory."""

    def __init__(self, weight: weakref.ref[Any]) -> None:
        self.weight = weight
        self.zeros: Tensor | None = None

    def __call__(self, gradient: Tensor) -> None:
        weight: Any = self.weight()
        zeros, self.zeros = self.zeros, None
        if gradient is zeros or not getattr(weight, FLAG, False) or not _is_accumulated(weight):
            return
        if not getattr(weight, "zero_out_wgrad", False):  # with it the trainer's hook adds the gradient
            weight.main_grad.add_(gradient.detach())


def _is_accumulated(weight: Tensor) -> bool:
    """Whether the running backward leaves the weight's gradient in the weight: not where `autograd.grad` returns it, or
    asks for others alone, or the weight was frozen since the forward."""
    if not weight.requires_grad:
        return False
    try:
        with torch.inference_mode(False):  # in that mode a view, by which PyTorch finds the node, has none
            node = get_gradient_edge(weight).node
        return _will_execute(node)
    except RuntimeError as error:
        if "autograd.grad()" in str(error):
            return False
        raise
