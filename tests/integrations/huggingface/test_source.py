# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Files that were edited since they were imported: their text is none of what runs."""

import importlib.util
import linecache
import textwrap

import pytest
import torch
from torch import nn

from tilegym_rmsnorm import patch_model
from tilegym_rmsnorm.integrations.huggingface import source
from tilegym_rmsnorm.integrations.huggingface.source import Unclear, tree_of

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
