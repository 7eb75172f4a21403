# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""RMSNorm in models that torch.fx traces: one node that calls rms_norm."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from tilegym_rmsnorm import RMSNorm, rms_norm

N = 8
OPTIONS = {
    "as torch": {},
    "bias": {"bias": True},
    "everything": {"eps": 1e-5, "offset": 1.0, "bias": True, "casting": "llama", "backend": "torch"},
    "no weight": {"elementwise_affine": False},
}


class WithResidual(nn.Module):
    """Two norms around a residual stream."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.last = RMSNorm(N, **options), RMSNorm(N, **options)

    def forward(self, x, residual):
        x, residual = self.first(x, residual)
        return self.last(x + residual), residual


def changed(model: nn.Module) -> nn.Module:
    """Make all parameters unlike each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter))
    return model


def calls_of(traced: fx.GraphModule) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op == "call_function" and node.target is rms_norm]


def results(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs, and the gradients of inputs and parameters."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = model(*leaves)
    outputs = list(y) if isinstance(y, tuple) else [y]
    total = sum(output.square().sum() for output in outputs)
    return outputs + list(torch.autograd.grad(total, [*leaves, *model.parameters()]))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_norm_is_one_node(name):
    model = changed(nn.Sequential(nn.Linear(N, N), RMSNorm(N, **OPTIONS[name])))
    x = torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    (call,) = calls_of(traced)
    assert call.kwargs["casting"] == model[1].casting and call.kwargs["backend"] == model[1].backend
    assert list(traced.state_dict()) == list(model.state_dict())
    for one, other in zip(results(traced, x), results(model, x), strict=True):
        assert torch.equal(one, other)


def test_the_parameters_are_looked_up_when_the_graph_runs():
    model = changed(nn.Sequential(RMSNorm(N, bias=True)))
    traced, x = fx.symbolic_trace(model), torch.randn(5, N)
    with torch.no_grad():
        traced.load_state_dict({"0.weight": torch.full((N,), 2.0), "0.bias": torch.full((N,), 3.0)})
    assert torch.equal(traced(x), rms_norm(x, (N,), torch.full((N,), 2.0), bias=torch.full((N,), 3.0)))


@pytest.mark.parametrize("name", OPTIONS)
def test_with_a_residual(name):
    model = changed(WithResidual(**OPTIONS[name]))
    inputs = torch.randn(5, N), torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    assert len(calls_of(traced)) == 2
    for one, other in zip(results(traced, *inputs), results(model, *inputs), strict=True):
        assert torch.equal(one, other)


def test_traced_again_and_by_itself():
    model, x = changed(nn.Sequential(RMSNorm(N, bias=True))), torch.randn(5, N)
    again = fx.symbolic_trace(fx.symbolic_trace(model))
    assert len(calls_of(again)) == 1 and list(again.state_dict()) == list(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert torch.equal(fx.symbolic_trace(model[0])(x), model(x))


def test_a_traced_model_can_be_copied():
    model, x = changed(nn.Sequential(RMSNorm(N))), torch.randn(5, N)
    traced = fx.symbolic_trace(model)
    assert torch.equal(copy.deepcopy(traced)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


class Tracer(fx.Tracer):
    """The tracer of docs/limits.md."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, RMSNorm) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tracer_of_ones_own_keeps_the_module(name):
    """Hooks of the norm run when the graph runs, as an nn.RMSNorm's do."""
    model = changed(WithResidual(**OPTIONS[name]))
    inputs = torch.randn(5, N), torch.randn(5, N)
    traced = fx.GraphModule(model, Tracer().trace(model))
    assert not calls_of(traced)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["first", "last"]
    for one, other in zip(results(traced, *inputs), results(model, *inputs), strict=True):
        assert torch.equal(one, other)
    y, _ = traced(*inputs)
    traced.last.register_forward_hook(lambda module, given, y: 2 * y)
    assert torch.equal(traced(*inputs)[0], 2 * y)
