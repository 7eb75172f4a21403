# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`accumulate_main_grad`: dw goes to a float32 main_grad, in every form and by every backend, once for each use of the
weight."""

import contextlib
import copy
import io

import pytest
import torch
from helpers import BF16, DEVICE, FP32, FP64, settle_interpreters, why_skip
from llama_like import LlamaLikeNorm
from main_grads import N, assert_added, exact_dw, norm_of, rows, two_uses
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import accumulate_main_grad, patch_model, rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.integrations.liger import LigerRMSNorm
from tilegym_rmsnorm.routes import main_grad

pytestmark = pytest.mark.usefixtures("marks_end")


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
def test_microbatches(backend, form, m):
    """Compare three backwards with float64, and with float32 dw added in order: bit for bit. All other gradients have
    the bits of a norm that adds nothing."""
    options = {"backend": backend, **FORMS[form]}
    has_residual = options.pop("residual", False)
    if options.get("dtype") is FP64 and backend != "torch":
        pytest.skip("only the reference takes float64")
    norm = norm_of(**options)
    other = copy.deepcopy(norm)
    assert not main_grad.is_marked(other.weight)
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
def test_the_sum_kernel_adds(backend, m, form, monkeypatch):
    """No operation of PyTorch's does."""
    if backend == "torch":
        pytest.skip("it has no kernels")
    options = {"backend": backend, **FORMS[form]}
    has_residual = options.pop("residual", False)
    norm = norm_of(**options, flag=True)  # whose zeros nobody adds
    shape = (m, 3, N) if norm.heads else (m, norm.normalized_shape[0])
    y = norm(*(rows(*shape).requires_grad_() for _ in range(1 + has_residual)))
    y, before = y[0] if has_residual else y, norm.weight.main_grad.clone()
    monkeypatch.setattr(Tensor, "add_", None)
    y.sum().backward()
    assert not torch.equal(norm.weight.main_grad, before)


@pytest.mark.parametrize("form", ["heads, composed", "in parts"])
def test_other_launches(form, monkeypatch):
    """Heads that no kernel of cutile holds are composed around a kernel; many rows are launched in parts."""
    pytest.importorskip("cuda.tile")
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    from tilegym_rmsnorm.backends.cutile.host import launcher
    from tilegym_rmsnorm.backends.cutile.host import norm as host
    from tilegym_rmsnorm.backends.cutile.plans.plan import Plan

    launcher.launcher_of.cache_clear()
    seen = []
    if form == "in parts":
        run = host._launch_parts
        monkeypatch.setattr(Plan, "most_rows", 17)
        monkeypatch.setattr(host, "_launch_parts", lambda *given: (seen.append(form), run(*given)))
        norm = norm_of(backend="cutile")
    else:
        run = around_kernels.backward
        monkeypatch.setattr(around_kernels, "backward", lambda *given: (seen.append(form), run(*given))[1])
        monkeypatch.setattr(host, "is_fused", lambda problem: not problem.form.per_head)
        norm = norm_of(backend="cutile", heads=3)
    shape = (37, 3, N) if norm.heads else (37, N)
    x, dy, before = rows(*shape), rows(*shape), norm.weight.main_grad.clone()
    for _ in range(2):
        norm(x).backward(dy)
    assert len(seen) >= 2 and norm.weight.grad is None
    assert_added(norm.weight.main_grad, before, [2 * exact_dw(x, dy, bool(norm.heads))], 74)
    launcher.launcher_of.cache_clear()


@pytest.mark.parametrize("offset", [0, 1, 3, 4])
@pytest.mark.parametrize("n", [7, 1000, 4099])
@pytest.mark.parametrize("m", [1, 37])
def test_a_main_grad_inside_of_a_buffer(backend, m, n, offset):
    """It may begin at any element, also where an earlier call's did not, and what lies around it stays."""
    norm = norm_of(n, backend=backend)
    for start in (8, 8 + offset):
        buffer = torch.randn(n + 24, device=DEVICE)
        norm.weight.main_grad = buffer[start : start + n]
        before, x, dy = buffer.clone(), rows(m, n), rows(m, n)
        norm(x).backward(dy)
        assert_added(buffer[start : start + n], before[start : start + n], [exact_dw(x, dy)], m)
        for outside in (slice(None, start), slice(start + n, None)):
            assert torch.equal(buffer[outside], before[outside])


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


@pytest.mark.parametrize("name", ["__fsdp_param__", "overwrite_main_grad"])
def test_where_a_trainer_overwrites_main_grad_the_gradient_is_ordinary(name):
    """It holds what is left of another weight."""
    norm = norm_of(flag=True)
    setattr(norm.weight, name, True)
    before = norm.weight.main_grad.clone()
    norm(rows(4, N)).sum().backward()
    assert norm.weight.grad.any() and torch.equal(norm.weight.main_grad, before)
    assert norm.weight.grad_added_to_main_grad is False


def test_megatrons_main_grad_of_16_bits_is_left_to_its_hook():
    norm = norm_of(flag=True)
    norm.weight.main_grad = torch.zeros(N, dtype=BF16, device=DEVICE)
    norm(rows(4, N)).sum().backward()
    assert norm.weight.grad.any() and not norm.weight.main_grad.any()
    assert norm.weight.grad_added_to_main_grad is False


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


def test_a_module_that_was_pickled_adds_when_asked():
    """Its weights come with their marks, into a process that knows of none."""
    file = io.BytesIO()
    torch.save(norm_of(), file)
    file.seek(0)
    main_grad.IN_USE.clear()
    norm = torch.load(file, weights_only=False)
    before, x = norm.weight.main_grad.clone(), rows(4, N)
    assert accumulate_main_grad(norm) == 1
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert_added(norm.weight.main_grad, before, [exact_dw(x, torch.ones_like(x))], 4)


@pytest.mark.parametrize("way", ["plain", "dispatch mode"])
def test_a_backward_in_inference_mode_adds(way):
    norm = norm_of()
    before, x, dy = norm.weight.main_grad.clone(), rows(4, N), rows(4, N)
    with FlopCounterMode(display=False) if way == "dispatch mode" else contextlib.nullcontext():
        y = norm(x)
    with torch.inference_mode():
        y.backward(dy)
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], 4)


@pytest.mark.parametrize("place", ["x", "bias"])
@pytest.mark.parametrize("way", ["plain", "dispatch mode"])
def test_a_marked_weight_in_another_place_has_a_gradient(way, place):
    weight = norm_of().weight
    before, given = weight.main_grad.clone(), {place: weight}
    with FlopCounterMode(display=False) if way == "dispatch mode" else contextlib.nullcontext():
        y = rms_norm(given.get("x", rows(3, N)), N, nn.Parameter(rows(N)), bias=given.get("bias"))
    y.square().sum().backward()
    assert y.dtype is BF16 and weight.grad.any() and torch.equal(weight.main_grad, before)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("way", ["plain", "residual", "dispatch mode", "checkpoint", "checkpoint, reentrant"])
def test_each_use_adds_once(way, flag):
    norm = norm_of(dtype=FP32, flag=flag)
    exact = copy.deepcopy(norm).double()
    before, x = norm.weight.main_grad.clone(), rows(5, N, dtype=FP32)
    for _ in range(2):
        two_uses(norm, way, x.clone().requires_grad_()).square().sum().backward()
        two_uses(exact, "residual" if way == "residual" else "plain", x.double()).square().sum().backward()
    assert_added(norm.weight.main_grad, before, [exact.weight.grad], 100)
    assert (norm.weight.grad is None) != flag
    if flag:
        assert norm.weight.grad_added_to_main_grad is True and not norm.weight.grad.any()


def test_patched_norms_and_adapters(monkeypatch):
    settle_interpreters(monkeypatch)
    norms = [LlamaLikeNorm(N, FP32, DEVICE), LlamaLikeNorm(N, FP32, DEVICE), LigerRMSNorm(N).to(DEVICE)]
    model = nn.ModuleList([*norms, nn.RMSNorm(N), nn.Linear(2, 2)])
    assert accumulate_main_grad(model) == 1
    patch_model(model[0])
    assert accumulate_main_grad(model) == 2
    assert [main_grad.is_marked(each.weight) for each in model] == [True, False, True, False, False]
    for norm in (model[0], model[2]):
        norm.weight.main_grad, x = torch.zeros(N, device=DEVICE), rows(6, N, dtype=FP32)
        accumulate_main_grad(norm, False)
        for _ in range(3):  # known from here on
            norm(x).sum().backward()
        assert norm.weight.grad.any() and not norm.weight.main_grad.any()
        accumulate_main_grad(norm)
        norm.weight.grad = None
        for _ in range(2):
            norm(x).sum().backward()
        assert norm.weight.grad is None
        x64 = x.double()
        exact = (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-6)).sum(0)
        assert_added(norm.weight.main_grad, torch.zeros(N, device=DEVICE), [exact, exact], 12)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_weight_that_the_checks_replace(dtype):
    """As autocast casts it on a GPU, they resolve a pending negation."""
    norm = norm_of(dtype=dtype)
    before = norm.weight.main_grad
    norm.weight = nn.Parameter(torch._neg_view(norm.weight.detach()))
    accumulate_main_grad(norm)
    norm.weight.main_grad, before = before, before.clone()
    x, dy = rows(5, N), rows(5, N)
    norm(x).backward(dy)
    assert norm.weight.is_neg() and norm.weight.grad is None
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], 5)


def test_an_x_that_the_checks_replace_leaves_the_sum_to_the_kernel(backend, monkeypatch):
    if backend == "torch":
        pytest.skip("it has no kernels")
    norm = norm_of(backend=backend)
    x, before = rows(5, N), norm.weight.main_grad.clone()
    y = norm(torch._neg_view(x))
    monkeypatch.setattr(Tensor, "add_", None)
    y.backward(torch.ones_like(y))
    assert_added(norm.weight.main_grad, before, [-exact_dw(x, torch.ones_like(x))], 5)


def test_saved_weights_that_a_hook_replaces():
    """The parameter is held by the backward itself."""
    norm = norm_of()
    x, dy, before = rows(5, N), rows(5, N), norm.weight.main_grad.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = norm(x)
    y.backward(dy)
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], 5)
