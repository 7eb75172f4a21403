# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Layers written so that a sum that moves into the norm behind it could show: each computes what it did, to the bit,
and has the gradients it had."""

import contextlib
import copy
import textwrap

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model

N = 16


class Layer(nn.Module):
    """Parts that the forwards below name, and helpers that change what they are given, or the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = LlamaRMSNorm(N), LlamaRMSNorm(N), LlamaRMSNorm(N)
        for norm in (self.first, self.second, self.third):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        self.mix, self.mlp, self.act = nn.Linear(N, N), nn.Linear(N, N), nn.ReLU(inplace=True)
        self.seen = []

    def changes_norm(self, x):
        """Exchange the norms, as what a layer does once."""
        self.second, self.third = self.third, self.second
        return x

    def changes_eps(self, x):
        self.second.variance_epsilon = 0.5
        return x

    def changes_weight(self, x):
        self.second.weight.data.mul_(2)
        return x

    def hooked(self, x):
        """Halve the gradient of x."""
        x.register_hook(lambda gradient: gradient / 2)
        return x


class Doubling(Tensor):
    """Tensor that adds in its own way."""

    def __add__(self, other):
        return 2 * self.as_subclass(Tensor) + other


class Late(Tensor):
    """Tensor of which PyTorch's functions return something else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        return 3 * found if function in (Tensor.add, Tensor.__add__) else found


class Other:
    """No tensor; adds itself from the right."""

    def __radd__(self, x):
        return x * 2


def swallowing(kind):
    return contextlib.suppress(kind)


HEAD = "r = x\nh = self.mix(self.first(x))\n"
# The statements of a forward, and how many norms add in it: these have no sum that is used otherwise.
FUSED = {
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = h + r\nr = h\nh = self.second(r)\nreturn r * 0.5 + self.mlp(h)": 1,
    HEAD + "t = r + h\nh = self.second(t)\nk = t\nreturn k - self.mlp(h)": 1,
    HEAD + "h = r + h\nh = self.second(h)\nreturn self.mlp(h)": 1,
    HEAD + "h = x + x\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = (r := 2 * h) + (r := 3 * r)\nk = h\nh = self.second(h)\nreturn r + k + self.mlp(h)": 1,
    HEAD + "h = r + self.changes_norm(h)\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + self.changes_eps(h)\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + self.changes_weight(h)\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "if flag:\n    h = r + h\n    r = h\n    h = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nf = r.reshape(-1, r.shape[-1])\nreturn self.mlp(h) + r + f": 1,
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nh = h + r\nr = h\nh = self.third(h)\nreturn r + h": 2,
    HEAD + "h = x.as_subclass(Doubling) + h\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h.as_subclass(Doubling)\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r.as_subclass(Late) + h\nr = h\nh = self.second(h)\nreturn r + h": 1,
    HEAD + "h = h + Other()\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h[:1]\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h.double()\nr = h\nh = self.second(h)\nreturn r + h": 1,
    HEAD + "h = self.hooked(r * 1) + h\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nh.register_hook(lambda g: g / 2)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r.detach() + h\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)": 1,
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nr = self.hooked(self.mlp(h))\nreturn r + h": 1,
}  # fmt: skip
for way in (
    "k = -r + r[:, :1] + r[0]",
    "k = self.mlp(h)\nk += r",
    "k = r.clone()\nself.hooked(k)",
    "k = torch.cat([r.transpose(0, 1), h.T]).mean() + r.mean(-1, keepdim=True)",
    "a, b = r.chunk(2, -1)\nself.hooked(a)\nk = a + b.sum()",
    "k = self.hooked(r.view(-1))",
):
    FUSED[HEAD + f"h = r + h\nr = h\nh = self.second(h)\n{way}\nreturn r + h + k.sum()"] = 1
# In these something else could see the sum, or a gradient of it: they are left as they are.
LEFT = [
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nself.hooked(r)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nr.register_hook(lambda g: g / 2)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nself.seen.append(r)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nself.kept = r\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\n(g,) = torch.autograd.grad(h.sum(), r, retain_graph=True)\n"
    "return r + self.mlp(h) + g",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nk = r\nk = [k]\nself.hooked(k[0])\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn self.mlp(h), r",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nif flag:\n    self.hooked(r)\nreturn r + self.mlp(h)",
    HEAD + "if flag:\n    h = r + h\n    r = h\n    h = self.second(h)\nself.hooked(r)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn (lambda: self.hooked(r))() + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nk = [self.hooked(r) for _ in range(1)][0]\nreturn k + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn torch.add(*[self.hooked(r), self.mlp(h)])",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn self.hooked(r.T) + self.hooked(r).T + self.mlp(h).T",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nk = r.contiguous()\nself.hooked(k)\nreturn k + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nk = self.hooked(r) if flag else r\nreturn k + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nk = (r, h)\nself.hooked(k[0])\nreturn r + self.mlp(h)",
    HEAD + "for i in range(2):\n    if i:\n        self.hooked(r)\n    h = r + h\n    r = h\n    h = self.second(h)\n"
    "return r + h",
    HEAD + "with swallowing(RuntimeError):\n    h = r + h\n    r = h\n    h = self.second(h)\nreturn r + h",
    HEAD + "with torch.no_grad():\n    h = r + h\n    r = h\n    h = self.second(h)\nreturn r + h + self.mlp(x)",
    HEAD + "try:\n    h = r + h\n    r = h\n    h = self.second(h)\nfinally:\n    self.seen.append(1)\nreturn r + h",
    "global g\n" + HEAD + "g = r + h\nh = self.second(g)\nreturn g + self.mlp(h)",
    HEAD + "def late():\n    return k.mean()\nk = r + h\nh = self.second(k)\nreturn k + self.mlp(h) + late()",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nself.hooked(+r)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nself.hooked(r.to(r.dtype))\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nself.changes_eps(h)\nh = self.second(h)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nr += self.mlp(h)\nreturn r",
    HEAD + "h = r + h\nr = h\nh = self.second(h)\nreturn r.add_(self.mlp(h))",
    HEAD + "h = r + h\nr = h\nh = self.second(*(h,))\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second(hidden_states=h)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\nh = self.second.forward(h)\nreturn r + self.mlp(h)",
    HEAD + "n = self.second\nh = r + h\nr = h\nn.variance_epsilon = 1.0\nh = n(h)\nreturn r + self.mlp(h)",
    HEAD + "h = r + h\nr = h\ntorch.set_grad_enabled(False)\nh = self.second(h)\ntorch.set_grad_enabled(True)\n"
    "return r + self.mlp(h)",
    HEAD + "h = r + h\nr = h.detach()\nh = self.second(h)\nreturn r + self.mlp(h)",
    HEAD + "h = sum([r, h])\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)",
    HEAD + "h += r\nr = h\nh = self.second(h)\nreturn r + self.mlp(h)",
    HEAD + "me = self\nself = r + h\nh = me.second(self)\nreturn self + me.mlp(h)",
]  # fmt: skip


@pytest.fixture
def class_of(class_from):
    def make(body):
        head = "def forward(self, x, flag=True):\n"
        return class_from(head + textwrap.indent(body, "    "), Layer, **globals())

    return make


def result_of(layer, dtype, grad):
    """Return a layer's outputs and gradients, or the error it raises."""
    x = torch.randn(3, N, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(grad == "all")
    for parameter in layer.parameters():
        parameter.requires_grad_(grad != "none")
    try:
        out = layer(x)
        out = [each.as_subclass(Tensor) for each in (out if isinstance(out, tuple) else (out,))]
        flags = [each.requires_grad for each in out]
        if any(flags):
            sum(each.float().square().sum() for each in out).backward()
    except Exception as error:
        return type(error), str(error)
    return out, flags, [x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_equal(one, other):
    assert torch.equal(one, other)


def check_alike(ours, expected, dtype, is_of_gradients=False):
    assert type(ours) is type(expected) and len(ours) == len(expected)
    if isinstance(expected[0], type):
        assert ours == expected
        return
    for one, other in zip(ours[0], expected[0], strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        (torch.testing.assert_close if is_of_gradients else assert_equal)(one, other)
    assert ours[1] == expected[1]
    for one, other in zip(ours[2], expected[2], strict=True):
        assert (one is None) == (other is None)
        if one is not None:  # those of the norm are rounded once
            tolerance = (1e-5 if dtype is torch.float32 else 3e-2) * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", [*FUSED, *LEFT], ids=range(len(FUSED) + len(LEFT)))
def test_values_gradients_and_errors_stay(class_of, body, dtype):
    torch.manual_seed(torch.seed() % 2**32)
    cls = class_of(body)
    for grad in ("all", "weights", "none"):
        original = cls().to(dtype)
        ours = copy.deepcopy(original)
        report = patch_model(ours, patch_layers=True, backend="torch")
        assert sum(len(each.norms) for each in report.layers) == FUSED.get(body, 0)
        results = result_of(ours, dtype, grad), result_of(original, dtype, grad)
        check_alike(*results, dtype, "autograd.grad(" in body)


def test_a_sum_that_is_used_otherwise_is_named(class_of):
    layer = class_of(LEFT[0])()
    (declined,) = patch_model(layer, patch_layers=True).declined
    assert declined.reason == (
        "its forward uses the sum before second in another way than in arithmetic: self.hooked(r)"
    )


@pytest.mark.parametrize("inside", ["autocast", "no_grad", "inference", "enabled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_around_a_layer(class_of, inside, dtype):
    original = class_of(next(iter(FUSED)))().to(dtype)
    ours = copy.deepcopy(original)
    assert patch_model(ours, patch_layers=True, backend="torch").layers
    x = torch.randn(3, N).to(dtype)
    blocks = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "enabled": torch.enable_grad,
    }
    with blocks[inside]():
        y, expected = ours(x), original(x)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    assert y.requires_grad == expected.requires_grad and y.is_inference() == expected.is_inference()


def test_a_property_in_the_place_of_a_norm(class_of):
    """The property is called once for each call of the layer, after operands were evaluated."""

    class Made(class_of(next(iter(FUSED)))):
        @property
        def second(self):
            self.seen.append("second")
            return self._modules["third"]

    original = Made()
    ours = copy.deepcopy(original)
    patch_model(ours, patch_layers=True, backend="torch")
    x = torch.randn(3, N)
    assert torch.equal(ours(x), original(x)) and ours.seen == original.seen == ["second"]


@pytest.mark.parametrize("change", ["bound", "swapped", "hooked", "pre-hooked", "compiled", "weight", "eps"])
def test_norms_that_are_changed_after_the_patch(class_of, change):
    original = class_of(next(iter(FUSED)))()
    ours = copy.deepcopy(original)
    patch_model(ours, patch_layers=True, backend="torch")
    for layer in (ours, original):
        if change == "bound":
            layer.second.forward = lambda x: 2 * x
        elif change == "swapped":
            layer.second = nn.Tanh()
        elif change == "hooked":
            layer.second.register_forward_hook(lambda module, given, y: 2 * y)
        elif change == "pre-hooked":
            layer.second.register_forward_pre_hook(lambda module, given: (2 * given[0].abs(),))
        elif change == "compiled":
            layer.second.compile(backend="eager")
        elif change == "weight":
            layer.second.weight = nn.Parameter(torch.full((1,), 3.0))
        else:
            layer.second.variance_epsilon = 0.25
    check_alike(
        result_of(ours, torch.float32, "all"), result_of(original, torch.float32, "all"), torch.float32
    )
