# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every entry that ships, on streams of a GPU that race. In parts, which go to different processes."""

import functools

import pytest
from helpers import DEVICE, alignment, wait_for_the_gpu
from racing import STREAMS, assert_same_bits_racing
from table_cases import entries_that_ship

ELEMENTS = 2**23  # of x, at most
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_every_entry_that_ships_as_it_races(backend, op, dtype, part):
    """The streams share a plan's launcher, as the layers of a model do. Once on memory filled with NaN, and once as
    it is: the fills keep a call's first kernel from starting while the call before still runs."""
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    machine, wrong = machine_of(DEVICE), {}
    for bucket, variant in entries_that_ship(machine, op, dtype)[part::PARTS]:
        try:
            check_racing(machine, bucket, variant)
        except Exception as error:
            wrong[bucket] = repr(error)
    assert not wrong, wrong


def check_racing(machine, bucket, variant):
    from tilegym_rmsnorm.backends.cutile.tuning import calls, search

    m, what = rows_that_race(machine, bucket, variant), f"{bucket} {variant}"
    # of even seeds, whose results are the same: no alpha
    each_inputs = [calls.checked_inputs(m, bucket, DEVICE, 2 * number) for number in range(STREAMS)]
    runs = [calls.runner(each, bucket, variant) for each in (search.Poisoned(machine), machine)]
    alone = [runs[0](inputs) for inputs in each_inputs]
    wait_for_the_gpu(what)
    for inputs, outputs in zip(each_inputs, alone, strict=True):
        assert calls.why_wrong(inputs, outputs) is None

    def results(run, inputs):
        return tuple(run(inputs).values())

    on_nan, as_it_is = ([functools.partial(results, run, one) for one in each_inputs] for run in runs)
    expected = [tuple(outputs.values()) for outputs in alone]
    assert_same_bits_racing(expected, tuple(alone[0]), on_nan, as_it_is, what=what)


def rows_that_race(machine, bucket, variant) -> int:
    """Return the most rows in ELEMENTS for which cuda-tile compiles the kernels that were timed: a multiple of 16, and
    so is the number of partial rows if it was."""
    from tilegym_rmsnorm.backends.cutile.tuning.search import rows_of

    timed = rows_of(bucket)[0]
    most = min(timed, ELEMENTS // bucket.n // 16 * 16)
    if bucket.op == "forward":
        return most

    def class_of_partials(m: int) -> str:
        return alignment(variant.partial_rows(m, bucket.n, machine.facts.sm_count))

    return next(m for m in range(most, 0, -16) if class_of_partials(m) == class_of_partials(timed))
