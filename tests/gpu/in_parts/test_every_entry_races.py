# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every entry that ships, on streams of a GPU that race. In parts, which go to different processes."""

import functools

import pytest
import torch
from helpers import DEVICE, alignment, make_inputs
from racing import STREAMS, assert_racing_changes_no_bit
from table_cases import entries_that_ship

from tilegym_rmsnorm.reference import compute_rms_norm_rstd_torch

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
    from tilegym_rmsnorm.backends.cutile.tuning import search

    m, dtype = rows_that_race(machine, bucket, variant), getattr(torch, bucket.dtype)
    weight_dtype = search.weight_dtype_of(bucket)
    each_inputs = [
        make_inputs(m, bucket.n, dtype, weight_dtype, eps=search.EPS, seed=seed) for seed in range(STREAMS)
    ]
    arguments = [
        (x, dy, weight, compute_rms_norm_rstd_torch(x, eps)) for x, dy, weight, eps, *_ in each_inputs
    ]
    runs = (search.runner(each, bucket, variant) for each in (search.Poisoned(machine), machine))
    on_nan, as_it_is = ([functools.partial(run, *one) for one in arguments] for run in runs)
    names = search.RESULTS[bucket.op]
    assert_racing_changes_no_bit(each_inputs, names, on_nan, as_it_is, what=f"{bucket} {variant}")


def rows_that_race(machine, bucket, variant) -> int:
    """As many as ELEMENTS allow for which cuda-tile compiles the kernels that were timed: a multiple of 16, and so is
    the number of partial rows if it was."""
    from tilegym_rmsnorm.backends.cutile.tuning.search import rows_of

    timed = rows_of(bucket)[0]
    most = min(timed, ELEMENTS // bucket.n // 16 * 16)
    if bucket.op == "forward":
        return most

    def class_of_partials(m: int) -> str:
        return alignment(variant.partial_rows(m, bucket.n, machine.facts.sm_count))

    return next(m for m in range(most, 0, -16) if class_of_partials(m) == class_of_partials(timed))
