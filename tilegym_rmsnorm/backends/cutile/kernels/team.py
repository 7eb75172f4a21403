# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Teams of blocks that share a row and add up one number each: their tickets and their board.

Each member writes its part to `board`, where row i has a slot for every member, and reads the slots of row i until none
is EMPTY. It adds them in an order that only their numbers decide, so all get the same bits on every run. A slot is
written once and is all that one block tells another, so its accesses need no order among others (RELAXED).

No block waits forever. Teams are formed of blocks in the order in which they start: each takes a ticket. So of all the
blocks of a launch that have started, at most MEMBERS - 1 wait for one that has not; the other teams end and make room.
The condition: launches that run at the same time, each with so many, leave room for a block on the SMs that
they may use. machine.py allows teams of an eighth of the device's SMs at most. So eight launches at once
(LAUNCHES_AT_ONCE) that may use all of them always do, more where an SM holds several blocks. More than that are not
covered. Nor are launches that may use fewer SMs than the device reports, in a green context or by a share of MPS: where
those hold fewer blocks than a team has members, a launch never ends.
"""

import cuda.tile as ct

from .pdl import wait_and_signal
from .tiles import ConstBool, ConstInt, at_least_zero

EMPTY = -1  # as float32 a NaN, whose bits no sum has: `post` sees to it
OTHER_NAN = 0x7FC00000
RELAXED = ct.MemoryOrder.RELAXED
DEVICE = ct.MemoryScope.DEVICE


def take_ticket(board):
    """0, 1, 2, ... for the blocks in the order in which they ask. The counter is in the board's last row."""
    last = (board.shape[0] - 1, 0)
    ticket = ct.atomic_add(board, last, 1, check_bounds=False, memory_order=RELAXED, memory_scope=DEVICE)
    return at_least_zero(ticket + 1)  # the counter begins at EMPTY


def join_team(board, MEMBERS, SLOTS):
    """The number of the block's team, and the team as functions of rows take it: the board, which member the block is,
    MEMBERS and SLOTS."""
    ticket = take_ticket(board)
    return ticket // MEMBERS, (board, ticket % MEMBERS, MEMBERS, SLOTS)


def member_of(team):
    """Which member of its team a block is: the first, 0, where there is no team."""
    return team[1] if len(team) > 0 else 0


def post(board, row, member, part):
    """Writes a member's part of a row's sum."""
    bits = ct.bitcast(part, ct.int32)
    bits = ct.reshape(ct.where(bits == EMPTY, OTHER_NAN, bits), (1, 1))
    ct.store(board, (row, member), bits, allow_tma=False, memory_order=RELAXED, memory_scope=DEVICE)


def read_slots(board, row, tslots):
    """Read slots by an atomic that changes nothing: tileiras 13.4 takes a load, even a relaxed one, out of the loop."""
    return ct.atomic_or(
        board, (row, tslots), 0, check_bounds=False, memory_order=RELAXED, memory_scope=DEVICE
    )


def sum_of_team(part, row, team):
    """The sum of all members' parts of a row's sum, once they are there; of one block, where team is (), its part."""
    total = part
    if len(team) > 0:
        board, member, MEMBERS, SLOTS = team
        post(board, row, member, part)
        tslots = ct.arange(SLOTS, dtype=ct.int32)
        tbits = read_slots(board, row, tslots)
        while ct.max(ct.astype((tbits == EMPTY) & (tslots < MEMBERS), ct.int32)) > 0:
            tbits = read_slots(board, row, tslots)
        total = ct.sum(ct.where(tslots < MEMBERS, ct.bitcast(tbits, ct.float32), 0.0))
    return total


def clear_board(
    board,  # (any multiple of ROWS, SLOTS), int32: written
    ROWS: ConstInt,
    SLOTS: ConstInt,
    DEPENDENT: ConstBool,
):
    """Grid: (rows of the board / ROWS,)."""
    wait_and_signal(DEPENDENT)
    ct.store(board, (ct.bid(0), 0), ct.full((ROWS, SLOTS), EMPTY, dtype=ct.int32), allow_tma=False)
