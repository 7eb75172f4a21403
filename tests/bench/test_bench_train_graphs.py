# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Graphs of whole steps: where they wait for what is communicated. Graphs that train: test_bench_train_processes.py."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from bench.train.traced import schedule

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without torch.distributed"
)
ATEN = torch.ops.aten


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


@pytest.mark.parametrize(
    ("gathers_at_once", "order"),
    [
        (True, "gather gather reduce wait add wait add wait add"),
        (False, "gather wait gather wait reduce add add wait add"),
    ],
)
def test_one_gather_waits_for_another_where_gloo_runs_them(gathers_at_once, order):
    ops = torch.ops._c10d_functional
    targets = {
        "gather": ops.all_gather_into_tensor.default,
        "reduce": ops.all_reduce.default,
        "wait": ops.wait_tensor.default,
        "add": ATEN.add.Tensor,
    }
    graph = Graph()
    x = graph.placeholder("x")
    waited = [
        graph.call_function(targets["wait"], (graph.call_function(targets[name], (x,)),))
        for name in ("gather", "gather", "reduce")
    ]
    graph.output(tuple(graph.call_function(targets["add"], (each, 1)) for each in waited))
    gm = GraphModule(torch.nn.Module(), graph)
    schedule(gm, gathers_at_once=gathers_at_once)
    names = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert names == [targets[name] for name in order.split()]
    gm.graph.lint()
