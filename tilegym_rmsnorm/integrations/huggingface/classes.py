# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Make patched classes: subclasses of modules' own classes, with the same names.

A patch is an object with `made(base)`, which makes the subclass, and `fits(base)`, which says whether base is still
what the patch was made for.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from typing import Any

import torch

from tilegym_rmsnorm.call.options import refuse_torch_jit_script
from tilegym_rmsnorm.integrations.huggingface.source import Unclear
from tilegym_rmsnorm.nn.configured import reduce_instance

_classes: dict[tuple[type, Any, Any], PatchedType] = {}


class PatchedType(type):
    """Metaclass of patched classes. A patched class is pickled as its base and its patch, since no name leads to it."""


def patched_class(base: type, patch: Any) -> PatchedType:
    """Return the subclass of `base` that a patch makes: the same object for the same patch, while base keeps its
    forward. Raise `Unclear` where a layer cannot be rewritten."""
    key = base, patch, inspect.getattr_static(base, "forward")
    if key not in _classes:
        _classes.setdefault(key, patch.made(base))  # two threads get one class
    return _classes[key]


def loaded_class(base: type, patch: Any) -> type:
    """Return the class for a module pickled with a patch: `base`, where its forward is no longer what was patched."""
    try:
        return patched_class(base, patch) if patch.fits(base) else base
    except Unclear:
        return base


class _Unseen(torch.nn.Module):
    """First base of a patched class while it is made: no __init_subclass__ of its own base registers or refuses it."""

    def __init_subclass__(cls) -> None:
        pass


def subclass(base: type, patch: Any, attributes: dict[str, Any]) -> PatchedType:
    """Make a subclass under the same name: transformers initializes classes with RMSNorm in their names."""
    for function in attributes.values():
        function.__qualname__ = f"{base.__qualname__}.{function.__name__}"
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "patched_from": (base, patch),
        "patched_forward": attributes["forward"],
        "old_forward": base.forward,  # type: ignore[attr-defined]
        "__reduce_ex__": functools.partialmethod(reduce_instance, base),
        "__prepare_scriptable__": refuse_torch_jit_script,
        **attributes,
    }
    made = PatchedType(base.__name__, (_Unseen, base), attributes)
    made.__bases__ = (base,)
    return made


def made_from(cls: type) -> tuple[type, Any] | None:
    """Return the base class and the patch of a patched class; None for others, such as a subclass of one."""
    return cls.__dict__.get("patched_from")


def is_outdated(cls: Any) -> bool:
    """Return whether the base of a patched class was given another forward since, which runs in place of the patch."""
    found = getattr(cls, "patched_from", None)
    return found is not None and found[0].forward is not cls.old_forward


def patch_of(cls: type) -> Any:
    """Return the patch of a class, or of one that it is derived from; None without one."""
    found = getattr(cls, "patched_from", None)
    return None if found is None else found[1]


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


def _reduce(cls: PatchedType) -> str | tuple[Any, ...]:
    found = made_from(cls)
    return (loaded_class, found) if found else cls.__qualname__


copyreg.pickle(PatchedType, _reduce)
