# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Recognize modules and attributes that the code which unchanging.py checks may call or read: they change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from tilegym_rmsnorm.integrations.huggingface.rewriting import called_child
from tilegym_rmsnorm.integrations.huggingface.source import Unclear
from tilegym_rmsnorm.integrations.huggingface.unchanging import Unchanging, is_inert

# Packages whose modules named Linear are projections, with weights that are quantized, sharded or adapted.
_OF_PROJECTIONS = frozenset(
    "auto_gptq awq bitsandbytes deepspeed gptqmodel hqq optimum peft torchao transformer_engine transformers".split()
)


def check_module(code: Unchanging, module: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
    """Raise `Unclear` where code that was checked may change anything when it runs for this module. is_norm: whether a
    module is one whose forward was read."""
    if type(module).__getattr__ is not nn.Module.__getattr__:
        raise Unclear("its class has a __getattr__ of its own")
    for name in sorted(map(called_child, code.norms)):
        if _computes_attributes(type(getattr(module, name))):
            raise Unclear(f"its {name} has properties, which would be read later")
    for name in sorted(code.called | code.returning):
        child = getattr(module, name, None)
        if child is None or _leaves_input(child, is_norm):
            continue
        kind = type(child).__name__
        if name in code.called:
            raise Unclear(
                f"its forward calls {name} between a norm and its rotation, and a {kind} may change its input"
            )
        raise Unclear(
            f"its forward uses what {name} returns between a norm and its rotation, and a {kind} may return what "
            "is no tensor"
        )
    for names in sorted(code.read):
        owner = module if len(names) == 1 else getattr(module, names[0], None)
        if owner is not module and not _has_plain_attributes(owner, names[1]):
            owner = None
        if owner is None or not is_inert(getattr(owner, names[-1], None)):
            raise Unclear(f"its forward reads {'.'.join(names)} between a norm and its rotation")


def _leaves_input(module: Any, is_norm: Callable[[nn.Module], bool]) -> bool:
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
    return is_known and all(_leaves_input(each, is_norm) for each in module.children())


def _has_plain_attributes(owner: Any, name: str) -> bool:
    """Return whether reading this attribute runs no code of its class. Configs of transformers count as such."""
    cls: Any = type(owner)
    if isinstance(owner, nn.Module) or hasattr(inspect.getattr_static(cls, name, None), "__get__"):
        return False
    is_plain = cls.__getattribute__ is object.__getattribute__ and not hasattr(cls, "__getattr__")
    return is_plain or cls.__module__.startswith("transformers.")


def _computes_attributes(cls: type) -> bool:
    """Return whether a class of modules has properties, or a __getattr__ of its own."""
    own = map(vars, cls.__mro__[: cls.__mro__.index(nn.Module)])
    return any("__getattr__" in each or any(map(inspect.isdatadescriptor, each.values())) for each in own)
