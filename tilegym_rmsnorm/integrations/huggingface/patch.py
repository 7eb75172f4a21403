# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Patch the norms, layers and attention of a model, and take the patch back. All changes are chosen before the first
is made.

A patch replaces the class of a module, and the forwards that are bound to the module: accelerate keeps one in
`_old_forward`, behind its hooks, and `kernelize` and the removal of hooks leave one in `forward`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tilegym_rmsnorm.integrations.huggingface import classes, report
from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match, is_eps, match_of
from tilegym_rmsnorm.integrations.huggingface.attention import AttentionPatch, check_module, norms_of, rotates
from tilegym_rmsnorm.integrations.huggingface.inplace import changed_inputs, fits
from tilegym_rmsnorm.integrations.huggingface.layers import LayerPatch, has_sum, rewritten
from tilegym_rmsnorm.integrations.huggingface.norms import NormPatch, norm_patch, why_apart, why_not_own
from tilegym_rmsnorm.integrations.huggingface.rewriting import names_read_by
from tilegym_rmsnorm.integrations.huggingface.source import Unclear
from tilegym_rmsnorm.nn.module import RMSNorm
from tilegym_rmsnorm.settings import check_backend_name

_CALLED = ("_call_impl", "__getattribute__")  # lead from a call to forward, besides __call__
_BOUND = ("forward", "_old_forward")  # attributes of a module that may hold a bound forward
_GRAPHS = (torch.jit.ScriptModule, torch.fx.GraphModule)
_REWRITINGS = (LayerPatch, AttentionPatch)
_OUTDATED = "its class was given another forward after the patch, which runs: call unpatch_model first"
_GRAPH = "it is a graph, not code: patch the model before it is scripted or traced"
# By id of a norm: its class after the patch, for an RMSNorm its patch; two norms that have the same are computed alike.
# Or the reason for which it cannot take part in layers and attention.
_Norms = dict[int, Any]
_Parts = list[tuple[str, nn.Module]]  # of a model, as named_modules() has them
_Parents = dict[int, list[tuple[nn.Module, str]]]  # by id of a child: its parents, and its name in each


def patch(model: Any, patch_layers: bool, backend: str | None) -> report.PatchReport:
    """Choose classes for norms, then for layers and attention, and give them to the modules: see `patch_model`."""
    _check_module("patch_model", model)
    check_backend_name(backend)
    patched: list[report.PatchedNorm] = []
    declined: list[report.Declined] = []
    changes: list[tuple[nn.Module, type]] = []
    norms: _Norms = {}
    already = 0
    parts = list(model.named_modules())
    parents = _parents(parts)
    for name, module in parts:
        cls = type(module)
        found, old = classes.made_from(cls), classes.patch_of(cls)
        if classes.is_outdated(cls):
            declined.append(report.Declined(name, cls.__name__, _OUTDATED))
            continue
        if isinstance(old, _REWRITINGS) or isinstance(module, _GRAPHS):
            continue
        if isinstance(module, RMSNorm) or (old is not None and found is None):
            already += 1  # ours, or of a class derived from a patched one
            norms[id(module)] = cls if old is not None else norm_patch(module) or f"it {why_not_own(module)}"
            continue
        original, _ = found or (cls, None)
        try:
            match = _match(module, original)
            _check_input_is_kept(module, parents)
        except Unclear as error:
            if _looks_like_norm(original, module):
                norms[id(module)] = str(error)
                declined.append(report.Declined(name, cls.__name__, report.elided(str(error))))
            continue
        new = NormPatch(match, backend)
        norms[id(module)] = changed = cls if old == new else classes.patched_class(original, new)
        if old == new:
            already += 1
            continue
        changes.append((module, changed))
        patched.append(report.PatchedNorm(name, cls.__name__, match.arithmetic))
    declined += _graphs(model, parts, norms)

    fused: list[tuple[nn.Module, report.PatchedLayer | report.PatchedAttention]] = []
    for name, module in parts if patch_layers else ():
        cls = type(module)
        if isinstance(classes.patch_of(cls), _REWRITINGS):
            already += not classes.is_outdated(cls)
            continue
        try:
            chosen = _chosen(module, norms)
        except Unclear as error:
            declined.append(report.Declined(name, cls.__name__, report.elided(str(error))))
            continue
        if chosen is not None:
            rewriting, changed = chosen
            kind = report.PatchedLayer if isinstance(rewriting, LayerPatch) else report.PatchedAttention
            fused.append((module, kind(name, cls.__name__, rewriting.norms)))
            changes.append((module, changed))

    for module, changed in changes:
        _give_class(module, changed)
    apart = [
        report.Declined(each.name, each.class_name, f"{norm}: {reason}")
        for module, each in fused
        for norm in each.norms
        if norm in module._modules and (reason := why_apart(module._modules[norm]))
    ]
    layers = tuple(each for _, each in fused if isinstance(each, report.PatchedLayer))
    attention = tuple(each for _, each in fused if isinstance(each, report.PatchedAttention))
    return report.PatchReport(
        tuple(patched), layers, attention, tuple(declined), already=already, apart=tuple(apart)
    )


def unpatch(model: Any) -> report.PatchReport:
    """Give patched modules the classes they had: see `unpatch_model`."""
    _check_module("unpatch_model", model)
    restored: list[report.Restored] = []
    declined: list[report.Declined] = []
    changes: list[tuple[nn.Module, type]] = []
    for name, module in model.named_modules():
        cls = type(module)
        found = classes.made_from(cls)
        if found is not None:
            restored.append(report.Restored(name, cls.__name__))
            changes.append((module, found[0]))
        elif classes.patch_of(cls) is not None:
            declined.append(report.Declined(name, cls.__name__, "was given another class after the patch"))
    for module, old_class in changes:
        _give_class(module, old_class)
    nothing = "nothing in this model is patched"
    return report.PatchReport(declined=tuple(declined), restored=tuple(restored), if_nothing=nothing)


def _check_module(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a torch.nn.Module, got {type(model).__name__}")


def _parents(parts: _Parts) -> _Parents:
    parents: _Parents = {}
    for _, parent in parts:
        for name, child in parent._modules.items():  # named_children leaves out a child's second name
            parents.setdefault(id(child), []).append((parent, name))
    return parents


def _graphs(model: nn.Module, parts: _Parts, norms: _Norms) -> Iterator[report.Declined]:
    """Yield the graphs in a model that may hold norms, none of which is patched."""
    inside: set[int] = set()
    for name, module in parts:
        if not isinstance(module, _GRAPHS) or id(module) in inside:
            continue
        held = dict(module.named_modules())
        inside |= set(map(id, held.values()))
        is_patched = any(_is_norm(norms, part) for part in held.values())
        if not is_patched and (module is model or any("norm" in each for each in held)):
            yield report.Declined(name, type(module).__name__, _GRAPH)


def _check_input_is_kept(norm: nn.Module, parents: _Parents) -> None:
    """Raise `Unclear` where a module that calls a norm changes the norm's x afterwards."""
    for caller, path in _callers(norm, parents):
        original, _ = classes.made_from(type(caller)) or (type(caller), None)
        for change in changed_inputs(original, path[0]):
            if not fits(change.child, path):
                continue
            if change.by is None or any(map(_works_in_place, _children_at(caller, change.by))):
                raise Unclear(f"its input is changed in place before the backward reads it: {change.text}")


def _callers(
    module: nn.Module, parents: _Parents, inside: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield the modules that hold this one at any depth, with the path from each. The path of an nn.Sequential counts
    too where this module is its first, which gets its input."""
    inside = (*inside, module)
    for parent, name in parents.get(id(module), ()):
        if any(parent is each for each in inside):  # a module may hold itself: stop there
            continue
        yield parent, (name,)
        is_first = _is_sequential(parent) and next(iter(parent.children())) is module
        for caller, path in _callers(parent, parents, inside):
            yield caller, (*path, name)
            if is_first:
                yield caller, path


def _children_at(module: nn.Module, path: tuple[str, ...]) -> Iterator[nn.Module]:
    if not path:
        yield module
    for name, child in module.named_children() if path else ():
        if fits(path[:1], (name,)):
            yield from _children_at(child, path[1:])


def _works_in_place(module: nn.Module) -> bool:
    if _is_sequential(module):
        return any(map(_works_in_place, itertools.islice(module.children(), 1)))
    return getattr(module, "inplace", False) is True


def _is_sequential(module: nn.Module) -> bool:
    return inspect.getattr_static(type(module), "forward", None) is nn.Sequential.forward


def _match(module: nn.Module, cls: type) -> Match:
    """Return the arithmetic of a module, or raise `Unclear`. cls: its class, for a patched module the original."""
    match: Match = _read(match_of, cls)
    _check_forward_is_called(module)
    # A rewritten layer does not call its norms, so this __call__ would be left out. The __call__ of the layer itself
    # still runs: transformers 5.17 checkpoints there.
    if type(module).__call__ is not nn.Module.__call__:
        raise Unclear("its class has a __call__ of its own")
    for name in module.__dict__:
        defined = inspect.getattr_static(cls, name, None)
        if name not in _BOUND and isinstance(defined, (FunctionType, staticmethod)):
            raise Unclear(f"its {name} was replaced on the module")
    for name in (match.eps, match.switch):
        if name and not hasattr(module, name):
            raise Unclear(f"it has no {name}")
    if match.eps:
        eps = getattr(module, match.eps)
        if not (is_eps(eps) or (eps is None and match.arithmetic == "torch")):
            raise Unclear(f"its {match.eps} is no finite number of at least 0")
    if match.switch and not isinstance(getattr(module, match.switch), bool):
        raise Unclear(f"its {match.switch} is no bool")
    if match.arithmetic == "torch" and len(getattr(module, "normalized_shape", (0,))) != 1:
        raise Unclear("it normalizes several dimensions")
    is_weighted = match.weight and (not match.switch or getattr(module, match.switch))
    weight = getattr(module, match.weight, None) if is_weighted else None
    if weight is None:
        if is_weighted and match.arithmetic != "torch":
            raise Unclear(f"it has no {match.weight}")
    elif not isinstance(weight, torch.Tensor) or torch.nn.parameter.is_lazy(weight) or weight.dim() != 1:
        raise Unclear(f"its {match.weight} is no tensor of one dimension")
    return match


def _chosen(module: nn.Module, norms: _Norms) -> tuple[LayerPatch | AttentionPatch, type] | None:
    """Return how a module is rewritten, and its new class; None for one that is neither a layer nor attention. Raise
    `Unclear` for one that cannot be rewritten."""
    reasons = []
    for choose in (_layer, _attention):
        try:
            patch = choose(module, norms)
            if patch is not None:
                return patch, classes.patched_class(type(module), patch)
        except Unclear as error:
            reasons.append(str(error))
    if reasons:
        raise Unclear("; ".join(dict.fromkeys(reasons)))
    return None


def _is_norm(norms: _Norms, module: nn.Module) -> bool:
    """Return whether a module is a norm that can take part in layers and attention."""
    return not isinstance(norms.get(id(module), ""), str)


def _patched_children(module: nn.Module, norms: _Norms) -> list[str]:
    return [name for name, child in module.named_children() if _is_norm(norms, child)]


def _layer(module: nn.Module, norms: _Norms) -> LayerPatch | None:
    children = _patched_children(module, norms)
    if not children:
        return None
    try:
        _check_forward_is_called(module)
        return LayerPatch(_read(lambda cls: rewritten(cls, children)[1], type(module)))
    except Unclear:
        holds_layers = any(isinstance(child, nn.ModuleList) for child in module.children())
        if has_sum(type(module)) and not holds_layers:
            raise
    return None


def _attention(module: nn.Module, norms: _Norms) -> AttentionPatch | None:
    if not module._modules:
        return None
    try:
        names = _read(norms_of, type(module))
    except Unclear:
        if _patched_children(module, norms) and rotates(type(module)):
            raise
        return None
    children: list[Any] = [getattr(module, name, None) for name in names]
    if None in children:
        return None  # it is built without these norms
    _check_forward_is_called(module)
    for name, norm in zip(names, children, strict=True):
        reason = norms.get(id(norm), "")
        if isinstance(reason, str):
            why = f": {reason}" if reason else ""
            raise Unclear(f"its {name}, of class {type(norm).__name__}, is not patched{why}")
        if classes.has_hooks(norm):
            raise Unclear(f"its {name} has hooks, or a forward of its own")
    check_module(module, functools.partial(_is_norm, norms))
    q_norm, k_norm = children
    if norms[id(q_norm)] is not norms[id(k_norm)]:
        raise Unclear(f"its {names[0]} and {names[1]} compute different norms")
    return AttentionPatch(names)


def _read(read: Callable[[type], Any], cls: type) -> Any:
    try:
        return read(cls)
    except Unclear as error:
        raise Unclear(f"its forward {error}") from None


def _check_forward_is_called(module: nn.Module) -> None:
    """Raise `Unclear` where a call of the module does not run its class's forward, also behind accelerate's hooks."""
    cls = type(module)
    if isinstance(module, _GRAPHS):
        raise Unclear(_GRAPH)
    if module.__dict__.get("_is_hooked") is True or "_hf_tp_plan" in module.__dict__:
        raise Unclear("tp_plan of transformers shards it, or wraps its forward")
    if torch.nn.utils.parametrize.is_parametrized(module):  # its removal restores the class's first base
        raise Unclear("it is parametrized: parametrize it after the patch")
    is_called = all(getattr(cls, name) is getattr(nn.Module, name) for name in _CALLED)
    if type(cls) not in (type, classes.PatchedType) or not is_called:
        raise Unclear("its class has a metaclass, a _call_impl or a __getattribute__ of its own")
    own = cls.forward
    values = [module.__dict__[name] for name in _BOUND if name in module.__dict__]
    if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__:
        values = [module.__dict__["_old_forward"]]  # forward calls the hook, which calls _old_forward
    if not all(_is_bound(value, own, module) for value in values):
        raise Unclear("its forward was replaced on the module")


def _is_bound(value: Any, function: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__func__ is function and value.__self__ is module


def _give_class(module: nn.Module, cls: type) -> None:
    own = type(module).forward
    # Not by module.__class__ = cls: a class may refuse to set attributes, or have a __class__ of its own.
    vars(object)["__class__"].__set__(module, cls)
    for name in _BOUND:
        if _is_bound(module.__dict__.get(name), own, module):
            module.__dict__[name] = MethodType(cls.forward, module)  # type: ignore[attr-defined]


def _looks_like_norm(cls: type, module: nn.Module) -> bool:
    """Return whether a module that is no known norm is worth a line in the report."""
    name = cls.__name__.lower()
    if "rmsnorm" in name or ("norm" in name and not module._modules):
        return True
    return not {"rsqrt", "rms_norm"}.isdisjoint(names_read_by(cls))
