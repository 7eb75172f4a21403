# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten: what PyTorch does above the ops, such as autograd and torch.func, stays as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten_cases import MARKS, norm_of, overridden, taken
from helpers import DEVICE, FP64, HAS_GPU, assert_within, expected_results, make_inputs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import override_aten, use_backend
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, TAKEN
from tilegym_rmsnorm.integrations.fx import replace_rmsnorm_pass

pytestmark = MARKS


def objective(x, weight):
    return F.rms_norm(x, (6,), weight, 1e-3).sin().sum()


def test_gradients_of_gradients():
    """gradgradcheck passes in float64, where calls are declined; in float32 the forward is taken."""
    x, weight = norm_of(3, 6, dtype=FP64), norm_of(6, dtype=FP64)

    def second(x, weight):
        gradients = torch.autograd.grad(objective(x, weight), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), (x, weight))

    theirs = second(x, weight)
    with overridden() as override:
        assert torch.autograd.gradgradcheck(
            lambda *leaves: F.rms_norm(leaves[0], (6,), leaves[1], 1e-3), (x, weight)
        )
        assert taken(override) == (0, 0)
        leaves = [t.detach().float().requires_grad_() for t in (x, weight)]
        ours = second(*leaves)
        assert taken(override)[0] == 1
    torch.testing.assert_close([t.double() for t in ours], list(theirs), rtol=1e-4, atol=1e-4)


TRANSFORMS = {
    "grad": (lambda x, w: torch.func.grad(objective, (0, 1))(x, w), True),
    "jvp": (
        lambda x, w: torch.func.jvp(lambda a, b: F.rms_norm(a, (6,), b, 1e-3), (x, w), (w.expand(3, 6), w)),
        True,
    ),
    "vmap": (lambda x, w: torch.vmap(lambda a: F.rms_norm(a, (6,), w, 1e-3))(x), False),
    "vmap of grad": (lambda x, w: torch.vmap(lambda a: torch.func.grad(objective)(a[None], w))(x), False),
    "vjp": (lambda x, w: torch.func.vjp(lambda a: F.rms_norm(a, (6,), w, 1e-3), x)[1](x), True),
    "jacrev": (lambda x, w: torch.func.jacrev(objective, (0, 1))(x, w), True),
    "hessian": (lambda x, w: torch.func.hessian(objective)(x, w), True),
    "functionalize": (lambda x, w: torch.func.functionalize(objective)(x, w), None),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name):
    """vmap decomposes the op: nothing of it arrives. None: that depends on the release."""
    transform, arrives = TRANSFORMS[name]
    x, weight = norm_of(3, 6, requires_grad=False), norm_of(6, requires_grad=False)
    theirs = transform(x.double(), weight.double())
    with overridden() as override:
        ours = transform(x, weight)
        assert arrives in (None, taken(override)[0] > 0)
    as_double = torch.utils._pytree.tree_map(torch.Tensor.double, ours)
    torch.testing.assert_close(as_double, theirs, rtol=1e-4, atol=1e-4)


def test_batches_of_gradients():
    x, weight, dy = norm_of(3, 16), norm_of(16), norm_of(2, 3, 16, requires_grad=False)

    def gradients():
        return torch.autograd.grad(F.rms_norm(x, (16,), weight), (x, weight), dy, is_grads_batched=True)

    theirs = gradients()
    with overridden() as override:
        torch.testing.assert_close(gradients(), theirs, rtol=1e-4, atol=1e-4)
        assert taken(override)[0] == 1


def test_modes_that_watch():
    x, weight = norm_of(3, 16), norm_of(16)
    with FlopCounterMode(display=False) as theirs:
        F.rms_norm(x, (16,), weight).sum().backward()
    expected, x.grad = x.grad, None
    with overridden(), FlopCounterMode(display=False) as ours:
        F.rms_norm(x, (16,), weight).sum().backward()
    assert ours.get_total_flops() == theirs.get_total_flops()
    torch.testing.assert_close(x.grad, expected)


def test_tensors_without_values_never_arrive():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with overridden() as override:
        assert F.rms_norm(torch.empty(3, 16, device="meta"), (16,)).shape == (3, 16)
        with FakeTensorMode():
            x = torch.empty(3, 16, device=DEVICE, requires_grad=True)
            F.rms_norm(x, (16,)).sum().backward()
            assert x.grad.shape == (3, 16)
        make_fx(lambda x: F.rms_norm(x, (16,)), tracing_mode="fake")(norm_of(3, 16, requires_grad=False))
        assert override.stats == {ATEN_FORWARD: {TAKEN: 0}, ATEN_BACKWARD: {TAKEN: 0}}


def test_inference_mode():
    x = norm_of(3, 16, requires_grad=False)
    with overridden() as override, torch.inference_mode():
        assert F.rms_norm(x.clone(), (16,)).is_inference()
        assert taken(override) == (1, 0)


def test_results_are_no_views():
    """Autograd lets one write into them in place."""
    with overridden() as override:
        y = F.rms_norm(norm_of(2, 3, 16), (16,))
        assert not y._is_view()
        y.mul_(2).sum().backward()
        assert taken(override) == (1, 1)


def test_autograd_inside_a_compiled_function():
    """Dynamo looks into what autograd calls where a graph breaks. It must not trace a launch."""

    def step(x):
        y = F.rms_norm(x, (16,))
        torch._dynamo.graph_break()
        return torch.autograd.grad(y.sum(), x)[0] + 1

    x = norm_of(3, 16)
    theirs = step(x)
    with overridden() as override:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(step, backend="eager")(x), theirs)
        assert taken(override) == (1, 1)
    torch._dynamo.reset()


@pytest.mark.skipif(HAS_GPU, reason="one gloo process has CPU tensors")
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.11", reason="DTensor has aten's rules from 2.11 on")
@pytest.mark.parametrize("dim", [0, 1])
def test_dtensor(dim, mesh):
    from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor

    inputs = make_inputs(6, 16)
    norm = torch.nn.RMSNorm(16, eps=inputs.eps)
    with torch.no_grad():
        norm.weight.copy_(inputs.weight)
    norm = torch.distributed.tensor.distribute_module(norm, mesh)
    x = distribute_tensor(inputs.x.float().view(2, 3, 16), mesh, [Shard(dim)]).requires_grad_()
    dy = distribute_tensor(inputs.dy.float().view(2, 3, 16), mesh, [Shard(dim)])
    with overridden() as override, debug.CommDebugMode() as communication:
        y = norm(x)
        y.backward(dy)
        assert taken(override) == (1, 1) and communication.get_total_counts() == 0
    assert y.placements == x.grad.placements == (Shard(dim),)
    assert norm.weight.placements == (Replicate(),)
    flat = {"y": y.detach(), "dx": x.grad}
    flat = {name: t.to_local().view(6, 16) for name, t in flat.items()}
    whole = inputs._replace(x=inputs.x.float(), dy=inputs.dy.float())
    assert_within(expected_results(whole), **flat, dw=norm.weight.grad.full_tensor())


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10", reason="torch 2.9 decomposes forwards when it traces"
)
def test_graphs_of_cpu_tensors_keep_the_norms_for_the_passes():
    """docs/traced-graphs.md says so. Without the override a tracer finds no norm of CPU tensors."""
    x, weight = norm_of(3, 6).cpu().detach().requires_grad_(), norm_of(6).cpu().detach().requires_grad_()

    def step(x, weight):
        return torch.autograd.grad(objective(x, weight), (x, weight))

    with override_aten("cpu"):
        gm = replace_rmsnorm_pass(make_fx(step, tracing_mode="fake")(x, weight))
    assert gm.meta["tilegym_rmsnorm_replaced"] == 2
    with use_backend("auto"):  # "cutile" takes tensors of a CPU in its interpreter alone
        torch.testing.assert_close(gm(x.detach(), weight.detach()), step(x, weight))
