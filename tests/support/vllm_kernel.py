# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A kernel of the order in which vLLM's `rms_norm_batch_invariant` adds, written from a description of that: one row a
program, squares in float32 summed by blocks of 1024 columns, blocks in order, and one rounding at the end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def vllm_rms_norm(x_ptr, weight_ptr, y_ptr, x_stride, y_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * y_stride
    squares = tl.zeros([1], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < n
        x = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(tl.where(mask, x * x, 0.0))
    inverse = 1.0 / tl.sqrt(squares / n + eps)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < n
        x = tl.load(x_row + columns, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=mask, other=1.0).to(tl.float32)
        y = x.to(tl.float32) * inverse * weight
        tl.store(y_row + columns, y.to(x.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: contiguous, (*, N)."""
    rows, y = x.view(-1, x.shape[-1]), torch.empty_like(x)
    n = x.shape[-1]
    vllm_rms_norm[(len(rows),)](rows, weight, y, n, n, n, eps, BLOCK=BLOCK)
    return y
