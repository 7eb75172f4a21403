# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Put the norm into Megatron-Core's specs: `with_rms_norm` into a spec that exists, `SpecProvider` where one is made.

A spec is a tree of dataclasses, whose fields are classes that Megatron calls, or further specs. In TransformerEngine's
specs the norm is no field: it is part of the linear layer behind it, and has to be taken out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from tilegym_rmsnorm.integrations.megatron.norm import RMSNorm, RMSNormWithResidual
from tilegym_rmsnorm.settings import BackendName, check_backend_name

# Fields of a layer behind whose norm a residual connection forks.
_WITH_RESIDUAL = ("input_layernorm", "pre_mlp_layernorm")
# Where TransformerEngine's linear layer may hold a norm: a part of a layer, its field, the norm's place in the layer.
_HOLDERS = (
    ("self_attention", "linear_qkv", "input_layernorm"),
    ("self_attention", "in_proj", "input_layernorm"),
    ("self_attention", "linear_q_up_proj", "self_attention.q_layernorm"),
    ("self_attention", "linear_kv_up_proj", "self_attention.kv_layernorm"),
    ("mlp", "linear_fc1", "pre_mlp_layernorm"),
    ("mixer", "in_proj", "norm"),
)


def with_rms_norm(
    spec: Any, config: Any = None, *, vp_stage: int | None = None, backend: BackendName | None = None
) -> Any:
    """Copy a spec of Megatron-Core with `RMSNorm` in the place of each of its norms, of q and k too.

    The norms are those that Megatron chooses between: `WrappedTorchNorm`, `FusedLayerNorm` and `TENorm`. A
    `TELayerNormColumnParallelLinear` is split into the norm and a `TEColumnParallelLinear`; names in distributed
    checkpoints stay. `L2Norm`, and modules of other code, stay as they are. To undo it, use the old spec.

    Args:
        spec: A `ModuleSpec` or a dataclass of submodules: of a layer, a block, a decoder, or multi-token prediction.
        config: A `TransformerConfig`. It makes submodules of a block from the spec of a layer, for `GPTModel`: as many
            layers as this pipeline stage has, and the norm behind them, which with the spec of a layer alone stays
            Megatron's.
        vp_stage: The virtual pipeline stage, beside a config.
        backend: A name or `"auto"`, for these norms. None: the backend in effect when a norm is called.

    Returns:
        The new spec, of the old one's type; with a config `TransformerBlockSubmodules`.

    Raises:
        ValueError: The spec has no norm, or a linear layer with a norm that cannot be split; there is no such backend.
        TypeError: It is no spec.
    """
    check_backend_name(backend)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        raise TypeError(f"spec: expected a ModuleSpec or submodules, got {type(spec).__name__}")
    copier = _Copier(backend)
    found = copier.copied(spec)
    if not copier.count:
        raise ValueError("spec: expected one with norms of Megatron-Core, got none")
    if config is None:
        return found
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    if isinstance(found, TransformerBlockSubmodules):
        return found
    of_stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    layers = [found] * get_num_layers_to_build(config, **of_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_builder("", backend))


class SpecProvider:
    """A `BackendSpecProvider` with `RMSNorm` for its norms, and all else from another provider.

    It gives norms and linear layers apart, also where TransformerEngine's provider gives one module for both. It is for
    functions that make a spec from a provider, such as `get_mlp_module_spec_for_backend` and
    `get_mtp_layer_spec_for_backend`. The ones that choose a provider themselves need `with_rms_norm`.

    Args:
        fallback: Megatron's provider, such as `TESpecProvider()` or `LocalSpecProvider()`.
        backend: A name or `"auto"`, for these norms. None: the backend in effect when a norm is called.

    Raises:
        ValueError: There is no such backend.
    """

    def __init__(self, fallback: Any, *, backend: BackendName | None = None) -> None:
        check_backend_name(backend)
        self.fallback = fallback
        self.backend = backend

    def fuse_layernorm_and_linear(self) -> bool:
        """Return False: there is no module for both."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """Return None: there is no module for both."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Return the class that builds a norm. rms_norm, for_qk: no effect, the config decides."""
        return _builder(_WITH_RESIDUAL[0] if has_residual else "", self.backend)

    def __getattr__(self, name: str) -> Any:
        if name == "fallback":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.fallback, name)


def _builder(field: str, backend: str | None) -> Any:
    """Return a class or a spec, from either of which Megatron builds the norm of this field."""
    builder = RMSNormWithResidual if field in _WITH_RESIDUAL else RMSNorm
    if backend is None:
        return builder
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=builder, params={"backend": backend})


class _Copier:
    """Copies a spec with other norms. Parts that the spec shares are shared in the copy, where they have one role."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.count = 0  # norms in the copy, with those that were RMSNorm before
        self._norms, self._linears = _modules_of_megatron()
        self._copies: dict[Any, tuple[Any, Any]] = {}  # with the originals, which keep their ids

    def copied(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Copy what a field holds. path: the fields that lead there."""
        if isinstance(value, type):
            return self._copied_class(value, path)
        if type(value) in (list, tuple):
            return type(value)([self.copied(each, path) for each in value])
        if not isinstance(value, functools.partial) and not dataclasses.is_dataclass(value):
            return value
        key = id(value), path[-2:]
        if key not in self._copies:
            self._copies[key] = value, self._copied_part(value, path)
        return self._copies[key][1]

    def _copied_class(self, value: type, path: tuple[str, ...]) -> Any:
        field = path[-1] if path else ""
        if issubclass(value, RMSNorm):
            self.count += 1
        elif value in self._norms and field != "k_norm":  # an indexer's, a LayerNorm whatever the config says
            self.count += 1
            return _builder(field, self.backend)
        elif "LayerNorm" in value.__name__ and "Linear" in value.__name__:
            if value not in self._linears or not any(
                path[-3:] == (part, "submodules", name) for part, name, _ in _HOLDERS
            ):
                raise ValueError(
                    f"spec: expected {'.'.join(path)} to be a linear layer alone, got {value.__name__}, "
                    "which has a norm too, and cannot be split there"
                )
        return value

    def _copied_part(self, value: Any, path: tuple[str, ...]) -> Any:
        """Copy a dataclass, or the `functools.partial` that stands for one in newer releases."""
        if isinstance(value, functools.partial):
            given = {name: self.copied(each, (*path, name)) for name, each in value.keywords.items()}
            return functools.partial(value.func, *value.args, **given)
        new = copy.copy(value)
        if getattr(value, "module", None) in self._norms:
            self.count += 1
            new.module = _builder(path[-1] if path else "", None)
            new.params = {**value.params, **({"backend": self.backend} if self.backend else {})}
            return new
        for field in dataclasses.fields(value):
            setattr(new, field.name, self.copied(getattr(value, field.name), (*path, field.name)))
        self._split(value, new)
        return new

    def _split(self, old: Any, new: Any) -> None:
        """Take the norms out of the linear layers of a layer. old, new: its submodules and their copy. The linear layer
        is looked for in the old ones: two layers may share a part, which is split already."""
        for part, name, place in _HOLDERS:
            linear = getattr(_submodules(getattr(old, part, None)), name, None)
            if not isinstance(linear, type) or linear not in self._linears:
                continue
            inner = _submodules(getattr(new, part))
            setattr(inner, name, self._linears[linear])
            holder, norm = (inner if "." in place else new), place.rpartition(".")[2]
            if not _is_none(getattr(holder, norm)):
                raise ValueError(
                    f"spec: expected no {place} beside {part}.{name}, which has a norm, "
                    f"got {getattr(holder, norm)}"
                )
            self.count += 1
            setattr(holder, norm, _builder(norm, self.backend))
            keys = {f"{place}.": f"{part}.{name}.layer_norm_"}
            new.sharded_state_dict_keys_map = {**new.sharded_state_dict_keys_map, **keys}


def _submodules(part: Any) -> Any:
    return (
        part.keywords.get("submodules")
        if isinstance(part, functools.partial)
        else getattr(part, "submodules", None)
    )


def _is_none(norm: Any) -> bool:
    """Whether a spec has no norm here."""
    return norm is None or getattr(norm, "__name__", "") == "IdentityOp"


def _modules_of_megatron() -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """Return the norms of Megatron-Core, and for each linear layer that holds one the linear layer alone."""
    from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norms = [WrappedTorchNorm, FusedLayerNorm, transformer_engine.TENorm]
    # New in the repository, after 0.16.1.
    norms += [getattr(transformer_engine_spec_provider, "_TENormWithResidual", WrappedTorchNorm)]
    linears = {transformer_engine.TELayerNormColumnParallelLinear: transformer_engine.TEColumnParallelLinear}
    # Without TransformerEngine they are no classes.
    return tuple(norms), {each: alone for each, alone in linears.items() if isinstance(each, type)}
