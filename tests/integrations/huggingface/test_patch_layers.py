# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Layers whose norms add the residual: which statements are rewritten, and that all else stays."""

import ast
import dis
import functools
import inspect
import textwrap
import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_rmsnorm import patch_model, unpatch_model
from tilegym_rmsnorm.integrations.huggingface import norms
from tilegym_rmsnorm.integrations.huggingface.layers import rewritten
from tilegym_rmsnorm.integrations.huggingface.rewriting import child_and_argument
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

N = 32


CALLS = {
    "self.norm(x)": "norm",
    "self.norm(x=x)": "",
    "self.norm(x, y=x)": "",
    "self.norm(*x)": "",
    "norm(x)": "",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_norm_is_called_with_one_argument(call):
    """Layers and attention call norms so."""
    name, argument = child_and_argument(ast.parse(call, mode="eval").body)
    assert name == CALLS[call] and bool(argument) is bool(name)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = LlamaRMSNorm(N), LlamaRMSNorm(N)
        self.mix, self.mlp = nn.Linear(N, N), nn.Linear(N, N)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight, 1.0, 0.3)


PRE_NORM = """
def forward(self, hidden, scale: "float" = 1.0, *, shift=0.0, **kwargs) -> "Tensor":
    residual = hidden
    hidden = self.first(hidden)
    hidden = self.mix(hidden) * scale
    hidden = residual + hidden
    residual = hidden
    hidden = self.second(hidden)
    hidden = self.mlp(hidden) + shift
    return residual + hidden
"""
SUM = """    hidden = residual + hidden
    residual = hidden
    hidden = self.second(hidden)
"""


def kept(forward):
    """Wrap as transformers' deprecate_kwarg wraps the forwards of layers."""

    @functools.wraps(forward)
    def wrapper(self, *args, old_scale=None, **kwargs):
        if old_scale is not None:
            kwargs["scale"] = old_scale
        return forward(self, *args, **kwargs)

    wrapper.mark = "outer"
    return wrapper


def twice(forward):
    same = forward

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs) + same(*args, **kwargs)

    return wrapper


@pytest.fixture
def class_of(class_from):
    return functools.partial(class_from, base=Layer, kept=kept, twice=twice)


def rows(dtype=torch.float32):
    return torch.randn(4, N, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("new", "added"),
    [
        (SUM, True),
        (SUM.replace("residual + hidden", "hidden + residual"), True),
        (SUM.replace("self.second(hidden)", "self.second(residual)"), True),
        (SUM.replace("residual + hidden", "residual + 0.5 * hidden"), True),
        (SUM.replace("residual + hidden", "self.mix(residual) + torch.relu(hidden)"), True),
        ("    total = residual + hidden\n    hidden = self.second(total)\n    residual = total\n", True),
        ("    residual = residual + hidden\n    hidden = self.second(residual)\n", True),
        ("    hidden = self.second(residual + hidden)\n", False),
        ("    hidden = residual + hidden\n    hidden = self.second(hidden)\n", True),
        ("    if scale:\n" + textwrap.indent(SUM, "    "), True),
        (SUM.replace("residual + hidden", "residual - hidden"), False),
        (SUM.replace("    residual = hidden\n", "    residual = hidden.clone()\n"), False),
        (SUM.replace("self.second(hidden)", "self.second(hidden.relu())"), False),
        (SUM.replace("self.second(hidden)", "self.mix(hidden)"), False),
        ("    hidden += residual\n    residual = hidden\n    hidden = self.second(hidden)\n", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_rewritten_computes_the_same(class_of, residuals, new, added, dtype):
    assert SUM in PRE_NORM
    cls = class_of(PRE_NORM.replace(SUM, new))
    original, ours = cls().to(dtype), cls().to(dtype)
    report = patch_model(ours, patch_layers=True, backend="torch")
    assert report.counts["patched"] == 2 and report.counts["layers"] == added
    if not added:
        reason = "its forward has no sum that one of its norms follows at once"
        assert [each.reason for each in report.declined] in ([reason], [])
    assert added == any(residuals) or not residuals
    for scale in (1.0, 0.7):
        assert torch.equal(ours(rows(dtype), scale), original(rows(dtype), scale))
    assert any(residuals) == added


def test_the_sum_is_rounded_before_it_is_normalized(class_of):
    cls = class_of(PRE_NORM)
    layer = cls().bfloat16()
    patch_model(layer, backend="torch")
    x, residual = (1e3 * rows(torch.bfloat16), rows(torch.bfloat16))
    y, total = norms.add_norm(residual, x, layer.second)
    assert torch.equal(total, residual + x) and torch.equal(y, layer.second(residual + x))


def test_signature_defaults_and_keywords_stay(class_of):
    cls = class_of(PRE_NORM)
    original, ours = cls(), cls()
    patch_model(ours, patch_layers=True, backend="torch")
    assert inspect.signature(ours.forward) == inspect.signature(original.forward)
    given = {"hidden": rows(), "scale": 2.0, "shift": 3.0, "other": None}
    assert torch.equal(ours(**given), original(**given))
    assert type(ours).__name__ == "Made" and isinstance(ours, cls) and "second" in dict(ours.named_children())
    unpatch_model(ours)
    assert type(ours) is cls


def test_errors_name_the_line_of_the_source(class_of):
    cls = class_of(PRE_NORM)
    layer = cls()
    patch_model(layer, patch_layers=True)
    layer.mlp = None
    with pytest.raises(TypeError) as caught:
        layer(rows())
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename.endswith(".py") and frame.line == "hidden = self.mlp(hidden) + shift"


def test_gradients(class_of):
    cls = class_of(PRE_NORM)
    gradients = []
    for is_patched in (False, True):
        layer, x = cls().double().float(), rows().requires_grad_()
        if is_patched:
            patch_model(layer, patch_layers=True, backend="torch")
        layer(x).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "watch",
    [
        lambda norm, seen: norm.register_forward_pre_hook(lambda module, given: seen.append(given[0])),
        lambda norm, seen: norm.register_forward_hook(lambda module, given, y: seen.append(given[0])),
        lambda norm, seen: nn.modules.module.register_module_forward_hook(
            lambda module, given, y: seen.append(given[0]) if module is norm else None
        ),
    ],
)
def test_a_norm_that_is_watched_gets_the_sum_in_a_call_of_its_own(class_of, residuals, watch):
    cls = class_of(PRE_NORM)
    original, ours = cls(), cls()
    expected = original(rows())
    patch_model(ours, patch_layers=True, backend="torch")
    seen = []
    handle = watch(ours.second, seen)
    try:
        assert torch.equal(ours(rows()), expected)
    finally:
        handle.remove()
    assert residuals == [False, False] and len(seen) == 1
    assert torch.equal(ours(rows()), expected) and residuals[2:] == [False, True]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_a_backward_see_the_norm_alone(class_of, residuals, register):
    layer, seen = class_of(PRE_NORM)(), []
    patch_model(layer, patch_layers=True, backend="torch")
    getattr(layer.second, register)(lambda module, *gradients: seen.append(module))
    layer(rows().requires_grad_()).sum().backward()
    assert seen == [layer.second] and residuals == [False, False]


@pytest.mark.parametrize(
    ("x", "residual"),
    [
        (rows(), rows()[:1]),
        (rows().double(), rows()),
        (rows().bfloat16(), rows()),
        (rows(), 1.0),
        (rows(), torch.ones(4, N, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_other_kinds(class_of, x, residual, norm, dtype):
    """y has the dtype that the norm gives to the sum, whose dtype is not always x's."""
    layer = class_of(PRE_NORM)()
    layer.second = norm(N).to(dtype)
    nn.init.normal_(layer.second.weight, 1.0, 0.3)
    expected = layer.second(residual + x), residual + x
    patch_model(layer, backend="torch")
    for ours, value in zip(norms.add_norm(residual, x, layer.second), expected, strict=True):
        assert ours.dtype == value.dtype and torch.equal(ours, value)


def test_a_layer_whose_forward_was_replaced_is_rewritten_anew(class_of):
    cls = class_of(PRE_NORM)
    layer = cls()
    patch_model(layer, patch_layers=True, backend="torch")
    unpatch_model(layer)
    cls.forward = class_of(PRE_NORM.replace("* scale", "* 0.1")).forward
    expected = layer(rows())
    assert patch_model(layer, patch_layers=True, backend="torch").counts["layers"] == 1
    assert torch.equal(layer(rows()), expected)


def test_a_norm_of_a_class_derived_from_the_patched_one_is_called(class_of):
    layer = class_of(PRE_NORM)()
    patch_model(layer, backend="torch")
    expected = torch.zeros(4, N)

    class Zero(type(layer.second)):
        def forward(self, x):
            return 0 * x

    layer.second.__class__ = Zero
    y, total = norms.add_norm(rows(), rows(), layer.second)
    assert torch.equal(y.abs(), expected) and torch.equal(total, 2 * rows())


def test_a_norm_that_is_put_in_its_place_later_is_called(class_of):
    cls = class_of(PRE_NORM)
    layer, original = cls(), cls()
    patch_model(layer, patch_layers=True, backend="torch")
    for each in (layer, original):
        each.second = nn.LayerNorm(N)
    assert torch.equal(layer(rows()), original(rows()))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("def forward", "@twice\ndef forward", "is wrapped by 'wrapper'"),
        ("return residual", "super().forward\n    return residual", "uses super(), which cannot be compiled again"),
        ("return residual", "self.__secret = 1\n    return residual", "has no source that can be read"),
        ("(self, ", "(this, ", "does not call its module self"),
        ("return residual", "locals()\n    return residual", "uses locals, which cannot be compiled again"),
        (SUM, "", "has no sum that one of its norms follows at once"),
    ],
)  # fmt: skip
def test_what_is_not_rewritten(class_of, old, new, reason):
    assert old in PRE_NORM
    source = PRE_NORM.replace(old, new)
    if "this" in new:
        source = source.replace("self.", "this.")
    with pytest.raises(Unclear) as caught:
        rewritten(class_of(source), ["first", "second"])
    assert str(caught.value) == reason


@pytest.mark.parametrize("arguments", ["this, hidden", "this, hidden, /"])
def test_a_layer_that_names_itself_otherwise_is_reported(class_of, arguments):
    call = "hidden + this.mlp(this.second(hidden))"
    layer = class_of(f"def forward({arguments}):\n    hidden = {call}\n    return hidden\n")()
    report = patch_model(layer, patch_layers=True)
    assert [reason for _, _, reason in report.declined] == ["its forward does not call its module self"]


def test_layers_that_calls_do_not_reach_are_left(class_of):
    class Meta(type):
        pass

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return True

    made = class_of(PRE_NORM)
    replaced, graph = made(), torch.fx.GraphModule(made(), Tracer().trace(made()))
    replaced.forward = lambda x: x
    assert "+" in graph.code and graph.first is not None
    reasons = {
        Meta(
            "Other", (made,), {}
        )(): "its class has a metaclass, a _call_impl or a __getattribute__ of its own",
        replaced: "its forward was replaced on the module",
        graph: "it is a graph, not code: patch the model before it is scripted or traced",
    }
    for layer, reason in reasons.items():
        before = type(layer)
        report = patch_model(layer, patch_layers=True)
        assert report.counts["patched"] == 2 and not report.layers and type(layer) is before
        assert [each.reason for each in report.declined] in ([reason], [] if layer is graph else [reason])


@pytest.mark.parametrize("decorators", ["@kept\n", "@kept\n@kept\n", "@kept\n@torch.no_grad()\n"])
def test_decorators_stay(class_of, residuals, decorators):
    made = class_of(PRE_NORM.replace("\ndef", f"\n{decorators}def"))
    made.forward.flag = "kept"
    inspect.unwrap(made.forward).flag = "inner"
    layer, original = made(), made()
    assert patch_model(layer, patch_layers=True).counts["layers"] == 1
    x = rows().requires_grad_()
    y, expected = (each(x, old_scale=0.5, shift=1.0) for each in (layer, original))
    assert torch.equal(y, expected) and y.requires_grad == expected.requires_grad == (
        "no_grad" not in decorators
    )
    assert residuals == [False, True]
    forward = type(layer).forward
    assert (forward.flag, forward.mark, inspect.unwrap(forward).flag) == ("kept", "outer", "inner")
    assert inspect.signature(forward) == inspect.signature(made.forward)
    assert forward.__qualname__ == made.forward.__qualname__


def test_wrapped_layers_that_cannot_be_rewritten_are_listed(class_of):
    layer = class_of(PRE_NORM.replace("\ndef", "\n@twice\ndef"))()
    before = type(layer)
    report = patch_model(layer, patch_layers=True)
    assert [each.reason for each in report.declined] == ["its forward is wrapped by 'wrapper'"]
    assert type(layer) is before


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_call_of_the_layers_own_stays(class_of, is_checkpointed):
    """GradientCheckpointingLayer of transformers 5.17 has one."""

    class Layer(class_of(PRE_NORM)):
        def __call__(self, *args, **kwargs):
            called.append(self)
            if is_checkpointed:
                return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
            return super().__call__(*args, **kwargs)

    called = []
    layer, original = Layer(), Layer()
    layer.load_state_dict(original.state_dict())
    assert patch_model(layer, patch_layers=True).counts["layers"] == 1
    results = []
    for each in (layer, original):
        x = rows().requires_grad_()
        y = each(x)
        y.square().sum().backward()
        results.append((y, x.grad, *(p.grad for p in each.parameters())))
    assert called == [layer, original]
    assert torch.equal(results[0][0], results[1][0])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("head", ["def inner(self, hidden, residual):", "class Inner:", "try:"])
def test_what_is_inside_of_these_is_left_as_it_is(class_of, head):
    """Functions, classes, and what an exception may interrupt."""
    inner = f"    {head}\n" + textwrap.indent(SUM, "    ")
    if head == "try:":
        inner += "    finally:\n        pass\n"
    assert "class" not in head or "second(hidden)" in inner
    cls = class_of(PRE_NORM.replace("    residual = hidden\n", f"    residual = hidden\n{inner}", 1))
    function, fused = rewritten(cls, ["first", "second"])
    assert fused == ("second",)
    if head == "try:":
        layer, original = class_of(PRE_NORM)(), cls()
        assert dis.Bytecode(inspect.unwrap(function)).dis().count("tilegym_add_norm") == 1
        assert layer.state_dict().keys() == original.state_dict().keys()


def test_a_norm_that_raises_leaves_the_sum_to_its_handler(class_of):
    body = (
        SUM.replace("    residual = hidden\n", "")
        .replace("\n    ", "\n        ")
        .replace("    hidden = r", "        hidden = r")
    )
    tried = f"    try:\n{body}    except RuntimeError:\n        pass\n"
    made = class_of(PRE_NORM.replace(SUM, tried + "    return hidden\n" + SUM))
    layer, original = made(), made()
    for each in (layer, original):
        each.second.weight = nn.Parameter(torch.ones(N - 1))
    patch_model(layer, patch_layers=True)
    assert torch.equal(layer(rows()), original(rows()))


def test_a_global_of_the_name_of_forward(class_of):
    made = class_of(PRE_NORM.replace("return residual + hidden", "return forward(residual + hidden)"))
    made.forward.__globals__["forward"] = torch.neg
    layer, original = made(), made()
    assert patch_model(layer, patch_layers=True).counts["layers"] == 1
    assert torch.equal(layer(rows()), original(rows()))
    ours, theirs = inspect.unwrap(type(layer).forward), made.forward
    assert (ours.__name__, ours.__code__.co_name) == (theirs.__name__, theirs.__code__.co_name)
    if hasattr(theirs.__code__, "co_qualname"):
        assert ours.__code__.co_qualname == theirs.__code__.co_qualname


def test_a_sum_that_no_name_holds_is_let_go(class_of):
    source = PRE_NORM.replace("    residual = hidden\n    hidden = self.second", "    hidden = self.second")
    function, fused = rewritten(class_of(source), ["first", "second"])
    assert fused == ("second",)
    code = dis.get_instructions(inspect.unwrap(function))
    assert [each.opname for each in code if each.argval == "tilegym_sum"] == ["STORE_FAST", "DELETE_FAST"]


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("is_on_the_module", [False, True])
def test_a_norm_whose_call_was_changed_after_the_patch_is_called(class_of, residuals, name, is_on_the_module):
    if is_on_the_module and name == "__call__":
        pytest.skip("Python looks for __call__ on the class")

    def halved(self, x):
        return nn.Module._call_impl(self, x) / 2

    made = class_of(PRE_NORM)
    layer, original = made(), made()
    patch_model(layer, patch_layers=True)
    for each in (layer, original):
        if is_on_the_module:
            each.second._call_impl = halved.__get__(each.second)
        else:
            each.second.__class__ = type("Derived", (type(each.second),), {name: halved})
    assert torch.equal(layer(rows()), original(rows()))
    assert residuals == [False, False]


def test_a_forward_that_is_wrapped_by_itself(class_of):
    made = class_of(PRE_NORM)
    made.forward.__wrapped__ = made.forward
    report = patch_model(nn.Sequential(made(), LlamaRMSNorm(N)), patch_layers=True)
    assert report.counts["patched"] == 3 and not report.layers
