# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rms_norm under autograd: which gradients, from which backend, once and twice."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32, FP64, assert_within, expected_results, make_inputs
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import rms_norm, rms_norm_backward, rms_norm_forward, use_backend
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.registry import Request, dispatch
from tilegym_rmsnorm.ops.norm import eager

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture
def calls(monkeypatch):
    """Each call of an implementation: (function, its arguments)."""
    seen = []

    def recording(op, request, backend=None):
        function = dispatch(op, request, backend)

        def call(*args):
            seen.append((function, args))
            return function(*args)

        return call

    monkeypatch.setattr(registry, "dispatch", recording)
    return seen


def _leaves(dtype=BF16, weight_dtype=FP32):
    inputs = make_inputs(13, 100, dtype, weight_dtype)
    return inputs, inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()


@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_are_those_of_the_backward_function(backend, casting, offset):
    inputs, x, weight = _leaves()
    options = {"offset": offset, "casting": casting, "backend": backend}
    y = rms_norm(x, (100,), weight, 1e-3, **options)
    y.backward(inputs.dy)
    expected, rstd = rms_norm_forward(x, weight, 1e-3, **options)
    dx, dw = rms_norm_backward(x, inputs.dy, weight, rstd, **options)
    assert torch.equal(y, expected) and torch.equal(x.grad, dx) and torch.equal(weight.grad, dw)
    assert y.requires_grad and not any(t.requires_grad for t in (expected, rstd, dx, dw))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_only_needed_gradients(backend, needs, calls):
    inputs, x, weight = _leaves()
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    rms_norm(x, (100,), weight, 1e-3, backend=backend).backward(inputs.dy)
    assert (x.grad is not None, weight.grad is not None) == needs
    assert len(calls) == 2 and (calls[-1][1][-1].dw is not None) == needs[1]
    grads = {"dx": x.grad, "dw": weight.grad}
    assert_within(
        expected_results(inputs), **{name: grad for name, grad in grads.items() if grad is not None}
    )


def test_no_graph_where_nobody_asks(backend, monkeypatch):
    inputs, x, weight = _leaves()
    monkeypatch.setattr(eager, "_record", lambda *_: pytest.fail("recorded for autograd"))
    with torch.no_grad():
        assert not rms_norm(x, (100,), weight, backend=backend).requires_grad
    assert not rms_norm(inputs.x, (100,), inputs.weight, backend=backend).requires_grad


@pytest.mark.parametrize("has_residual", [False, True])
def test_halves_of_a_backward_have_the_bits_of_the_whole(backend, has_residual):
    """Pipelines take the gradients of inputs first, those of weights later."""
    inputs, x, weight = _leaves()
    bias = torch.zeros_like(weight, requires_grad=True)
    residual = x.detach().sin().requires_grad_() if has_residual else None
    y = rms_norm(x, (100,), weight, 1e-3, bias=bias, residual=residual, backend=backend)
    y = y[0] if has_residual else y
    of_inputs, of_weights = (x, residual)[: 1 + has_residual], (weight, bias)
    whole = torch.autograd.grad(y, (*of_inputs, *of_weights), inputs.dy, retain_graph=True)
    first = torch.autograd.grad(y, of_inputs, inputs.dy, retain_graph=True)
    later = torch.autograd.grad(y, of_weights, inputs.dy)
    assert all(torch.equal(a, b) for a, b in zip((*first, *later), whole, strict=True))


@pytest.mark.parametrize("size", [(6, 64), (2, 3, 64), (64,)])
def test_in_place_operations_on_the_output(backend, size):
    x = torch.randn(size, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad((2 * rms_norm(x, (64,), backend=backend)).sum(), x)[0]
    y = rms_norm(x, (64,), backend=backend)
    y.mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_an_input_changed_before_the_backward_is_an_error(backend):
    _, x, weight = _leaves()
    held = x * 1
    y = rms_norm(held, (100,), weight, backend=backend)
    held.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_backward_runs_on_the_forwards_backend(calls, monkeypatch):
    inputs, x, weight = _leaves(FP32)
    with use_backend("torch"):
        y = rms_norm(x, (100,), weight)
    monkeypatch.setattr(registry, "dispatch", lambda *_: pytest.fail("chosen again"))
    with use_backend("cutile"):
        y.backward(inputs.dy)
    request = Request(x.device, FP32, FP32, "once")
    expected = [dispatch(op, request, "torch") for op in ("rms_norm_forward", "rms_norm_backward")]
    assert [function for function, _ in calls] == expected


def test_a_tangent_that_reaches_the_backward_through_dy_alone(backend):
    """Forward mode over reverse mode, of what comes behind the norm: the tangent was lost."""
    inputs, x, weight = _leaves(FP32, FP32)

    def tangent_of(norm):
        with forward_ad.dual_level():
            scale = forward_ad.make_dual(torch.ones((), device=DEVICE), torch.ones((), device=DEVICE))
            loss = (norm(x, (100,), weight, 1e-3) * scale).square().sum()
            return [forward_ad.unpack_dual(each).tangent for each in torch.autograd.grad(loss, (x, weight))]

    # F.rms_norm's own backward has no forward mode on GPUs before torch 2.13.
    def formula(x, shape, weight, eps):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight

    got = tangent_of(functools.partial(rms_norm, backend=backend))
    torch.testing.assert_close(got, tangent_of(formula), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="autocast of CPU tensors")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_cpu_autocast_changes_nothing_as_in_aten(dtype, backend):
    inputs, x, weight = _leaves(dtype, dtype)
    expected = rms_norm(x, (100,), weight, 1e-3, backend=backend)
    with torch.autocast("cpu", BF16):
        y = rms_norm(x, (100,), weight, 1e-3, backend=backend)
        assert y.dtype == F.rms_norm(x, (100,), weight, 1e-3).dtype
    y.backward(inputs.dy)
    assert torch.equal(y, expected) and x.grad.dtype == dtype


def test_inside_torch_compile(backend):
    """The op is called as it is, in a break of the graph; Dynamo would trace into the caches of a launch, or fail."""
    inputs, x, weight = _leaves()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a: rms_norm(a * 1, (100,), weight, 1e-3, backend=backend) * 1, backend="eager"
    )
    y = compiled(x)
    dx, dw = torch.autograd.grad(y, (x, weight), inputs.dy)
    expected = rms_norm(x, (100,), weight, 1e-3, backend=backend)
    expected_dx, expected_dw = torch.autograd.grad(expected, (x, weight), inputs.dy)
    assert torch.equal(y, expected)
    if backend != "torch" or TorchVersion(torch.__version__) >= "2.13":
        assert torch.equal(dx, expected_dx) and torch.equal(dw, expected_dw)
    assert_within(expected_results(inputs), y=y.detach(), dx=dx, dw=dw)


def test_rows_inside_torch_compile(backend):
    inputs = make_inputs(13, 100)
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def both(x, dy, weight):
        y, rstd = rms_norm_forward(x * 1, weight, 1e-3, backend=backend)
        return y, rstd, *rms_norm_backward(x * 1, dy, weight, rstd, backend=backend)

    results = dict(zip(("y", "rstd", "dx", "dw"), both(*inputs[:3]), strict=True))
    assert_within(expected_results(inputs), **results)


def test_the_reference_by_name_does_not_break_a_graph(monkeypatch):
    """A process's first call, before anything is chosen, breaks none either."""
    monkeypatch.setattr(registry, "_chosen", {})
    x, weight = torch.randn(2, 3, 100, requires_grad=True), torch.rand(100, requires_grad=True)
    torch._dynamo.reset()
    norm = torch.compile(rms_norm, backend="eager", fullgraph=True)
    y, expected = (run(x, (100,), weight, backend="torch") for run in (norm, rms_norm))
    assert torch.equal(y, expected) and y.requires_grad


def test_no_graph_is_compiled_again_for_other_calls():
    """Dynamo guards on all that a call reads: caches that grow by each new dtype must not be among it."""
    frames = CompileCounter()
    torch._dynamo.reset()
    norm = torch.compile(
        lambda x, weight: rms_norm(x, (8,), weight, backend="torch"), backend=frames, fullgraph=True
    )
    x, weight = torch.randn(3, 8, requires_grad=True), torch.rand(8)
    for dtype in (None, FP64, BF16, torch.float16):
        if dtype is not None:
            rms_norm(x.to(dtype), (8,), weight.to(dtype), backend="torch")
        norm(x, weight)
    assert frames.frame_count == 1
