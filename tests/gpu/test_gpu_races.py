# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Streams that race on a GPU: their kernels share SMs, and come and go in any order. No result may change a bit."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import BF16, FP32, Inputs, assert_within, expected_results, make_inputs
from racing import STREAMS, Results, assert_racing_changes_no_bit

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward


@pytest.mark.parametrize("memory", ["of NaN", "as it is"])
@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("m", "n"), [(1024, 4096), (8192, 1024), (1024, 20000), (300, 32768)])
def test_training_steps_that_race(backend, m, n, memory, request):
    if memory == "of NaN":
        request.getfixturevalue("poisoned_empty")

    def step(inputs: Inputs) -> Results:
        x, dy, weight, eps, *_ = inputs
        y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
        return y, rstd, *rms_norm_backward(x, dy, weight, rstd, backend=backend)

    each_inputs = [make_inputs(m, n, BF16, FP32, seed=seed) for seed in range(STREAMS)]
    calls = [functools.partial(step, inputs) for inputs in each_inputs]
    assert_racing_changes_no_bit(each_inputs, ("y", "rstd", "dx", "dw"), calls)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_host_threads_may_share_kernels(backend):
    inputs = [make_inputs(257, 1024, BF16, FP32, seed=seed) for seed in range(8)]

    def run(one):
        with torch.cuda.stream(torch.cuda.Stream()):
            y, rstd = rms_norm_forward(one.x, one.weight, one.eps, backend=backend)
            dx, dw = rms_norm_backward(one.x, one.dy, one.weight, rstd, backend=backend)
            torch.cuda.current_stream().synchronize()
        return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        for one, results in zip(inputs, pool.map(run, inputs), strict=True):
            assert_within(expected_results(one), **results)
