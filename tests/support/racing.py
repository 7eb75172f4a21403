# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls that race on streams of a GPU, and whether any of their results has other bits than alone."""

import functools
from collections.abc import Callable

import torch
from helpers import Inputs, assert_within, expected_results, wait_for_the_gpu

STREAMS, ROUNDS = 4, 6
RACES, MOST_TRIES = 3, 8
GATE_CYCLES = 40_000_000  # about 20 ms, to begin with

Results = tuple[torch.Tensor, ...]
Call = Callable[[], Results]


@functools.cache
def streams() -> list[torch.cuda.Stream]:
    """Share streams among races: torch keeps memory for each apart."""
    return [torch.cuda.Stream() for _ in range(STREAMS)]


def assert_racing_changes_no_bit(
    each_inputs: list[Inputs], names: tuple[str, ...], calls: list[Call], what: str = ""
) -> None:
    """STREAMS inputs, and a call with each whose results have these names. Alone its results are within tolerance of
    float64; those of every call that raced have the same bits."""
    alone = [call() for call in calls]
    wait_for_the_gpu(what)
    for inputs, results in zip(each_inputs, alone, strict=True):
        assert_within(expected_results(inputs), **dict(zip(names, results, strict=True)))
    assert_same_bits_racing(alone, names, calls, what=what)


def assert_same_bits_racing(
    alone: list[Results], names: tuple[str, ...], *ways: list[Call], what: str = ""
) -> None:
    """Check that STREAMS racing calls give the bits that each gave alone. ways: those calls, each time made in another
    way."""
    for racing in ways:
        cycles, races = GATE_CYCLES, 0
        for _ in range(MOST_TRIES):
            if race(racing, alone, names, cycles, what):
                races += 1
            else:
                cycles *= 2
            if races == RACES:
                break
        assert races == RACES, f"{races} races of {MOST_TRIES}: the others began before all calls were queued"


def race(calls: list[Call], alone: list[Results], names: tuple[str, ...], cycles: int, what: str) -> bool:
    """Queues ROUNDS calls on each stream behind a gate, since kernels would have ended before the host launches the
    next. Each call of a stream has other inputs than the one before, so what it left behind is wrong for this one.
    Whether the gate held until all were queued."""
    all_streams = streams()
    gate = torch.cuda.Event()
    torch.cuda._sleep(cycles)
    gate.record()
    for stream in all_streams:
        stream.wait_event(gate)
    raced: list[tuple[int, int, int, Results]] = []
    for turn in range(ROUNDS):
        for number, stream in enumerate(all_streams):
            with torch.cuda.stream(stream):
                which = (number + turn) % len(calls)
                raced.append((number, turn, which, calls[which]()))
    held = not gate.query()
    for stream in all_streams:
        torch.cuda.current_stream().wait_stream(stream)
    wait_for_the_gpu(what)
    wrong = [
        f"{name} of stream {number} in round {turn}"
        for number, turn, which, results in raced
        for name, value, expected in zip(names, results, alone[which], strict=True)
        if not torch.equal(value, expected)
    ]
    assert not wrong, f"other bits than without other streams: {len(wrong)} results, {wrong[:9]}"
    return held
