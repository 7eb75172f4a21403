# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton's interpreter (TRITON_INTERPRET=1), made to round as GPUs do while these kernels run in it.

Triton 3.6 and 3.9 interpret the conversion of float32 to bfloat16 as truncation: errors of up to one unit in the last
place, all towards zero, where the compiled kernel rounds to nearest even.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextlib.contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Within it, float32 becomes bfloat16 by rounding to nearest even."""
    truncating = InterpreterBuilder.cast_impl

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, dtype: Any) -> TensorHandle:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return truncating(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy().reshape(source.data.shape), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_impl
    try:
        yield
    finally:
        InterpreterBuilder.cast_impl = truncating
