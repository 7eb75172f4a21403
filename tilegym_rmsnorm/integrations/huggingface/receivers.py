# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Find out what a forward does with rotated q and k, where rounding them to autocast's dtype must not show.

Under autocast with float32 weights q and k are float32, and attention's products round them. They may be rounded before
where nothing else reads them. Known to be so is attention by transformers, written as there:

    if CACHE is not None:                                      may be missing; CACHE is an argument of forward
        k, v = CACHE.update(k, v, ...)
    F = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, EAGER)
    y = F(self, q, k, v, ...)

Code that unchanging.py lists may stand in between, without calls of modules. F has to be SDPA or Flash Attention as
transformers calls them, or an EAGER function of transformers that gives q and k to torch.matmul alone. The weights of
attention that EAGER returns have the dtype of q, so they are rounded, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of
from tilegym_rmsnorm.integrations.huggingface.unchanging import Unchanging

_NAME = r"self\.config\._attn_implementation"
# F, EAGER and the registry, in one statement, or in the two of transformers 4.57.
_INTERFACE = re.compile(rf"(?P<F>\w+)(: \w+)? = (?P<registry>\w+)\.get_interface\({_NAME}, (?P<eager>\w+)\)")
_INTERFACE_4 = re.compile(
    rf"(?P<F>\w+)(: \w+)? = (?P<eager>\w+)\nif {_NAME} != 'eager':\n    (?P=F) = (?P<registry>\w+)\[{_NAME}\]"
)
_ATTENTION = ("transformers.integrations.sdpa_attention", "transformers.integrations.flash_attention")
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # others may compute with the keys
_Q_AND_K = ("query", "key", "key_states")  # in an eager function
# All that it may do with q and k.
_IN_EAGER = (
    "key_states = repeat_kv(key, module.num_key_value_groups)",
    "causal_mask = attention_mask[:, :, :, :key_states.shape[-2]]",
    "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling",
    "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
)


@dataclass(frozen=True)
class Receivers:
    """Functions of transformers to which a forward gives rotated q and k.

    Args:
        scope: The globals of the forward.
        registry: The global name of ALL_ATTENTION_FUNCTIONS.
        eager: The global name of the eager function.
        known_eager: The eager function that was read; None for one that computes more with q and k.
        cache: The argument of forward that holds k; "" where none does.
    """

    scope: dict[str, Any]
    registry: str
    eager: str
    known_eager: FunctionType | None
    cache: str

    def round(self, module: torch.nn.Module, cache: Any, dtype: torch.dtype) -> bool:
        """Return whether all of them round q and k to this dtype in a call of this module. cache: its cache or None."""
        implementation = module.config._attn_implementation  # type: ignore[union-attr]
        if implementation == "eager":
            is_known = self.known_eager is not None and self.scope.get(self.eager) is self.known_eager
        else:
            function = self.scope[self.registry].get(implementation)
            is_known = getattr(function, "__globals__", {}).get("__name__") in _ATTENTION
        if not is_known or cache is None:
            return is_known
        # A cache that outlives the call shows what it holds: while autograd records it does not.
        return torch.is_grad_enabled() and _holds(cache, getattr(module, "layer_idx", None), dtype)


def _holds(cache: Any, layer: Any, dtype: torch.dtype) -> bool:
    """Return whether a cache is transformers', and holds keys of this dtype in this layer, or none yet."""
    layers: Any = getattr(cache, "layers", None)
    is_known = type(cache).__module__ == "transformers.cache_utils" and isinstance(layers, list)
    if not is_known or type(layer) is not int:
        return False
    if layer >= len(layers):
        return True
    keys = getattr(layers[layer], "keys", None)
    return type(layers[layer]).__name__ in _LAYERS and (keys is None or keys.dtype is dtype)


def receivers(
    function: FunctionType, behind: list[ast.stmt], names: tuple[str, ...], unchanging: Unchanging
) -> Receivers | None:
    """Return what receives the values of these names, rotated q and k. None: something else may read them.

    Args:
        function: The forward.
        behind: Its statements behind the rotation.
        names: Those of q and k.
        unchanging: A check of the forward's code, of its own.
    """
    scope, rest = function.__globals__, list(behind)
    interface: dict[str, str] = {}
    caches: set[str] = set()
    while rest:
        statement = rest.pop(0)
        text = ast.unparse(statement)
        if found := _INTERFACE.fullmatch(text):
            interface = found.groupdict()
        elif rest and (found := _INTERFACE_4.fullmatch(f"{text}\n{ast.unparse(rest[0])}")):
            interface = found.groupdict()
            del rest[0]
        elif interface and _is_attention(statement, interface["F"], names, unchanging):
            registry, eager = interface["registry"], interface["eager"]
            if (
                {registry, eager} & unchanging.locals
                or type(scope.get(registry)).__module__ != "transformers.modeling_utils"
                or len(caches) > 1
                or unchanging.called
                or uses(names, *rest)
            ):
                return None
            return Receivers(scope, registry, eager, _read(scope.get(eager)), *(caches or {""}))
        else:
            parts: list[ast.AST] = [statement]
            if isinstance(statement, ast.If):
                parts = [statement.test, *statement.body, *statement.orelse]
            for part in parts:
                if cache := _updated_cache(part, unchanging):
                    caches.add(cache)
                    unchanging.tensors.append(part.value)  # type: ignore[attr-defined]
                elif uses(names, part) or not unchanging.is_unchanging(part):
                    return None
    return None


def _updated_cache(statement: ast.AST, unchanging: Unchanging) -> str:
    """Return CACHE of `k, v = CACHE.update(k, v, ...)`, an argument of forward; "" of other statements."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return ""
    call = statement.value
    name, _, method = ast.unparse(call.func).rpartition(".")
    is_cache = method == "update" and name in unchanging.parameters and name not in unchanging.values
    results = f"({', '.join(map(ast.unparse, call.args[:2]))})"
    is_known = not call.keywords and list(map(ast.unparse, statement.targets)) == [results]
    return name if is_cache and is_known and unchanging.is_unchanging(*call.args) else ""


def _is_attention(node: ast.stmt, interface: str, names: tuple[str, ...], unchanging: Unchanging) -> bool:
    """Return whether a statement is `... = INTERFACE(self, q, k, ...)`, with nothing of q and k behind."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    given = [ast.unparse(each) for each in call.args[:3]]
    others = [*call.args[3:], *(word.value for word in call.keywords)]
    return (
        isinstance(call.func, ast.Name)
        and call.func.id == interface
        and given == ["self", *names]
        and not uses(names, *node.targets, *others)
        and unchanging.is_unchanging(*others)
    )


def uses(names: Collection[str], *nodes: ast.AST) -> bool:
    """Return whether nodes read or bind one of these names."""
    return any(isinstance(each, ast.Name) and each.id in names for node in nodes for each in ast.walk(node))


def _read(eager: Any) -> FunctionType | None:
    """Return an eager function of transformers, if q and k enter its products alone."""
    if not isinstance(eager, FunctionType) or not eager.__module__.startswith("transformers."):
        return None
    try:
        tree = tree_of(eager)
    except Unclear:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):  # may leave autocast
            return None
        if isinstance(node, (ast.Assign, ast.Expr, ast.Return, ast.AugAssign, ast.AnnAssign)):
            if uses(_Q_AND_K, node) and ast.unparse(node) not in _IN_EAGER:
                return None
        elif isinstance(node, (ast.If, ast.While)) and uses(_Q_AND_K, node.test):
            return None
    return eager
