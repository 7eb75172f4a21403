# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The cuTile interpreter's blocks that wait for each other, and the order in which they run."""

import random
import signal
import threading

import cuda.tile as ct
import pytest
import torch

from tilegym_rmsnorm.backends.cutile.interpreter import blocks, empty, launch, unwritten

FP32, INT32 = torch.float32, torch.int32
RELAXED, DEVICE = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE

ROWS, TEAM, WIDTH, BLOCKS = 7, 4, 8, 12
SCHEDULES = [
    pytest.param(
        {"order": order, "resident": resident, "lockstep": lockstep}, id=f"{name}-{resident}-{lockstep}"
    )
    for name, order in {
        "ascending": range(BLOCKS),
        "descending": range(BLOCKS)[::-1],
        "shuffled": random.Random(0).sample(range(BLOCKS), BLOCKS),
    }.items()
    for resident in (None, TEAM + 1)
    for lockstep in (False, True)
]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def read(array, index):
    return ct.atomic_or(array, index, 0, memory_order=RELAXED, memory_scope=DEVICE, check_bounds=False)


def publish(array, index, value):
    tile = ct.reshape(value, (1,) * array.ndim)
    ct.store(array, index, tile, memory_order=RELAXED, memory_scope=DEVICE)


def take_ticket(counter, index, bug):
    if bug == "tickets without atomics":
        ticket = ct.load(counter, index, shape=(), memory_order=RELAXED, memory_scope=DEVICE)
        publish(counter, index, ticket + 1)
        return ticket
    return ct.atomic_add(counter, index, 1, memory_order=RELAXED, memory_scope=DEVICE, check_bounds=False)


def normalize(bug: str | None):
    """y = x / x.sum(1): a team of blocks shares each row, and its blocks tell each other their partial sums."""

    def kernel(y, board, x, TEAM: ct.Constant, WIDTH: ct.Constant):
        ticket = take_ticket(board, (x.shape[0], 0), bug) + 1
        if bug == "teams by block number":
            ticket = ct.bid(0)
        team, member = ticket // TEAM, ticket % TEAM
        for row in range(team, x.shape[0], ct.num_blocks(0) // TEAM):
            slots = team if bug == "slots used twice" else row
            tx = ct.load(x, (row, member), (1, WIDTH))
            publish(board, (slots, member), ct.bitcast(ct.sum(tx), ct.int32))
            tparts = read(board, (slots, ct.arange(TEAM, dtype=ct.int32)))
            while bug != "does not wait" and ct.min(ct.astype(tparts != -1, ct.int32)) == 0:
                tparts = read(board, (slots, ct.arange(TEAM, dtype=ct.int32)))
            ct.store(y, (row, member), tx / ct.sum(ct.bitcast(tparts, ct.float32)))

    return kernel


def is_normalized(bug: str | None = None, **schedule) -> bool:
    x = torch.arange(1.0, 1.0 + ROWS * TEAM * WIDTH).reshape(ROWS, TEAM * WIDTH)
    y, board = empty(tuple(x.shape), FP32), torch.full((ROWS + 1, TEAM), -1, dtype=INT32)
    launch(normalize(bug), (BLOCKS,), (y, board, x, TEAM, WIDTH), **schedule)
    return unwritten(y) == 0 and torch.equal(y, x / x.sum(1, keepdim=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_teams_share_rows(schedule):
    assert is_normalized(**schedule)


def test_threads_write_to_tensors_made_for_inference():
    with torch.inference_mode():
        assert is_normalized()


def test_planted_bugs():
    assert not is_normalized("does not wait")
    assert not is_normalized("slots used twice")
    assert is_normalized("tickets without atomics") and is_normalized("teams by block number")
    with pytest.raises(RuntimeError, match="wait for each other forever"):
        is_normalized("tickets without atomics", lockstep=True)
    with pytest.raises(RuntimeError, match="wait for each other forever"):
        is_normalized(
            "teams by block number", order=[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11], resident=TEAM + 1
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_block_gets_another_ticket(schedule):
    def kernel(tickets, counter):
        ct.scatter(tickets, ct.bid(0), ct.atomic_add(counter, 0, 1))

    tickets, counter = empty((BLOCKS,), INT32), torch.zeros(1, dtype=INT32)
    launch(kernel, (BLOCKS,), (tickets, counter), **schedule)
    assert tickets[list(schedule["order"])].tolist() == list(range(BLOCKS)) and counter.item() == BLOCKS


@pytest.mark.parametrize("how", ["atomic_or", "relaxed load"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_blocks_that_wait_forever(how, lockstep):
    def look(board, index):
        if how == "atomic_or":
            return read(board, index)
        return ct.load(board, index, shape=(), memory_order=RELAXED, memory_scope=DEVICE)

    def waits(board):
        if ct.bid(0) != 1:
            while look(board, 0) + look(board, 1) < 0:
                pass

    message = r"^blocks number 0, 2, 3 of waits wait for each other forever.* \[block \(., 0, 0\) of waits\]$"
    with pytest.raises(RuntimeError, match=message):
        launch(waits, (4,), (torch.full((2,), -1, dtype=INT32),), lockstep=lockstep)
    with pytest.raises(RuntimeError, match="^blocks number 0 of waits wait"):
        launch(waits, (1,), (torch.full((2,), -1, dtype=INT32),), lockstep=lockstep)


def wait_for(board, slot):
    while read(board, slot) == -1:
        pass


def test_a_block_that_looks_often_and_then_publishes_is_no_deadlock():
    def kernel(y, board):
        if ct.bid(0) == 0:
            for _ in range(50):
                read(board, 1)
            publish(board, (0,), 1)
        else:
            wait_for(board, 0)
        ct.scatter(y, ct.bid(0), 1.0)

    y = empty((3,), FP32)
    launch(kernel, (3,), (y, torch.full((2,), -1, dtype=INT32)))
    assert unwritten(y) == 0


def test_a_block_knows_its_number_when_it_goes_on():
    def kernel(y, board):
        before = ct.bid(0)
        publish(board, (before,), 1)
        for slot in range(ct.num_blocks(0)):
            wait_for(board, slot)
        ct.scatter(y, ct.bid(0), before)

    y = empty((5,), INT32)
    launch(kernel, (5,), (y, torch.full((5,), -1, dtype=INT32)))
    assert y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lockstep", [False, True])
def test_when_blocks_take_turns(lockstep):
    turns = []

    def kernel(board):
        if ct.bid(0) < 2:
            wait_for(board, ct.bid(0))
        for slot in range(2, 5):
            read(board, slot)
            turns.append(int(str(ct.bid(0))))
        if ct.bid(0) == 2:
            publish(board, (0,), 1)
            publish(board, (1,), 1)

    launch(kernel, (3,), (torch.tensor([-1, -1, 7, 7, 7], dtype=INT32),), lockstep=lockstep)
    assert turns == ([2, 2, 2, 0, 0, 1, 0, 1, 1] if lockstep else [2, 2, 2, 0, 0, 0, 1, 1, 1])


def test_blocks_that_wait_for_each_other_many_times():
    def kernel(board):
        for i in range(150):
            if ct.bid(0) == i % 2:
                publish(board, (i,), 1)
            wait_for(board, i)

    board = torch.full((150,), -1, dtype=INT32)
    launch(kernel, (2,), (board,), lockstep=True)
    assert board.tolist() == [1] * 150


def test_lockstep_finds_a_flag_raised_too_early():
    def kernel(y, board):
        if ct.bid(0) == 0:
            publish(board, (0,), 1)
            publish(board, (1,), 1)
        else:
            lanes = ct.arange(2, dtype=ct.int32)
            tslots = read(board, lanes)
            while ct.max(tslots) == -1:
                tslots = read(board, lanes)
            ct.store(y, (0,), tslots)

    def found(**schedule):
        y = empty((2,), INT32)
        launch(kernel, (2,), (y, torch.full((2,), -1, dtype=INT32)), **schedule)
        return y.tolist()

    assert found() == [1, 1] and found(lockstep=True) == [1, -1]


def test_after_an_error_no_block_starts_or_goes_on():
    ran = []

    def kernel(board):
        wait_for(board, ct.bid(0))
        ran.append(int(str(ct.bid(0))))
        publish(board, (0,), 1)
        ct.static_assert(False)

    with pytest.raises(AssertionError, match=r"block \(1, 0, 0\)"):
        launch(kernel, (3,), (torch.tensor([-1, 1, 1], dtype=INT32),))
    assert ran == [1]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("raised", [ZeroDivisionError("planted"), KeyboardInterrupt()])
def test_an_error_surfaces_while_other_blocks_wait(failing, raised):
    def fail():
        raise raised

    def kernel(board):
        publish(board, (ct.bid(0),), 1)
        if ct.bid(0) == failing:
            wait_for(board, 2)
            fail()
        wait_for(board, 3)

    with pytest.raises(type(raised)) as caught:
        launch(kernel, (3,), (torch.full((4,), -1, dtype=INT32),))
    assert [entry.name for entry in caught.traceback][-2:] == ["kernel", "fail"]
    if isinstance(raised, Exception):
        assert f"[block ({failing}, 0, 0) of kernel]" in str(caught.value)
        raised.args = ("planted",)


@pytest.mark.parametrize("has_ended", [False, True])
def test_an_interrupt_while_the_caller_waits(has_ended, monkeypatch):
    """Block 0 runs in the caller's thread: it is suspended when the signal comes, or has ended. However late that is,
    the others poll until then."""
    monkeypatch.setattr(blocks, "_ROUNDS_IN_VAIN", 10**9)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def kernel(board):
        if ct.bid(0) == 2:
            if has_ended:
                publish(board, (0,), 1)
                for _ in range(3):
                    read(board, 0)
            interrupt()
        wait_for(board, 0 if ct.bid(0) == 0 else 1)

    try:
        with pytest.raises(KeyboardInterrupt):
            launch(kernel, (3,), (torch.full((2,), -1, dtype=INT32),))
    finally:
        signal.signal(signal.SIGINT, before)


def test_blocks_that_do_not_wait_start_no_thread(monkeypatch):
    def kernel(y, counter):
        ct.scatter(y, ct.atomic_add(counter, 0, 1), 1.0)

    def independent(y):
        ct.scatter(y, ct.bid(0), 1.0)

    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    for function, more in ((kernel, (torch.zeros(1, dtype=INT32),)), (independent, ())):
        y = empty((5,), FP32)
        launch(function, (5,), (y, *more))
        assert unwritten(y) == 0


def test_there_is_room_for_a_block_at_least():
    with pytest.raises(ValueError, match="resident: expected at least 1, got 0"):
        launch(lambda: None, (1,), (), resident=0)
