# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope of DTensors: sharded by batches, sequence or heads nothing is gathered, and dw is Partial."""

import pytest
import torch
from processes import placed
from rope_calls import case, ours

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
from torch.distributed.tensor import Partial, Replicate, Shard, debug, distribute_tensor  # noqa: E402
from torch.distributed.tensor.experimental import implicit_replication  # noqa: E402

from tilegym_rmsnorm import rms_norm_rope  # noqa: E402
from tilegym_rmsnorm.ops.rope import op as rope_op  # noqa: E402


def gradients(outputs, leaves):
    sum(each.sin().sum() for each in outputs).backward()
    return [each.grad for each in leaves if each is not None]


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("tables", ["T", "BT", "1T"])
@pytest.mark.parametrize("weights", ["vector", "heads", "none"])
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_values_and_placements(mesh, dim, weights, tables, backend):
    tensors = case(weights=weights, tables=tables, device="cpu")
    placement = Replicate() if dim is None else Shard(dim)
    of_weights = Shard(0) if weights == "heads" and dim == 2 else Replicate()
    leaves = [None if each is None else each.clone().requires_grad_() for each in tensors[:4]]
    want = ours(*leaves, *tensors[4:])
    placements = placement, placement, of_weights, of_weights
    sharded = placed(leaves, mesh, placements)
    with debug.CommDebugMode() as mode:
        got = ours(*sharded, *tensors[4:], backend=backend)  # plain tables: replicated
    assert mode.get_total_counts() == 0
    assert [each.placements for each in got] == [(placement,)] * 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    for one, other in zip(gradients(got, sharded), gradients(want, leaves), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_one_result_alone(mesh, index, create_graph):
    tensors = case(device="cpu")
    leaves = [each.clone().requires_grad_() for each in tensors[:4]]
    placements = Shard(1), Shard(1), Replicate(), Replicate()
    sharded = placed(leaves, mesh, placements)
    want = torch.autograd.grad(ours(*leaves, *tensors[4:])[index].sin().sum(), leaves, allow_unused=True)
    total = ours(*sharded, *tensors[4:])[index].sin().sum()
    got = torch.autograd.grad(total, sharded, create_graph=create_graph, allow_unused=True)
    assert got[1 - index] is None is got[3 - index] and want[1 - index] is None is want[3 - index]
    for one, other in zip(got[index::2], want[index::2], strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_are_sharded_along_the_sequence(mesh, dtype):
    q, k, q_weight, k_weight, cos, sin = case(tables="positions", device="cpu")
    positions = torch.randint(0, 8, (2, 5), dtype=dtype)
    given = [distribute_tensor(each, mesh, [Shard(1)]) for each in (q, k)]
    vectors = [distribute_tensor(each, mesh, [Replicate()]) for each in (q_weight, k_weight)]
    got = ours(*given, *vectors, cos, sin, position_ids=positions)
    want = ours(q, k, q_weight, k_weight, cos, sin, position_ids=positions)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_the_norm_alone_is_rounded(mesh, backend):
    tensors = case(dtype=torch.bfloat16, d=64, device="cpu")
    sharded = [distribute_tensor(each, mesh, [Shard(1)]) for each in tensors[:2]]
    vectors = [distribute_tensor(each, mesh, [Replicate()]) for each in tensors[2:4]]
    got = ours(*sharded, *vectors, *tensors[4:], rope_rounding="norm", backend=backend)
    for one, other in zip(got, ours(*tensors, rope_rounding="norm"), strict=True):
        assert torch.equal(one.full_tensor(), other)


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(
    "plain", [["q"], ["k"], ["q_weight"], ["k_weight"], ["q", "k"], ["q_weight", "k_weight"]]
)
def test_a_plain_tensor_is_named(mesh, plain, backend):
    tensors = case(device="cpu")
    names = "q", "k", "q_weight", "k_weight"
    given = [
        each if name in plain else distribute_tensor(each, mesh, [Replicate()])
        for name, each in zip(names, tensors, strict=False)
    ]
    other = next(name for name in names if name not in plain)
    with pytest.raises(
        TypeError, match=f"^{plain[0]}: expected a DTensor as {other} is, got a plain tensor of shape"
    ):
        ours(*given, *tensors[4:], backend=backend)
    if plain == ["q"]:
        with pytest.raises(
            TypeError, match="^x: expected a DTensor as weight is, got a plain tensor of shape"
        ):
            rms_norm_rope(given[0], given[2], *tensors[4:], backend=backend)
        with implicit_replication():
            for one, want in zip(ours(*given, *tensors[4:], backend=backend), ours(*tensors), strict=True):
                torch.testing.assert_close(one.full_tensor(), want)


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
