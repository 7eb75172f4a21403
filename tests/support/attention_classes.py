# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Attention in which forwards stand that a test writes: its children, its inputs, and comparisons with the original.
Import it behind `importorskip("transformers")`."""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model

N, D, B, T = 32, 8, 2, 5


class Attention(nn.Module):
    """Four heads of q, two of k and of v, with norms named first and second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(N, 4 * D), nn.Linear(N, 2 * D)
        self.first, self.second = LlamaRMSNorm(D), LlamaRMSNorm(D)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight, 1.0, 0.3)


def given(dtype=torch.float32, width=D, batch=B, **options):
    """Hidden states, and tables whose halves differ."""
    generator = torch.Generator().manual_seed(1)
    x, cos, sin = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((B, T, N), (batch, T, width), (batch, T, width))
    )
    return {"x": x, "tables": (cos, sin), **options}


def both_of(cls, dtype=torch.float32):
    """Attention, and the same with a patch that folded it."""
    original, ours = cls().to(dtype), cls().to(dtype)
    assert patch_model(ours, patch_layers=True, backend="torch").counts["attention"] == 1
    return original, ours


def assert_same(original, ours, arguments):
    for y, expected in zip(ours(**arguments), original(**arguments), strict=True):
        assert y.dtype == expected.dtype and torch.equal(y, expected)
