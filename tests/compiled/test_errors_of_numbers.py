# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Dynamo quotes the package's error for a number of a wrong type or value, with fullgraph=True too."""

import decimal
import re
import warnings

import numpy
import pytest
import torch
from helpers import DEVICE

from tilegym_rmsnorm import (
    RMSNorm,
    compute_rms_norm_rstd_torch,
    qk_norm_rope,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_rope,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]

X, W, RSTD = (torch.randn(shape, device=DEVICE) for shape in ((2, 3, 4, 8), (8,), (24,)))
TABLE = torch.randn(3, 8, device=DEVICE)

CALLS = {
    ("rms_norm", "eps"): lambda x, v: rms_norm(x, 8, W, v),
    ("rms_norm", "offset"): lambda x, v: rms_norm(x, 8, W, offset=v),
    ("rms_norm", "residual_alpha"): lambda x, v: rms_norm(x, 8, W, residual=x, residual_alpha=v),
    ("rms_norm of torch", "eps"): lambda x, v: rms_norm(x, 8, W, v, backend="torch"),
    ("rms_norm_forward", "eps"): lambda x, v: rms_norm_forward(x, W, v),
    ("rms_norm_backward", "offset"): lambda x, v: rms_norm_backward(x, x, W, RSTD, offset=v),
    ("rstd", "eps"): lambda x, v: compute_rms_norm_rstd_torch(x, v),
    ("qk_norm_rope", "eps"): lambda x, v: qk_norm_rope(x, x, W, W, TABLE, TABLE, eps=v),
    ("qk_norm_rope", "offset"): lambda x, v: qk_norm_rope(x, x, W, W, TABLE, TABLE, offset=v),
    ("rms_norm_rope", "rotary_dim"): lambda x, v: rms_norm_rope(x, W, TABLE, TABLE, rotary_dim=v),
}
WRONG = {
    "a text": "1e-6",
    "a bool": True,
    "a list": [1e-6],
    "a tensor": torch.ones((), device=DEVICE),
    "a complex number": 1j,
    "NaN": float("nan"),
    "infinite": float("-inf"),
    "beyond floats": -(10**400),
    "an object": decimal.Decimal("-1"),
}


@pytest.mark.parametrize(
    ("called", "value"),
    [
        *((("rms_norm", "eps"), value) for value in WRONG),
        *((called, value) for called in list(CALLS)[1:] for value in ("a text", "NaN")),
    ],
)
def test_dynamo_quotes_the_error(called, value):
    call = CALLS[called]
    with pytest.raises((TypeError, ValueError), match=f"^{called[1]}: expected .*, got ") as refused:
        call(X, WRONG[value])
    expected = re.escape(str(refused.value).split(", got ")[0] + ", got ")
    with pytest.raises((torch._dynamo.exc.TorchDynamoException, TypeError, ValueError), match=expected):
        torch.compile(lambda x: call(x, WRONG[value]), fullgraph=True, backend="eager")(X)


@pytest.mark.parametrize("called", [each for each in CALLS if each[1] != "rotary_dim"], ids=" ".join)
def test_a_number_of_numpy_which_dynamo_takes_for_an_array(called):
    with pytest.raises(
        torch._dynamo.exc.TorchDynamoException, match=f"{called[1]}: expected a finite number.*pass Python's"
    ):
        torch.compile(lambda x: CALLS[called](x, numpy.float32(1e-6)), fullgraph=True, backend="eager")(X)


def test_a_module_keeps_a_number_of_numpy_as_dynamo_takes_it():
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # NumPy's, of an overflow, where a check compares it with a larger float
        norm = RMSNorm(8, eps=numpy.float32(1e-3), offset=numpy.float64(0.5), device=DEVICE)
    y = torch.compile(norm, fullgraph=True, backend="eager")(X)
    torch.testing.assert_close(y, RMSNorm(8, eps=1e-3, offset=0.5, device=DEVICE)(X))


@pytest.mark.parametrize(
    "called", [("rms_norm", "eps"), ("qk_norm_rope", "eps"), ("rstd", "eps")], ids=" ".join
)
def test_a_symbol_of_a_wrong_value_is_shown(called):
    compiled = torch.compile(CALLS[called], fullgraph=True, backend="eager", dynamic=True)
    compiled(X, 0.5)
    errors = torch._dynamo.exc.TorchDynamoException, ValueError
    with pytest.raises(errors, match="eps: expected a finite number, at least 0, or None, got -0.5"):
        compiled(X, -0.5)
