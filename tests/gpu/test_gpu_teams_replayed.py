# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls by teams, as many at once as docs/limits.md allows, in CUDA graphs of the ops: they end, with the same bits."""

import pytest
import torch
from helpers import BF16, HAS_GPU, make_inputs, wait_for_the_gpu, why_skip

from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

AT_ONCE = 8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 131, 1024])
def test_eight_graphs_at_once(rows):
    numbers = 0.0, "once", 1.0, None, None
    calls = []
    for seed in range(AT_ONCE):
        x, dy, weight, eps, *_ = make_inputs(rows, 32768, BF16, BF16, seed=seed)

        def run(x=x, dy=dy, weight=weight, eps=eps):
            y, rstd, _ = FORWARD(x, None, weight, None, 1, eps, *numbers, "cutile")
            return y, *BACKWARD(dy, x, weight, rstd, None, 3, 1, *numbers, None, None, "cutile")[:2]

        expected = run()  # compiles, before the capture
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        wait_for_the_gpu()
        with torch.cuda.graph(graph, stream=stream):
            results = run()
        calls.append((graph, stream, results, expected, run))  # run: with the inputs, which no graph keeps
    for _ in range(200):
        for graph, stream, results, *_ in calls:
            with torch.cuda.stream(stream):
                for each in results:
                    each.fill_(float("nan"))
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        wait_for_the_gpu()
        for _, _, results, expected, _ in calls:
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
