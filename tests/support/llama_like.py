# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A norm with the statements of those in transformers, which patch_model recognizes without that library."""

import torch
from torch import Tensor, nn


class LlamaLikeNorm(nn.Module):
    def __init__(self, n: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n, dtype=dtype, device=device))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
