# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The blocks of one launch, of which one runs at a time, and the turns they take where they wait for each other.

A block runs on while what it does is its own, or while what it finds at an atomic access is new to it. Once it finds
what it has found there before, it is polling, and the baton goes to a block that has not started yet or else to the
one that has been suspended longest. A suspended block keeps its thread and the next one gets another, so a launch in
which no block is ever suspended runs in the caller's thread alone.

One hand-over: block 0, in the caller's thread, polls. `saw` calls `_suspend`, which queues a `_Turn` for block 0 and
lets `_pass_on` start a thread for block 1; block 0's thread waits for the turn's baton. When block 1 polls in its turn
and no block is left to start, `_pass_on` sets that baton: block 0 goes on, in the thread that it has kept.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

_ROUNDS_IN_VAIN = 100  # far more than a block asks twice for other reasons than waiting


class _Abandoned(BaseException):
    """Unwinds a suspended block whose launch has failed. No Exception: it is no error of that block."""


@dataclasses.dataclass
class _Turn:
    """A suspended block, and what it has found so far. baton: set when it may go on."""

    number: int
    found: set[int]
    baton: threading.Event = dataclasses.field(default_factory=threading.Event)


class Blocks:
    """number: of the block that is running (x counts fastest). resident, lockstep, dependent: as for `launch`."""

    def __init__(
        self,
        extents: tuple[int, ...],
        resident: int | None = None,
        lockstep: bool = False,
        dependent: bool = False,
    ):
        self.extents = extents + (1,) * (3 - len(extents))
        self.number = 0
        self._is_dependent = dependent
        self._waited: set[int] = set()  # the blocks for which the launch before has ended
        self._found: set[int] = set()
        self._lockstep = lockstep
        self._vacancies = resident
        self._suspended: deque[_Turn] = deque()
        self._in_vain = 0  # atomic accesses in a row that told no block anything new
        self._threads: list[threading.Thread] = []
        self._end = threading.Event()
        self._failure: BaseException | None = None

    @property
    def block(self) -> tuple[int, int, int]:
        x, y, _ = self.extents
        return self.number % x, self.number // x % y, self.number // (x * y)

    def run(self, kernel: Callable, arguments: list, order: Iterable[int]) -> None:
        """Runs kernel(*arguments) once for each block number in `order`; raises what a block raises."""
        self._kernel, self._arguments, self._unstarted = kernel, arguments, iter(order)
        self._is_inference = torch.is_inference_mode_enabled()  # every thread has its own
        self._go_on_until(self._end, lambda: self._start_blocks(self._next()))
        for thread in self._threads:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame: a cycle that would keep the arguments alive

    def wait_for_launch_before(self) -> None:
        self._waited.add(self.number)

    def check_access(self) -> None:
        """Raise RuntimeError if the launch before may still be running for this block."""
        if self._is_dependent and self.number not in self._waited:
            raise RuntimeError("an array is accessed before ct.grid_dependency_control_wait")

    def saw(self, where: Hashable, values: Tensor) -> None:
        """The running block found `values` by an atomic access: perhaps it is another block's turn."""
        finding = hash((where, bytes(values.reshape(-1).view(torch.uint8).tolist())))
        is_new = finding not in self._found
        self._found.add(finding)
        self._in_vain = 0 if is_new else self._in_vain + 1
        if self._lockstep or not is_new:
            self._suspend()

    def published(self) -> None:
        """The running block stored something that others may be waiting for."""
        if self._lockstep:
            self._suspend()

    def _suspend(self) -> None:
        """Lets another block run, if one can; returns when it is this one's turn again."""
        turn = _Turn(self.number, self._found)
        waiting = sorted([self.number, *(each.number for each in self._suspended)])
        if self._in_vain > _ROUNDS_IN_VAIN * len(waiting):
            raise RuntimeError(
                f"blocks number {', '.join(map(str, waiting))} of {self._kernel.__name__} wait for each other forever:"
                f" {_ROUNDS_IN_VAIN} times each they polled and found nothing new"
            )
        self._suspended.append(turn)
        self._go_on_until(turn.baton, self._pass_on)
        if self._failure is not None:
            raise _Abandoned
        self.number, self._found = turn.number, turn.found

    def _pass_on(self) -> None:
        """Gives the baton to a new block, to the one suspended longest, or, with none left, to the caller."""
        number = self._next()
        if number is not None:
            self._threads.append(threading.Thread(target=self._run_thread, args=(number,), daemon=True))
            self._threads[-1].start()
        elif self._suspended:
            self._suspended.popleft().baton.set()
        else:
            self._end.set()

    def _run_thread(self, number: int) -> None:
        with torch.inference_mode(self._is_inference):
            self._start_blocks(number)

    def _start_blocks(self, number: int | None) -> None:
        """Runs a block to its end, then, as long as there are any, those that have not started."""
        try:
            while number is not None:
                self._run_block(number)
                number = self._next()
        except BaseException as error:
            self._failure = self._failure or error
        self._pass_on()

    def _run_block(self, number: int) -> None:
        self.number, self._found = number, set()
        try:
            self._kernel(*self._arguments)
        except Exception as error:
            error.args = (f"{error} [block {self.block} of {self._kernel.__name__}]",)
            raise
        if self._vacancies is not None:
            self._vacancies += 1

    def _next(self) -> int | None:
        """The number of the block that is to start now; None: none is left, or there is no room for one."""
        if self._vacancies == 0 or self._failure is not None:
            return None
        number = next(self._unstarted, None)
        if number is not None and self._vacancies is not None:
            self._vacancies -= 1
        return number

    def _go_on_until(self, signal: threading.Event, step: Callable[[], None]) -> None:
        """Does `step`, which passes the baton on, and waits until it comes back with `signal`.

        Ctrl-C meanwhile ends the launch like a block's error, but not before that: another block has the baton.
        """
        try:
            step()
            signal.wait()
        except KeyboardInterrupt as interrupt:
            self._failure = interrupt
            signal.wait()
