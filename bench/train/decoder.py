# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A decoder as people write it, which computes its norms in one of three ways.

`plain` calls each norm by itself and adds residuals with `+`. `residual` gives each residual to the norm behind it.
`fused` also normalizes and rotates q and k in one call. Parameters have the same names in all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.train.models import Sizes
from tilegym_rmsnorm import RMSNorm, qk_norm_rope

STYLES = ("plain", "residual", "fused")
THETA = 500000.0


def tables(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head) in bfloat16."""
    frequencies = THETA ** (-torch.arange(0, sizes.head, 2, device=device) / sizes.head)
    angles = torch.outer(torch.arange(sizes.length, device=device), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, length, heads, head)."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class Rotation(nn.Module):
    """Rotate q and k."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, cos, sin), rotated(k, cos, sin)


class NormAndRotation(nn.Module):
    """Normalize the heads of q and k, and rotate them."""

    def __init__(self, sizes: Sizes, norm: type[nn.RMSNorm]):
        super().__init__()
        self.q_norm, self.k_norm = norm(sizes.head, sizes.eps), norm(sizes.head, sizes.eps)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)


class NormAndRotationInOne(NormAndRotation):
    """Normalize and rotate both in one call."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, cos, sin, eps=self.q_norm.eps)


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, sizes: Sizes, norm: type[nn.RMSNorm], style: str):
        super().__init__()
        self.head = sizes.head
        self.q, self.k, self.v = (
            nn.Linear(sizes.width, heads * sizes.head, bias=False)
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )
        self.out = nn.Linear(sizes.heads * sizes.head, sizes.width, bias=False)
        if sizes.has_qk_norm:
            self.rotation = (NormAndRotationInOne if style == "fused" else NormAndRotation)(sizes, norm)
        else:
            self.rotation = Rotation()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head)) for linear in (self.q, self.k, self.v))
        q, k = self.rotation(q, k, cos, sin)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner_width, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer. Returns the residual stream."""

    def __init__(self, sizes: Sizes, norm: type[nn.RMSNorm], style: str):
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(sizes.width, sizes.eps), norm(sizes.width, sizes.eps)
        self.attention, self.mlp = Attention(sizes, norm, style), MLP(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class ResidualBlock(Block):
    """A layer whose norms add the residual. Returns a branch and the residual, which the next norm adds."""

    def forward(
        self, branch: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.attention_norm(branch), branch
        else:
            x, residual = self.attention_norm(branch, residual=residual)
        x, residual = self.mlp_norm(self.attention(x, cos, sin), residual=residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers, a last norm, logits. `norm`: the class of its norms, nn.RMSNorm or RMSNorm."""

    def __init__(self, sizes: Sizes, norm: type[nn.RMSNorm], style: str, device: torch.device):
        super().__init__()
        if style != "plain" and not issubclass(norm, RMSNorm):
            raise TypeError(f"norm: expected a class that takes a residual for style {style!r}, got {norm}")
        self.adds_in_norm = style != "plain"
        block = ResidualBlock if self.adds_in_norm else Block
        with device:
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.ModuleList(block(sizes, norm, style) for _ in range(sizes.layers))
            self.norm = norm(sizes.width, sizes.eps)
            self.logits = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for number, table in enumerate(tables(sizes, device)):
            self.register_buffer("cos" if number == 0 else "sin", table, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length), int64. Returns logits, (batch, length, vocabulary)."""
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            if self.adds_in_norm:
                x, residual = block(x, residual, self.cos, self.sin)
            else:
                x = block(x, self.cos, self.sin)
        x = self.norm(x) if residual is None else self.norm(x, residual=residual)[0]
        return self.logits(x)
