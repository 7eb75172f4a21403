# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""More of interpreter_cases.py: tuples as arguments, and arrays of four dimensions."""

import cuda.tile as ct
import torch
from interpreter_cases import FLOATS, accepted, refused
from interpreter_cases_of_atomics import CASES

__all__ = ["CASES"]

FOUR = torch.arange(2.0 * 3 * 2 * 8).reshape(2, 3, 2, 8)


@accepted(x=FLOATS, others=(FLOATS.half(), 0.5, 3))
def tuple_of_an_array_and_numbers(x, others):
    array, scale, n = others
    ct.static_assert(len(others) == 3)
    if n > 2:
        ct.store(x, (0,), ct.astype(ct.load(array, (0,), (4,)), x.dtype) * scale + others[1])


@accepted(x=FLOATS, others=())
def empty_tuple_as_a_switch(x, others):
    if len(others) > 0:
        ct.store(x, (0,), ct.load(others[0], (0,), (4,)))


@accepted(x=FLOATS, others=((), (FLOATS.half(), (2,))))
def nested_tuples(x, others):
    ct.static_assert(len(others[0]) == 0 and len(others[1][1]) == 1)
    ct.store(x, (0,), ct.load(others[-1][0], (0,), (4,)) * others[1][1][0])


def store_first(x, others):
    ct.store(x, (0,), ct.load(others[0], (0,), (4,)))


@accepted(x=FLOATS, others=(FLOATS.half(),))
def tuple_passed_on(x, others):
    store_first(x, others)
    store_first(x, (x, *others))


@refused(x=FLOATS, others=(FLOATS.half(),))
def tuple_in_place_of_an_array(x, others):
    ct.store(x, (0,), ct.load(others, (0,), (4,)))


@refused(x=FLOATS, others=(FLOATS.half(),))
def item_beyond_the_tuple(x, others):
    ct.store(x, (0,), ct.load(others[1], (0,), (4,)))


@refused(x=FLOATS, others=(FLOATS, 0.5))
def unpacking_into_too_many_names(x, others):
    _array, _scale, _offset = others
    ct.store(x, (0,), 0.0)


@accepted(y=FOUR, x=FOUR.half())
def tiles_of_four_dimensions(y, x):
    tile = ct.load(
        x, (ct.bid(1), 1, ct.bid(2), 0), (1, 2, 4, 16), padding_mode=ct.PaddingMode.ZERO, allow_tma=True
    )
    rows = ct.reshape(ct.astype(tile, ct.float32), (8, 16))
    ct.static_assert(rows.shape == (8, 16))
    back = ct.reshape(rows - ct.sum(rows, axis=1, keepdims=True), (1, 2, 4, 16))
    sums, flat = ct.sum(back, axis=-1, keepdims=True), ct.max(back, axis=3)
    ct.static_assert(sums.shape == (1, 2, 4, 1) and flat.shape == (1, 2, 4))
    ct.store(y, (0, 1, 0, 0), back + sums + flat[:, :, :, None])


@accepted(y=FOUR, x=FOUR.half())
def gathers_of_four_dimensions(y, x):
    t = ct.arange(4, dtype=ct.int32)[None, :, None, None]
    h = ct.arange(2, dtype=ct.int32)[None, None, :, None]
    n = ct.arange(8, dtype=ct.int32)[None, None, None, :]
    tile = ct.gather(x, (1, t, h, n), padding_value=0)
    ct.static_assert(tile.shape == (1, 4, 2, 8))
    ct.scatter(y, (1, t, h, n), tile, mask=n < 7)


@refused(y=FOUR)
def three_indices_of_four(y):
    ct.store(y, (0, 0, 0), ct.zeros((1, 1, 1, 8), ct.float32))


@refused(y=FOUR)
def tile_of_another_rank(y):
    ct.store(y, (0, 0, 0, 0), ct.zeros((2, 8), ct.float32))
