# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tell which modules change nothing when they are called, and which attributes and values run no code when they are
read: those of PyTorch, and the projections of libraries that are known."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Packages whose modules named Linear are projections, with weights that are quantized, sharded or adapted.
_OF_PROJECTIONS = frozenset(
    "auto_gptq awq bitsandbytes deepspeed gptqmodel hqq optimum peft torchao transformer_engine transformers".split()
)


def leaves_input(module: Any, is_norm: Callable[[nn.Module], bool]) -> bool:
    """Return whether a call of a module is known to change nothing: norms, modules of torch and projections are."""
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if is_norm(module):
        return True
    cls: Any = type(module)
    is_called = cls.__call__ is nn.Module.__call__ and cls._call_impl is nn.Module._call_impl
    is_called |= cls.__module__ == nn.ParameterDict.__module__  # some containers refuse calls
    hook = module.__dict__.get("_hf_hook")
    is_accelerate = type(hook).__module__ == "accelerate.hooks" and type(hook).__name__ != "SequentialHook"
    own = module.__dict__.get("_old_forward" if is_accelerate else "forward")
    if not is_called or not (own is None or getattr(own, "__func__", None) is cls.forward):
        return False
    package, _, inner = cls.__module__.partition(".")  # classes derived from those below may have properties
    if package == "torch" and inner.startswith("nn.modules."):
        # A forward that was put there since has other globals.
        is_torch = cls.forward.__globals__["__name__"].startswith("torch.nn.modules.")
        is_known = is_torch and not getattr(module, "inplace", False)
    else:
        is_known = package in _OF_PROJECTIONS and "Linear" in cls.__name__
    return is_known and all(leaves_input(each, is_norm) for each in module.children())


def has_plain_attributes(owner: Any, name: str) -> bool:
    """Return whether reading this attribute runs no code of its class. Configs of transformers count as such."""
    cls: Any = type(owner)
    if isinstance(owner, nn.Module) or hasattr(inspect.getattr_static(cls, name, None), "__get__"):
        return False
    is_plain = cls.__getattribute__ is object.__getattribute__ and not hasattr(cls, "__getattr__")
    return is_plain or cls.__module__.startswith("transformers.")


def is_inert(value: Any) -> bool:
    """Return whether reading a value, or an item of it, runs no code."""
    if isinstance(value, (list, tuple)):
        return all(map(is_inert, value))
    if isinstance(value, dict):
        return all(map(is_inert, value.values()))
    kinds = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device)
    return value is None or isinstance(value, kinds)


def computes_attributes(cls: type) -> bool:
    """Return whether a class of modules has properties, or a __getattr__ of its own."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return any(
        "__getattr__" in vars(each) or any(map(inspect.isdatadescriptor, vars(each).values())) for each in own
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether something on the module itself sees its calls."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # accelerate's hooks, too
        or "_call_impl" in module.__dict__
    )
