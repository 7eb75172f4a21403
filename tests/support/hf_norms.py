# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms of transformers, and what they are given."""

from typing import Any

import pytest
import torch
from hf_models import ARCHITECTURES
from torch import Tensor, nn

LLAMA = ARCHITECTURES[0]
N = 32


def norm_of(cls: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A norm over N elements whose weight is random; without a class, Llama's."""
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    module = (cls or modeling_llama.LlamaRMSNorm)(N, **options).to(dtype)
    nn.init.normal_(module.weight, 1.0, 0.3)
    return module


def changed(**attributes: Any) -> nn.Module:
    """Llama's norm with these attributes on the module."""
    norm = norm_of()
    for name, value in attributes.items():
        setattr(norm, name, value)
    return norm


def rows(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(3, 5, N, generator=torch.Generator().manual_seed(seed)).to(dtype)
