# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""How a kernel's loads by TMA share memory with what its workers read: from its machine code for sm_90.

A warp of its own loads tiles into slots of shared memory; each slot has a barrier that says that it is full. The
workers read slots and say, by other barriers, which steps they have ended: as many steps as there are such barriers may
be under way. So a tile may be loaded once the step that used its slot before has ended:

    wait for the end of step i - S, load into slot i mod S                  S slots are enough
    load into slot i mod K, wait for the end of step i - S                  K must be S + 1
"""

from __future__ import annotations

import re

from compiling import backward_branches

BARRIER = re.compile(r"SYNCS\.([\w.]+) (?:P\d, |RZ, |URZ, )\[[^\]]*?(0x[0-9a-f]+)\]")
# What is done to a barrier. Loaded: so many bytes will come; workers arrive by ARRIVE.TRANS64.A1T0.
MADE, LOADED, WAITED = "EXCH", "ARRIVE.TRANS64", "PHASECHK"


def overwritten(code: list[str]) -> list[str]:
    """The loads of a loop that may reach a slot whose tile the workers still read; each with its reason."""
    counts = _barriers(code)
    found = []
    for last, first in backward_branches(code):
        body = code[first : last + 1]
        if any("NANOSLEEP" in line for line in body[-8:]) or not any("UTMALDG" in line for line in body):
            continue  # a wait that tries again; a loop of workers
        steps = None  # how many the last wait left under way
        early: list[str] = []  # barriers of slots that were loaded before any wait
        for operation, address in (match.groups() for match in map(BARRIER.search, body) if match):
            waits_for_own_load = address in early
            if operation.startswith(WAITED) and not waits_for_own_load:
                steps = counts[address]
                few = [each for each in early if counts[each] <= steps]
                found += [f"{each}: {counts[each]} slots, {steps} steps" for each in few]
                early = []
            elif operation == LOADED and steps is None:
                early.append(address)
            elif operation == LOADED and counts[address] < steps:
                found.append(f"{address}: {counts[address]} slots, {steps} steps, waited for before")
    return found


def _barriers(code: list[str]) -> dict[str, int]:
    """How many barriers, one beside the other, begin at each address that is waited for or arrived at."""
    matches = [match for match in map(BARRIER.search, code) if match]
    made = {int(match[2], 16) for match in matches if match[1].startswith(MADE)}
    used = sorted({int(match[2], 16) for match in matches if not match[1].startswith(MADE)})
    ends = dict(zip(used, [*used[1:], 2**32], strict=False))
    return {hex(address): sum(address <= each < end for each in made) for address, end in ends.items()}
