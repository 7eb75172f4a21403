# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Layers that change a norm's input in place: such a norm is declined, as the kernels' backward reads its input."""

import textwrap

import pytest
import torch
from torch import nn

from tilegym_rmsnorm import patch_model, unpatch_model

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.llama.modeling_llama import LlamaRMSNorm

N = 32
REASON = "its input is changed in place before the backward reads it: "


class Layer(nn.Module):
    norm_class = LlamaRMSNorm

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = self.norm_class(N), self.norm_class(N)
        self.mix, self.mlp = nn.Linear(N, N), nn.Linear(N, N)


@pytest.fixture
def class_of(tmp_path):
    """A class of layers whose forward has these statements, in a file of its own."""

    def make(body):
        path = tmp_path / "layer.py"
        path.write_text(
            "class Made(Layer):\n    def forward(self, x, flag=True):\n"
            + textwrap.indent(textwrap.dedent(body), " " * 8)
        )
        scope = {"Layer": Layer, "torch": torch, "F": nn.functional}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        return scope["Made"]

    return make


def trained(layer):
    """What the layer gives and its gradients, in bfloat16: the original's norm keeps a copy in float32."""
    x = torch.randn(4, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = (2 * x.requires_grad_()).clone()
    y = layer(x)
    y.float().square().sum().backward()
    return [y, *(parameter.grad for parameter in layer.parameters())]


SUM = "r = x + self.mix(self.first(x))\nh = self.second(r)\n"

CHANGED = {
    "x += self.mix(self.first(x))\nreturn self.second(x)": ("first", "x += self.mix(self.first(x))"),
    SUM + "r += self.mlp(h)\nreturn r": ("second", "r += self.mlp(h)"),
    SUM + "r.add_(self.mlp(h))\nreturn r": ("second", "r.add_(self.mlp(h))"),
    SUM + "return torch.relu_(r) + h": ("second", "torch.relu_(r)"),
    SUM + "return F.silu(r, inplace=True) + h": ("second", "F.silu(r, inplace=True)"),
    SUM + "with torch.no_grad():\n    torch.mul(h, 2, out=r)\nreturn h": ("second", "torch.mul(h, 2, out=r)"),
    SUM + "r[:, 0] = 0\nreturn h + r": ("second", "r[:, 0] = 0"),
    SUM + "r[1:] += h[1:]\nreturn h + r": ("second", "r[1:] += h[1:]"),
    SUM + "r.view(-1).mul_(2)\nreturn h + r": ("second", "r.view(-1).mul_(2)"),
    SUM + "a, b = h, r.T\nb *= 2\nreturn a": ("second", "b *= 2"),
    SUM + "a, *b = torch.t(r), h, h\na *= 2\nreturn h": ("second", "a *= 2"),
    SUM + "if flag:\n    h = r\nh *= 2\nreturn r": ("second", "h *= 2"),
    SUM + "(h := r if flag else h).mul_(2)\nreturn h": ("second", "(h := (r if flag else h)).mul_(2)"),
    "h = x + self.mix(self.first(x))\nr = h\nh = self.second(h)\nr += self.mlp(h)\nreturn r": (
        "second",
        "r += self.mlp(h)",
    ),
    "for _ in range(2):\n    x *= 2\n    h = self.first(x)\nreturn self.second(h)": ("first", "x *= 2"),
    "while x.sum() is not None:\n    h = self.first(x)\n    x += 1\n    break\nreturn self.second(h)": (
        "first",
        "x += 1",
    ),
    "try:\n    h = self.first(hidden_states=x)\nfinally:\n    x.zero_()\nreturn self.second(h)": (
        "first",
        "x.zero_()",
    ),
}
KEPT = [
    SUM + "h += 1\nreturn r + self.mlp(h)",  # y is changed, which no backward reads
    SUM + "h = self.mlp(h)\nh += r\nreturn h",
    SUM + "r = r + self.mlp(h)\nr += 1\nreturn r",
    SUM + "h, r = self.mlp(h), r.clone()\nr += h\nreturn r",
    SUM + "if flag:\n    r = self.mlp(h)\nelse:\n    r = h\nr += 1\nreturn r",
    SUM + "r.requires_grad_()\nreturn r + self.mlp(h)",
    SUM + "return F.silu(r, inplace=False) + h",
    "x += 1\n" + SUM + "return r + self.mlp(h)",
]


@pytest.mark.parametrize("layers", [False, True], ids=["norms", "layers"])
@pytest.mark.parametrize("body", CHANGED)
def test_a_norm_whose_input_is_changed_is_declined(class_of, body, layers):
    cls = class_of(body)
    original, ours = cls().bfloat16(), cls().bfloat16()
    norm, change = CHANGED[body]
    report = patch_model(ours, patch_layers=layers)
    declined = {each.name: each.reason for each in report.declined if "norm" in each.class_name.lower()}
    assert declined == {norm: REASON + change}
    assert [each.name for each in report.patched] == [{"first": "second", "second": "first"}[norm]]
    expected, got = trained(original), trained(ours)
    assert torch.equal(got[0], expected[0])
    assert [each is None for each in got] == [each is None for each in expected]
    assert patch_model(ours, patch_layers=layers).declined == report.declined
    unpatch_model(ours)


@pytest.mark.parametrize("body", KEPT)
def test_what_is_changed_beside_it_is_no_reason(class_of, body):
    cls = class_of(body)
    original, ours = cls().bfloat16(), cls().bfloat16()
    report = patch_model(ours, patch_layers=True)
    assert report.counts["patched"] == 2 and report.layers and not report.declined
    assert torch.equal(trained(ours)[0], trained(original)[0])


def test_the_norm_of_pytorch_keeps_its_input_too(class_of, monkeypatch):
    monkeypatch.setattr(Layer, "norm_class", nn.RMSNorm)
    layer = class_of(SUM + "r += self.mlp(h)\nreturn r")()
    assert patch_model(layer).counts["patched"] == 2


def test_a_norm_of_two_parents_is_declined_for_either(class_of):
    changing, other = class_of(SUM + "r += h\nreturn r")(), nn.Sequential()
    other.add_module("shared", changing.second)
    assert [each.name for each in patch_model(nn.ModuleList([other, changing])).declined] == ["0.shared"]
