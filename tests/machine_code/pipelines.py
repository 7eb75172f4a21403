# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Memory that a kernel's loads by TMA share with its workers' reads, from its machine code.

A warp of its own loads tiles into slots of shared memory; each slot has a barrier that says that it is full. The
workers read slots and say, by other barriers, which steps they have ended: as many steps as there are such barriers may
be under way. So a tile may be loaded once the step that used its slot before has ended:

    wait for the end of step i - S, load into slot i mod S                  S slots are enough
    load into slot i mod K, wait for the end of step i - S                  K must be S + 1
    load into the one slot, wait for the end of step i itself               so few do where shared memory is scarce

A loop may have steps of several kinds, each with barriers of its own: one for a row's first tile, one for its second.
So the wait that counts for a slot is the one for the barriers at which the workers arrive when they have read it.

Where memory is scarcer still, as on sm_120, the workers load for themselves, and all of them must meet between their
reading and the next load.

What is not read: which slots lie in the same memory, as some of different steps do on sm_120.
"""

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from control_flow import followers, loops, reaching

BARRIER = re.compile(
    r"SYNCS\.([\w.]+) (?:P\d, |RZ, |URZ, )\[(?:(\w+)\+)?(?:URZ\+)?(0x[0-9a-f]+)\](?:, (\w+))?"
)
# What is done to a barrier. Loaded: so many bytes will come; ended: a worker arrives.
MADE, LOADED, ENDED, WAITED = "EXCH.64", "ARRIVE.TRANS64", "ARRIVE.TRANS64.A1T0", "PHASECHK.TRANS64.TRYWAIT"
# A number as it is, or its lowest bit as the highest.
COPY = re.compile(
    r"\*/\s+(?:U?MOV|R2UR|IMAD(?:\.MOV)?\.U32|SHF\.L\.U32) \w+, (?:RZ, RZ, )?(\w+)(?:, 0x1f, RZ)? ;"
)
# An address in shared memory that does not change with the step, from the base of all; and a worker's read at one.
SUM = re.compile(r"\*/\s+UIADD3 (UR\d+), (UR\d+), (0x[0-9a-f]+), URZ ;")
UNIFORM = re.compile(r"\*/\s+(?:@!?U?P\d )?[\w.]+ (UR\d+),")
TILE = re.compile(r"UTMALDG\.2D \[UR(\d+)\]")
READ = re.compile(r"LDS[\w.]* \w+, \[\w+\+UR\d+(?:\+(0x[0-9a-f]+))?\]")


class Operation(NamedTuple):
    """An instruction's use of a barrier."""

    place: int  # in the code
    name: str
    base: str  # the register from which its address counts: of one among several, which one
    barrier: str  # the first of those that lie side by side
    parity: str  # of a wait: the register whose highest bit says for which of two phases


def overwritten(code: list[str]) -> list[str]:
    """The loads of a loop that may reach a slot whose tile the workers still read; each with its reason. Raises
    ValueError where the loads, or what they wait for, are not recognised."""
    if not any("UTMALDG" in line for line in code):
        return []
    if other := [line for line in code if re.search(r"\bSYNCS\.(?!CCTL)", line) and not BARRIER.search(line)]:
        raise ValueError(f"not recognised: {other}")
    every = loops(code)
    loading = [loop for loop in every if any("UTMALDG" in code[place] for place in loop)]
    if not loading:
        raise ValueError("loads by TMA, and none of them in a loop")
    workers = [operations(code, loop) for loop in every if loop not in loading]
    return [each for loop in loading for each in _overwritten_by(loop, workers, code)]


def _overwritten_by(loop: list[int], workers: list[list[Operation]], code: list[str]) -> list[str]:
    """Return those of one loop. workers: operations in each loop that loads nothing."""
    counts, own = _barriers(code), operations(code, loop)
    loads, all_waits = _each_once(own, LOADED), _each_once(own, WAITED)
    waits = {barrier: each for barrier, each in all_waits.items() if barrier not in loads}
    if not loads or not all_waits or not (waits or all_waits.keys() >= loads.keys()):
        raise ValueError(
            f"a loop loads by TMA, but {len(loads)} loads and {len(all_waits)} waits were recognised"
        )
    if not waits:
        places = {slot: (each.place, all_waits[slot].place) for slot, each in loads.items()}
        return [f"{slot}: read on" for slot, each in places.items() if not _meet(code, loop, *each)]

    memory = _memory_of_slots(code, loop)
    full = {slot: slot for slot in loads} | _passed_on(own, loads, waits)
    found, read = [], set()
    counting = {WAITED: full, ENDED: waits}
    for done in workers:
        steps = [each for each in done if each.barrier in counting.get(each.name, ())]
        if not _each_once(steps, ENDED) or not _each_once(steps, WAITED):
            continue  # a wait that tries again, or a loop of other warps
        ends = _ends_by_memory(steps, memory, code)
        if ends.keys() != loads.keys():
            ends = _ends_of_slots(steps)
        for barrier, end in ends.items():
            slot = full[barrier]
            is_early = loads[slot].place < waits[end].place
            needed = counts[end] + is_early
            if counts[slot] < needed and awaits_first_end(code, waits[end]):
                needed = int(is_early)
            if counts[slot] < needed:
                found.append(f"{slot}: {counts[slot]} slots instead of {needed}, {counts[end]} steps")
            read.add(slot)
    if read != set(loads):
        raise ValueError(f"what reads these slots is not recognised: {sorted(set(loads) - read)}")
    return found


def operations(code: list[str], places: Iterable[int]) -> list[Operation]:
    found = ((place, BARRIER.search(code[place])) for place in places)
    return [Operation(place, *match.groups("")) for place, match in found if match]


def _each_once(operations: list[Operation], name: str) -> dict[str, Operation]:
    """Return those of this name by barrier. Raises ValueError for a second one: then a round of the loop is several."""
    found: dict[str, Operation] = {}
    for each in operations:
        if each.name == name and found.setdefault(each.barrier, each) is not each:
            raise ValueError(f"{name} of {each.barrier} twice in a loop")
    return found


def _passed_on(own: list[Operation], loads: Iterable[str], waits: Iterable[str]) -> dict[str, str]:
    """Barriers by which a warp says, when it has waited for its own load, that the slot is full, each with that."""
    found, slot = {}, None
    for each in own:
        if each.name == WAITED and each.barrier in loads:
            slot = each.barrier
        elif each.name == ENDED and each.barrier not in waits and slot:
            found[each.barrier] = slot
    return found


def _ends_of_slots(steps: list[Operation]) -> dict[str, str]:
    """Return, by each slot's barrier, that at which workers arrive when they have read it: the next one. Several
    arrivals in a row go by the same register, or else in the order of the waits, and the last is for all others."""
    ends: dict[str, str] = {}
    unread: dict[str, str] = {}  # each with the register of its wait
    for i, each in enumerate(steps * 2):  # what is waited for at a loop's end may be read at its beginning
        if each.name == WAITED:
            unread[each.barrier] = each.base
            continue
        by_base = [barrier for barrier, base in unread.items() if base == each.base]
        if steps[(i + 1) % len(steps)].name == WAITED:
            ended = list(unread)
        else:
            ended = by_base if len(by_base) < len(unread) and by_base else list(unread)[:1]
        for barrier in ended:
            del unread[barrier]
            ends[barrier] = each.barrier
    return ends


def _memory_of_slots(code: list[str], loop: list[int]) -> dict[str, range]:
    """Return the shared memory of the tiles of each slot's barrier that several loads fill, if each step has the
    same."""
    offsets: dict[str, tuple[str, int]] = {}
    found: dict[str, list[int]] = {}
    for place in loop:
        if tile := TILE.search(code[place]):
            registers = [f"UR{int(tile[1]) + i}" for i in range(2)]  # of the tile, of its barrier
            (base, offset), (other, barrier) = (offsets.get(each, (each, 0)) for each in registers)
            if base == other:
                found.setdefault(hex(barrier), []).append(offset)
        elif added := SUM.search(code[place]):
            offsets[added[1]] = added[2], int(added[3], 16)
        elif written := UNIFORM.search(code[place]):
            offsets[written[1]] = written[1] + " of unknown value", 0
    steps = {end - start for each in found.values() for start, end in itertools.pairwise(each)}
    if len(steps) != 1:
        return {}
    [size] = steps
    return {barrier: range(each[0], each[-1] + size) for barrier, each in found.items()}


def _ends_by_memory(steps: list[Operation], memory: dict[str, range], code: list[str]) -> dict[str, str]:
    """Return, by each slot's barrier, that at which workers arrive next after its last read. Nothing, where they are
    not seen to read of each slot as much."""
    places = range(min(each.place for each in steps), max(each.place for each in steps))
    reads = [(place, int(read[1] or "0", 16)) for place in places if (read := READ.search(code[place]))]
    by_slot = {slot: [place for place, offset in reads if offset in tiles] for slot, tiles in memory.items()}
    if len({len(each) for each in by_slot.values()}) != 1 or not all(by_slot.values()):
        return {}
    arrivals = [each for each in steps if each.name == ENDED]
    later = {slot: [each.barrier for each in arrivals if each.place > max(by_slot[slot])] for slot in by_slot}
    return {slot: barriers[0] for slot, barriers in later.items() if barriers}


def _meet(code: list[str], loop: list[int], load: int, wait: int) -> bool:
    """Whether warps that load for themselves meet after the wait for a tile and before the next load."""
    start = loop.index(wait)
    following = [*loop[start:], *loop[:start]]
    return any("BAR.SYNC" in code[place] for place in following[: following.index(load)])


def awaits_first_end(code: list[str], wait: Operation) -> bool:
    """Whether a wait begins with parity 0, and so for the first arrivals of all. In a loop that is the end of the same
    step: with 1 the first passes, and each later one waits for a step before. What is not copied from a zero counts as
    1."""
    register, place = wait.parity, wait.place
    earlier = reaching({place}, followers(code))  # not the workers, whose registers have the same names
    while register not in ("RZ", "URZ"):
        written = re.compile(rf"\*/\s+(?:@!?U?P\d )?[\w.]+ {register}, ")
        place = max((each for each in earlier if each < place and written.search(code[each])), default=0)
        copy = COPY.search(code[place])
        if not copy:
            return False
        register = copy[1]
    return True


def _barriers(code: list[str]) -> dict[str, int]:
    """Count the barriers, side by side, that begin at each address that is waited for or arrived at."""
    done = operations(code, range(len(code)))
    made = {int(each.barrier, 16) for each in done if each.name == MADE}
    used = sorted({int(each.barrier, 16) for each in done if each.name != MADE})
    ends = dict(zip(used, [*used[1:], 2**32], strict=False))
    return {hex(address): sum(address <= each < end for each in made) for address, end in ends.items()}
