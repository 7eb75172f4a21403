# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compare sizes. Some may be known only when a graph runs, as those of `x[mask]`: the graph then compares them, as
that of PyTorch's add does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from tilegym_rmsnorm.call.watched import is_traced


def are_equal(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two shapes are equal. Sizes that are known only when a graph runs are compared then (`torch._check`)."""
    if not is_traced():
        with contextlib.suppress(RuntimeError):  # GuardOnDataDependentSymNode, of such sizes
            return tuple(sizes) == tuple(others)
    return are_equal_in_graph(sizes, others)


def spans(size: int, whole: int) -> bool:
    """Whether a dimension is 1, so that it is expanded, or has all of the elements. Compared as by `are_equal`."""
    return is_known(size, 1) or are_equal((size,), (whole,))


def is_known(size: int, value: int) -> bool:
    """Whether a size is this value. False for one that is known only when a graph runs."""
    if not is_traced():
        with contextlib.suppress(RuntimeError):
            return bool(size == value)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size == value)


def are_equal_in_graph(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """`are_equal` of sizes that may be symbols."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    if len(sizes) != len(others):
        return False
    for i in range(len(sizes)):
        is_equal = sizes[i] == others[i]
        if not guard_or_false(is_equal):
            if not guard_or_true(is_equal):
                return False
            torch._check(is_equal)
    return True
