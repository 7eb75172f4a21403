# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The orders in which machine code (compiling.disassembled) adds a row.

tileiras 13.4 adds the last rows that a block walks in code of their own where a loop loads rows ahead, and there a
thread may add what it holds of a row otherwise than in the loop. A thread adds its elements, then lanes add theirs by
SHFL.BFLY, then warps theirs through shared memory, which is a `Sum` of its own. The shape of its expression is read:
what is added to which, and what is fused; not which elements these are. In all cases that were compared on an H200,
those of one shape gave a row one result, and those of two did not.

What a block adds up over its rows, for dw, begins with a zero in a register, a row's sum with a product.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from control_flow import followers, reached

INSTRUCTION = re.compile(r"^\w+\*/\s+(?:@\S+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
REGISTER = re.compile(r"R\d+")
ZERO = re.compile(r"CS2R\S* R\d+, SRZ|(IMAD\.)?MOV\S* R\d+, (RZ, RZ, )?RZ|HFMA2\S* R\d+, -RZ, RZ, 0, 0")
MOVE = re.compile(r"(?:MOV|IMAD\.MOV\.U32) (R\d+), (?:RZ, RZ, )?(R\d+)(?:\.reuse)?")
INTEGER = re.compile(
    r"(?:MOV|IMAD\.MOV\.U32) R\d+, (?:RZ, RZ, )?(0x\w+)|HFMA2\S* R\d+, -RZ, RZ, 0, (\S+e-0\d)"
)
FEWEST = 3  # additions of a row's sum that no lanes add: a term of dx has one or two


class Sum(NamedTuple):
    """additions: in a thread. shape: of their expression. shuffles: how far away are the lanes of which each adds what
    they have."""

    additions: int
    shape: str
    shuffles: tuple[int, ...]


NOTHING = Sum(0, "", ())


class _Value(NamedTuple):
    number: int  # of this value alone
    sum: Sum
    is_of_rows: bool = False  # added to over the rows
    # the number of what this lane has of it, and how far away that lane is
    of_other_lane: tuple[int, int] = (-1, 0)


def sums_of_rows(code: list[str], in_chunks: bool = False) -> set[Sum]:
    """Return the sums of rows. in_chunks: they begin with a zero too, and nothing is added up over rows. Raises
    ValueError where there are none."""
    reader, following = _Reader(), followers(code)
    for number, line in enumerate(code):
        reader.enter(number)
        if found := INSTRUCTION.match(line):
            reader.read(number, f"{found[1]} {found[2]}")
        reader.leave(number, following[number])
    behind = set() if in_chunks else reached(reader.left, following)
    found = {
        value.sum
        for number, value in reader.ends
        if in_chunks or not value.is_of_rows and number not in behind
    }
    if not found:
        raise ValueError("expected sums of rows, found none")
    return found


def differing(sums: Iterable[Sum]) -> list[list[Sum]]:
    """Return the sums that differ though they have as many additions: those of lanes apart from those of one thread, of
    what warps left. Without additions they may be those of lanes, of warps and of a team, and have as many shuffles."""
    alike: dict[tuple[int, int], set[Sum]] = defaultdict(set)
    for each in sums:
        alike[each.additions, min(1, len(each.shuffles)) if each.additions else len(each.shuffles)].add(each)
    return [sorted(found) for found in alike.values() if len(found) > 1]


class _Reader:
    """Follows registers through the code as it lies, where a copy of a loop's body comes before or behind it. What is
    jumped to alone, as shuffles of threads that went apart, has those of the first jump."""

    def __init__(self) -> None:
        self.registers: dict[str, _Value] = {}
        self.ends: list[tuple[int, _Value]] = []  # instructions that use a sum, but not to add to it
        self.left: set[int] = set()  # instructions that hand what was added up over rows to other threads
        self.integers: dict[str, int] = {}  # of shuffles whose distance is in a register
        self.made = 0
        self.jumps: dict[int, dict[str, _Value]] = {}  # registers at instructions that are jumped to
        self.goes_on = True

    def enter(self, number: int) -> None:
        if not self.goes_on and number in self.jumps:
            self.registers = dict(self.jumps[number])

    def leave(self, number: int, following: Iterable[int]) -> None:
        self.goes_on = number + 1 in following
        for each in following:
            if each > number + 1:
                self.jumps.setdefault(each, dict(self.registers))

    def read(self, number: int, text: str) -> None:
        name, _, rest = text.partition(" ")
        kind, operands = name.split(".")[0], [_bare(each) for each in rest.split(",")]
        if kind.startswith(("SHFL", "ATOM")):
            del operands[0]  # a predicate
        if kind == "FADD":
            self.registers[operands[0]] = self._added(number, operands[1], operands[2])
        elif kind == "FFMA" and operands[3] != "RZ":
            self._use(number, operands[1:3], are_factors=True)
            addend = self._value(operands[3])
            self.registers[operands[0]] = self._new(_joined("fused", addend.sum), addend.is_of_rows)
        elif kind == "SHFL":
            value = self._value(operands[1])
            self._hand_on(number, value)
            if not name.startswith("SHFL.BFLY"):  # what another lane has in the same place
                self.registers[operands[0]] = self._new(value.sum, value.is_of_rows)
                return
            distance = self.integers[operands[2]] if REGISTER.fullmatch(operands[2]) else int(operands[2], 16)
            self.registers[operands[0]] = self._new()._replace(of_other_lane=(value.number, distance))
        elif moved := MOVE.fullmatch(text):
            self.registers[moved[1]] = self._value(moved[2])
        elif kind in ("STS", "STG"):
            self._hand_on(number, self._value(operands[-1]))
            self._use(number, operands[-1:])
        else:
            if kind in ("FMUL", "FFMA"):
                self._use(number, operands[1:], are_factors=True)
            if integer := INTEGER.fullmatch(text):
                # HFMA2 makes one as the bits of a float16 below all normal ones
                self.integers[operands[0]] = (
                    int(integer[1], 16) if integer[1] else round(float(integer[2]) * 2**24)
                )
            if REGISTER.fullmatch(operands[0]):
                first = int(operands[0][1:])
                for each in range(first, first + _width(name)):
                    self.registers[f"R{each}"] = self._new(is_of_rows=bool(ZERO.fullmatch(text)))

    def _new(self, sum: Sum = NOTHING, is_of_rows: bool = False) -> _Value:
        self.made += 1
        return _Value(self.made, sum, is_of_rows)

    def _value(self, operand: str) -> _Value:
        if not REGISTER.fullmatch(operand):
            return self._new()
        return self.registers.setdefault(operand, self._new())

    def _added(self, number: int, *operands: str) -> _Value:
        if "RZ" in operands:
            return self._value(operands[operands[0] == "RZ"])
        a, b = map(self._value, operands)
        for own, other in ((a, b), (b, a)):
            number_of_own, distance = other.of_other_lane
            if number_of_own == own.number:
                sum_of_lanes = own.sum._replace(shuffles=(*own.sum.shuffles, distance))
                return self._new(sum_of_lanes, own.is_of_rows)
        self._use(number, operands)
        return self._new(_joined("added", a.sum, b.sum), a.is_of_rows or b.is_of_rows)

    def _use(self, number: int, operands: Iterable[str], are_factors: bool = False) -> None:
        for each in operands:
            value = self.registers.get(each)
            if value and (value.sum.shuffles or are_factors and value.sum.additions >= FEWEST):
                self.ends.append((number, value))

    def _hand_on(self, number: int, value: _Value) -> None:
        if value.is_of_rows and value.sum.additions:
            self.left.add(number)


def _bare(operand: str) -> str:
    """Return a register without its sign and the cache's hints."""
    return operand.strip().replace(".reuse", "").lstrip("-").strip("|")


def _joined(how: str, *parts: Sum) -> Sum:
    shape = hashlib.sha256(repr((how, sorted((each.shape, each.shuffles) for each in parts))).encode())
    return Sum(sum(each.additions for each in parts) + 1, shape.hexdigest()[:8], ())


def _width(name: str) -> int:
    """Return how many registers an instruction writes."""
    if name.startswith("LDSM"):
        return int(name[-1]) if name[-2] == "." else 1
    if "128" in name:
        return 4
    return 2 if re.search(r"\.(64|WIDE)\b|^CS2R$", name) else 1
