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


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("gathers_at_once", [True, False])
def test_one_gather_waits_for_another_where_gloo_runs_them(gathers_at_once):
    collectives = torch.ops._c10d_functional
    gather, reduce = collectives.all_gather_into_tensor.default, collectives.all_reduce.default
    wait = collectives.wait_tensor.default
    graph = Graph()
    x = graph.placeholder("x")
    found = []
    for target, more in (gather, (2, "group")), (gather, (2, "group")), (reduce, ("sum", "group")):
        found.append(graph.call_function(wait, (graph.call_function(target, (x, *more)),)))
    graph.output(tuple(graph.call_function(ATEN.add.Tensor, (each, 1)) for each in found))
    gm = GraphModule(torch.nn.Module(), graph)
    schedule(gm, gathers_at_once=gathers_at_once)
    names = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    gathers = [gather, gather] if gathers_at_once else [gather, wait, gather, wait]
    reads = (
        [wait, ATEN.add.Tensor] * 3 if gathers_at_once else [*[ATEN.add.Tensor] * 2, wait, ATEN.add.Tensor]
    )
    assert names == [*gathers, reduce, *reads]
    gm.graph.lint()
