# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of `rms_norm_forward` and `rms_norm_backward` like one that passed all checks skip them: with its bits, on
other tensors, by each option, and with the errors of an unknown call."""

import pytest
import torch
from every_op import assert_same_bits
from helpers import BF16, DEVICE

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.ops.norm import checks
from tilegym_rmsnorm.routes import known_calls

WIDTH = 40


def rows(*size, dtype=BF16):
    return torch.randn(size, dtype=dtype, device=DEVICE)


FORWARD_OPTIONS = {
    "eps": (1e-6, 0.5),
    "offset": (0.0, 1.0),
    "casting": ("once", "llama"),
    "out_dtype": (None, torch.float32),
    "bias": (None, rows(WIDTH)),
}
SUM_OPTIONS = {
    "residual": (rows(6, WIDTH), rows(6, WIDTH)),
    "residual_alpha": (1.0, 0.5),
    "residual_dtype": (None, torch.float32),
}
BACKWARD_OPTIONS = {
    "offset": (0.0, 1.0),
    "casting": ("once", "llama"),
    "d_residual_out": (None, rows(6, WIDTH)),
    "dw_dtype": (None, torch.float32),
    "needs_db": (False, True),
}


def _in_parts(function, monkeypatch):
    """Tensors of a call of the function, twice, and what notes the calls that are checked."""
    inputs = [(rows(6, WIDTH), rows(WIDTH)) for _ in range(2)]
    if function is rms_norm_backward:
        inputs = [(x, rows(6, WIDTH), w, rms_norm_forward(x, w, backend="cutile")[1]) for x, w in inputs]
    name = "checked_backward" if function is rms_norm_backward else "checked_forward"
    checked, check = [], getattr(checks, name)
    monkeypatch.setattr(checks, name, lambda *a, **k: checked.append(a) or check(*a, **k))
    return *inputs, checked


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (rms_norm_forward, FORWARD_OPTIONS),
        (rms_norm_forward, SUM_OPTIONS),
        (rms_norm_backward, BACKWARD_OPTIONS),
    ],
)
def test_calls_without_autograd_are_known(function, options, monkeypatch):
    """With the bits of calls that passed all checks, on other tensors, and by each option."""
    one, other, checked = _in_parts(function, monkeypatch)
    usual = {name: values[0] for name, values in options.items()}
    kinds = [usual, *(usual | {name: values[1]} for name, values in options.items())]
    for kind in kinds:
        function(*one, **kind, backend="cutile")
    checked.clear()
    found = [function(*other, **kind, backend="cutile") for kind in kinds]
    assert not checked
    for kind, known in zip(kinds, found, strict=True):
        known_calls.forget()
        assert_same_bits(known, function(*other, **kind, backend="cutile"))


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("function", [rms_norm_forward, rms_norm_backward])
def test_known_calls_without_autograd_record_nothing(function, needs_grad, monkeypatch):
    one, _, checked = _in_parts(function, monkeypatch)
    given = [each.requires_grad_(needs_grad) for each in one]
    for _ in range(3):
        assert not any(each.requires_grad for each in function(*given, backend="cutile"))
    assert len(checked) == 1


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize(
    "change",
    [
        {"rstd": None},
        {"rstd": rows(5, dtype=torch.float32)},
        {"dy": rows(6, WIDTH + 8)},
        {"weight": rows(WIDTH + 8)},
        {"offset": True},
        {"needs_db": 0},
        {"casting": "gemma"},
        {"dw_dtype": "float32"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_known_backward_refuses_what_an_unknown_one_refuses(change, monkeypatch):
    (x, dy, weight, rstd), _, _ = _in_parts(rms_norm_backward, monkeypatch)
    given = {"x": x, "dy": dy, "weight": weight, "rstd": rstd, "backend": "cutile"}
    for _ in range(2):
        rms_norm_backward(**given)
    with pytest.raises((TypeError, ValueError)):
        rms_norm_backward(**given | change)
