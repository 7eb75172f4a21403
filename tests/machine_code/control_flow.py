# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Instructions that may follow each one of a kernel, and its loops, from machine code (compiling.disassembled)."""

import re
from collections.abc import Collection

BRANCH = re.compile(r"\bBRA\S* (!?\w+, )?0x([0-9a-f]+)")
# BREAK is no jump: a thread that is to leave a BSYNC out says so, and goes on.
NOT_READ = re.compile(r"\b(?:BRX|BRXU|JMP|JMX|CALL|RET)\b.*")


def followers(code: list[str]) -> list[list[int]]:
    """Return the indices in `code` of what may follow each instruction. Raises ValueError for a jump whose target is
    not in the instruction."""
    numbers = {int(line.split("*/")[0], 16): number for number, line in enumerate(code)}
    found = []
    for number, line in enumerate(code):
        if other := NOT_READ.search(line):
            raise ValueError(f"expected branches to addresses, got {other[0]}")
        branch = BRANCH.search(line)
        # by a predicate in front, or from sm_100 on by a uniform one behind: BRA.U !UP0, 0x230
        is_conditional = "@" in line or bool(branch and branch[1])
        is_last = number + 1 == len(code) or (branch or re.search(r"\bEXIT\b", line)) and not is_conditional
        found.append(([numbers[int(branch[2], 16)]] if branch else []) + ([] if is_last else [number + 1]))
    return found


def reached(starts: set[int], following: list[list[int]], without: Collection[int] = ()) -> set[int]:
    """Return `starts` and what may follow, on ways that pass none of `without`."""
    found, waiting = set(starts), list(starts)
    while waiting:
        for each in following[waiting.pop()]:
            if each not in found and each not in without:
                found.add(each)
                waiting.append(each)
    return found


def reaching(targets: set[int], following: list[list[int]], without: Collection[int] = ()) -> set[int]:
    """Return `targets` and what may come before, on such ways."""
    return reached(targets, _preceding(following), without)


def _preceding(following: list[list[int]]) -> list[list[int]]:
    """Return those that may precede each instruction."""
    preceding: list[list[int]] = [[] for _ in following]
    for number, nexts in enumerate(following):
        for each in nexts:
            preceding[each].append(number)
    return preceding


def loops(code: list[str]) -> list[list[int]]:
    """The instructions of each loop, in order: from the one that all ways into it lead to, up to the last branch back
    there. So what a loop does far behind, where a wait for a barrier tries again, is left out."""
    following = followers(code)
    preceding = _preceding(following)
    found: dict[int, tuple[set[int], int]] = {}
    for last, nexts in enumerate(following):
        for first in nexts:
            if first >= last:
                continue
            body = reached({last}, preceding, {first}) | {first}
            # Else it is only laid out backwards: there is a way to its end around its beginning.
            if 0 not in body:
                known, before = found.get(first, (set(), 0))
                found[first] = known | body, max(last, before)
    return [[each for each in sorted(body) if each <= last] for body, last in found.values()]
