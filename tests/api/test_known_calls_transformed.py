# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Known calls under autograd, torch.func and torch.compile, and under every way to choose a backend."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, settle_interpreters
from known_calls import N, W, X, call, make_known
from torch.nn import Parameter

from tilegym_rmsnorm import BackendUnavailableError, RMSNorm, rms_norm, set_backend, settings, use_backend
from tilegym_rmsnorm.backends import registry


def test_gradients_may_be_wanted_later_and_no_longer(checks):
    make_known(checks)
    x, weight = X.clone().requires_grad_(), Parameter(W)
    ops_first = call(input=x, weight=weight)
    assert len(checks) == 1, "the backward's implementation was not chosen yet, and nothing was recorded"
    checks.clear()
    y = call(input=x, weight=weight)
    assert not checks and torch.equal(y, ops_first)
    dy = torch.randn(3, N)
    again = torch.autograd.grad(y, (x, weight), dy)
    expected = torch.autograd.grad(ops_first, (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))

    assert call(input=X, weight=weight).requires_grad and not call(input=X, weight=W).requires_grad
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert not call(input=x, weight=weight).requires_grad
    x.requires_grad_(False)
    weight.requires_grad_(False)
    assert not call(input=x, weight=weight).requires_grad


def test_a_parameter_replaced_in_a_module_by_one_of_another_dtype(checks):
    module = RMSNorm(N, eps=1e-6, backend="torch")
    for _ in range(2):
        module(X)
    module.weight = Parameter(torch.rand(N, dtype=torch.float64))
    checks.clear()
    y = module(X)
    assert len(checks) == 1 and torch.equal(y, rms_norm(X, (N,), module.weight, 1e-6, backend="torch"))
    module.double()
    assert module(X.double()).dtype == torch.float64


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_known_call_is_traced(checks):
    """Its y was a constant of the trace."""
    make_known(checks)
    traced = torch.jit.trace(lambda x: call(input=x) * 2.0, (X,))
    x = torch.randn(7, N)
    torch.testing.assert_close(traced(x), 2.0 * F.rms_norm(x, (N,), W, 1e-6))


@pytest.mark.parametrize("size", [(3, N), (2, 3, N)])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_tensor_that_outlived_its_transform(size, needs_grad, checks):
    """A wrapper around nothing is unwrapped by Function.apply, and by what stands in for it."""
    x, weight, outlived = torch.randn(size), W.clone().requires_grad_(needs_grad), []
    torch.func.grad(lambda t: (outlived.append(t), t.sum())[1])(x)
    make_known(checks, weight=weight)
    y = call(input=outlived[0], weight=weight)
    assert torch.equal(y, call(input=x, weight=weight)) and y.requires_grad == needs_grad
    if needs_grad:
        grads = [torch.autograd.grad(call(input=t, weight=weight).sum(), weight)[0] for t in (outlived[0], x)]
        assert torch.equal(*grads)


class Probe:
    IMPLEMENTATION = "tilegym_rmsnorm.backends"

    def unusable(self, request):
        return None


@pytest.fixture
def two_backends(monkeypatch):
    """ "triton" and "torch", replaced: y is all 1 or all 2."""

    def forward(value):
        return lambda spec, tensors: (
            torch.full_like(tensors[0], value),
            tensors[0].new_ones(len(tensors[0])),
            None,
        )

    monkeypatch.setattr(registry, "_probe", lambda name: Probe())
    settle_interpreters(monkeypatch)
    values = {"cutile": 0.0, "triton": 1.0, "torch": 2.0}
    impls = {("rms_norm_forward", name): forward(value) for name, value in values.items()}
    impls |= {("rms_norm_backward", name): lambda *_: pytest.fail("not called") for name in values}
    monkeypatch.setattr(registry, "_impls", impls)
    return lambda **arguments: {value: name for name, value in values.items()}[call(**arguments)[0, 0].item()]


def test_every_way_to_choose_a_backend_reaches_a_known_call(two_backends, monkeypatch, checks):
    ran = two_backends
    for name in ("triton", "torch", "auto", None):
        make_known(checks, backend=name)
    assert ran(backend="triton") == "triton" and ran(backend="torch") == "torch"
    assert ran(backend=None) == ran(backend="auto") == "cutile"

    monkeypatch.setenv(settings.BACKEND_VARIABLE, "triton")
    assert ran(backend=None) == "triton"
    set_backend("torch")
    assert ran(backend=None) == "torch"
    with use_backend("triton"):
        assert ran(backend=None) == "triton"
        assert ran(backend="torch") == "torch"
    assert ran(backend=None) == "torch"
    set_backend(None)
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "torch")
    assert ran(backend=None) == "torch"
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="TILEGYM_RMSNORM_BACKEND: expected one of"):
        call(backend=None)
    monkeypatch.delenv(settings.BACKEND_VARIABLE)
    assert ran(backend=None) == "cutile"
    assert not [x for x in checks if x is not X]


def test_an_environment_without_its_private_dictionary_is_read_too(two_backends, monkeypatch):
    monkeypatch.setattr(settings.os, "environ", {settings.BACKEND_VARIABLE: "triton"})
    assert two_backends(backend=None) == "triton"
    monkeypatch.setattr(settings.os, "environ", {})
    assert two_backends(backend=None) == "cutile"


def test_a_backend_that_the_environment_may_take_back_is_never_known(monkeypatch, checks):
    """cutile runs CPU tensors only while its variable says so."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
    for _ in range(2):
        call(backend="cutile")
    assert len(checks) == 2
    monkeypatch.delenv("TILEGYM_RMSNORM_INTERPRET")
    with pytest.raises(BackendUnavailableError):
        call(backend="cutile")


def test_autocast_is_another_call(checks):
    x, weight = X.to(DEVICE, torch.bfloat16), W.to(DEVICE, torch.bfloat16)
    make_known(checks, input=x, weight=weight)
    with torch.autocast(DEVICE.type):
        y, expected = call(input=x, weight=weight), F.rms_norm(x, (N,), weight, 1e-6)
    assert y.dtype == expected.dtype and len(checks) == 1
    assert call(input=x, weight=weight).dtype == torch.bfloat16 and len(checks) == 1
