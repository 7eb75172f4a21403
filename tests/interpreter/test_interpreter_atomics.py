# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter's atomics and relaxed accesses: values, bounds, unwritten memory, races."""

import itertools

import cuda.tile as ct
import pytest
import torch

from tilegym_rmsnorm.backends.cutile.interpreter import empty, launch

INT32 = torch.int32
RELAXED, DEVICE = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE


ACCESSES = {
    "load": lambda x: ct.load(x, (0,), (1,)),
    "gather": lambda x: ct.gather(x, 0),
    "store": lambda x: ct.store(x, (0,), 1),
    "scatter": lambda x: ct.scatter(x, 0, 1),
    "relaxed load": lambda x: ct.load(x, (0,), (1,), memory_order=RELAXED, memory_scope=DEVICE),
    "relaxed store": lambda x: ct.store(x, (0,), 1, memory_order=RELAXED, memory_scope=DEVICE),
    "atomic_or": lambda x: ct.atomic_or(x, 0, 0),
    "atomic_add": lambda x: ct.atomic_add(x, 0, 1),
}
PLAIN, ATOMIC = (
    ["load", "gather", "store", "scatter"],
    ["relaxed load", "relaxed store", "atomic_or", "atomic_add"],
)
ONLY_READ = {"load", "gather", "relaxed load"}


@pytest.mark.parametrize(("one", "other"), list(itertools.product(ACCESSES, repeat=2)))
def test_blocks_may_only_meet_at_an_element_atomically_or_to_read(one, other):
    first, second = ACCESSES[one], ACCESSES[other]

    def kernel(x):
        if ct.bid(0) == 0:
            first(x)
        else:
            second(x)

    def both(x):
        first(x)
        second(x)

    launch(both, (1,), (torch.zeros(1, dtype=INT32),))
    if {one, other} <= {*ATOMIC} or {one, other} <= ONLY_READ:
        launch(kernel, (2,), (torch.zeros(1, dtype=INT32),))
    else:
        with pytest.raises(RuntimeError, match=r"x\[0\] is .* here and .* by block number 0, .*: a race"):
            launch(kernel, (2,), (torch.zeros(1, dtype=INT32),))


def test_a_plain_write_where_several_blocks_meet():
    def kernel(x):
        ct.atomic_add(x, 1, 1)
        if ct.bid(0) == 2:
            ct.store(x, (1,), 1)

    with pytest.raises(
        RuntimeError, match=r"x\[1\] is written here and atomically written by several other blocks"
    ):
        launch(kernel, (3,), (torch.zeros(2, dtype=INT32),))


def test_overlapping_arguments_may_not_be_changed_by_atomics():
    def kernel(x, y):
        ct.atomic_add(x, 0, ct.gather(y, 0))

    buffer = torch.zeros(4)
    with pytest.raises(RuntimeError, match="x and y overlap in memory"):
        launch(kernel, (1,), (buffer[:3], buffer[1:]))


def change(operation, x: torch.Tensor, index, update, dtype: ct.DType, **options):
    """Return what one lane or four at index(lanes) find, and leave in x."""
    found = empty((4,), x.dtype)

    def kernel(found, x):
        lanes = ct.arange(4, dtype=ct.int32)
        ct.scatter(found, lanes, operation(x, index(lanes), ct.astype(update(lanes), dtype), **options))

    launch(kernel, (1,), (found, x))
    return found.tolist(), x.tolist()


def test_values_found_and_left():
    def ints():
        return torch.tensor([1, 2, 4, 8], dtype=INT32)

    def same(lanes):
        return lanes

    def backwards(lanes):
        return 3 - lanes

    def first(lanes):
        return lanes // 4

    assert change(ct_add, ints(), backwards, same, ct.int32) == ([8, 4, 2, 1], [4, 4, 5, 8])
    assert change(ct_or, ints(), same, backwards, ct.int32) == ([1, 2, 4, 8], [3, 2, 5, 8])
    assert change(ct_xchg, ints(), same, backwards, ct.int32) == ([1, 2, 4, 8], [3, 2, 1, 0])
    assert change(ct_add, ints(), first, same, ct.int32) == ([1, 1, 2, 4], [7, 2, 4, 8])
    halves = torch.full((4,), 2048.0, dtype=torch.float16)
    assert change(ct_add, halves, same, same, ct.float16)[1] == [2048.0, 2048.0, 2050.0, 2052.0]
    view = torch.zeros(4, 2)[:, 1]
    assert change(ct_add, view, same, same, ct.float32)[1] == [0, 1, 2, 3]


def ct_add(*args, **options):
    return ct.atomic_add(*args, **options)


def ct_or(*args, **options):
    return ct.atomic_or(*args, **options)


def ct_xchg(*args, **options):
    return ct.atomic_xchg(*args, **options)


def test_indices_broadcast():
    def kernel(x):
        rows, columns = ct.arange(2, dtype=ct.int32)[:, None], ct.arange(4, dtype=ct.int32)
        found = ct.atomic_add(x, (rows, columns), columns, memory_order="RELAXED", memory_scope="DEVICE")
        ct.static_assert(found.shape == (2, 4) and found.dtype == x.dtype)
        ct.static_assert(ct.atomic_add(x, (0, rows + 1), 1.0).shape == (2, 1))
        ct.static_assert(ct.atomic_add(x, (0, 0), 1).shape == ())

    x = torch.zeros(2, 4)
    launch(kernel, (1,), (x,))
    assert x.tolist() == [[1, 2, 3, 3], [0, 1, 2, 3]]


def test_bounds():
    def kernel(found, x, CHECK: ct.Constant):
        lanes = ct.arange(4, dtype=ct.int32)
        ct.scatter(found, lanes, ct.atomic_add(x, lanes + 2, 1, check_bounds=CHECK))

    x, found = torch.zeros(4, dtype=INT32), empty((4,), INT32)
    launch(kernel, (1,), (found, x, True))
    assert x.tolist() == [0, 0, 1, 1] and found.tolist() == [0, 0, 2**31 - 1, 2**31 - 1]
    with pytest.raises(
        IndexError, match=r"atomic_add at index 4 of axis 0, check_bounds=False, is outside x"
    ):
        launch(kernel, (1,), (found, x, False))


@pytest.mark.parametrize("access", ["relaxed load", "atomic_or", "atomic_add"])
def test_reading_what_nobody_wrote(access):
    operation = ACCESSES[access]

    def kernel(x):
        operation(x)

    def written(x):
        ct.store(x, (0,), 1, memory_order=RELAXED, memory_scope=DEVICE)
        operation(x)

    with pytest.raises(RuntimeError, match=r"x\[0\] is read, but no kernel has written it"):
        launch(kernel, (1,), (empty((1,), INT32),))
    launch(written, (1,), (empty((1,), INT32),))


@pytest.mark.parametrize(
    ("operation", "order", "scope"),
    [
        (lambda x, **how: ct.load(x, (0,), (1,), **how), "ACQUIRE", "DEVICE"),
        (lambda x, **how: ct.store(x, (0,), 1, **how), "RELEASE", "DEVICE"),
        (lambda x, **how: ct.store(x, (0,), 1, **how), "RELAXED", "BLOCK"),
        (lambda x, **how: ct.atomic_add(x, 0, 1, **how), "RELAXED", "BLOCK"),
    ],
)
def test_orders_and_scopes_that_are_not_covered_say_so(operation, order, scope):
    def kernel(x):
        operation(x, memory_order=ct.MemoryOrder[order], memory_scope=ct.MemoryScope[scope])

    with pytest.raises(
        NotImplementedError, match=rf"memory_order=.*{order}, memory_scope=.*{scope}\) is not"
    ):
        launch(kernel, (1,), (torch.zeros(1, dtype=INT32),))
