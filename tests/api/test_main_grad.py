# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`accumulate_main_grad`: dw goes to a float32 main_grad, once for each use of the weight, and nowhere else. Calls that
cannot add it raise before anything is added."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import BACKENDS, BF16, DEVICE, FP32, FP64, settle_interpreters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import (
    RMSNorm,
    accumulate_main_grad,
    patch_model,
    qk_norm_rope,
    rms_norm_backward,
    rms_norm_forward,
)
from tilegym_rmsnorm.integrations.liger import LigerRMSNorm
from tilegym_rmsnorm.ops.norm import eager
from tilegym_rmsnorm.routes import main_grad

N = 48


@pytest.fixture(autouse=True)
def in_use_here_alone():
    yield
    main_grad.IN_USE.clear()


def norm_of(n=N, dtype=BF16, main=True, flag=False, **options):
    """A norm that adds, with random weights and a main_grad that holds something."""
    norm = RMSNorm(n, 1e-5, device=DEVICE, dtype=dtype, **options)
    nn.init.normal_(norm.weight)
    assert accumulate_main_grad(norm) == 1
    if main:
        norm.weight.main_grad = torch.randn(norm.weight.shape, device=DEVICE)
    if flag:
        norm.weight.grad_added_to_main_grad = False
    return norm


def rows(*shape, dtype=BF16):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def exact_dw(x, dy, heads=False):
    x, dy = x.detach().double(), dy.double()
    terms = dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return terms.flatten(0, -3 if heads else -2).sum(0)


def assert_added(found: Tensor, before: Tensor, dws: list[Tensor], terms: int) -> None:
    """Compare with float64. terms: how many products each sum has."""
    wanted = before.double() + sum(dws)
    assert found.dtype == FP32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * terms)


FORMS = {
    "plain": {},
    "float32": {"dtype": FP32},
    "float64": {"dtype": FP64},
    "7 columns": {"n": 7},
    "offset, llama": {"offset": 1.0, "casting": "llama", "dtype": FP32},
    "bias": {"bias": True},
    "residual": {"residual": True},
    "residual, bias, alpha": {"residual": True, "bias": True, "residual_alpha": 0.5, "residual_dtype": FP32},
    "heads": {"heads": 3},
    "heads, residual, bias": {"heads": 3, "residual": True, "bias": True},
}


@pytest.mark.parametrize("m", [1, 37])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_microbatches(backend, form, m):
    """Compare three backwards with float64, and with float32 dw added in order: bit for bit. All other gradients have
    the bits of a norm that adds nothing."""
    options = {"backend": backend, **FORMS[form]}
    has_residual = options.pop("residual", False)
    if options.get("dtype") is FP64 and backend != "torch":
        pytest.skip("only the reference takes float64")
    norm = norm_of(**options)
    other = copy.deepcopy(norm)
    assert not hasattr(other.weight, main_grad.MARK)
    dtype, heads = norm.weight.dtype, norm.heads
    shape = (m, heads, norm.normalized_shape[0]) if heads else (m, norm.normalized_shape[0])
    before = norm.weight.main_grad.clone()
    in_order, exact = before.clone(), []
    for _ in range(3):
        residual = (rows(*shape),) if has_residual else ()
        inputs = [each.requires_grad_() for each in (rows(*shape, dtype=dtype), *residual)]
        others = [each.detach().clone().requires_grad_() for each in inputs]
        y, normalized = norm(*inputs) if has_residual else (norm(*inputs), inputs[0])
        dy = torch.randn_like(y)
        y.backward(dy)
        assert norm.weight.grad is None
        z = other(*others)
        (z[0] if has_residual else z).backward(dy)
        assert all(torch.equal(one.grad, two.grad) for one, two in zip(inputs, others, strict=True))
        if "llama" not in form:
            exact.append(exact_dw(normalized, dy, bool(heads)))
        has_bias = getattr(norm, "bias", None) is not None  # it chooses another kernel
        call = {"offset": norm.offset, "casting": norm.casting, "backend": backend}
        x, weight = normalized.detach(), norm.weight.detach()
        rstd = rms_norm_forward(x, weight, 1e-5, **call)[-1]
        in_order += rms_norm_backward(x, dy, weight, rstd, dw_dtype=FP32, needs_db=has_bias, **call)[1]
    if has_bias:
        assert torch.equal(norm.bias.grad, other.bias.grad)
    assert torch.equal(norm.weight.main_grad, in_order)
    if exact:
        assert_added(norm.weight.main_grad, before, exact, 3 * m)


@pytest.mark.parametrize("form", ["plain", "residual, bias, alpha", "heads", "7 columns"])
@pytest.mark.parametrize("m", [1, 37])
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "torch"])
def test_the_sum_kernel_adds(backend, m, form, monkeypatch):
    """No operation of PyTorch's does."""
    options = {"backend": backend, **FORMS[form]}
    has_residual = options.pop("residual", False)
    norm = norm_of(**options)
    shape = (m, 3, N) if norm.heads else (m, norm.normalized_shape[0])
    y = norm(*(rows(*shape).requires_grad_() for _ in range(1 + has_residual)))
    y, before = y[0] if has_residual else y, norm.weight.main_grad.clone()
    monkeypatch.setattr(Tensor, "add_", None)
    y.sum().backward()
    assert not torch.equal(norm.weight.main_grad, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_known_calls_see_marks_and_main_grads(backend, monkeypatch):
    """A call like an earlier one sees that its weight was marked, or no longer is, and another main_grad."""
    settle_interpreters(monkeypatch)
    norm = norm_of(backend=backend)
    first = norm.weight.main_grad
    x, dy = rows(5, N), rows(5, N)
    exact = exact_dw(x, dy)

    def step():
        norm.weight.grad = None
        norm(x).backward(dy)
        return norm.weight.grad

    for _ in range(2):
        accumulate_main_grad(norm, False)
        for _ in range(2):
            first.zero_()
            assert step() is not None and not first.any()
        accumulate_main_grad(norm)
        for _ in range(2):
            first.zero_()
            assert step() is None
            assert_added(first, torch.zeros_like(first), [exact], 5)
        norm.weight.main_grad = second = torch.zeros(N, device=DEVICE)
        first.zero_()
        assert step() is None and not first.any()
        assert_added(second, torch.zeros_like(second), [exact], 5)
        norm.weight.main_grad = first


@pytest.mark.parametrize("has_attribute", [True, False])
def test_without_main_grad_the_gradient_is_ordinary(has_attribute):
    norm = norm_of(main=False)
    if has_attribute:
        norm.weight.main_grad = None
    y = norm(rows(4, N))
    y.sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == BF16


def test_main_grad_may_be_set_between_forward_and_backward():
    norm = norm_of(main=False)
    x, dy = rows(4, N), rows(4, N)
    y = norm(x)
    norm.weight.main_grad = torch.zeros(N, device=DEVICE)
    y.backward(dy)
    assert norm.weight.grad is None
    assert_added(norm.weight.main_grad, torch.zeros(N, device=DEVICE), [exact_dw(x, dy)], 4)


def test_a_mark_counts_as_the_forward_found_it():
    norm = norm_of()
    before = norm.weight.main_grad.clone()
    y = norm(rows(4, N))
    accumulate_main_grad(norm, False)
    y.sum().backward()
    assert norm.weight.grad is None and not torch.equal(norm.weight.main_grad, before)
    y = norm(rows(4, N))
    accumulate_main_grad(norm)
    before = norm.weight.main_grad.clone()
    y.sum().backward()
    assert norm.weight.grad is not None and torch.equal(norm.weight.main_grad, before)


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
    with pytest.raises(error, match=f"main_grad: expected .*{text}"):
        y.sum().backward()
    if isinstance(norm.weight.main_grad, Tensor) and norm.weight.main_grad.is_cpu and what != "sparse":
        assert not norm.weight.main_grad.any()


def uses(norm, way, x):
    """Two uses of a norm's weight, one behind the other."""
    if way == "plain":
        return norm(norm(x))
    if way == "residual":
        return norm(*norm(x, x))[0]
    if way == "dispatch mode":
        with FlopCounterMode(display=False):
            return norm(norm(x))
    return checkpoint(lambda x: norm(norm(x)), x, use_reentrant=way == "checkpoint, reentrant")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("way", ["plain", "residual", "dispatch mode", "checkpoint", "checkpoint, reentrant"])
def test_each_use_adds_once(way, flag):
    norm = norm_of(dtype=FP32, flag=flag)
    exact = copy.deepcopy(norm).double()
    before, x = norm.weight.main_grad.clone(), rows(5, N, dtype=FP32)
    for _ in range(2):
        uses(norm, way, x.clone().requires_grad_()).square().sum().backward()
        uses(exact, "residual" if way == "residual" else "plain", x.double()).square().sum().backward()
    assert_added(norm.weight.main_grad, before, [exact.weight.grad], 100)
    assert (norm.weight.grad is None) != flag
    if flag:
        assert norm.weight.grad_added_to_main_grad is True and not norm.weight.grad.any()


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
        uses(norm, way, x).square().sum(), (x, norm.weight), create_graph=create_graph
    )
    exact = copy.deepcopy(norm).double()
    exact(exact(x.detach().double())).square().sum().backward()
    torch.testing.assert_close(dw.double(), exact.weight.grad, rtol=1e-4, atol=1e-4)
    assert dw.requires_grad == create_graph
    torch.autograd.grad(uses(norm, way, x).square().sum(), x)
    uses(norm, way, x).square().sum().backward(inputs=[x])
    assert torch.equal(norm.weight.main_grad, before)


def test_second_derivatives_raise_before_anything_is_added():
    norm = norm_of(dtype=FP32)
    before, x = norm.weight.main_grad.clone(), rows(5, N, dtype=FP32).requires_grad_()
    with pytest.raises(RuntimeError, match="main_grad: expected a backward without create_graph"):
        norm(x).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="main_grad: expected a backward without create_graph"):
        with FlopCounterMode(display=False):
            norm(x).square().sum().backward(create_graph=True)
    assert torch.equal(norm.weight.main_grad, before) and norm.weight.grad is None


def test_hooks_of_the_weight_raise():
    """They would see zeros, or nothing: one that clips changed no gradient."""
    norm = norm_of()
    norm.weight.register_hook(lambda gradient: gradient / 2)
    before = norm.weight.main_grad.clone()
    with pytest.raises(RuntimeError, match="main_grad: expected a weight without hooks"):
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


@pytest.mark.parametrize("way", ["kernels", "a dispatch mode", "float64 x"])
def test_qk_norm_rope(way):
    """q and k may have one weight, and main_grads that lie behind each other in one buffer."""
    buffer = torch.zeros(2 * 16, device=DEVICE)
    norms = [norm_of(16, main=False) for _ in range(2)]
    for each, part in zip(norms, buffer.split(16), strict=True):
        each.weight.main_grad = part
    tables = [torch.randn(5, 16, device=DEVICE) for _ in range(2)]
    q, k = rows(2, 5, 3, 16, dtype=FP64 if "64" in way else BF16), rows(2, 5, 1, 16)
    k = k.to(q.dtype)
    tables = [each.to(q.dtype) if "64" in way else each for each in tables]
    for is_shared in (False, True):
        q_norm, k_norm = norms[0], norms[0 if is_shared else 1]
        buffer.zero_()
        with FlopCounterMode(display=False) if "mode" in way else torch.enable_grad():
            out = qk_norm_rope(q, k, q_norm.weight, k_norm.weight, *tables, eps=1e-5)
        dys = [torch.randn_like(each) for each in out]
        torch.autograd.backward(out, dys)
        assert q_norm.weight.grad is None and k_norm.weight.grad is None
        exact = [each.weight.detach().double().requires_grad_() for each in (q_norm, k_norm)]
        given = (each.double() for each in (q, k)), exact, (each.double() for each in tables)
        outs = qk_norm_rope(*given[0], *given[1], *given[2], eps=1e-5, backend="torch")
        torch.autograd.backward(outs, [each.double() for each in dys])
        first, second = (each.grad for each in exact)
        wanted = torch.cat([first + second, 0 * first] if is_shared else [first, second])
        torch.testing.assert_close(buffer.double(), wanted, rtol=1e-5, atol=1e-5)


def test_patched_norms_and_adapters():
    class LlamaNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(N, device=DEVICE)), 1e-5

        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    model = nn.ModuleList(
        [LlamaNorm(), LlamaNorm(), LigerRMSNorm(N).to(DEVICE), nn.RMSNorm(N), nn.Linear(2, 2)]
    )
    assert accumulate_main_grad(model) == 1
    patch_model(model[0])
    assert accumulate_main_grad(model) == 2
    assert [hasattr(each.weight, main_grad.MARK) for each in model] == [True, False, True, False, False]
    for norm in (model[0], model[2]):
        norm.weight.main_grad, x = torch.zeros(N, device=DEVICE), rows(6, N, dtype=FP32)
        for _ in range(2):
            norm(x).sum().backward()
        assert norm.weight.grad is None
        x64 = x.double()
        eps = 1e-5 if norm is model[0] else 1e-6
        exact = (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)).sum(0)
        assert_added(norm.weight.main_grad, torch.zeros(N, device=DEVICE), [exact, exact], 12)


def test_saved_weights_that_a_hook_replaces():
    """The parameter is held by the backward itself."""
    norm = norm_of()
    x, dy, before = rows(5, N), rows(5, N), norm.weight.main_grad.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = norm(x)
    y.backward(dy)
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], 5)


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
    assert accumulate_main_grad(RMSNorm(N, elementwise_affine=False)) == 0
    assert accumulate_main_grad(nn.Sequential(norm := RMSNorm(N), norm)) == 1


@pytest.mark.parametrize("name", [None, "other"])
def test_a_torch_that_cannot_tell_refuses_the_mark(name, monkeypatch):
    monkeypatch.setattr(main_grad, "_will_execute", None)
    norm = RMSNorm(N)
    with pytest.raises(RuntimeError, match="accumulate_main_grad: torch 2.9 to 2.14 can do it, got"):
        accumulate_main_grad(norm)
    assert not hasattr(norm.weight, main_grad.MARK) and not main_grad.IN_USE
