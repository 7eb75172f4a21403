# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Layers that change a norm's input in place: such a norm is declined, as the kernels' backward reads its input."""

import collections
import functools
import importlib.metadata
import inspect
import itertools
import textwrap
import time
import types

import pytest
import torch
from hf_models import classes_of_models
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface import inplace
from tilegym_rmsnorm.integrations.huggingface.inplace import changed_inputs

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
def class_of(class_from):
    """A class of layers whose forward has these statements."""

    def make(body, first="self", base=Layer):
        head = f"def forward({first}, x, flag=True):\n"
        return class_from(head + textwrap.indent(textwrap.dedent(body), "    "), base, nn=nn, F=nn.functional)

    return make


def trained(layer):
    """Return the layer's y and gradients, in bfloat16: the original's norm keeps a copy in float32."""
    x = torch.randn(4, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = (2 * x.requires_grad_()).clone()
    y = layer(x)
    y.float().square().sum().backward()
    return [y, *(parameter.grad for parameter in layer.parameters())]


SUM = "r = x + self.mix(self.first(x))\nh = self.second(r)\n"

CHANGED = {
    "x += self.mix(self.first(x))\nreturn self.second(x)": ("first", "x += self.mix(self.first(x))"),
    SUM + "r += self.mlp(h)\nreturn r": ("second", "r += self.mlp(h)"),
    "both = 2 * x\n(r,) = [each for each in (both,)]\nh = self.second(r)\nboth.data.mul_(2)\nreturn h": (
        "second",
        "both.data.mul_(2)",
    ),
    "both = 2 * x\n(r,) = map(lambda each: each, [both])\nh = self.second(r)\nboth.data.mul_(2)\nreturn h": (
        "second",
        "both.data.mul_(2)",
    ),
    SUM + "r.detach().view(torch.int16).numpy().fill(1)\nreturn h": (
        "second",
        "r.detach().view(torch.int16).numpy().fill(1)",
    ),
    SUM + "r.untyped_storage().fill_(0)\nreturn h": ("second", "r.untyped_storage().fill_(0)"),
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
    SUM + "torch.relu(r)\nF.silu(r, False)\nnn.ReLU()(r)\nself.mlp(r)\nreturn r + self.mlp(h)",
    SUM + "r_ = r.clone()\nr_.mul_(2)\nr_.mean()\nreturn r + self.mlp(h)",
    SUM + "r = [each + 1 for each in [r]][0]\nr += 1\nreturn r + self.mlp(h)",
    SUM + "def late(k):\n    k += 1\nreturn r + self.mlp(h)",  # is not called
    SUM + "def plus(k):\n    return k + 1\nr = plus(r)\nr += 1\nreturn r + self.mlp(h)",
    SUM + "self.kept = r + 0\nself.kept += 1\nreturn r + self.mlp(h)",
    SUM + "r.requires_grad_()\nreturn r + self.mlp(h)",
    SUM + "return F.silu(r, inplace=False) + h",
    "x += 1\n" + SUM + "return r + self.mlp(h)",
    # New tensors and numbers are no views.
    SUM + "k = torch.zeros_like(r)\nk += self.mlp(h)\nreturn k + r",
    SUM + "k = r.new_zeros(r.shape)\nk[0] = 1\nk.index_add_(0, torch.arange(4), h)\nreturn k + r",
    SUM + "k = torch.full(r.shape, 1.0, device=r.device).to(r.dtype)\nk.triu_(1)\nreturn k + r",
    SUM + "b, n = r.shape\nn += 1\nb = r.shape[0]\nb += 1\nc = len(r)\nc += 1\nreturn r + self.mlp(h)",
    SUM + "m = r.mean(-1, keepdim=True)\nm += 1\ni = r.argmax(-1)\ni += 1\nreturn m + r + self.mlp(h)",
    SUM + "k = torch.cat([r, h]).mul_(2)\nj = torch.matmul(r, r.T).div_(2)\nreturn k[:4] + r + h + j.sum()",
    SUM + "k = r.mul(2).mul_(2)\nreturn k + r + h",
    "r = x\nfor norm in (self.first, self.second):\n    x = x + norm(x)\nx += r\nreturn x",
    # To a tensor no tuple is added, and none has texts as keys. A forward does not initialize.
    SUM + "out = (r, h)\nout += (r,)\nout += (h,)\nreturn out[0] + out[2] + self.mlp(out[3])",
    SUM + "out = [r]\nout += [h, r]\nreturn out[0] + self.mlp(out[1]) + out[2]",
    SUM + "parts = {'r': r}\nparts['r'] = h\nparts['h'] = r\nreturn parts['h'] + self.mlp(parts['r'])",
    SUM + "def _init_weights(r):\n    r.zero_()\nreturn r + self.mlp(h)",
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
    assert report.counts["patched"] == 2
    assert all("the sum before second" in each.reason for each in report.declined)
    assert report.layers or report.declined or SUM not in body
    assert torch.equal(trained(ours)[0], trained(original)[0])


# How h may be changed after `y = self.second(h)`. Each ends with a use of h.
WAYS = [
    "h.data.mul_(2)",
    "h.data *= 2",
    "h.data = 2 * h.data",
    "h.data[...] = 2",
    "h.data[:, 1:].mul_(2)",
    "h.detach().mul_(2)",
    "h.detach()[0] = 1",
    "with torch.no_grad():\n    h.copy_(2 * h)",
    "with torch.no_grad():\n    torch.mul(h, 2, out=h)",
    "with torch.no_grad():\n    torch.add(x, x, out=(h))",
    "h.detach().set_((2 * h).detach())",
    "torch._foreach_mul_([h], 2)",
    "h[:] = 2 * x",
    "h[0], k = x[0], 1",
    "for h[0] in x.clone():\n    pass",
    "h *= 2",
    "F.relu(h, inplace=True)",
    "nn.ReLU(inplace=True)(h)",
    "self.act(h)",
    "self.acts(h)",
    "view = h.view(-1)[1:]\nview += 1",
    "a, b = h.chunk(2, -1)\na.data.mul_(2)",
    "for part in h.split(1):\n    part.data.mul_(2)",
    "k = [x.clone(), h]\nk[1].data.mul_(2)",
    "k = {'h': h}\nk['h'] += 1",
    "k = (x.clone(),)\nk += (h,)\nk[1].data.mul_(2)",
    "k = [x.clone()]\nk += [h]\nfor part in k[1:]:\n    part.data.mul_(2)",
    "k = [h]\nk[0] += 1",
    "with torch.no_grad() as _, torch.enable_grad():\n    h.data.mul_(2)",
    "match flag:\n    case False:\n        h = x.clone()\n    case True:\n        h.data.mul_(2)",
    "(k := h.data).mul_(2)",
    "try:\n    raise ValueError\nexcept ValueError:\n    h.data.mul_(2)",
    "if flag:\n    k = h\nelse:\n    k = x.clone()\nk.data.mul_(2)",
]
# How the norm may be called with h.
CALLS = {
    "me = self\ny = me.second(h)": "second",
    "norm = self.second\ny = norm(h)": "second",
    "y = self.second.forward(h)": "second",
    "y = self.norms[0](h)": "norms.0",
    "for norm in self.norms:\n    y = norm(h)": "norms.0",
    "for i, norm in enumerate(self.norms):\n    y = norm(h)": "norms.0",
    "for norm, _ in zip(self.norms, x):\n    y = norm(h)": "norms.0",
    "y = [norm(h) for norm in self.norms][0]": "norms.0",
    "y = self.named['norm'](h)": "named.norm",
    "for norm in self.named.values():\n    y = norm(h)": "named.norm",
    "y = self.block.norm(h)": "block.norm",
    "block = self.block\ny = block.norm(h)": "block.norm",
    "y = self.blocks[0].norm(h)": "blocks.0.norm",
    "for block in self.blocks:\n    y = block.norm(h)": "blocks.0.norm",
    "y = self.row(h)": "row.0",
    "y = torch.utils.checkpoint.checkpoint(self.second, h, use_reentrant=False)": "second",
    "y = self.second(k := h)": "second",
}


class Parts(Layer):
    """Parts that the code above names."""

    def __init__(self):
        super().__init__()
        norm = self.norm_class(N)
        self.norms, self.named = nn.ModuleList([norm]), nn.ModuleDict({"norm": self.norm_class(N)})
        self.block = nn.Module()
        self.block.norm = self.norm_class(N)
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].norm = self.norm_class(N)
        self.row = nn.Sequential(self.norm_class(N), nn.Linear(N, N))
        self.act = nn.ReLU(inplace=True)
        self.acts = nn.Sequential(nn.ReLU(inplace=True))


def declined_of(ours):
    """The norms that are declined, each for what changes its input."""
    declined = [each for each in patch_model(ours).declined if "norm" in each.class_name.lower()]
    assert all(each.reason.startswith(REASON) for each in declined)
    return [each.name for each in declined]


def outcome(layer):
    """Return the layer's y and gradients, or its backward's error."""
    try:
        return trained(layer)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def check_as_before(original, ours):
    expected, got = outcome(original), outcome(ours)
    assert type(got) is type(expected)
    if isinstance(expected, list):
        assert torch.equal(got[0], expected[0])
        for one, other in zip(got[1:], expected[1:], strict=True):
            assert (one is None) == (other is None)
            if one is not None:  # of the norms that are patched gradients are rounded once
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


@pytest.mark.parametrize("first", ["self", "s"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_in_which_an_input_is_changed(class_of, monkeypatch, way, first):
    code = way if first == "self" else way.replace("self.", "s.")
    body = f"h = {first}.mix({first}.first(x))\ny = {first}.second(h)\n{code}\nreturn y + h"
    cls = class_of(body, first, Parts)
    original, ours = cls().bfloat16(), cls().bfloat16()
    assert declined_of(ours) == ["second"]
    check_as_before(original, ours)


@pytest.mark.parametrize("call", CALLS)
def test_ways_in_which_a_norm_is_called(class_of, call):
    cls = class_of(f"h = self.mix(self.first(x))\n{call}\nh.data.mul_(2)\nreturn y + h", base=Parts)
    original, ours = cls().bfloat16(), cls().bfloat16()
    assert CALLS[call] in declined_of(ours)
    assert len(declined_of(ours)) == 1
    check_as_before(original, ours)


def test_another_method_that_calls_a_norm_is_read(class_of):
    class Base(Layer):
        def normed(self, k):
            k = self.first(k)
            y = self.second(k)
            k.data.mul_(2)
            return y + k

    cls = class_of("return self.normed(self.mix(x))", base=Base)
    original, ours = cls().bfloat16(), cls().bfloat16()
    assert declined_of(ours) == ["second"]
    check_as_before(original, ours)


@pytest.mark.parametrize("made", [torch.jit.script, lambda linear: torch.jit.trace(linear, torch.ones(2, N))])
def test_a_norm_beside_modules_of_torchscript(made):
    model = nn.Sequential(made(nn.Linear(N, N)), nn.RMSNorm(N), made(nn.Linear(N, N)))
    x = torch.randn(3, N)
    expected = model(x)
    assert patch_model(model).counts["patched"] == 1
    torch.testing.assert_close(model(x), expected)


def test_submodules_of_one_call_may_run_in_any_order(class_of):
    """A set decided which of them was taken for the first, and so by chance whether the norm was declined."""
    cls = class_of("return nn.functional.checkpoint(self.act, self.second, x, self.mlp)")
    changed = {(each.child, each.by) for each in changed_inputs(cls, "second")}
    names = [(name,) for name in ("act", "mlp", "second")]
    assert changed >= set(itertools.permutations(names, 2))


def test_a_long_forward_is_read_in_time():
    """A forward of transformers took 8 seconds, when each function that it calls was read too."""
    from transformers.models.zamba2.modeling_zamba2 import Zamba2Model

    begin = time.process_time()
    list(changed_inputs(Zamba2Model, "layers"))
    assert time.process_time() - begin < 2


def test_a_norm_that_pytorch_has(class_of, monkeypatch):
    """nn.RMSNorm on a CPU keeps a copy in float32 where x is half."""
    monkeypatch.setattr(Layer, "norm_class", functools.partial(nn.RMSNorm, eps=1e-6))
    cls = class_of("h = self.mix(self.first(x))\ny = self.second(h)\nh += 1\nreturn y + h")
    original, ours = cls().bfloat16(), cls().bfloat16()
    assert declined_of(ours) == ["second"]
    check_as_before(original, ours)
    assert isinstance(outcome(ours), list)


def test_a_norm_of_two_names_is_declined_for_either(class_of):
    layer = class_of("h = self.mix(x)\ny = self.other(h)\nh.data.mul_(2)\nreturn y + h")()
    layer.other = layer.second
    assert declined_of(layer) == ["second"]


def test_a_norm_of_two_parents_is_declined_for_either(class_of):
    changing, other = class_of(SUM + "r += h\nreturn r")(), nn.Sequential()
    other.add_module("shared", changing.second)
    assert [each.name for each in patch_model(nn.ModuleList([other, changing])).declined] == ["0.shared"]


def code_of(function):
    """Make a key that functions share that read alike. A function within it is like no other: its text is not here."""
    code = function.__code__
    return code.co_code, code.co_names, code.co_varnames, *map(repr, code.co_consts)


def statements(cls, known):
    """The statements of a class that change the input of a submodule, each with the submodules. known: those of a
    function, by its code. Of transformers' models many are written like another's."""
    found = collections.defaultdict(set)
    for name, each in vars(cls).items():
        function = inspect.unwrap(each) if isinstance(each, types.FunctionType) else None
        if isinstance(function, types.FunctionType) and name not in inplace._INITIALIZING:
            code = code_of(function)
            if code not in known:
                known[code] = list(inplace._changed_inputs(function))
            for change in known[code]:
                if change.by is None:
                    found[name, change.text].add(change.child)
    return found


@pytest.mark.slow
def test_statements_of_transformers():
    """Before tuples, texts as keys and initializations counted as no changes, there were 142, 3 behind norms. That of
    HiggsAudioV2 is left: its index is a mask, which makes a copy, but might be a slice."""
    every, behind_norms, known = 0, [], {}
    for cls in classes_of_models("nn.Module"):
        for (_, text), children in statements(cls, known).items():
            every += 1
            if any("norm" in child[-1] for child in children if child):
                behind_norms.append((cls.__name__, text))
    assert every > 50
    if importlib.metadata.version("transformers") == "5.23.0":
        assert every == 100 and [name for name, _ in behind_norms] == ["HiggsAudioV2DecoderLayer"]
