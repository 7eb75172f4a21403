# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""torch.fx.symbolic_trace takes a patched model as it takes the original: it records the forward that was there, which
has no kernel in it. torch.jit.script takes no patched model."""

import copy
import inspect

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tilegym_rmsnorm import patch_model, unpatch_model

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

N = 8
CLASSES = [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm, T5LayerNorm, nn.RMSNorm]
TRACEABLE = [cls for cls in CLASSES if cls is not T5LayerNorm]  # it asks for the dtype of its weight

REFUSED = pytest.raises(RuntimeError, match=r"^torch\.jit\.script .*torch\.export\.export[^\n]*$")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = LlamaRMSNorm(N), nn.Linear(N, N)

    def forward(self, hidden, residual):
        hidden = residual + hidden
        residual = hidden
        hidden = self.norm(hidden)
        return residual + self.mlp(hidden)


def rows():
    return torch.randn(3, N, generator=torch.Generator().manual_seed(0))


def both(original):
    patched = copy.deepcopy(original)
    assert patch_model(patched, patch_layers=True).counts["patched"] == 1
    return original, patched


def code_of(traced):
    return [(node.op, str(node.target)) for node in traced.graph.nodes]


@pytest.mark.parametrize("is_root", [True, False], ids=["alone", "in a model"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_torch_jit_script_is_refused(cls, is_root):
    _, patched = both(cls(N) if is_root else nn.Sequential(cls(N), nn.SiLU()))
    before = [type(part) for part in patched.modules()]
    with REFUSED:
        torch.jit.script(patched)
    assert [type(part) for part in patched.modules()] == before
    unpatch_model(patched)
    assert isinstance(torch.jit.script(patched), torch.jit.ScriptModule)


@pytest.mark.parametrize("made", [torch.jit.script, lambda model: torch.jit.trace(model, rows())])
def test_a_model_of_torchscript_is_left_as_it_is(made):
    model = made(nn.Sequential(LlamaRMSNorm(N), nn.RMSNorm(N)))
    expected, code = model(rows()), model.code
    report = patch_model(model, patch_layers=True)
    assert sum(report.counts.values()) == 1 and not any(unpatch_model(model).counts.values())
    assert [(each.name, each.reason) for each in report.declined] == [
        ("", "it is a graph, not code: patch the model before it is scripted or traced")
    ]
    assert model.code == code and torch.equal(model(rows()), expected)


@pytest.mark.parametrize("is_root", [True, False], ids=["alone", "in a model"])
@pytest.mark.parametrize("cls", TRACEABLE, ids=lambda cls: cls.__name__)
def test_traced_by_symbols(cls, is_root):
    original, patched = both(cls(N) if is_root else nn.Sequential(cls(N), nn.SiLU()))
    expected, traced = torch.fx.symbolic_trace(original), torch.fx.symbolic_trace(patched)
    assert code_of(traced) == code_of(expected)
    assert torch.equal(traced(rows()), original(rows()))


def test_a_rewritten_layer():
    original, patched = both(Layer())
    assert "tilegym_add_norm" in inspect.unwrap(type(patched).forward).__code__.co_freevars
    expected, traced = torch.fx.symbolic_trace(original), torch.fx.symbolic_trace(patched)
    assert code_of(traced) == code_of(expected)
    assert torch.equal(traced(rows(), 2 * rows()), original(rows(), 2 * rows()))
    with REFUSED:
        torch.jit.script(patched)


def test_a_forward_has_the_attributes_of_the_one_that_was_there():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """y"""
            return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).to(
                x.dtype
            )

        forward.mark = "kept"

    original, patched = both(Norm())
    ours, theirs = type(patched).forward, Norm.forward
    assert ours is not theirs and ours.mark == "kept" and ours.__doc__ == "y"
    assert ours.__annotations__ == theirs.__annotations__ and ours.__qualname__ == theirs.__qualname__
    assert inspect.signature(patched.forward) == inspect.signature(original.forward)
