# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""DTensors by the ops and, with backend="torch", by F.rms_norm: nothing is gathered, dw is Partial."""

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor  # noqa: E402
from torch.distributed.tensor.experimental import implicit_replication  # noqa: E402
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module  # noqa: E402

from tilegym_rmsnorm import RMSNorm, rms_norm  # noqa: E402
from tilegym_rmsnorm.routes import library_op  # noqa: E402

OPTIONS = {
    "as F.rms_norm": {},
    "offset": {"offset": 1.0},
    "llama": {"casting": "llama"},
    "bias": {"bias": True},
    "residual": {"residual": True},
}


def outcome(x, weight, name, bias=False, residual=False, **options):
    """y, and the gradients of x and weight, of a sum as training has it."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    options |= {"bias": weight.detach()} if bias else {}
    options |= {"residual": x.detach()} if residual else {}
    y = rms_norm(x, (8,), weight, 1e-6, backend=name, **options)
    y = y[0] if residual else y
    y.sin().sum().backward()
    return y, x.grad, weight.grad


CASES = [
    (torch.float32, Shard(0), "auto"),
    (torch.float32, Shard(1), "torch"),
    (torch.float32, Shard(2), "torch"),
]
CASES += [(torch.float32, Replicate(), "auto"), (torch.bfloat16, Shard(1), "auto")]


@pytest.mark.parametrize(("dtype", "placement", "name"), CASES)
def test_values_and_placements(mesh, dtype, placement, name):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 8).to(dtype), torch.rand(8) + 0.5
    tensors = distribute_tensor(x, mesh, [placement]), distribute_tensor(weight, mesh, [Replicate()])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for options in OPTIONS.values():
        expected = outcome(x, weight, "torch", **options)
        got = outcome(*tensors, name, **options)
        assert got[0].placements == (placement,)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=tolerance, atol=tolerance)


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
def test_the_first_dtensor_may_be_any_argument_of_an_op(mesh, index, monkeypatch):
    """Under `implicit_replication` DTensor's engine takes plain tensors beside it, and asks for rules."""
    registered = []
    register = library_op._register_rules
    monkeypatch.setattr(library_op, "_register_rules", lambda: registered.append(True) or register())
    given = [torch.randn(4, 8), torch.randn(4, 8), torch.rand(8), torch.rand(4, 1)]  # dy, x, weight, rstd
    options = 1, 0.0, "once", 1.0, None, None, None, None, None
    expected = torch.ops.tilegym_rmsnorm.rms_norm_backward(*given, None, 3, *options)
    given[index] = distribute_tensor(given[index], mesh, [Replicate()])
    assert not registered
    with implicit_replication():
        dx, dw, *_ = torch.ops.tilegym_rmsnorm.rms_norm_backward(*given, None, 3, *options)
    assert registered
    for one, other in zip((dx, dw), expected, strict=False):
        torch.testing.assert_close(one.full_tensor(), other)
