# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter's loads, stores, gathers, scatters and memory by offsets: padding, bounds, masks, views."""

import math

import cuda.tile as ct
import pytest
import torch

from tilegym_rmsnorm.backends.cutile.interpreter import empty, launch, unwritten

FP32, INT32 = torch.float32, torch.int32


def copy_tiles(y, x, index, SIZE: ct.Constant, CHECK: ct.Constant):
    ct.store(y, (index,), ct.load(x, (index,), (SIZE,), check_bounds=CHECK), check_bounds=CHECK)


def copy_lanes(y, x, first, SIZE: ct.Constant, CHECK: ct.Constant):
    lanes = ct.arange(SIZE, dtype=ct.int32) + first
    ct.scatter(y, lanes, ct.gather(x, lanes, check_bounds=CHECK), check_bounds=CHECK)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("ZERO", 0.0), ("NEG_ZERO", -0.0), ("NAN", math.nan), ("POS_INF", math.inf), ("NEG_INF", -math.inf)],
)
def test_load_pads_past_the_end(mode, expected):
    padding = ct.PaddingMode[mode]

    def kernel(y, x):
        ct.store(y, (0, 0), ct.load(x, (1, 0), (2, 4), padding_mode=padding))

    y = empty((2, 4), FP32)
    launch(kernel, (1,), (y, torch.arange(9.0).reshape(3, 3)))
    assert y[0, :3].tolist() == [6, 7, 8]
    lanes = [y[0, 3].item(), *y[1].tolist()]
    assert all(str(lane) == str(expected) for lane in lanes)  # as text: tells 0 from -0, and NaN equals NaN


@pytest.mark.parametrize(("dtype", "poison"), [(FP32, math.nan), (INT32, 2**31 - 1)])
def test_undetermined_padding_is_poison(dtype, poison):
    y = empty((4,), dtype)
    launch(copy_tiles, (1,), (y[:4], torch.ones(3, dtype=dtype), 0, 4, True))
    assert str(y.tolist()) == str([*torch.ones(3, dtype=dtype).tolist(), poison])


def test_store_ignores_what_lies_past_the_end():
    y = empty((6,), FP32)
    launch(copy_tiles, (1,), (y[:5], torch.arange(8.0), 1, 4, True))
    assert y[4] == 4 and unwritten(y) == 5


def test_scalars_are_stored_at_any_rank():
    def kernel(y, x):
        ct.store(y, (1, 0), ct.load(x, 1, shape=()))

    y = empty((2, 1), FP32)
    launch(kernel, (1,), (y, torch.arange(3.0)))
    assert y[1, 0] == 1 and unwritten(y) == 1


@pytest.mark.parametrize("index", [2, -1])
@pytest.mark.parametrize("check", [True, False])
def test_a_tile_wholly_outside_raises(index, check):
    with pytest.raises(
        IndexError, match=rf"load at index \({index},\).* x of shape \(7,\).*block \(0, 0, 0\)"
    ):
        launch(copy_tiles, (1,), (torch.zeros(16), torch.zeros(7), index, 4, check))
    with pytest.raises(IndexError, match=rf"store at index \({index},\).* y of shape \(7,\)"):

        def kernel(y, index):
            ct.store(y, (index,), ct.zeros((4,), ct.float32))

        launch(kernel, (1,), (torch.zeros(7), index))


def test_unchecked_access_past_the_end_raises():
    with pytest.raises(IndexError, match=r"load at index \(1,\).*x of shape \(7,\).*block"):
        launch(copy_tiles, (1,), (torch.zeros(8), torch.zeros(7), 1, 4, False))
    with pytest.raises(IndexError, match=r"store at index \(1,\).*y of shape \(7,\).*block"):
        launch(copy_tiles, (1,), (torch.zeros(7), torch.zeros(8), 1, 4, False))
    with pytest.raises(IndexError, match=r"gather at index 7 of axis 0.*x of shape \(7,\).*block"):
        launch(copy_lanes, (1,), (torch.zeros(8), torch.zeros(7), 4, 4, False))
    with pytest.raises(IndexError, match=r"gather at index -1 of axis 0.*x of shape \(8,\).*block"):
        launch(copy_lanes, (1,), (torch.zeros(7), torch.zeros(8), -1, 4, False))
    with pytest.raises(IndexError, match=r"scatter at index 7 of axis 0.*y of shape \(7,\).*block"):
        launch(copy_lanes, (1,), (torch.zeros(7), torch.zeros(8), 4, 4, False))


def test_gather_pads_and_scatter_skips_lanes_outside():
    def kernel(y, z, x, PADDING: ct.Constant):
        lanes = ct.arange(8, dtype=ct.int32)
        tile = ct.gather(x, lanes - 2, padding_value=PADDING)
        ct.scatter(y, lanes, tile)
        ct.scatter(z, lanes - 2, tile)

    for padding in (0, 5.0):
        y, z = empty((8,), FP32), empty((5,), FP32)
        launch(kernel, (1,), (y, z, torch.arange(1.0, 4.0), padding))
        assert y.tolist() == [padding, padding, 1, 2, 3, padding, padding, padding]
        assert z.tolist() == [1, 2, 3, padding, padding]


@pytest.mark.parametrize("check", [True, False])
def test_masked_lanes_touch_nothing(check):
    def kernel(y, x, CHECK: ct.Constant):
        lanes = ct.arange(8, dtype=ct.int32)
        tile = ct.gather(x, lanes, mask=lanes < 3, padding_value=-1.0, check_bounds=CHECK)
        ct.scatter(y, lanes, tile, mask=(lanes > 0) & (lanes < 4), check_bounds=CHECK)

    y, x = empty((5,), FP32), empty((5,), FP32)
    launch(copy_tiles, (1,), (x[:3], torch.arange(3.0), 0, 4, True))
    launch(kernel, (1,), (y, x, check))
    assert y[1:4].tolist() == [1, 2, -1] and unwritten(y) == 2


def test_gather_broadcasts_its_indices():
    def kernel(y, x):
        rows = ct.arange(2, dtype=ct.int32)[:, None]
        columns = ct.arange(4, dtype=ct.int32)
        ct.scatter(y, (rows, columns), ct.gather(x, (rows + 1, columns)))

    x, y = torch.arange(9.0).reshape(3, 3), empty((2, 4), FP32)
    launch(kernel, (1,), (y, x))
    assert torch.equal(y, torch.nn.functional.pad(x[1:], (0, 1)))


def test_lanes_that_write_one_element_twice():
    def kernel(y):
        ct.scatter(y, ct.arange(4, dtype=ct.int32) // 2, 1.0)

    with pytest.raises(RuntimeError, match="several lanes .* same element of y"):
        launch(kernel, (1,), (torch.zeros(4),))


@pytest.mark.parametrize("how", ["tiles", "lanes"])
@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.arange(24.0).reshape(3, 8)[:, 1:6],
        lambda: torch.arange(15.0).reshape(5, 3).t(),
        lambda: torch.arange(5.0).expand(3, 5),
        lambda: torch.arange(3.0)[:, None].expand(3, 5),
    ],
)
def test_strided_and_expanded_arrays(how, view):
    def kernel(y, x, TILES: ct.Constant):
        if TILES:
            ct.store(y, (0, 0), ct.load(x, (0, 0), (4, 8)))
        else:
            place = ct.arange(4, dtype=ct.int32)[:, None], ct.arange(8, dtype=ct.int32)
            ct.scatter(y, place, ct.gather(x, place))
        ct.static_assert(len(x.strides) == x.ndim)

    x = view()
    y = empty((10, 3), FP32)[::2].t()
    launch(kernel, (1,), (y, x, how == "tiles"))
    assert torch.equal(y, x) and unwritten(y) == 0


@pytest.mark.parametrize("dtype", [ct.int32, ct.int64])
def test_a_slice_begins_where_its_dtype_can_count(dtype):
    """2**31 elements behind the array's first: with an index of int32 a GPU reads before the array."""

    def kernel(x):
        x.slice(0, ct.astype(ct.bid(0) + 2, dtype), 3)

    x = torch.empty(3 * 2**30, dtype=torch.int8).view(3, 2**30)  # never touched
    if dtype is ct.int64:
        launch(kernel, (1,), (x,))
        return
    with pytest.raises(
        OverflowError, match="slice of x .* at 2147483648 elements is out of range of torch.int32"
    ):
        launch(kernel, (1,), (x,))


def test_array_slices():
    def kernel(y, x, start, stop):
        part = x.slice(0, start, stop)
        ct.store(y, (0,), ct.load(part, (0,), (4,), padding_mode=ct.PaddingMode.ZERO) + part.shape[0])

    y = empty((4,), FP32)
    launch(kernel, (1,), (y, torch.arange(8.0), 3, 6))
    assert y.tolist() == [6, 7, 8, 3]
    with pytest.raises(IndexError, match="slice 3:9 of axis 0 is outside x"):
        launch(kernel, (1,), (y, torch.arange(8.0), 3, 9))


def test_tiles_in_an_array():
    def kernel(y, x):
        ct.store(y, (0,), ct.num_tiles(x, 1, (2, 4)))

    y = empty((1,), INT32)
    launch(kernel, (1,), (y, torch.zeros(3, 9)))
    assert y.item() == 3


def copy_offsets(y, x, first, COUNT: ct.Constant):
    """Copy 8 lanes, COUNT of them active, from offset `first` of x to the same of y."""
    toffsets = ct.arange(8, dtype=ct.int64) + first
    active = ct.arange(8, dtype=ct.int32) < COUNT
    tile = x.get_raw_memory().load_offset(toffsets, mask=active, padding_value=-1.0, latency=2)
    y.get_raw_memory().store_offset(toffsets, tile, mask=active)


def test_memory_by_offsets_goes_on_from_row_to_row():
    y, x = empty((3, 4), FP32), torch.arange(13.0)[1:].view(3, 4)  # behind another element of its storage
    launch(copy_offsets, (1,), (y, x, 2, 7))
    assert y.view(-1)[2:9].tolist() == x.view(-1)[2:9].tolist() and unwritten(y) == 5


def test_memory_by_offsets_pads_what_is_not_loaded():
    def kernel(y, x):
        lanes = ct.arange(4, dtype=ct.int32)
        ct.store(y, (0,), x.get_raw_memory().load_offset(lanes, mask=lanes < 2, padding_value=5.0))

    y = empty((4,), FP32)
    launch(kernel, (1,), (y, torch.ones(2)))
    assert y.tolist() == [1, 1, 5, 5]


def test_offsets_outside_an_array_raise():
    def store(y, first):
        y.get_raw_memory().store_offset(ct.arange(2, dtype=ct.int32) + first, ct.zeros((2,), ct.float32))

    for first in (-1, 11):
        with pytest.raises(IndexError, match=r"load_offset at offsets .* is outside x of shape \(3, 4\)"):
            launch(copy_offsets, (1,), (torch.zeros(20), torch.zeros(3, 4), first, 2))
        with pytest.raises(IndexError, match=r"store_offset at offsets .* is outside y of shape \(3, 4\)"):
            launch(store, (1,), (torch.zeros(3, 4), first))


def test_offsets_count_in_packed_memory_alone():
    with pytest.raises(NotImplementedError, match="not packed"):
        launch(copy_offsets, (1,), (torch.zeros(12), torch.zeros(3, 8)[:, :4], 0, 4))


def test_lanes_of_one_offset_raise():
    def kernel(y):
        y.get_raw_memory().store_offset(ct.arange(4, dtype=ct.int32) // 2, ct.zeros((4,), ct.float32))

    with pytest.raises(RuntimeError, match="several lanes of one store_offset"):
        launch(kernel, (1,), (torch.zeros(4),))


def test_blocks_that_store_at_one_offset_race():
    def kernel(y):
        y.get_raw_memory().store_offset(ct.arange(2, dtype=ct.int32) + ct.bid(0), ct.zeros((2,), ct.float32))

    with pytest.raises(RuntimeError, match="race"):
        launch(kernel, (2,), (torch.zeros(4),))
