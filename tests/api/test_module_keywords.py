# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Keywords of other libraries' norms: the error of RMSNorm names ours, and its signature takes none of them."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

from tilegym_rmsnorm import RMSNorm
from tilegym_rmsnorm.nn import configured, keywords


class Named(RMSNorm):
    def __init__(self, width, **options):
        super().__init__(width, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden_size": 8}, "normalized_shape= for hidden_size="),
        ({"dim": 8, "epsilon": 1e-6}, "normalized_shape= for dim=, eps= for epsilon="),
        ({"normalized_shape": 8, "variance_epsilon": 1e-6}, "eps= for variance_epsilon="),
        ({"normalized_shape": 8, "casting_mode": "gemma"}, 'casting="llama" or "once" for casting_mode='),
        (
            {"normalized_shape": 8, "other": 1, "zero_centered_gamma": True},
            "offset=1.0 for zero_centered_gamma=",
        ),
        (
            {"hidden_size": 8, "params_dtype": None},
            "normalized_shape= for hidden_size=, dtype= for params_dtype=",
        ),
    ],
)
def test_ours_are_named(options, said):
    with pytest.raises(TypeError, match=f"^RMSNorm: expected {re.escape(said)}; docs/coming-from.md has"):
        RMSNorm(**options)


@pytest.mark.parametrize("theirs", keywords.OURS)
def test_each_in_a_subclass_and_a_configured_class(theirs):
    with pytest.raises(TypeError, match=f"^Named: expected .* for {theirs}=; "):
        Named(8, **{theirs: 1})
    cls = RMSNorm.configured(offset=1.0)
    if theirs in configured.OTHER_NAMES:  # which such a class takes, as models of transformers pass them
        assert keywords.OURS[theirs] == f"{configured.OTHER_NAMES[theirs]}="
    else:
        with pytest.raises(TypeError, match=f"^RMSNorm: expected .* for {theirs}=; "):
            cls(8, **{theirs: 1})


def test_ours_are_named_where_a_class_is_configured():
    with pytest.raises(
        TypeError, match='^configured: expected casting="llama" or "once" for casting_mode=; '
    ):
        RMSNorm.configured(casting_mode="gemma")
    with pytest.raises(TypeError, match="^configured: expected options among eps, .*, got 'hidden_size'$"):
        RMSNorm.configured(hidden_size=8)


def test_ours_exist_and_theirs_do_not():
    parameters = inspect.signature(RMSNorm).parameters
    assert not parameters.keys() & keywords.OURS.keys()
    assert {text.partition("=")[0] for text in keywords.OURS.values()} <= parameters.keys()


def test_a_name_of_nobody_is_refused_as_python_refuses_it():
    with pytest.raises(TypeError, match=r"^RMSNorm.__init__\(\) got an unexpected keyword argument 'ep'"):
        RMSNorm(8, ep=1e-6)


def test_help_shows_the_signature_itself():
    assert not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(RMSNorm).parameters.values())
    shown = pydoc.plain(pydoc.render_doc(RMSNorm))
    assert "RMSNorm(normalized_shape: 'int | Sequence[int]', eps: 'float | None' = None" in shown
