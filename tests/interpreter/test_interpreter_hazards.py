# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Hazards that the cuTile interpreter finds and no GPU tells: unwritten memory, races, overlaps, and planted bugs."""

import gc

import cuda.tile as ct
import pytest
import torch

from tilegym_rmsnorm.backends.cutile.interpreter import empty, launch, memory, unwritten

FP32 = torch.float32


def copy_tiles(y, x, index, SIZE: ct.Constant):
    ct.store(y, (index,), ct.load(x, (index,), (SIZE,)))


def copy_lanes(y, x, first, SIZE: ct.Constant):
    lanes = ct.arange(SIZE, dtype=ct.int32) + first
    ct.scatter(y, lanes, ct.gather(x, lanes))


@pytest.mark.parametrize("copy", [copy_tiles, copy_lanes])
def test_reading_what_nobody_wrote(copy):
    x, y = empty((8,), FP32), empty((8,), FP32)
    assert x.isnan().all() and unwritten(x) == 8
    launch(copy, (1,), (x, torch.ones(8), 0, 4))
    assert unwritten(x) == 4 and unwritten(x[:5]) == 1
    launch(copy, (1,), (y, x, 0, 4))
    with pytest.raises(
        RuntimeError, match=r"x\[4\] is read, but no kernel has written it .*block \(0, 0, 0\)"
    ):
        launch(copy, (1,), (y, x[:5], 0, 8))
    with pytest.raises(ValueError, match="interpreter.empty"):
        unwritten(torch.zeros(4))


def test_memory_from_empty_is_not_kept_alive(quick_gc):
    before = len(memory._unwritten)
    x = empty((8,), FP32)
    view = x[4:]
    del x
    assert len(memory._unwritten) == before + 1 and unwritten(view) == 4
    del view
    gc.collect()
    assert len(memory._unwritten) == before


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_reading_what_another_block_writes_is_a_race(order):
    def kernel(y, x):
        block = ct.bid(0)
        ct.store(y, (block,), 1.0)
        ct.scatter(x, block, ct.load(y, block + 1, shape=()))

    with pytest.raises(RuntimeError, match=r"y\[1\] is .*: a race \[block \(., 0, 0\)"):
        launch(kernel, (2,), (torch.zeros(3), torch.zeros(3)), order=order)


def test_blocks_may_read_the_same_and_rewrite_their_own():
    def kernel(y, x):
        for _ in range(2):
            ct.store(y, (ct.bid(0),), ct.load(x, (0,), (1,)) + ct.load(y, (ct.bid(0),), (1,)))

    y = torch.zeros(3)
    launch(kernel, (3,), (y, torch.ones(1)))
    assert y.tolist() == [2, 2, 2]


def test_writing_what_another_block_wrote_or_read_is_a_race():
    def all_write(y):
        ct.scatter(y, 1, 1.0)

    def last_writes(y, x):
        ct.scatter(x, ct.bid(0), ct.gather(y, 2))
        if ct.bid(0) == 2:
            ct.scatter(y, 2, 1.0)

    with pytest.raises(
        RuntimeError, match=r"y\[1\] is written here and written by block number 0.*block \(1, 0, 0\)"
    ):
        launch(all_write, (2,), (torch.zeros(2),))
    with pytest.raises(RuntimeError, match=r"y\[2\] is written here and read by several other blocks"):
        launch(last_writes, (3,), (torch.zeros(3), torch.zeros(3)))
    launch(all_write, (1,), (torch.zeros(2),))  # and what one launch wrote, the next may write


def test_overlapping_arguments_may_only_be_read():
    def add(y, a, b):
        ct.store(y, (0,), ct.load(a, (0,), (4,)) + ct.load(b, (0,), (4,)))

    buffer = torch.ones(8)
    launch(add, (1,), (torch.zeros(4), buffer[:4], buffer[2:6]))
    with pytest.raises(RuntimeError, match="y and b overlap in memory"):
        launch(add, (1,), (buffer[:4], buffer[4:], buffer[3:7]))
    with pytest.raises(RuntimeError, match="overlap in memory"):
        launch(add, (1,), (buffer[:4], torch.zeros(4), torch.frombuffer(buffer.numpy(), dtype=FP32)[:4]))

    def untouched(y, a, b):
        ct.store(y, (0,), ct.load(a, (0,), (4,)))

    launch(untouched, (1,), (buffer[:4], buffer[4:], buffer))
    halves = torch.ones(4, 8)
    launch(add, (1,), (halves[:, 0], halves[:, 1], halves[:, 2]))


def partial_sums(bug: str | None):
    """The backward in small: each block adds its rows of x into its row of `partial`; one bug can be planted."""

    def kernel(partial, x, ROWS: ct.Constant, WIDTH: ct.Constant):
        block, blocks = ct.bid(0), ct.num_blocks(0)
        mode = ct.PaddingMode.UNDETERMINED if bug == "missing padding" else ct.PaddingMode.ZERO
        total = ct.zeros((ROWS, WIDTH), ct.float32)
        count = ct.cdiv(x.shape[0], ROWS) - (1 if bug == "skips the last rows" else 0)
        for i in range(0 if bug == "every block takes all rows" else block, count, blocks):
            tile = ct.load(
                x, (i, 0), (ROWS, WIDTH), padding_mode=mode, check_bounds=bug != "reads past the end"
            )
            total = total + tile
        if bug == "adds a tile twice":
            total = total + ct.load(x, (block, 0), (ROWS, WIDTH), padding_mode=mode)
        row = 0 if bug == "all blocks write one row" else block
        if bug != "one block does not write" or block > 0:
            ct.store(partial, (row, 0), ct.sum(total, axis=0, keepdims=True))

    return kernel


def total_of_rows(bug: str | None) -> torch.Tensor:
    def kernel(dw, partial, WIDTH: ct.Constant):
        total = ct.zeros((1, WIDTH), ct.float32)
        for i in range(partial.shape[0]):
            total = total + ct.load(partial, (i, 0), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
        ct.store(dw, (0,), ct.reshape(total, (WIDTH,)))

    partial, dw = empty((3, 6), FP32), empty((6,), FP32)
    launch(partial_sums(bug), (3,), (partial, torch.arange(66.0).reshape(11, 6), 2, 8))
    launch(kernel, (1,), (dw, partial, 8))
    return dw


def test_planted_bugs():
    right = torch.arange(66.0).reshape(11, 6).sum(0)
    assert torch.equal(total_of_rows(None), right)
    for bug in ("skips the last rows", "adds a tile twice", "every block takes all rows", "missing padding"):
        assert not torch.equal(total_of_rows(bug), right), bug
    with pytest.raises(IndexError, match="check_bounds=False, reaches outside x"):
        total_of_rows("reads past the end")
    with pytest.raises(RuntimeError, match=r"partial\[0, 0\] is read, but no kernel has written it"):
        total_of_rows("one block does not write")
    with pytest.raises(RuntimeError, match=r"partial\[0, 0\] is written here and written by block number 0"):
        total_of_rows("all blocks write one row")
