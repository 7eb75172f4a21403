# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arrays that the cuTile backend allocates lie between elements that nobody may write: on a GPU a kernel that passes an
array's end says nothing."""

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

GUARD = 64  # elements on either side: 128 bytes at least, more than the 16 that kernels rely on
WITNESS = 77  # of any dtype


@contextlib.contextmanager
def guarded_arrays() -> Iterator[None]:
    """Guard all launches' arrays. AssertionError at the end if an element beside one was written, or none was
    allocated."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    taken = []

    def guarding(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarded(self: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            count = math.prod(shape)
            storage = empty(self, (count + 2 * GUARD,), dtype)
            storage[:GUARD] = storage[GUARD + count :] = WITNESS
            taken.append((storage, count))
            return storage[GUARD : GUARD + count].view(shape)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for owner in (machine.GpuMachine, machine.InterpretedMachine):  # interpreters run beside a GPU, too
            patch.setattr(owner, "empty", guarding(owner.empty))
        yield
    assert taken, "no array was allocated"
    for storage, count in taken:
        for beside in (storage[:GUARD], storage[GUARD + count :]):
            assert (beside == WITNESS).all(), (
                f"beside an array of {count} {storage.dtype} elements one was written"
            )
