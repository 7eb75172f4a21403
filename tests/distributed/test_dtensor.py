# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""DTensors by the ops and, with backend="torch", by PyTorch's operations: nothing is gathered, gradients of weights are
Partial. And DistributedDataParallel around a model with RMSNorm, in one process, on each backend."""

import copy
import itertools

import pytest
import torch
from every_op import OPS, each_op, of_each_op
from helpers import DEVICE
from processes import placed
from rope_calls import case, ours
from torch.distributed.tensor import Partial, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tilegym_rmsnorm import RMSNorm, rms_norm
from tilegym_rmsnorm.ops.rope import op as rope_op
from tilegym_rmsnorm.routes import sharding_rules

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

PLACED = [
    pytest.param(op, kind, dim, id=f"{op.name}, {name}, {dim}")
    for op in OPS
    for name, kind in op.placed.items()
    for dim in (*range(next(iter(op.make(kind, device="meta").leaves.values())).ndim - 1), None)
]


def sharded(call, mesh, dim):
    """Return leaves as DTensors, and the placement of rows: sharded in `dim`, None for replicated."""
    leaves, rows = call.recorded(), next(iter(call.leaves.values()))
    placement = Replicate() if dim is None else Shard(dim)
    of_heads = Shard(0) if dim == rows.ndim - 2 else Replicate()
    places = [
        placement if leaf.ndim == rows.ndim else of_heads if leaf.ndim == 2 else Replicate()
        for leaf in leaves
    ]
    return placed(leaves, mesh, places), placement


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(("op", "kind", "dim"), PLACED)
def test_values_and_placements(mesh, op, kind, dim, backend):
    call = op.make(kind, device="cpu")
    tables = [call.fixed.values()]  # plain ones: replicated
    if [each.ndim for each in call.fixed.values()] == [2, 2]:
        tables.append([each[None] for each in call.fixed.values()])
    for fixed in tables:
        given, placement = sharded(call, mesh, dim)
        with debug.CommDebugMode() as mode:
            results = call.public(*given, *fixed, backend=backend)
        assert mode.get_total_counts() == 0
        assert all(each.placements == (placement,) for each in results)
        gradients = torch.autograd.grad(results, given, placed(call.dys, mesh, [placement] * len(results)))
        limit = 1e-2 if torch.bfloat16 in kind else 1e-5
        for one, other in zip((*results, *gradients), call.both_passes(), strict=True):
            torch.testing.assert_close(one.full_tensor().detach(), other, rtol=limit, atol=limit)


def of_two_results(op):
    """The first kind of an op that has several results, if one has."""
    kinds = op.placed.items()
    return dict([each for each in kinds if len(op.make(each[1], device="meta").dys) > 1][:1])


@pytest.mark.parametrize("create_graph", [False, True])
@of_each_op(of_two_results)
def test_one_result_alone(mesh, op, kind, create_graph):
    call = op.make(kind, device="cpu")
    for index in range(len(call.dys)):
        found = []
        for leaves in (call.recorded(), sharded(call, mesh, 1)[0]):
            total = call.public(*leaves, *call.fixed.values())[index].sin().sum()
            found.append(torch.autograd.grad(total, leaves, create_graph=create_graph, allow_unused=True))
        want, got = found
        assert [each is None for each in got] == [each is None for each in want]
        for one, other in zip(got, want, strict=True):
            if one is not None:
                torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("backend", [None, "torch"])
@each_op
def test_a_plain_tensor_is_named(mesh, op, backend):
    """One, or several, beside DTensors."""
    call = op.make(op.alike, device="cpu")
    names = list(call.leaves)
    for count in range(1, len(names)):
        for plain in itertools.combinations(names, count):
            given = [
                each if name in plain else distribute_tensor(each, mesh, [Replicate()])
                for name, each in call.leaves.items()
            ]
            other = next(name for name in names if name not in plain)
            text = f"^{plain[0]}: expected a DTensor as {other} is, got a plain tensor of shape"
            with pytest.raises(TypeError, match=text):
                call.public(*given, *call.fixed.values(), backend=backend)
    with implicit_replication():
        results = call.public(*given, *call.fixed.values(), backend=backend)
    for one, other in zip(results, call.public(*call.tensors), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("name", [None, "torch"])
def test_sequence_parallel(mesh, name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(RMSNorm(8, backend=name))
    torch.nn.init.uniform_(model[0].weight, 0.5, 1.5)
    x, weight = torch.randn(2, 6, 8, requires_grad=True), model[0].weight
    expected = model(x)
    expected_grads = torch.autograd.grad(expected.sin().sum(), (x, weight))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    y = model(x)
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.sin().sum().backward()
    got = x.grad, model[0].weight.grad.full_tensor()
    for one, other in zip(got, expected_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_in_one_graph(mesh):
    """Dynamo traces the reference by name."""
    torch._dynamo.reset()
    # PyTorch's caches of placements name the mesh of an earlier test, an equal one, which this graph does not have.
    # Graphs of torch 2.9 hold no mesh.
    if clear := getattr(debug, "_clear_sharding_prop_cache", None):
        clear()
    x = distribute_tensor(torch.randn(2, 6, 8), mesh, [Shard(1)])
    weight = distribute_tensor(torch.rand(8), mesh, [Replicate()]).requires_grad_()
    norm = torch.compile(
        lambda x: rms_norm(x, (8,), weight, 1e-6, backend="torch"), backend="aot_eager", fullgraph=True
    )
    y = norm(x)
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), rms_norm(x, (8,), weight, 1e-6).full_tensor())
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@each_op
def test_the_first_dtensor_may_be_any_argument_of_an_op(mesh, op, index, monkeypatch):
    """Under `implicit_replication` DTensor's engine takes plain tensors beside it, and asks for rules."""
    registered = []
    register = sharding_rules._register_rules
    monkeypatch.setattr(sharding_rules, "_register_rules", lambda: registered.append(True) or register())
    wanted = op.wanted(op.alike)[-1]
    given = list(op.make(op.alike, device="cpu").of_backward(wanted))
    expected = op.backward(*given)
    tensors = [i for i, each in enumerate(given) if isinstance(each, torch.Tensor)]
    index = tensors[index % len(tensors)]
    given[index] = distribute_tensor(given[index], mesh, [Replicate()])
    assert not registered
    with implicit_replication():
        results = op.backward(*given)
    assert registered
    for one, other in zip(results, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_the_norm_alone_is_rounded(mesh, backend):
    tensors = case(dtype=torch.bfloat16, d=64, device="cpu")
    sharded = [distribute_tensor(each, mesh, [Shard(1)]) for each in tensors[:2]]
    vectors = [distribute_tensor(each, mesh, [Replicate()]) for each in tensors[2:4]]
    got = ours(*sharded, *vectors, *tensors[4:], rope_rounding="norm", backend=backend)
    for one, other in zip(got, ours(*tensors, rope_rounding="norm"), strict=True):
        assert torch.equal(one.full_tensor(), other)


def rules(count, *arguments):
    """Placements of results and tensors, by the placement of q."""
    found = {}
    for results, given in rope_op._sharding_rules(count, arguments):
        found[given[count - 2]] = results, given
    return found


def test_rules_of_the_forward():
    q, k, q_weight, k_weight, cos, sin = case(weights="heads", tables="BT", device="cpu")
    found = rules(2, q, k, q_weight, k_weight[0], cos, sin, None, *[None] * 7)
    assert set(found) == {Replicate(), Shard(0), Shard(1), Shard(2)}
    for placement, of_tables in ((Shard(0), Shard(0)), (Shard(1), Shard(1)), (Shard(2), Replicate())):
        results, given = found[placement]
        of_q_weight = Shard(0) if placement == Shard(2) else Replicate()
        assert results == [placement, placement]
        assert given[:7] == [placement, placement, of_q_weight, Replicate(), of_tables, of_tables, None]
    flat = rules(2, q, k, None, None, cos[0], sin[0], None, *[None] * 7)
    assert flat[Shard(1)][1][4] == Shard(0) and flat[Shard(0)][1][4] == Replicate()


def test_rules_of_the_backward_sum_over_what_is_sharded():
    q, k, q_weight, k_weight, cos, sin = case(weights="heads", device="cpu")
    positions = torch.zeros(5, dtype=torch.int64)
    given = q, k, q, k, q_weight, k_weight[0], cos, sin, positions, 3, *[None] * 7
    found = rules(4, *given)
    assert found[Replicate()][0][2:] == [Replicate(), Replicate()]
    assert found[Shard(0)][0][2:] == [Partial(), Partial()]
    assert found[Shard(1)][0][2:] == [Partial(), Partial()]
    assert found[Shard(2)][0][2:] == [Shard(0), Partial()]
    assert found[Shard(1)][1][6:9] == [Replicate(), Replicate(), Shard(0)]
    only_k = rules(4, *given[:9], 2, *[None] * 7)
    assert only_k[Shard(1)][0][2:] == [None, Partial()]


def test_gradients_are_those_of_the_model_in_float64(backend):
    norm = RMSNorm(8, eps=1e-5, backend=backend)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 1)).to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    x, exact = torch.randn(4, 8, device=DEVICE), copy.deepcopy(model).double()
    exact[1] = torch.nn.RMSNorm(8, eps=1e-5, dtype=torch.float64, device=DEVICE)
    exact[1].load_state_dict(norm.state_dict())
    exact(x.double()).sin().sum().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(x).sin().sum().backward()
    finally:
        dist.destroy_process_group()
    for got, expected in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)
