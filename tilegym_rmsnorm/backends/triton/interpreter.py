# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton's interpreter (TRITON_INTERPRET=1), made to round as GPUs do and to run one launch at a time.

Triton 3.6 and 3.9 interpret the conversion of float32 to bfloat16 as truncation: errors of up to one unit in the last
place, all towards zero, where the compiled kernel rounds to nearest even. And they hold the state of a launch, such as
the number of the program that runs, in globals.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_truncating = InterpreterBuilder.cast_impl
_lock = threading.Lock()


def one_launch_at_a_time() -> contextlib.AbstractContextManager:
    """In which kernels may be launched. The first call makes the interpreter round, in this process and for good."""
    InterpreterBuilder.cast_impl = _cast_rounding_to_nearest
    return _lock


def _cast_rounding_to_nearest(self: InterpreterBuilder, source: TensorHandle, dtype: Any) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
        return _truncating(self, source, dtype)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
    return TensorHandle(rounded.numpy().reshape(source.data.shape), tl.bfloat16)
