# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Every class of the installed transformers that holds an RMSNorm: how many are layers that can be rewritten, and that
what is compiled for them has their statements but for the sum and the norm."""

import collections
import dis
import inspect
import re

import pytest
import transformers
from hf_models import classes_of_models

from tilegym_rmsnorm.integrations.huggingface.layers import rewritten
from tilegym_rmsnorm.integrations.huggingface.rewriting import forward_of
from tilegym_rmsnorm.integrations.huggingface.source import Unclear

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
