# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every class of the installed transformers whose name is that of an RMSNorm, or of a norm like T5's: it is matched and
computes the same bits, or it is declined. Of those that hold an RMSNorm: how many are layers that can be rewritten, and
that what is compiled for them has their statements but for the sum and the norm. docs/huggingface.md has these figures,
and its snippets print what it shows."""

import collections
import contextlib
import dis
import inspect
import io
import re
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import ARCHITECTURES, classes_of_models
from test_hf_attention_classes import REWRITTEN as ATTENTION
from torch import nn

from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface.arithmetic import ARITHMETICS, match_of
from tilegym_rmsnorm.integrations.huggingface.layers import rewritten
from tilegym_rmsnorm.integrations.huggingface.report import elided
from tilegym_rmsnorm.integrations.huggingface.rewriting import forward_of
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

N = 48
NAME = re.compile(r"RMSNorm|RmsNorm|LayerNorm$")
# Of transformers 5.23.0. Other releases have other classes; what is matched is checked there all the same.
EXPECTED = {
    "llama": 141,
    "once": 16,
    "offset": 13,
    "t5": 10,
    "optional weight": 8,
    "no weight": 4,
    "declined": 76,
}
# Classes named RMSNorm that are declined, and why.
DECLINED_RMS_NORMS = {
    "takes more than one tensor": 14,
    "rounds rstd to x's dtype before it multiplies x": 3,
    "rounds 1 + weight to weight's dtype before it multiplies": 1,
    "returns rstd alone": 1,
    "calls self.": 2,
    "computes ": 3,
}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float64),
]


def norm_classes():
    for cls in classes_of_models(r"^\s*class \w*(RMSNorm|RmsNorm|LayerNorm)\w*\("):
        if NAME.search(cls.__name__):
            yield cls


@pytest.fixture(scope="module")
def found():
    """Map each class to its match, or why it is declined."""
    result = {}
    for cls in norm_classes():
        try:
            result[cls] = match_of(cls)
        except Unclear as error:
            result[cls] = str(error)
    return result


def built(cls):
    for arguments in ((N,), (N, 1e-6), (), (1e-6,)):
        try:
            module = cls(*arguments)
        except TypeError:
            continue
        weight = getattr(module, "weight", None)
        if weight is None or weight.shape == (N,):
            return module
    raise AssertionError(f"{cls} is built in another way")


@pytest.mark.slow
def test_how_many_classes_have_which_arithmetic(found):
    counts = collections.Counter("declined" if isinstance(m, str) else m.arithmetic for m in found.values())
    assert len(found) >= 140 and counts["llama"] > counts["once"] > 0 and set(counts) <= set(EXPECTED)
    reasons = [
        reason for cls, reason in found.items() if isinstance(reason, str) and "RMS" in cls.__name__.upper()
    ]
    if transformers.__version__ == "5.23.0":
        assert counts == EXPECTED
        by_reason = {begin: sum(r.startswith(begin) for r in reasons) for begin in DECLINED_RMS_NORMS}
        assert by_reason == DECLINED_RMS_NORMS and sum(by_reason.values()) == len(reasons)


@pytest.mark.slow
def test_what_is_matched_computes_the_same_bits(found):
    generator = torch.Generator().manual_seed(0)
    checked = 0
    for cls, match in found.items():
        if isinstance(match, str):
            continue
        for x_dtype, weight_dtype in DTYPES:
            module = built(cls).to(weight_dtype)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
            # Rows of different scales, one of zeros, one with a column far out.
            x = torch.randn(8, N, generator=generator) * torch.logspace(-4, 3, 8)[:, None]
            x[1], x[2, 5] = 0.0, 300.0
            x = x.to(x_dtype)
            expected = module(x)
            report = patch_model(module, backend="torch")
            assert [norm.arithmetic for norm in report.patched] == [match.arithmetic]
            y = module(x)
            message = f"{cls.__module__}.{cls.__name__} of {x_dtype} with {weight_dtype}"
            assert y.dtype == expected.dtype, message
            assert torch.equal(y, expected), message
            checked += 1
    assert checked > 90 * len(DTYPES)
    if transformers.__version__ == "5.23.0":
        assert checked > 190 * len(DTYPES)


@pytest.mark.slow
def test_what_is_declined_is_listed_with_its_reason(found):
    for cls, reason in found.items():
        if isinstance(reason, str) and "RMS" in cls.__name__.upper():
            module = nn.Module.__new__(cls)
            nn.Module.__init__(module)
            report = patch_model(module)
            assert not report.patched
            assert report.declined == (("", cls.__name__, elided(f"its forward {reason}")),)


REWRITTEN = {1: 145, 2: 6}  # of transformers 5.23.0: classes in which so many norms add


def holders():
    """Classes and the names of their norms."""
    for cls in classes_of_models("RMSNorm"):
        if "forward" in vars(cls):
            names = re.findall(r"self\.(\w+) = \w*RMSNorm\(", inspect.getsource(cls.__init__))
            if names:
                yield cls, names


def calls(function):
    return [each.argval for each in dis.get_instructions(function) if each.opname.startswith("LOAD_ATTR")]


@pytest.mark.slow
def test_which_layers_are_rewritten():
    counts = collections.Counter()
    for cls, names in holders():
        try:
            function, fused = rewritten(cls, names)
        except Unclear as error:
            assert str(error)
            continue
        counts[len(fused)] += 1
        function, original = inspect.unwrap(function), forward_of(cls)
        assert inspect.signature(function).parameters.keys() == inspect.signature(original).parameters.keys()
        assert collections.Counter(calls(function)) <= collections.Counter(
            calls(original)
        ) + collections.Counter(fused)
        assert "tilegym_add_norm" in function.__code__.co_freevars
    assert sum(counts.values()) > 60
    if transformers.__version__ == "5.23.0":
        assert counts == REWRITTEN


PAGE = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text(encoding="utf-8")


def test_snippets_print_what_is_shown():
    scope, shown_blocks = {}, 0
    blocks = re.findall(r"^```python\n(.*?)^```\n\n((?:    [^\n]*\n)*)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for snippet, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(snippet, "docs/huggingface.md", "exec"), scope)
        assert output.getvalue() == textwrap.dedent(shown)
        shown_blocks += bool(shown)
    assert shown_blocks == 3


def test_the_table_of_arithmetics():
    rows = re.findall(r"^\| `([\w ]+)` \| (.*?) \| (\d* ?)\| .* \|$", PAGE, re.MULTILINE)
    assert {name: meaning for name, meaning, _ in rows} == {
        name: meaning for name, (meaning, _) in ARITHMETICS.items()
    }
    counts = {name: int(count) for name, _, count in rows if count.strip()}
    assert counts == {name: count for name, count in EXPECTED.items() if name != "declined"}
    text = " ".join(PAGE.split())
    assert f"these are {sum(counts.values())} classes" in text
    assert f"are {sum(DECLINED_RMS_NORMS.values())} classes named RMSNorm: the 14 gated ones" in text
    assert f"{sum(REWRITTEN.values())} classes of layers" in text
    assert f"{ATTENTION} classes of attention" in text
    assert DECLINED_RMS_NORMS["takes more than one tensor"] == 14
    assert f"{len(ARCHITECTURES)} architectures" in text
