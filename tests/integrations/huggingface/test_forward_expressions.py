# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arithmetic of a forward, read from its source: what leaves no trace, and what no longer matches. Of files that were
edited since they were imported the text is none of what runs."""

import functools
import importlib.util
import linecache
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import source
from tilegym_rmsnorm.integrations.huggingface.arithmetic import Match, match_of
from tilegym_rmsnorm.integrations.huggingface.expressions import X, expression_of, text_of
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

LLAMA = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
GEMMA = """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
def forward(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
"""
T5 = """
def forward(self, hidden_states):
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states
"""
OPTIONAL = """
def forward(self, x):
    normed = x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
    if self.with_scale:
        normed = normed * self.weight.float()
    return normed.type_as(x)
"""
LLAMA_MATCH = Match("llama", "weight", "variance_epsilon")


@pytest.fixture
def class_of(class_from):
    return functools.partial(class_from, F=F, nn=nn)


def refused(cls) -> str:
    with pytest.raises(Unclear) as caught:
        match_of(cls)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LLAMA, LLAMA_MATCH),
        (GEMMA, Match("offset", "weight", "eps", offset=1.0)),
        (
            GEMMA.replace("_norm(self, x)", "_norm(self, x, y=None)"),
            Match("offset", "weight", "eps", offset=1.0),
        ),
        (GEMMA.replace("1.0 + self", "2 + self"), Match("offset", "weight", "eps", offset=2.0)),
        (GEMMA.replace("(1.0 + self.weight.float())", "self.weight"), Match("once", "weight", "eps")),
        (T5, Match("t5", "weight", "variance_epsilon")),
        (OPTIONAL, Match("optional weight", "weight", "eps", switch="with_scale")),
        (LLAMA.replace("self.variance_epsilon", "1e-6"), Match("llama", "weight", fixed_eps=1e-6)),
        (
            "def forward(self, x): return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)",
            Match("torch", "weight", "eps"),
        ),
    ],
)
def test_arithmetics(class_of, source, expected):
    assert match_of(class_of(source)) == expected


GLM = """
def forward(self, hidden_states):
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states_2 = hidden_states * torch.rsqrt(variance + self.eps)
    return (self.weight * hidden_states_2).to(hidden_states.dtype)
"""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (GLM, Match("once", "weight", "eps")),
        (GLM.replace("self.weight *", "self.weight.float() *"), Match("once", "weight", "eps")),
        (
            GLM.replace(".to(hidden_states.dtype)", ".type(hidden_states.dtype)"),
            Match("once", "weight", "eps"),
        ),
        (
            GLM.replace("self.weight *", "(1 + self.weight.float()) *"),
            Match("offset", "weight", "eps", offset=1.0),
        ),
        (GLM.replace("self.weight * ", ""), Match("no weight", eps="eps")),
        (
            OPTIONAL.replace("normed = x.float() *", "normed = x *"),
            Match("optional weight", "weight", "eps", switch="with_scale"),
        ),
        (
            T5.replace("hidden_states = hidden_states *", "hidden_states = hidden_states.float() *"),
            Match("t5", "weight", "variance_epsilon"),
        ),
    ],
)
def test_x_that_is_cast_by_a_product_alone(class_of, source, expected):
    """Its factor is float32, so the product is: with the bits of the original."""
    cls = class_of(source)
    assert match_of(cls) == expected
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for weight_dtype in DTYPES:
            norm = cls()
            norm.eps = norm.variance_epsilon = 1e-6
            norm.with_scale = True
            norm.weight = nn.Parameter(1 + 0.5 * torch.randn(48, generator=generator).to(weight_dtype))
            x = torch.randn(64, 48, generator=generator) * torch.logspace(-4, 3, 64)[:, None]
            y = norm(x.to(dtype))
            assert patch_model(norm, backend="torch").counts["patched"] == 1
            assert norm(x.to(dtype)).dtype == y.dtype and torch.equal(norm(x.to(dtype)), y)


@pytest.mark.parametrize(
    "source",
    [
        GLM.replace(".to(torch.float32)", ""),  # the mean is that of x
        GLM.replace("(variance + self.eps)", "(variance + self.eps).to(hidden_states.dtype)"),
        GLM.replace("self.weight *", "(1 + self.weight) *"),
        GLM.replace(".to(hidden_states.dtype)", ""),
        GLM.replace(
            "self.weight * hidden_states_2", "self.weight * torch.rsqrt(variance + self.eps) * hidden_states"
        ),
    ],
)
def test_other_roundings_do_not_match(class_of, source):
    assert source != GLM and refused(class_of(source))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "def forward(self, hidden_states):",
            'def forward(self, hidden_states: "X") -> int:\n    "A docstring."',
        ),
        ("input_dtype", "other_name"),
        ("hidden_states", "x"),
        ("self.variance_epsilon", "self.the_eps"),
        ("self.weight", "self.gain"),
        (".to(torch.float32)", ".float()"),
        (".to(input_dtype)", ".type_as(given)"),
        (".pow(2)", ".square()"),
        ("hidden_states.pow(2)", "(hidden_states * hidden_states)"),
        ("hidden_states.pow(2)", "(hidden_states ** 2)"),
        ("hidden_states.pow(2)", "torch.square(hidden_states)"),
        ("mean(-1, keepdim=True)", "mean(dim=-1, keepdim=True)"),
        ("mean(-1, keepdim=True)", "mean((-1,), True)"),
        ("torch.rsqrt(variance + self.variance_epsilon)", "(self.variance_epsilon + variance).rsqrt()"),
        ("torch.rsqrt(variance + self.variance_epsilon)", "(variance + self.variance_epsilon) ** -0.5"),
        ("self.weight * hidden_states.to(input_dtype)", "hidden_states.to(input_dtype) * self.weight"),
        (
            "self.weight * hidden_states.to(input_dtype)",
            "torch.mul(self.weight, hidden_states.to(input_dtype))",
        ),
        ("    input_dtype =", "    pass\n    input_dtype: object ="),
    ],
)
def test_what_leaves_no_trace(class_of, old, new):
    assert old in LLAMA
    source = LLAMA.replace(old, new)
    if "given" in new:
        source = source.replace("    input_dtype =", "    given = hidden_states\n    input_dtype =")
    expected = LLAMA_MATCH
    if "the_eps" in new:
        expected = Match("llama", "weight", "the_eps")
    if "gain" in new:
        expected = Match("llama", "gain", "variance_epsilon")
    assert match_of(class_of(source)) == expected


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (LLAMA, ".to(torch.float32)", ".to(torch.float64)"),
        (LLAMA, "hidden_states = hidden_states.to(torch.float32)", "hidden_states = hidden_states"),
        (LLAMA, ".pow(2)", ".pow(3)"),
        (LLAMA, ".pow(2)", ".abs()"),
        (LLAMA, "mean(-1", "mean(-2"),
        (LLAMA, "mean(-1", "mean((-2, -1)"),
        (LLAMA, "mean(-1", "sum(-1"),
        (LLAMA, "keepdim=True", "keepdim=False"),
        (LLAMA, "mean(-1, keepdim=True)", "mean(-1, keepdim=True, dtype=torch.float64)"),
        (LLAMA, "torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance) + self.variance_epsilon"),
        (LLAMA, "hidden_states * torch.rsqrt(", "hidden_states / torch.sqrt("),
        (LLAMA, "variance + self.variance_epsilon", "variance - self.variance_epsilon"),
        (LLAMA, "variance + self.variance_epsilon", "variance + self.eps * 2"),
        (LLAMA, "torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance + self.eps).to(input_dtype)"),
        (LLAMA, ".to(input_dtype)", ".to(torch.bfloat16)"),
        (LLAMA, "self.weight *", "(self.weight * 2) *"),
        (LLAMA, "self.weight *", "self.weight * self.weight *"),
        (LLAMA, "return self.weight * hidden_states.to(input_dtype)", "return self.weight + hidden_states"),
        (LLAMA, "self.weight * hidden_states.to(input_dtype)", "F.dropout(self.weight * hidden_states)"),
        (LLAMA, "    variance =", "    hidden_states.add_(1)\n    variance ="),
        (LLAMA, "    variance =", "    hidden_states *= 2\n    variance ="),
        (LLAMA, "    variance =", "    self.calls = 1\n    variance ="),
        (LLAMA, "    variance =", "    with torch.no_grad(): pass\n    variance ="),
        (LLAMA, "    variance =", "    if self.training: return hidden_states\n    variance ="),
        (LLAMA, "    variance =", "    hidden_states = hidden_states - 1.0\n    variance ="),
        (LLAMA, "(self, hidden_states)", "(self, hidden_states, gate=None)"),
        (LLAMA, "(self, hidden_states)", "(self, hidden_states, **kwargs)"),
        (LLAMA, "(self, hidden_states)", "(self, *hidden_states)"),
        (GEMMA, "1.0 + self.weight.float()", "1.0 - self.weight.float()"),
        (GEMMA, "1.0 + self.weight.float()", "1.0 + self.weight"),
        (GEMMA, "(1.0 + self.weight.float())", "(1.0 + self.weight).float()"),
        (GEMMA, "def forward", "@torch.no_grad()\ndef forward"),
        (GEMMA, "def _norm(self, x)", "def _norm(self, x, y=())"),
        (GEMMA, "def _norm", "@property\ndef _norm"),
        (GEMMA, "self._norm(", "self.other("),
        (GEMMA, "self._norm(x.float())", "self._norm(x.float(), x)"),
        (T5, "[torch.float16, torch.bfloat16]", "[torch.float16]"),
        (T5, "hidden_states.to(self.weight.dtype)", "hidden_states.to(torch.bfloat16)"),
        (OPTIONAL, "if self.with_scale", "if not self.with_scale"),
        (OPTIONAL, "if self.with_scale", "if self.training"),
    ],
)  # fmt: skip
def test_a_forward_that_computes_something_else_does_not_match(class_of, source, old, new):
    assert old in source
    changed = class_of(source.replace(old, new))
    if new == "if self.training":  # read as a switch; a module's `training` decides at each call
        assert match_of(changed).switch == "training"
    elif new == "1.0 + self.weight":  # a float32 weight is not rounded, others would be
        assert "no arithmetic that is known" in refused(changed)
    else:
        assert refused(changed)


def test_reasons_say_what_it_is(class_of):
    assert (
        refused(class_of(LLAMA.replace("states)", "states, gate)", 1))) == "takes more than one tensor: gate"
    )
    rounded = """
def forward(self, x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)
"""
    assert refused(class_of(rounded)) == "rounds rstd to x's dtype before it multiplies x"
    once = LLAMA.replace(".to(input_dtype)", "")
    assert refused(class_of(once)).startswith(
        "computes no arithmetic that is known: (weight * (to(x, float32) * "
    )
    assert refused(nn.LayerNorm) == "calls F.layer_norm"


def test_names_are_looked_up_where_the_code_is(class_of):
    """`torch` may be something else there, and a function of its own is read too."""

    class Other:
        float32, rsqrt = torch.float32, staticmethod(lambda x: x)

    assert match_of(class_of(LLAMA, torch=torch)) == LLAMA_MATCH
    other = class_of(LLAMA)
    other.forward.__globals__["torch"] = Other
    assert refused(other)
    helper = class_of("def half_power(x): return torch.rsqrt(x)\n" + LLAMA).half_power
    source = LLAMA.replace("torch.rsqrt(", "root(")
    assert match_of(class_of(source, root=helper)) == LLAMA_MATCH
    assert refused(class_of(source, root=abs))


def test_a_helper_that_was_replaced_since_is_read_again(class_of, monkeypatch):
    helpers = "def half_power(x): return torch.rsqrt(x)\ndef other(x): return torch.rsqrt(x + x)\n"
    functions = class_of(helpers + LLAMA)
    cls = class_of(LLAMA.replace("torch.rsqrt(", "root("), root=functions.half_power)
    assert match_of(cls) == LLAMA_MATCH
    cls.forward.__globals__["root"] = functions.other
    assert refused(cls)
    cls.forward.__globals__["root"] = functions.half_power
    assert match_of(cls) == LLAMA_MATCH
    monkeypatch.setattr(torch, "rsqrt", abs)
    assert refused(cls)


def test_the_arithmetic_is_that_of_the_forward_that_runs(class_of):
    cls = class_of(LLAMA)
    assert match_of(cls) == LLAMA_MATCH
    cls.forward = class_of(
        LLAMA.replace(".pow(2)", ".pow(4)")
    ).forward  # another one, after the first was read
    assert refused(cls)
    gemma = class_of(GEMMA)
    assert match_of(gemma).arithmetic == "offset"
    gemma._norm = class_of(GEMMA.replace("pow(2)", "pow(4)"))._norm
    assert refused(gemma)
    assert match_of(type("Derived", (class_of(LLAMA),), {})) == LLAMA_MATCH

    @functools.wraps(class_of(LLAMA).forward)
    def wrapper(self, x):
        return 2 * x

    assert "wrapped by" in refused(type("Wrapped", (nn.Module,), {"forward": wrapper}))


def test_without_source():
    namespace = {"torch": torch}
    exec(f"class Norm(torch.nn.Module):\n{textwrap.indent(LLAMA, '    ')}", namespace)
    assert refused(namespace["Norm"]) == "has no source that can be read"
    assert refused(type("Norm", (nn.Module,), {"forward": len})) == "is no plain function"


def test_a_source_that_was_edited_since_is_not_read(class_of):
    for old, new in (
        (" * torch", " + torch"),
        (".pow(2)", ".pow(3)"),
        ("self.weight", "self.gain"),
        ("rsqrt", "sqrt"),
    ):
        cls = class_of(LLAMA)
        path = Path(cls.forward.__code__.co_filename)
        path.write_text(path.read_text().replace(old, new))
        linecache.checkcache()
        assert refused(cls) == "has no source that can be read"


def test_a_decorator_that_gives_the_function_back_changes_nothing(class_of):
    def noted(function):
        function.note = True
        return function

    def replaced(function):
        return lambda self, x: function(self, 2 * x)

    source = LLAMA.replace("def forward", "@decorator\ndef forward")
    assert match_of(class_of(source, decorator=noted)) == LLAMA_MATCH
    assert refused(class_of(source, decorator=replaced))


def test_expressions_as_text(class_of):
    assert expression_of(class_of("def forward(self, x): return x")) == X
    text = text_of(expression_of(class_of(LLAMA)))
    root = "rsqrt((mean(square(to(x, float32))) + variance_epsilon))"
    assert text == f"(weight * to((to(x, float32) * {root}), dtype(x)))"


BODY = """
def forward(self, x, d, *rest):
    \"\"\"Its text.\"\"\"
    if self.flag and "a" in d:
        y = self.weight * x.to(d)
    else:
        y = x - 1
    if rest:
        x = x + 1
        d = x.dtype
    try:
        x = x + y
        y = y * 2
    except ValueError:
        y = x
    return super().finish(y) if rest else torch.rsqrt(y)
"""
TRIED = "        y = y * 2\n    except ValueError:\n        y = x\n"


@pytest.fixture
def imported(tmp_path):
    """Gives the class of a file, and a function that changes the file."""
    path = tmp_path / "edited.py"

    def make(body, name="Edited", first="import torch\n"):
        def write(body):
            path.write_text(f"{first}class {name}(torch.nn.Module):\n{textwrap.indent(body, '    ')}")

        write(body)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def edit(old, new):
            assert body.count(old) == 1
            write(body.replace(old, new))
            linecache.checkcache(str(path))
            source._tree_of.cache_clear()  # a tree that was read is still that of the code

        return getattr(module, name), edit

    return make


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.weight * x.to(d)", "(self.weight * x).to(d)"),
        ("x - 1", "1 - x"),
        ("x - 1", "x - 1.0"),
        ("x - 1", "x - True"),
        ('"a" in', '"b" in'),
        ("if self.flag and", "if not self.flag and"),
        ("self.flag and", "self.flag or"),
        ("*rest", "**rest"),
        ("d, *rest", "d, rest"),
        (TRIED, "        pass\n    except ValueError:\n        y = x\n    y = y * 2\n"),
        ("    else:\n        y = x - 1\n", "    y = x - 1\n"),
        ("        d = x.dtype\n", "    d = x.dtype\n"),  # the target of a jump alone
        ("    try:\n        x = x + y\n", "    x = x + y\n    try:\n"),  # where an exception is handled, alone
        ("super().finish", "self.finish"),
    ],
)  # fmt: skip
def test_what_runs_is_another(imported, old, new):
    """Its text is refused, and before the edit it was read."""
    cls, edit = imported(BODY)
    assert tree_of(cls.forward).name == "forward"
    edit(old, new)
    with pytest.raises(Unclear, match="^has no source that can be read$"):
        tree_of(cls.forward)


@pytest.mark.parametrize(
    ("old", "new"), [("Its text.", "Another text."), ("x - 1\n", "x - 1  # less\n"), ("x - 1", "(x - 1)")]
)
def test_what_runs_is_the_same(imported, old, new):
    cls, edit = imported(BODY)
    edit(old, new)
    assert tree_of(cls.forward).name == "forward"


@pytest.mark.parametrize("first", ["import torch\n", "from __future__ import annotations\nimport torch\n"])
def test_functions_inside_and_their_annotations(imported, first):
    body = "def forward(self, x):\n    def inner(y: Missing = 1): return y\n    return inner(x)\n"
    cls, edit = imported(body.replace("Missing", "int"), first=first)
    assert tree_of(cls.forward).name == "forward"
    edit("return y", "return -y")
    with pytest.raises(Unclear):
        tree_of(cls.forward)


def test_a_norm_that_was_edited_is_declined(imported):
    """Both texts are norms that are known. What runs is the first one."""
    body = """
def __init__(self):
    super().__init__()
    self.weight, self.eps = torch.nn.Parameter(torch.full((8,), 1.3)), 1e-6

def forward(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * x.to(dtype)
"""
    cls, edit = imported(body, "EditedRMSNorm")
    model = nn.Sequential(cls())
    x = torch.randn(3, 8).bfloat16()
    expected = model(x)
    edit("self.weight * x.to(dtype)", "(self.weight * x).to(dtype)")
    report = patch_model(model)
    assert [each.reason for each in report.declined] == ["its forward has no source that can be read"]
    assert model(x).dtype is expected.dtype is torch.float32 and torch.equal(model(x), expected)
