# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`accumulate_main_grad`: gradients are not lost where something else asks for them or gives the weight one, and calls
that cannot add raise before anything is added."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32, FP64, settle_interpreters
from main_grads import N, assert_added, exact_dw, norm_of, rows, two_uses
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.tensor import distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import RMSNorm, accumulate_main_grad
from tilegym_rmsnorm.ops.norm import eager
from tilegym_rmsnorm.routes import main_grad

pytestmark = pytest.mark.usefixtures("marks_end")


def shared_memory(weight):
    weight.data = torch.zeros(2 * N, device=DEVICE)[:N]
    return torch.as_strided(weight.data, (N,), (1,), N // 2)


WRONG = {
    "float64": (
        lambda w: torch.zeros(N, dtype=FP64, device=DEVICE),
        TypeError,
        "torch.float32, got torch.float64",
    ),
    "weight's dtype": (lambda w: torch.zeros(N, dtype=BF16, device=DEVICE), TypeError, "torch.float32, got"),
    "no tensor": (lambda w: [0.0] * N, TypeError, "a torch.Tensor, got list"),
    "shape": (
        lambda w: torch.zeros(1, N, device=DEVICE),
        ValueError,
        r"shape of the weight, \(48,\), got \(1, 48\)",
    ),
    "size": (lambda w: torch.zeros(N + 1, device=DEVICE), ValueError, r"got \(49,\)"),
    "device": (lambda w: torch.zeros(N, device="meta"), ValueError, "device of the weight, .*, got meta"),
    "strides": (lambda w: torch.zeros(2 * N, device=DEVICE)[::2], ValueError, "contiguous memory"),
    "sparse": (lambda w: torch.zeros(N, device=DEVICE).to_sparse(), ValueError, "contiguous memory"),
    "grad": (lambda w: torch.zeros(N, device=DEVICE, requires_grad=True), ValueError, "requires_grad=False"),
    "weight's memory": (shared_memory, ValueError, "memory of its own, got memory of the weight"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("is_kernel", [True, False])
def test_a_wrong_main_grad_raises_before_a_launch(what, is_kernel, monkeypatch):
    make, error, text = WRONG[what]
    norm = norm_of(dtype=FP32 if what == "weight's memory" else BF16)
    norm.weight.main_grad = make(norm.weight)
    x = rows(4, N).requires_grad_()
    if is_kernel:
        y = norm(x)
        monkeypatch.setattr(eager.passes, "bind_backward", None)
    else:
        with FlopCounterMode(display=False):
            y = norm(x)
    with pytest.raises(error, match=f"main_grad of a weight .*: expected .*{text}"):
        y.sum().backward()
    if isinstance(norm.weight.main_grad, Tensor) and norm.weight.main_grad.is_cpu and what != "sparse":
        assert not norm.weight.main_grad.any()


def test_a_main_grad_that_backends_would_copy_raises():
    """Of one element: PyTorch calls it contiguous with any stride."""
    norm = norm_of(1)
    norm.weight.main_grad = torch.zeros(5, device=DEVICE)[::5]
    with pytest.raises(ValueError, match=r"main_grad of .*: expected contiguous memory, got .*\(5,\)"):
        norm(rows(7, 1)).sum().backward()


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("order", ["added alone", "ordinary alone", "both", "both, the other way"])
def test_megatrons_hook_gets_all_that_reaches_a_weight(order, zero_out):
    """It runs once in each backward, adds `.grad` where the flag is False or zero_out_wgrad is True, and drops it. The
    flag stays True for all microbatches."""
    norm = norm_of(dtype=FP32, flag=True)
    weight, x = norm.weight, rows(5, N, dtype=FP32)
    weight.zero_out_wgrad = zero_out
    seen, before, wanted = [], weight.main_grad.clone(), []

    def hook(*_):
        seen.append(weight.grad_added_to_main_grad)
        if weight.grad is not None and (not weight.grad_added_to_main_grad or zero_out):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(hook)
    for microbatch in range(3):
        parts = {"added": norm(x), "ordinary": F.rms_norm(x, (N,), weight, 1e-5)}
        chosen = list(parts) if "both" in order else [order.split()[0]]
        if microbatch == 1:
            chosen = ["added"]  # the flag is True from here on
        if "other way" in order:
            chosen.reverse()
        total = sum(parts[each].square().sum() for each in chosen)
        exact = weight.detach().double().requires_grad_()
        (F.rms_norm(x.double(), (N,), exact, 1e-5).square().sum() * len(chosen)).backward()
        total.backward()
        wanted.append(exact.grad)
    assert len(seen) == 3 and seen[1:] == [True, True]
    assert_added(weight.main_grad, before, wanted, 100)


def test_ordinary_gradients_reach_grad_where_no_trainer_drops_it():
    norm = norm_of(dtype=FP32)
    x, before = rows(5, N, dtype=FP32), norm.weight.main_grad.clone()
    (norm(x).sum() + (norm.weight * 3).sum()).backward()
    assert torch.equal(norm.weight.grad, torch.full_like(norm.weight, 3))
    assert_added(norm.weight.main_grad, before, [exact_dw(x, torch.ones_like(x))], 5)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("way", ["plain", "dispatch mode"])
def test_autograd_grad_returns_it_and_adds_nothing(way, create_graph, flag):
    norm = norm_of(dtype=FP32, flag=flag)
    norm(rows(2, N, dtype=FP32)).sum().backward()  # the flag is True, and its hook is there
    before, x = norm.weight.main_grad.clone(), rows(5, N, dtype=FP32).requires_grad_()
    dx, dw = torch.autograd.grad(
        two_uses(norm, way, x).square().sum(), (x, norm.weight), create_graph=create_graph
    )
    exact = copy.deepcopy(norm).double()
    exact(exact(x.detach().double())).square().sum().backward()
    torch.testing.assert_close(dw.double(), exact.weight.grad, rtol=1e-4, atol=1e-4)
    assert dw.requires_grad == create_graph
    torch.autograd.grad(two_uses(norm, way, x).square().sum(), x)
    two_uses(norm, way, x).square().sum().backward(inputs=[x])
    assert torch.equal(norm.weight.main_grad, before)
    two_uses(norm, way, x).square().sum().backward(inputs=[norm.weight])
    assert not torch.equal(norm.weight.main_grad, before)


def test_second_derivatives_raise_before_anything_is_added():
    norm = norm_of(dtype=FP32)
    before, x = norm.weight.main_grad.clone(), rows(5, N, dtype=FP32).requires_grad_()
    with pytest.raises(RuntimeError, match="main_grad of .*: expected a backward without create_graph"):
        norm(x).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="main_grad of .*: expected a backward without create_graph"):
        with FlopCounterMode(display=False):
            norm(x).square().sum().backward(create_graph=True)
    assert torch.equal(norm.weight.main_grad, before) and norm.weight.grad is None


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_autograd_raises():
    """The hook that adds what else reaches the weight would not run in it."""
    norm = norm_of(dtype=FP32, flag=True)
    before, loss = norm.weight.main_grad.clone(), norm(rows(5, N, dtype=FP32)).sum() + norm.weight.sum()
    with pytest.raises(RuntimeError, match="main_grad of .*: expected a backward without compiled autograd"):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    assert torch.equal(norm.weight.main_grad, before)


def test_hooks_of_the_weight_raise():
    """They would see zeros, or nothing: one that clips changed no gradient."""
    norm = norm_of()
    norm.weight.register_hook(lambda gradient: gradient / 2)
    before = norm.weight.main_grad.clone()
    with pytest.raises(RuntimeError, match="main_grad of .*: expected no hook"):
        norm(rows(5, N)).sum().backward()
    assert torch.equal(norm.weight.main_grad, before)


TRANSFORMS = {
    "grad": lambda norm, x: torch.func.grad(lambda x: norm(x).sum())(x),
    "vmap": lambda norm, x: torch.func.vmap(norm)(x),
    "forward mode": lambda norm, x: torch.func.jvp(norm, (x,), (x,)),
    "make_fx": lambda norm, x: torch.fx.experimental.proxy_tensor.make_fx(norm)(x),
    "jit.trace": lambda norm, x: torch.jit.trace(norm, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_raise(name):
    norm = norm_of()
    with pytest.raises(RuntimeError, match="accumulate_main_grad: expected an eager call"):
        TRANSFORMS[name](norm, rows(4, N))
    accumulate_main_grad(norm, False)
    TRANSFORMS[name](norm, rows(4, N))


def test_without_grad_marks_count_for_nothing():
    norm = norm_of()
    x = rows(4, N)
    with torch.no_grad():
        y = norm(x)
        torch.testing.assert_close(torch.func.vmap(norm)(x), y)
    norm.weight.requires_grad_(False)
    norm(x.requires_grad_()).sum().backward()
    assert x.grad is not None and norm.weight.grad is None


@pytest.mark.parametrize("way", ["plain", "dispatch mode"])
def test_a_weight_that_is_frozen_before_the_backward_gets_nothing(way):
    """As from PyTorch's operations."""
    norm = norm_of()
    before, x = norm.weight.main_grad.clone(), rows(4, N).requires_grad_()
    y = two_uses(norm, way, x)
    norm.weight.requires_grad_(False)
    y.sum().backward()
    assert x.grad is not None and norm.weight.grad is None and torch.equal(norm.weight.main_grad, before)


@pytest.mark.parametrize("flag", [False, True])
def test_nothing_keeps_a_weight(flag, monkeypatch):
    settle_interpreters(monkeypatch)
    norm = norm_of(flag=flag)
    for _ in range(2):
        norm(rows(5, N)).sum().backward()
    kept = weakref.ref(norm.weight), weakref.ref(norm.weight.main_grad)
    del norm
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_arguments():
    with pytest.raises(TypeError, match="module: expected a torch.nn.Module, got Parameter"):
        accumulate_main_grad(RMSNorm(N).weight)
    with pytest.raises(TypeError, match="enabled: expected a bool"):
        accumulate_main_grad(RMSNorm(N), 1)
    without = RMSNorm(N, elementwise_affine=False), nn.RMSNorm(N)  # a model may hope that its norms add
    for module in without:
        with pytest.raises(
            ValueError, match="module: expected weights of norms of this package .*, got none"
        ):
            accumulate_main_grad(module)
    assert accumulate_main_grad(nn.Sequential(*without), False) == 0
    assert accumulate_main_grad(nn.Sequential(norm := RMSNorm(N), norm)) == 1


def test_a_torch_that_cannot_tell_refuses_the_mark(monkeypatch):
    monkeypatch.setattr(main_grad, "IS_SUPPORTED", False)
    norm = RMSNorm(N)
    with pytest.raises(RuntimeError, match="accumulate_main_grad: expected torch 2.9 to 2.14, got"):
        accumulate_main_grad(norm)
    assert not main_grad.is_marked(norm.weight) and not main_grad.IN_USE


def test_dtensors_are_refused(mesh):
    """Nothing is marked then."""
    first, second = RMSNorm(N), RMSNorm(N)
    second.weight = nn.Parameter(distribute_tensor(second.weight.detach(), mesh))
    with pytest.raises(TypeError, match="weight: expected a plain parameter, got DTensor"):
        accumulate_main_grad(nn.Sequential(first, second))
    assert not main_grad.IN_USE and not main_grad.is_marked(first.weight)
