# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Override the norms of torchtitan's models, or the layers around them, by torchtitan's own mechanism.

    --override.imports tilegym_rmsnorm.integrations.torchtitan.rms_norm
    --override.imports 'tilegym_rmsnorm.integrations.torchtitan.layers={"backend": "cutile"}'

Written against torchtitan 0.3.0, which imports this module. The modules for torchtitan are the only ones that import
their library at the top: it registers an override when the override's module is imported. Releases before 0.3 have no
overrides; see `tilegym_rmsnorm.integrations.torchtitan_converter`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from torchtitan.config import derive, override
except ImportError as error:
    raise ImportError(
        "expected torchtitan 0.3 or later, which has overrides; for 0.2 there is "
        "tilegym_rmsnorm.integrations.torchtitan_converter"
    ) from error

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm as TitanRMSNorm
from torchtitan.models.common.rope import CosSinRoPE, _maybe_check_max_pos, _maybe_wrap_positions
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module

from tilegym_rmsnorm import nn
from tilegym_rmsnorm.functional import rms_norm as rms_norm_of  # the override has its name
from tilegym_rmsnorm.rope import qk_norm_rope
from tilegym_rmsnorm.settings import check_backend_name

# Blocks whose forward is `h = x + attention(attention_norm(x)); h + ffn(ffn_norm(h))`, below torchtitan.models.
_BLOCKS = {
    "llama3.model.Llama3TransformerBlock",
    "qwen3.model.Qwen3TransformerBlock",
    "deepseek_v3.model.DeepSeekV3TransformerBlock",
    "gpt_oss.model.GptOssTransformerBlock",
}

_log = logging.getLogger("tilegym_rmsnorm")


class RMSNorm(nn.RMSNorm, Module):
    """`tilegym_rmsnorm.RMSNorm` as a torchtitan Module, with the parameters and the state dict of torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanRMSNorm.Config):  # fields that a later release adds arrive by themselves
        backend: str | None = None

    def __init__(self, config: RMSNorm.Config) -> None:
        shape, eps, affine = config.normalized_shape, config.eps, config.elementwise_affine
        super().__init__(shape, eps, affine, backend=config.backend)

    # torchtitan looks shardings up by the names of these: x, as that of torch.nn.RMSNorm. Its graph trainer gives the
    # module a class with a property `weight`, which gathers the parameter: it is asked for by this name.
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return rms_norm_of(x, self.normalized_shape, self.weight, self.eps, backend=self.backend)


class RMSNormOfSum(RMSNorm):
    """The same, called with a residual: normalize x + residual, and return that sum too."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shape, weight = self.normalized_shape, self.weight
        return rms_norm_of(x, shape, weight, self.eps, residual=residual, backend=self.backend)


class Attention(GQAttention):
    """`GQAttention` in which one call computes the norms of q and k and their rotation."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        # Under autocast torch's norm returns float32 or not, by its release. Hooks wait for a call of the module.
        if torch.is_autocast_enabled(x_BLD.device.type) or _has_hooks(self.q_norm) or _has_hooks(self.k_norm):
            return super().forward(x_BLD, attention_masks, positions)
        q, k, v = self.qkv_linear(x_BLD)
        q, k = self._normed_and_rotated(q, k, positions)
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return self.wo(out.contiguous().flatten(2))

    def _normed_and_rotated(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        cache = self.rope.cache  # a row for each position: cosines, then sines
        positions = _maybe_wrap_positions(positions, q)
        if positions is None:
            cache = cache[: q.shape[1]]
        else:
            _maybe_check_max_pos(positions, max_valid_pos=cache.shape[0] - 1)
            positions = positions.expand(q.shape[0], -1)
        cos, sin = cache[:, : self.head_dim], cache[:, self.head_dim :]
        return qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            eps=self.q_norm.eps,
            position_ids=positions,
            rope_rounding="norm",  # a norm, and then a rotation in float32
            backend=self.q_norm.backend,
        )


@override(target=TitanRMSNorm.Config, exact=True, description="RMSNorm by tilegym_rmsnorm")
def rms_norm(cfg: TitanRMSNorm.Config, backend: str | None = None) -> RMSNorm.Config:
    """Replace every norm whose config is exactly torchtitan's `RMSNorm.Config`; a subclass may compute something else.

    Args:
        cfg: torchtitan's config of a norm.
        backend: As for `tilegym_rmsnorm.RMSNorm`.

    Returns:
        The config of ours, with all fields and the sharding of cfg.

    Raises:
        ValueError: There is no such backend.
    """
    check_backend_name(backend)
    return derive(cfg, RMSNorm.Config, backend=backend)


@override(target=BaseModel.Config, description="residual add and QK-norm with RoPE fused, by tilegym_rmsnorm")
def layers(cfg: BaseModel.Config, backend: str | None = None) -> BaseModel.Config:
    """Replace the norms of a model as `rms_norm` does, and fuse them with what stands beside them: the residual add of
    attention with `ffn_norm`, and the norms of q and k with a `CosSinRoPE`. A layer of another form is left as it is,
    but for its norms.

    Give it alone. torchtitan refuses two overrides of which one claims what is inside of the other's.

    Args:
        cfg: torchtitan's config of a model, changed in place.
        backend: As for `tilegym_rmsnorm.RMSNorm`.

    Returns:
        cfg.

    Raises:
        ValueError: There is no such backend.
        RuntimeError: torchtitan is not of a release whose layers these are.
    """
    check_backend_name(backend)
    try:
        release = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        release = (
            "one that is not installed, whose release nothing says (to mend it: pip install -e TORCHTITAN)"
        )
    if release.split(".")[:2] != ["0", "3"]:
        raise RuntimeError(
            f"layers: expected torchtitan 0.3, whose layers it repeats, got {release}; "
            "tilegym_rmsnorm.integrations.torchtitan.rms_norm replaces the norms alone"
        )
    norms, attentions, blocks = (_below(cfg, each) for each in (TitanRMSNorm, GQAttention, TransformerBlock))
    norms = [place for place in norms if type(place[0]) is TitanRMSNorm.Config]
    for norm, parent, name in norms:
        _put(rms_norm(norm, backend), parent, name)
    attentions = [place for place in attentions if _is_fusible(place[0])]
    for attention, parent, name in attentions:
        _put(derive(attention, Attention.Config), parent, name)
    # Found before, so that a block which holds a replaced attention is known by its place.
    blocks = [place for place in blocks if _is_known(place[0])]
    for block, parent, name in blocks:
        ffn_norm = derive(block.ffn_norm, RMSNormOfSum.Config)
        _put(derive(block, _block_class(type(block)._owner).Config, ffn_norm=ffn_norm), parent, name)
    _log.info(
        "torchtitan: replaced %d norms; fused %d residual adds, and %d attentions' norms of q and k with RoPE",
        len(norms),
        len(blocks),
        len(attentions),
    )
    return cfg


def _below(cfg: Any, module: type) -> list[tuple[Any, Any, Any]]:
    """Find the configs of a kind below cfg: each with what holds it, and its name or number there."""
    found = cfg.traverse(module.Config, recurse=True)  # type: ignore[attr-defined]
    return [(each, parent, name) for _, each, parent, name in found if parent is not None]


def _put(cfg: Any, parent: Any, name: Any) -> None:
    if isinstance(parent, list):
        parent[name] = cfg
    else:
        setattr(parent, name, cfg)


def _is_fusible(cfg: Any) -> bool:
    head_dim = cfg.dim // cfg.n_heads if cfg.head_dim is None else cfg.head_dim
    return (
        type(cfg) is GQAttention.Config
        and type(cfg.qk_norm) is RMSNorm.Config
        and cfg.qk_norm.normalized_shape == head_dim
        and type(cfg.rope) is CosSinRoPE.Config
        and cfg.rope.dim == head_dim
    )


def _is_known(cfg: Any) -> bool:
    owner = type(cfg)._owner
    name = f"{owner.__module__}.{owner.__qualname__}".removeprefix("torchtitan.models.")
    return name in _BLOCKS and type(cfg.ffn_norm) is RMSNorm.Config


@functools.cache
def _block_class(base: Any) -> Any:
    """Return the subclass of a block in which ffn_norm takes attention's result and the residual."""

    class Block(base):
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
            key = getattr(self, "attn_mask_key", None)  # gpt_oss: the name of this layer's mask
            if key is not None and isinstance(attention_masks, dict):
                attention_masks = attention_masks[key]
            branch = self.attention(self.attention_norm(x), attention_masks, positions)
            y, x = self.ffn_norm(branch, x)
            return x + (self.moe(y) if getattr(self, "moe_enabled", False) else self.feed_forward(y))

    Block.__name__ = Block.__qualname__ = base.__name__
    Block.Config.__qualname__ = f"{base.__name__}.Config"
    return Block


def _has_hooks(module: Any) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
