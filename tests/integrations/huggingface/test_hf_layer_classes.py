# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every class of the installed transformers that holds an RMSNorm: how many are layers that can be rewritten, and that
what is compiled for them has their statements but for the sum and the norm."""

import collections
import dis
import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
from torch import nn

from tilegym_rmsnorm.integrations.huggingface.expressions import Unclear
from tilegym_rmsnorm.integrations.huggingface.layers import forward_of, rewritten

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

REWRITTEN = {1: 145, 2: 6}  # of transformers 5.23.0: classes in which so many norms add


def holders():
    """Classes and the names of their norms."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "RMSNorm" not in path.read_text():
            continue
        module_name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:  # needs a library that is not here
            continue
        for cls in list(vars(module).values()):
            if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module_name):
                continue
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
        original = forward_of(cls)
        assert inspect.signature(function).parameters.keys() == inspect.signature(original).parameters.keys()
        assert collections.Counter(calls(function)) <= collections.Counter(
            calls(original)
        ) + collections.Counter(fused)
        assert "tilegym_add_norm" in function.__code__.co_freevars
    assert sum(counts.values()) > 100
    if transformers.__version__ == "5.23.0":
        assert counts == REWRITTEN
