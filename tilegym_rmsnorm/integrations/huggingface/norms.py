# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Run the norm of a model by `rms_norm`: make a subclass of the norm's own class with another forward.

To patch a module is to give it that class. All else stays: parameters, buffers, hooks, eps, the training flag, the
answer of isinstance. Where a call has dtypes that no kernel reads, the forward of the base class runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from tilegym_rmsnorm.backends.refusals import KERNEL_DTYPES
from tilegym_rmsnorm.call.arithmetic import promoted
from tilegym_rmsnorm.call.tensors import PLAIN_TYPES, OfPlainType
from tilegym_rmsnorm.call.watched import outside_of_trace
from tilegym_rmsnorm.functional import checked_norm, norm_of
from tilegym_rmsnorm.integrations.huggingface.arithmetic import Call, Match, match_of
from tilegym_rmsnorm.integrations.huggingface.classes import PatchedType, has_hooks, is_outdated, subclass
from tilegym_rmsnorm.integrations.huggingface.rewriting import forward_now
from tilegym_rmsnorm.integrations.huggingface.strides import in_order, order_in_memory
from tilegym_rmsnorm.nn.module import RMSNorm
from tilegym_rmsnorm.ops.norm.op import norm_in_graph
from tilegym_rmsnorm.ops.norm.passes import KNOWN, norm_call
from tilegym_rmsnorm.routes.known_calls import call_of, shared
from tilegym_rmsnorm.routes.main_grad import IN_USE, is_marked

_log = logging.getLogger("tilegym_rmsnorm")
_told: set[tuple[str, str, str]] = set()
_KNOWN = shared()  # calls of patched norms, by what a module says
_own_patches: dict[tuple[float, str, str | None], NormPatch] = {}


@dataclass(frozen=True)
class NormPatch:
    """Description from which a patched class is made, beside its base class: the arithmetic and the backend."""

    match: Match
    backend: str | None

    def fits(self, base: type) -> bool:
        return match_of(base) == self.match

    def made(self, base: type) -> PatchedType:
        match, backend, following = self.match, self.backend, cast(Any, base)
        original, original_repr = following.forward, following.extra_repr
        name = list(inspect.signature(original).parameters)[1]
        in_graph = _in_graph(match, backend)

        @functools.wraps(original)
        def forward(self: Any, x: Any = None, /, *more: Any, **named: Any) -> Any:
            # `while_current` does the same in a call of its own, which would take 0.3 us more.
            if following.forward is not original:
                given = more if x is None else (x, *more)
                return forward_now(self, base)(*given, **named)
            if is_dynamo_compiling() and not (more or named) and (y := in_graph(self, x)) is not None:
                return y
            if x is None:  # x is given by its name, or missing
                x = named.get(name)
                if x is None or len(named) > 1:
                    return original(self, **named)
            elif more or named:
                return original(self, x, *more, **named)
            return compute(self, x, match, original, backend)

        def extra_repr(self: Any) -> str:
            text = original_repr(self)
            return f"{text}{', ' if text else ''}tilegym_rmsnorm: {match.arithmetic}"

        return subclass(base, self, {"forward": forward, "extra_repr": extra_repr})


# Operations that known norms, layers and rotary embeddings apply to a tensor.
_OPERATIONS = tuple(
    "__add__ __getitem__ __mul__ __neg__ __pow__ __radd__ __rmul__ add float mean mul pow rsqrt square to type type_as "
    "unsqueeze".split()
)


def computes_as_tensor(x: Any) -> bool:
    """Return whether x is a tensor that leaves its operations to PyTorch's dispatcher."""
    return type(x) in PLAIN_TYPES or _leaves_operations(type(x))


@torch.compiler.assume_constant_result
def _leaves_operations(cls: Any) -> bool:
    """Return whether a class is one of tensors that leaves its operations to PyTorch's dispatcher, as DTensor does."""
    if cls is FunctionalTensor:  # its to() means the same
        return True
    if not issubclass(cls, Tensor):
        return False
    function, default = cls.__torch_function__, cast(Any, Tensor.__torch_function__).__func__
    is_own = getattr(function, "__func__", None) is not default
    if is_own and function is not torch._C._disabled_torch_function_impl:
        return False
    return all(getattr(cls, name) is getattr(Tensor, name) for name in _OPERATIONS)


def _in_graph(match: Match, backend: str | None) -> Callable[[Any, Any], Tensor | None]:
    """Make a function of a norm and x which Dynamo traces with few guards (routes/traced.py). It returns None for all
    but the usual call, of x that is packed."""
    if match.switch or backend == "torch":  # which `norm_in_graph` declines
        return lambda norm, x: None
    of_weight, of_eps, fixed_eps, offset = match.weight, match.eps, match.fixed_eps, match.offset
    follows_autocast = match.arithmetic == "torch"

    @torch.compiler.assume_constant_result
    def plan_of(x: torch.dtype, weight: torch.dtype | None) -> tuple[Any, Any] | None:
        plan = match.plan(x, weight)
        return None if plan is None else (plan.casting, None if plan.out_dtype is x else plan.out_dtype)

    def call(norm: Any, x: Any) -> Tensor | None:
        weight = getattr(norm, of_weight) if of_weight else None
        if not isinstance(x, OfPlainType) or x.ndim == 0 or not x.is_contiguous():
            return None
        if of_weight and (weight is None or weight.ndim != 1):
            return None
        plan = plan_of(x.dtype, None if weight is None else weight.dtype)
        if plan is None:
            return None
        casting, out_dtype = plan
        eps = getattr(norm, of_eps) if of_eps else fixed_eps
        numbers = x.shape[-1:], eps, offset, casting, 1.0, None, out_dtype
        return norm_in_graph((x, weight, None, None), numbers, backend, follows_autocast)

    return call


def compute(norm: Any, x: Any, match: Match, original: Callable[..., Any], backend: str | None) -> Any:
    """Compute y of a norm by a kernel, or by its original forward. A call like an earlier one is known by x, weight and
    eps: what else a kernel needs follows from them and the class of the norm."""
    described: Any = None
    if type(x) in PLAIN_TYPES and not is_dynamo_compiling():
        described, tensors, eps = _described(norm, x, match, backend)
        known = _KNOWN.find(described)
        if known is not None:
            return known(tensors)
    call = match.call(norm, x.shape, x.dtype) if computes_as_tensor(x) else None
    if call is None:
        return original(norm, x)
    y = run(x, match, call, backend)
    if described is not None and call.weight is tensors[1] and call.eps is eps:
        known = KNOWN.find(norm_call(tensors, _numbers(x, match, call), backend))
        if known is not None:
            _KNOWN.remember(described, known)
    return y


def _described(norm: Any, x: Tensor, match: Match, backend: str | None) -> tuple[Any, Any, float | None]:
    """Describe a call for `_KNOWN`, and return its tensors as `rms_norm` takes them, and eps. The description is None
    where more decides than it says. Dictionaries are read: Module.__getattr__ takes 0.6 us for a parameter."""
    attributes, weight, cls = norm.__dict__, None, type(norm)
    # A property of the class decides before the dictionaries.
    if (match.weight and hasattr(cls, match.weight)) or (match.eps and hasattr(cls, match.eps)):
        return None, (), None
    if match.weight and (not match.switch or getattr(norm, match.switch)):
        weight = attributes["_parameters"].get(match.weight)
        if weight is None or match.weight in attributes:
            return None, (), None
    eps = attributes.get(match.eps) if match.eps else match.fixed_eps
    # Around a norm that is written in PyTorch's operations autocast is left.
    if type(eps) is not float or (match.arithmetic != "torch" and torch.is_autocast_enabled()):
        return None, (), None
    if x.layout is not torch.strided or not x.is_contiguous():
        return None, (), None
    others = cls, match.arithmetic, match.offset, eps, len(IN_USE) and is_marked(weight)
    return call_of((x,), (weight,), (weight is None,), others, backend), (x, weight, None, None), eps


def run(x: Tensor, match: Match, call: Call, backend: str | None) -> Tensor:
    """Compute y by the arithmetic of a norm, with the strides that the original's y has: in most norms its dimensions
    lie in the order of x's. So heads that were transposed before their norm are rows for the kernel, and view() of
    y.transpose(1, 2) works."""
    order = order_of_y(x, match)
    if order is not None and order[-1] == x.dim() - 1:
        back = [order.index(dim) for dim in range(x.dim())]
        return _run(x.permute(order), None, match, call, backend).permute(back)
    y = _run(x, None, match, call, backend)
    return y if order is None else in_order(y, order)


def order_of_y(x: Tensor, match: Match) -> tuple[int, ...] | None:
    """Return the order in memory of the dimensions of the original's y. None: in their order."""
    return None if match.arithmetic == "torch" else order_in_memory(x, match.rstd_first)


def _run(x: Tensor, residual: Tensor | None, match: Match, call: Call, backend: str | None) -> Any:
    """Call `rms_norm`: contiguous y, or y and the sum with the residual."""
    tensors, numbers = (x, call.weight, None, residual), _numbers(x, match, call)
    # Autocast casts the arguments of F.rms_norm, but nothing in a norm that is written in PyTorch's operations.
    is_cast = match.arithmetic != "torch" and torch.is_autocast_enabled() and x.is_cuda
    with torch.autocast("cuda", enabled=False) if is_cast else contextlib.nullcontext():
        if not is_dynamo_compiling():
            return norm_of(tensors, numbers, backend)
        result = norm_in_graph(tensors, numbers, backend, True)
        return checked_norm(tensors, numbers, backend) if result is None else result


def _numbers(x: Tensor, match: Match, call: Call) -> tuple[Any, ...]:
    casting, out_dtype = call.plan
    dtype = None if out_dtype is x.dtype else out_dtype
    return x.shape[-1:], call.eps, match.offset, casting, 1.0, None, dtype


def add_norm(residual: Any, x: Any, norm: Any) -> tuple[Any, Any]:
    """Return `norm(residual + x)` and `residual + x`: in one call where the norm is ours and nothing sees its calls."""
    patch = norm_patch(norm)
    reason = "it is not patched"
    if patch is not None:
        reason = why_watched(norm) or outside_of_trace(_why_not_added, residual, x)
        if not reason:
            dtype = promoted(x.dtype, residual.dtype)
            call = patch.match.call(norm, x.shape, dtype)
            if call is not None:
                return _run(x, residual, patch.match, call, patch.backend)
            reason = why_no_call(norm, patch.match, x.shape, dtype)
    tell_fallback("residual add", norm, reason)
    total = residual + x
    return norm(total), total


def _why_not_added(residual: Any, x: Any) -> str:
    """Say why a norm cannot add these; "" if it can."""
    for each in (x, residual):
        if not isinstance(each, Tensor) or not each.is_floating_point():
            return "it adds what is no floating tensor"
        if not computes_as_tensor(each):
            return f"it adds a {type(each).__name__}"
    if x.shape != residual.shape or x.device != residual.device:
        return "the two that it adds differ in shape or device"
    for each in (x, residual):
        # TensorIterator orders the sum's dimensions by the other operand where one is expanded.
        if not each.is_contiguous() and (0 in each.stride() or order_in_memory(each) is not None):
            return "the dimensions of one that it adds do not lie in memory in their order"
    return ""


def why_watched(norm: torch.nn.Module) -> str:
    """Say what sees the calls of a norm of ours, so that none may be left out; "" if nothing does."""
    if has_hooks(norm):
        return "it has hooks, or a forward of its own"
    cls: Any = type(norm)
    if is_outdated(cls):
        return "its class was given another forward after the patch"
    # A class derived from ours may define these:
    if cls.forward is not getattr(cls, "patched_forward", RMSNorm.forward):
        return "its class has a forward of its own"
    if cls.__call__ is not torch.nn.Module.__call__ or cls._call_impl is not torch.nn.Module._call_impl:
        return "its class has a __call__ of its own"
    return "a hook sees all modules" if torch.nn.modules.module._has_any_global_hook() else ""


def why_no_call(norm: torch.nn.Module, match: Match, shape: torch.Size, dtype: torch.dtype) -> str:
    """Say why `match.call` of this norm returned None."""
    weight = match.weight_of(norm)
    if weight is None:
        return f"no kernel has its weight, its eps and {dtype}"
    if weight.shape != shape[-1:]:
        return f"its weight has shape {tuple(weight.shape)} where rows have {tuple(shape[-1:])}"
    return f"no kernel has its eps, {dtype} and a weight of {weight.dtype}"


def why_apart(norm: Any) -> str:
    """Say why a norm of ours would run apart from what it is fused with if called now; "" if no reason is known."""
    patch = norm_patch(norm)
    if patch is None or (reason := why_watched(norm)):
        return "it is not patched" if patch is None else reason
    weight = patch.match.weight_of(norm)
    if weight is not None and weight.numel() == 0:
        return "its weight has no elements now, as under ZeRO-3"
    if weight is not None and weight.dtype not in KERNEL_DTYPES:
        return f"no kernel takes its weight of {weight.dtype}"
    return ""


def tell_fallback(kind: str, norm: Any, reason: str) -> None:
    """Log once for each class why a norm runs apart from what it is fused with. kind: the other."""
    if is_dynamo_compiling() or not _log.isEnabledFor(logging.INFO):
        return
    cls = type(norm)
    key = kind, f"{cls.__module__}.{cls.__qualname__}", reason
    if key not in _told:
        _told.add(key)
        _log.info("%s runs apart from the %s: %s", cls.__name__, kind, reason)


def norm_patch(norm: Any) -> NormPatch | None:
    """Return how a norm of ours is computed: a patched one, or `RMSNorm`. None for other modules, and for an `RMSNorm`
    that computes more than a norm of the last dimension (`why_not_own`)."""
    found = getattr(type(norm), "patched_from", None)
    if found is not None:
        return found[1] if isinstance(found[1], NormPatch) else None
    if not isinstance(norm, RMSNorm) or why_not_own(norm):
        return None
    key = norm.offset, norm.casting, norm.backend
    patch = _own_patches.get(key)
    if patch is None:
        match = Match("torch", weight="weight", eps="eps", offset=norm.offset, own_casting=norm.casting)
        # One object for the same options: two norms that run in one call have the same.
        patch = _own_patches.setdefault(key, NormPatch(match, norm.backend))
    return patch


def why_not_own(norm: Any) -> str:
    """Say what an `RMSNorm` computes besides a norm of the last dimension; "" if nothing."""
    # Module.__getattr__ takes 2 us for an attribute that is absent.
    if "bias" in norm._parameters or "bias" in norm.__dict__ or norm._modules or norm._buffers:
        return "has a bias, or parts"
    if type(norm).forward is not RMSNorm.forward:
        return "has a forward of its own"
    if norm.heads is not None:
        return "has a weight for each head"
    if len(norm.normalized_shape) != 1:
        return "normalizes several dimensions"
    return "has an out_dtype" if norm.out_dtype is not None else ""
