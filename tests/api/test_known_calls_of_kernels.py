# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Known calls of kernels: the bits of calls that passed all checks, for every form, with and without grad; no tensor is
kept, and threads share what is known."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from helpers import BF16, DEVICE, FP32
from known_calls import rows

from tilegym_rmsnorm import RMSNorm, override_aten, rms_norm, use_backend
from tilegym_rmsnorm.integrations import aten as overrides
from tilegym_rmsnorm.ops.norm import eager, passes
from tilegym_rmsnorm.routes import known_calls

pytestmark = pytest.mark.usefixtures("known_kernels")

N = 40


def form(
    x=lambda: rows(6, N), weight=(N,), bias=None, residual=None, shape=None, weight_dtype=BF16, **options
):
    """Tensors of a call, made anew by each call of the result, and its other arguments."""

    def make():
        made = {"input": x(), "residual": None if residual is None else residual()}
        for name, size in (("weight", weight), ("bias", bias)):
            made[name] = None if size is None else rows(*size, dtype=weight_dtype)
        return made

    return make, {"normalized_shape": shape or (N,), "eps": 1e-5, "backend": "cutile", **options}


FORMS = {
    "plain": form(),
    "no weight": form(weight=None),
    "offset, llama": form(offset=1.0, casting="llama"),
    "float32 weight": form(weight_dtype=FP32),
    "three dimensions": form(lambda: rows(2, 3, N)),
    "one row": form(lambda: rows(N)),
    "strided rows": form(lambda: rows(6, 2 * N)[:, :N]),
    "overlapping rows": form(lambda: rows(1, N).expand(6, N)),
    "columns apart": form(lambda: rows(6, 2 * N)[:, ::2]),
    "rows that begin between 16 bytes": form(lambda: rows(6 * N + 1)[1:].view(6, N)),
    "odd rows": form(lambda: rows(5, 37), weight=(37,), shape=37),
    "several dimensions": form(lambda: rows(3, 5, 8), weight=(5, 8), shape=(5, 8)),
    "bias": form(bias=(N,)),
    "y in float32": form(out_dtype=FP32),
    "residual": form(residual=lambda: rows(6, N)),
    "residual of other strides": form(lambda: rows(2, 3, N), residual=lambda: rows(3, 2, N).transpose(0, 1)),
    "residual, alpha, dtypes, bias": form(
        residual=lambda: rows(6, N, dtype=FP32),
        residual_alpha=0.5,
        residual_dtype=FP32,
        out_dtype=BF16,
        bias=(N,),
    ),
    "weights of heads": form(lambda: rows(2, 3, 4, N), weight=(4, N)),
    "heads, a slice": form(lambda: rows(2, 3, 9, N)[:, :, 2:6]),
    "weights of heads, a slice, bias": form(lambda: rows(2, 3, 9, N)[:, :, 2:6], weight=(4, N), bias=(4, N)),
    "heads, transposed": form(lambda: rows(2, 4, 3, N).transpose(1, 2), weight=(4, N)),
    "wide residual": form(
        lambda: rows(2, 16392), residual=lambda: rows(2, 16392), weight=(16392,), shape=16392
    ),
}


def run(tensors, options, needs_grad, seed=0):
    """The results of a call and of its backward."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: each for name, each in tensors.items() if each is not None}
    if needs_grad:
        leaves = {name: each.detach().requires_grad_() for name, each in leaves.items()}
    results = rms_norm(**{**tensors, **leaves}, **options)
    results = results if isinstance(results, tuple) else (results,)
    if not needs_grad:
        return results
    gradients = [torch.randn(each.shape, generator=generator).to(DEVICE, each.dtype) for each in results]
    return *results, *torch.autograd.grad(results, list(leaves.values()), gradients)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@pytest.mark.parametrize("name", FORMS)
def test_the_bits_of_calls_that_passed_all_checks(name, needs_grad, checks, monkeypatch):
    make, options = FORMS[name]
    run(make(), options, needs_grad)
    checks.clear()
    tensors, slow, gradients = make(), [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))
    with contextlib.nullcontext() if needs_grad else torch.no_grad():
        run(make(), options, needs_grad)  # under another grad mode it was another call
        checks.clear()
        slow.clear()
        known = run(tensors, options, needs_grad)
    assert not checks and not slow
    known_calls.forget()
    for ours, expected in zip(known, run(tensors, options, needs_grad), strict=True):
        assert ours.dtype == expected.dtype and ours.stride() == expected.stride()
        assert torch.equal(ours, expected) and not ours.isnan().any()
    outputs = known[: 1 + (tensors["residual"] is not None)]
    assert all(each._base is None for each in outputs), "autograd refuses operations in place on such views"


def test_one_gradient_for_both_results(checks, monkeypatch):
    """A sum of both hands each the same tensor."""
    x, r = rows(6, N).requires_grad_(), rows(6, N).requires_grad_()
    slow, gradients = [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))
    dy, found = rows(6, N), []
    for _ in range(3):
        results = rms_norm(x, (N,), None, 1e-5, residual=r, backend="cutile")
        found.append(torch.autograd.grad(results, (x, r), (dy, dy)))
    assert len(slow) == 1
    assert all(map(torch.equal, found[0], found[2]))


TWICE = {"x and residual": ("input", "residual"), "weight and bias": ("weight", "bias")}


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "recorded"])
@pytest.mark.parametrize("name", TWICE)
def test_one_tensor_given_twice_is_known(name, needs_grad, checks, monkeypatch):
    """Guards take no tensor twice. A call of two tensors of the same metadata is another call."""
    first, second = TWICE[name]
    options = {"normalized_shape": (N,), "eps": 1e-5, "backend": "cutile"}
    slow, gradients = [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))

    def both(is_one):
        x, weight = rows(6, N), rows(N)
        given = {"input": x, "weight": weight, second: {"input": x, "weight": weight}[first]}
        given = {each: tensor.requires_grad_(needs_grad) for each, tensor in given.items()}
        if not is_one:
            given[second] = given[second].detach().clone().requires_grad_(needs_grad)
        results = rms_norm(**given, **options)
        results = results if isinstance(results, tuple) else (results,)
        if needs_grad:
            torch.autograd.grad(results, given[first], [torch.ones_like(each) for each in results])
        wide = {each: tensor.detach().double() for each, tensor in given.items()}
        total = wide["input"] + wide.get("residual", 0)
        y = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * wide["weight"]
        torch.testing.assert_close(results[0].double(), y + wide.get("bias", 0), rtol=2e-2, atol=5e-2)

    for is_one in (True, False, True):
        both(is_one)
        checks.clear()
        slow.clear()
        both(is_one)
        assert not checks and not slow


def test_the_grad_mode_counts(checks):
    x = rows(6, N).requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not rms_norm(x, (N,), None, 1e-5, backend="cutile").requires_grad
        assert rms_norm(x, (N,), None, 1e-5, backend="cutile").requires_grad


def test_the_override_of_aten(checks):
    x, w = rows(6, N).requires_grad_(), rows(N).requires_grad_()

    def step():
        y = torch.nn.functional.rms_norm(x, (N,), w, 1e-5)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    aten = torch.ops.aten
    with use_backend("cutile"), override_aten(DEVICE.type) as override:
        first, *others = step(), step(), step()
        assert overrides._FORWARDS._kinds and overrides._BACKWARDS._kinds
        assert all(all(map(torch.equal, first, each)) for each in others)
        assert override.stats["_fused_rms_norm"] == override.stats["_fused_rms_norm_backward"] == {"taken": 3}
        y, rstd = aten._fused_rms_norm(x.detach(), [N], w.detach(), 1e-5)
        for mask in ((True, True), (True, False), (False, True), (True, True)):
            for _ in range(2):
                dx, dw = aten._fused_rms_norm_backward(y, x.detach(), [N], rstd, w.detach(), mask)
                assert (dx is not None, dw is not None) == mask
    with use_backend("cutile"), override_aten(DEVICE.type):
        for _ in range(2):  # a view at an offset, without rows
            y, rstd = aten._fused_rms_norm(x.detach()[6:], [N], w.detach(), 1e-5)
            assert y.shape == (0, N) and rstd.shape == (0, 1)


def test_no_tensor_is_kept(quick_gc):
    """Nothing bound to the backward of a known call keeps one."""
    for name in ("residual, alpha, dtypes, bias", "weights of heads, a slice, bias", "overlapping rows"):
        make, options = FORMS[name]
        for _ in range(3):
            tensors = make()
            results = run(tensors, options, needs_grad=True)
            references = [weakref.ref(each) for each in (*results, *tensors.values()) if each is not None]
            del tensors, results
            gc.collect()
            assert not [each for each in references if each() is not None]
    assert passes.KNOWN._kinds


def test_no_more_calls_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_KEYS", 5)
    module = RMSNorm(N, device=DEVICE, dtype=BF16, backend="cutile")
    for m in range(1, 12):
        module(rows(m, N))
    assert len(passes.KNOWN._kinds) <= 5
    for stride in range(N, N + 40, 4):  # the same key
        module(rows(4, stride)[:, :N])
    assert all(len(kinds) <= known_calls.MOST_KINDS for kinds in passes.KNOWN._kinds.values())


def test_threads():
    """Each with its own rows, which are known or not."""
    module, errors = RMSNorm(N, device=DEVICE, dtype=BF16, backend="cutile"), []
    inputs = [rows(m, N) for m in range(1, 9)]
    expected = [module(x).detach().clone() for x in inputs]
    known_calls.forget()

    def work(first):
        try:
            for i in range(24):
                at = (first + i) % len(inputs)
                x = inputs[at].clone().requires_grad_(i % 2 == 0)
                assert torch.equal(module(x), expected[at])
                if i % 7 == 0:
                    known_calls.forget()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
