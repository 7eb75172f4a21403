# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Uses of torch.nn.RMSNorm work with RMSNorm: each runs on both classes and must come to the same."""

from typing import Any

import module_uses_in_calls  # noqa: F401 fills USES and REFUSALS
import pytest
import torch
from module_uses import REFUSALS, USES
from torch import Tensor, nn

from tilegym_rmsnorm import RMSNorm

CLASSES = pytest.mark.parametrize(
    "cls", [RMSNorm, RMSNorm.configured(eps=None)], ids=["RMSNorm", "configured"]
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Mismatch dtype")
@pytest.mark.parametrize("name", USES)
@CLASSES
def test_it_comes_to_the_same_as_with_torch(name, cls):
    assert_same(USES[name](cls), USES[name](nn.RMSNorm))


@pytest.mark.parametrize("name", REFUSALS)
@CLASSES
def test_it_raises_as_with_torch(name, cls):
    """Errors are of the same kind and name what is wrong. Where arguments do not fit, rms_norm raises TypeError or
    ValueError, F.rms_norm mostly RuntimeError. No more of the messages is compared: PyTorch's change from version to
    version."""
    function, text = REFUSALS[name]
    with pytest.raises(Exception, match=text) as theirs:
        function(nn.RMSNorm)
    with pytest.raises(Exception, match=text) as ours:
        function(cls)
    is_of_arguments = ours.type in (TypeError, ValueError) and issubclass(theirs.type, RuntimeError)
    assert ours.type is theirs.type or is_of_arguments


def assert_same(result: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(result, nn.Parameter) == isinstance(expected, nn.Parameter)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, (list, tuple)):
        assert type(result) is type(expected) and len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key in expected:
            assert_same(result[key], expected[key])
    else:
        assert result == expected
