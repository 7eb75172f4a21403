# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Graphs of whole steps: where they wait for what is communicated. Graphs that train: test_bench_train_processes.py."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from bench.train.traced import schedule

ATEN = torch.ops.aten


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_a_graph_waits_where_something_is_read():
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    graph = Graph()
    x = graph.placeholder("x")
    waited = graph.call_function(wait_tensor, (x,))
    first, second = (graph.call_function(ATEN.view.default, (waited, [2, 2])) for _ in range(2))
    graph.call_function(ATEN.mul.Tensor, (x, x))  # nothing reads it
    before = graph.call_function(ATEN.add.Tensor, (x, 1))
    changed = graph.call_function(ATEN.add_.Tensor, (before, 1))  # returns what it has changed
    after = graph.call_function(ATEN.mul.Tensor, (first, second))
    graph.output((changed, after))
    gm = GraphModule(torch.nn.Module(), graph)
    schedule(gm)
    names = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    views = [ATEN.view.default] * 2
    assert names == [ATEN.add.Tensor, ATEN.add_.Tensor, wait_tensor, *views, ATEN.mul.Tensor]
    gm.graph.lint()
