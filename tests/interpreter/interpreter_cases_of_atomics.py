# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""More of interpreter_cases.py: atomic operations, and accesses that are ordered among blocks."""

import cuda.tile as ct
from interpreter_cases import CASES, FLOATS, INTS, accepted, refused

__all__ = ["CASES"]


@accepted(x=INTS)
def poll_of_relaxed_slots(x):
    scope, ticket = ct.MemoryScope.DEVICE, ct.atomic_add(x, 0, 1, check_bounds=False)
    ct.static_assert(ticket.shape == () and ticket.dtype == ct.int32)
    tile = ct.reshape(ct.bitcast(ticket * 1.0, ct.int32), (1,))
    ct.store(x, (0,), tile, memory_order=ct.MemoryOrder.RELAXED, memory_scope=scope)
    slots = ct.atomic_or(x, ct.arange(4, dtype=ct.int32), 0)
    while ct.min(ct.astype(slots != -1, ct.int32)) == 0:
        slots = ct.load(x, (0,), (4,), memory_order=ct.MemoryOrder.RELAXED, memory_scope=scope)


@accepted(x=FLOATS.half(), y=FLOATS.bfloat16())
def atomic_sums_of_half_types(x, y):
    ct.atomic_add(x, 0, 1.5)
    ct.atomic_add(x, ct.zeros((1,), ct.int32), 1)
    ct.atomic_add(y, ct.zeros((4,), ct.int32), 1)


@accepted(x=FLOATS.double(), n=4)
def atomics_that_cast_their_update(x, n):
    ct.atomic_add(x, (1,), n, memory_order="ACQUIRE", memory_scope="SYS")
    ct.atomic_xchg(x, 0, ct.zeros((), ct.float16), memory_order=ct.MemoryOrder.RELEASE)


@accepted(x=INTS.long())
def bits_of_the_same_dtype(x):
    ct.atomic_or(x, 0, ct.zeros((), ct.int64))
    ct.atomic_or(x, 0, 2**40)


@refused(x=FLOATS.half())
def float_constant_added_to_float16_lanes(x):
    ct.atomic_add(x, ct.zeros((1,), ct.int32), 1.5)


@refused(x=INTS.long())
def constant_bits_of_another_dtype(x):
    ct.atomic_or(x, 0, 0)


@refused(x=INTS)
def bits_of_a_bool(x):
    ct.atomic_or(x, 0, True)


@refused(x=FLOATS)
def atomic_bits_of_a_float(x):
    ct.atomic_or(x, 0, 0)


@refused(x=INTS.short())
def atomic_sum_of_int16(x):
    ct.atomic_add(x, 0, 1)


@refused(x=FLOATS.half())
def exchange_of_float16(x):
    ct.atomic_xchg(x, 0, 1.0)


@refused(x=INTS)
def int64_added_to_int32(x):
    ct.atomic_add(x, 0, ct.zeros((), ct.int64))


@refused(x=INTS)
def update_too_large_for_the_array(x):
    ct.atomic_add(x, 0, 2**40)


@refused(x=INTS)
def update_of_more_axes(x):
    ct.atomic_add(x, ct.arange(4, dtype=ct.int32), ct.ones((1, 4), ct.int32))


@refused(x=INTS)
def masked_atomic(x):
    ct.atomic_add(x, 0, 1, mask=True)


@refused(x=INTS)
def run_time_choice_of_checked_atomics(x):
    ct.atomic_add(x, 0, 1, check_bounds=ct.bid(0) == 0)


@refused(x=INTS)
def order_by_its_value(x):
    ct.atomic_add(x, 0, 1, memory_order="relaxed")


@refused(x=INTS)
def scope_as_order(x):
    ct.atomic_add(x, 0, 1, memory_order=ct.MemoryScope.DEVICE)


@refused(x=INTS)
def weak_atomic(x):
    ct.atomic_add(x, 0, 1, memory_order=ct.MemoryOrder.WEAK, memory_scope=ct.MemoryScope.NONE)


@refused(x=INTS)
def atomic_without_scope(x):
    ct.atomic_add(x, 0, 1, memory_scope=ct.MemoryScope.NONE)


@refused(x=INTS)
def atomic_in_a_cluster(x):
    ct.atomic_add(x, 0, 1, memory_scope=ct.MemoryScope.CLUSTER)


@refused(x=INTS)
def relaxed_load_without_scope(x):
    ct.load(x, (0,), (4,), memory_order=ct.MemoryOrder.RELAXED)


@refused(x=INTS)
def weak_load_with_scope(x):
    ct.load(x, (0,), (4,), memory_scope=ct.MemoryScope.DEVICE)


@refused(x=INTS)
def load_that_releases(x):
    ct.load(x, (0,), (4,), memory_order=ct.MemoryOrder.RELEASE, memory_scope=ct.MemoryScope.DEVICE)


@refused(x=INTS)
def store_that_acquires(x):
    ct.store(x, (0,), 1, memory_order=ct.MemoryOrder.ACQUIRE, memory_scope=ct.MemoryScope.DEVICE)
