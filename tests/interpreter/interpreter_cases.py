# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Kernels of one idea each, with the arguments to try them on: `accepted` or `refused` by cuda-tile's compiler."""

import cuda.tile as ct
import pytest
import torch

FLOATS = torch.tensor([3.0, -1.5, 0.1, 1e-3])
INTS = torch.tensor([7, -7, 2, 0], dtype=torch.int32)

CASES: list = []


def accepted(**args):
    return lambda function: CASES.append(pytest.param(function, args, True, id=function.__name__))


def refused(**args):
    return lambda function: CASES.append(pytest.param(function, args, False, id=function.__name__))


@accepted(x=FLOATS.half())
def float16_tile_with_a_float_constant(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) * 0.1)


@accepted(x=FLOATS.half())
def integer_tile_stored_as_float16(x):
    ct.store(x, (0,), ct.arange(4, dtype=ct.int32))


@accepted(x=FLOATS, n=4)
def loop_to_a_run_time_bound(x, n):
    total = ct.zeros((4,), ct.float32)
    for i in range(ct.bid(0), n, ct.num_blocks(0)):
        total = total + ct.load(x, i, shape=())
    ct.store(x, 0, total)


@accepted(x=FLOATS)
def static_iteration_over_tiles(x):
    tiles = tuple(ct.load(x, (j,), (2,)) for j in ct.static_iter(range(2)))
    tiles = tiles + (tiles[0] + tiles[1],)
    ct.static_assert(len(tiles) == 3)
    ct.store(x, (0,), tiles[2])


@accepted(x=FLOATS)
def conditions_on_scalars(x):
    if ct.bid(0) == 0 and not ct.bid(1):
        ct.store(x, (0,), min(ct.num_blocks(0), 2) * 1.0)
    if 0 <= ct.bid(0) < 3:
        return


@accepted(x=FLOATS.reshape(2, 2))
def new_axes_and_views(x):
    tile = ct.reshape(ct.load(x, (0, 0), (2, 2)), (4, -1))[:, None]
    ct.static_assert(tile.shape == (4, 1, 1) and tile.ndim == 3)
    part = x.slice(0, 1, 2)
    ct.store(part, (0, 0), ct.extract(ct.transpose(tile.reshape((2, 2))), (0, 1), (1, 1)))


@accepted(x=torch.zeros(4, dtype=torch.bool))
def one_is_a_bool(x):
    ct.store(x, (0,), 1)


@accepted(x=FLOATS)
def minus_a_mask(x):
    ct.store(x, (0,), ct.abs(-(ct.load(x, (0,), (4,)) > 0)))


@refused(x=FLOATS.half(), y=FLOATS.bfloat16())
def bfloat16_with_float16(x, y):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) + ct.load(y, (0,), (4,)))


@refused(x=FLOATS.half())
def float32_stored_as_float16(x):
    ct.store(x, (0,), ct.zeros((4,), ct.float32))


@refused(x=INTS)
def float_constant_stored_as_int32(x):
    ct.store(x, (0,), 0.0)


@refused(x=INTS)
def constant_too_large_for_the_array(x):
    ct.scatter(x, 0, 2**40)


@refused(x=INTS.to(torch.int8))
def constant_too_large_for_the_tile(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) + 300)


@refused(x=INTS)
def float_padding_of_an_integer_gather(x):
    ct.scatter(x, 0, ct.gather(x, 0, padding_value=0.0))


@refused(x=INTS)
def nan_padding_of_an_integer_load(x):
    ct.store(x, (0,), ct.load(x, (0,), (8,), padding_mode=ct.PaddingMode.NAN))


@refused(x=FLOATS)
def tile_of_three(x):
    ct.store(x, (0,), ct.load(x, (0,), (3,)))


@refused(x=FLOATS)
def full_of_three(x):
    ct.store(x, (0,), ct.sum(ct.full((3,), 1.0, ct.float32)))


@refused(x=FLOATS, n=4)
def run_time_extent(x, n):
    ct.store(x, (0,), ct.zeros((n,), ct.float32))


@refused(x=FLOATS.reshape(2, 2))
def index_of_another_rank(x):
    ct.store(x, (0, 0), ct.load(x, (0,), (2, 2)))


@refused(x=FLOATS.reshape(2, 2))
def load_shape_of_another_rank(x):
    ct.store(x, (0, 0), ct.load(x, (0, 0), (2,)))


@refused(x=FLOATS.reshape(2, 2))
def tile_of_another_rank(x):
    ct.store(x, (0, 0), ct.zeros((2,), ct.float32))


@refused(x=FLOATS.reshape(2, 2))
def gather_of_another_rank(x):
    ct.store(x, (0, 0), ct.gather(x, 0))


@refused(x=FLOATS)
def float_index(x):
    ct.store(x, (0,), ct.gather(x, ct.arange(4, dtype=ct.float32)))


@refused(x=FLOATS)
def index_with_an_axis(x):
    ct.store(x, (0,), ct.load(x, (ct.zeros((1,), ct.int32),), (4,)))


@refused(x=FLOATS)
def mask_of_integers(x):
    ct.scatter(x, ct.arange(4, dtype=ct.int32), 1.0, mask=ct.arange(4, dtype=ct.int32))


@refused(x=FLOATS)
def scattered_value_of_more_axes(x):
    ct.scatter(x, ct.arange(4, dtype=ct.int32), ct.zeros((2, 4), ct.float32))


@refused(x=FLOATS)
def shapes_that_do_not_broadcast(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) + ct.load(x, (0,), (2,)))


@refused(x=FLOATS)
def sum_of_masks(x):
    ct.store(x, (0,), (ct.load(x, (0,), (4,)) > 0) + (ct.load(x, (0,), (4,)) < 0))


@refused(x=FLOATS)
def bits_of_a_float(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) & 1)


@refused(x=INTS)
def bits_of_two_dtypes(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,)) & ct.zeros((4,), ct.int64))


@refused(x=FLOATS)
def tile_as_condition(x):
    if ct.load(x, (0,), (4,)) > 0:
        ct.store(x, (0,), 1.0)


@refused(x=FLOATS)
def subscripted_tile(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,))[0])


@refused(x=FLOATS)
def tuple_indexed_by_a_loop_variable(x):
    values = (1.0, 2.0)
    for i in range(2):
        ct.store(x, (0,), values[i])


@refused(x=FLOATS)
def loop_downwards(x):
    for i in range(3, -1, -1):
        ct.store(x, (i,), 1.0)


@refused(x=FLOATS)
def static_iteration_to_a_run_time_bound(x):
    for i in ct.static_iter(range(x.shape[0])):
        ct.store(x, (i,), 1.0)


@refused(x=FLOATS)
def static_assertion_of_a_run_time_value(x):
    ct.static_assert(x.shape[0] == 4)


@refused(x=FLOATS)
def run_time_value_as_python_integer(x):
    ct.store(x, (int(x.shape[0]) - 4,), 1.0)


@refused(x=FLOATS)
def repeated_axis(x):
    ct.store(x, (0,), ct.sum(ct.load(x, (0,), (4,)), axis=(0, 0)))


@refused(x=FLOATS)
def axis_beyond_the_rank(x):
    ct.store(x, (0,), ct.sum(ct.load(x, (0,), (4,)), axis=1))


@refused(x=FLOATS)
def bitcast_to_another_width(x):
    ct.bitcast(ct.load(x, (0,), (4,)), ct.int16)


@refused(x=FLOATS)
def unpacking_of_no_bytes(x):
    ct.unpack_from_bytes(ct.load(x, (0,), (4,)), ct.int32)


@refused(x=FLOATS)
def unpacking_of_rows_of_bytes(x):
    ct.unpack_from_bytes(ct.reshape(ct.pack_to_bytes(ct.load(x, (0,), (4,))), (4, 4)), ct.int32)


@refused(x=FLOATS)
def unpacking_of_half_a_number(x):
    ct.unpack_from_bytes(ct.pack_to_bytes(ct.zeros((1,), ct.float16)), ct.int32)


@refused(x=FLOATS)
def dtype_by_keyword(x):
    ct.store(x, (0,), ct.astype(ct.load(x, (0,), (4,)), dtype=ct.float32))


@refused(x=FLOATS)
def latency_of_eleven(x):
    ct.store(x, (0,), ct.load(x, (0,), (4,), latency=11))


@refused(x=FLOATS)
def run_time_choice_of_bounds_checks(x):
    ct.store(x, (0,), 1.0, check_bounds=ct.bid(0) == 0)


@refused(x=FLOATS)
def fourth_grid_axis(x):
    ct.store(x, (0,), ct.bid(3))


@refused(x=FLOATS)
def subtile_outside_its_tile(x):
    ct.store(x, (0,), ct.extract(ct.load(x, (0,), (4,)), (2,), (2,)))


@refused(x=FLOATS)
def mixed_concatenation(x):
    ct.store(x, (0,), ct.cat((ct.load(x, (0,), (2,)), ct.zeros((2,), ct.float16)), 0))


@refused(x=FLOATS)
def wrong_divisor(x):
    ct.store(x, (ct.assume_divisible_by(5, 4) - 5,), 1.0)
