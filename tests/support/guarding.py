# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arrays that the cuTile backend allocates lie between elements that nobody may write: on a GPU a kernel that passes an
array's end says nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from helpers import HAS_GPU
from torch import Tensor

GUARD = 64  # elements on either side: 128 bytes at least, more than the 16 that kernels rely on
WITNESS = 77  # of any dtype


@contextlib.contextmanager
def guarded_arrays() -> Iterator[None]:
    """Of all launches within. AssertionError at its end where an element beside an array was written, or nothing was
    allocated."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    owner = machine.GpuMachine if HAS_GPU else machine.InterpretedMachine
    empty, taken = owner.empty, []

    def guarded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        storage = empty(self, (count + 2 * GUARD,), dtype)
        storage[:GUARD] = storage[GUARD + count :] = WITNESS
        taken.append((storage, count))
        return storage[GUARD : GUARD + count].view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "empty", guarded)
        yield
    assert taken, "no array was allocated"
    for storage, count in taken:
        for beside in (storage[:GUARD], storage[GUARD + count :]):
            assert (beside == WITNESS).all(), (
                f"beside an array of {count} {storage.dtype} elements one was written"
            )
