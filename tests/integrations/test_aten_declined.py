# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""override_aten: calls that no kernel takes run as they did before."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from aten_cases import MARKS, fused, fused_backward, norm_of, overridden, taken
from helpers import BF16, DEVICE, FP64, HAS_GPU

from tilegym_rmsnorm import set_backend, use_backend
from tilegym_rmsnorm.integrations import aten
from tilegym_rmsnorm.integrations.aten import ATEN_BACKWARD, ATEN_FORWARD, TAKEN

pytestmark = MARKS


def declined(reason: str):
    x, weight, ones = (t.detach() for t in (norm_of(3, 16), norm_of(16), torch.ones(3, 1, device=DEVICE)))
    other = torch.randn(3, 16, device=DEVICE).as_subclass(type("Named", (torch.Tensor,), {}))
    lazy = torch._lazy_clone(norm_of(3, 16).detach())
    return {
        "float64": ("dtype", x.double(), weight.double(), x.double(), ones.double()),
        "no rows": ("memory", x[:0], weight, x[:0], ones[:0]),
        "no columns": ("memory", x[:, :0], weight[:0], x[:, :0], ones),
        "a subclass": ("memory", other, weight, x, ones),
        "shared until it is written": ("memory", lazy, weight, x, ones),
        "short weight": ("shape", x, weight[:1], x, ones),
    }[reason]


REASONS = ["float64", "no rows", "a subclass", "shared until it is written", "short weight"]
REASONS[:0] = [] if HAS_GPU else ["no columns"]


def test_gradients_that_no_kernel_takes():
    x, rstd = norm_of(3, 16).detach(), torch.ones(3, 1, device=DEVICE)
    lazy = torch._lazy_clone(norm_of(3, 16).detach())
    gradients = {
        "dtype": [(x.double(), rstd), (x, rstd.half())],
        "shape": [(x[:1], rstd), (x, rstd[:1])],
        "memory": [
            (lazy, rstd),
            (x, torch._lazy_clone(rstd.clone())),
            (x.as_subclass(type("Named", (torch.Tensor,), {})), rstd),
        ],
    }
    if HAS_GPU:
        gradients["shape"] += [(x.cpu(), rstd), (x, rstd.cpu())]
    with overridden() as override:  # it is asked alone: PyTorch's kernels do not look at what they are given

        def why(dy, rstd):
            at_once = override._patch._reason_at_once(x, None, dy, rstd)
            return at_once or override._patch._implementation("rms_norm_backward", x, [16], None, dy, rstd)

        assert not isinstance(why(x, rstd), str)
        for reason, several in gradients.items():
            assert [why(dy, each) for dy, each in several] == [reason] * len(several)
    assert torch._C._is_cow_tensor(lazy)  # nobody asked for its address


def outcome(function, *arguments):
    """Return a call's result, or its error's type."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("reason", REASONS)
def test_a_declined_forward_is_as_before(reason):
    category, x, weight, _, _ = declined(reason)
    arguments = x, x.shape[1:], weight, None
    theirs = outcome(fused, *arguments)
    with overridden() as override:
        ours = outcome(fused, *arguments)
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, category: 1}
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert not reason.startswith("shared") or torch._C._is_cow_tensor(x)  # nobody asked for its address


@pytest.mark.parametrize("reason", REASONS[:-1])
def test_a_declined_backward_is_as_before(reason):
    category, x, weight, dy, rstd = declined(reason)
    arguments = dy, x, x.shape[1:], rstd, weight, (True, True)
    with overridden() as override:
        ours = outcome(fused_backward, *arguments)
        assert override.stats[ATEN_BACKWARD] == {TAKEN: 0, category: 1}
    if HAS_GPU:
        theirs = outcome(fused_backward, *arguments)
    else:
        theirs = aten._backward_by_operations(*arguments)
        if x.numel():
            xhat = x.double() * rstd
            torch.testing.assert_close(theirs[1].double(), (dy.double() * xhat).sum(0), rtol=1e-5, atol=1e-5)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("eps", [-1e-3, float("inf"), float("nan")])
def test_an_eps_that_no_kernel_takes(eps):
    x = norm_of(3, 16, requires_grad=False)
    theirs = F.rms_norm(x, (16,), None, eps)
    with overridden() as override:
        torch.testing.assert_close(F.rms_norm(x, (16,), None, eps), theirs, equal_nan=True)
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "eps": 1}


def test_the_backend_in_effect_counts():
    x = norm_of(3, 16, requires_grad=False)
    with overridden() as override:
        with use_backend("torch"):
            F.rms_norm(x, (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "backend": 1}
        set_backend("torch")
        F.rms_norm(x, (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "backend": 2}
        set_backend(None)
        F.rms_norm(x, (16,))
        assert taken(override) == (int(HAS_GPU), 0)  # "auto" takes no interpreter


def test_a_backend_that_cannot_run_declines(monkeypatch):
    monkeypatch.setattr(aten, "why_unusable", lambda name, request: "it is not installed")
    with overridden() as override:
        F.rms_norm(norm_of(3, 16), (16,)).sum().backward()
        assert override.stats == {
            ATEN_FORWARD: {TAKEN: 0, "backend": 1},
            ATEN_BACKWARD: {TAKEN: 0, "backend": 1},
        }


def test_what_is_declined_by_its_dtype_is_asked_nothing_else(monkeypatch):
    """So that it costs little."""
    for name in ("is_plain", "_is_copied_on_write", "get_current_backend", "_implementation"):
        monkeypatch.setattr(aten, name, None)
    with overridden() as override:
        F.rms_norm(norm_of(3, 16, dtype=FP64, requires_grad=False), (16,))
        assert override.stats[ATEN_FORWARD] == {TAKEN: 0, "dtype": 1}


def test_other_dtypes_of_weight_never_reach_the_op():
    x, weight = norm_of(3, 16, dtype=BF16), norm_of(16)
    with warnings.catch_warnings(), overridden() as override:
        warnings.simplefilter("ignore")  # F.rms_norm says so itself
        F.rms_norm(x, (16,), weight).float().sum().backward()
        assert override.stats == {ATEN_FORWARD: {TAKEN: 0}, ATEN_BACKWARD: {TAKEN: 0}}
