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
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32, HAS_GPU, settle_interpreters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_rmsnorm import RMSNorm, override_aten, rms_norm, use_backend
from tilegym_rmsnorm.routes import choose, eager, known_calls
from tilegym_rmsnorm.routes.op import BACKWARD, FORWARD

N = 40


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Without a GPU the interpreter runs the kernels, and its calls are known too."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    if not HAS_GPU:
        monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
        settle_interpreters(monkeypatch)
    known_calls.forget()


def rows(*size, dtype=BF16):
    return torch.randn(size, dtype=dtype, device=DEVICE)


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


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_ops(has_residual, checks):
    x, r, w, dy, d = rows(2, 3, N), rows(2, 3, N), rows(N), rows(2, 3, N), rows(2, 3, N)
    dtype = BF16 if has_residual else None
    numbers = (1, 1e-5, 0.0, "once", 0.5 if has_residual else 1.0, dtype, dtype, "cutile")

    def both():
        y, rstd, residual_out = FORWARD(x, r if has_residual else None, w, None, *numbers)
        z = residual_out if has_residual else x
        given = dy, z, w, rstd, d if has_residual else None
        bits = 15 if has_residual else 3
        gradients = BACKWARD(*given, bits, 1, 0.0, "once", numbers[4], BF16, dtype, BF16, dtype, "cutile")
        return [y, rstd, residual_out, *gradients]

    both()
    checks.clear()
    for grad_mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with grad_mode:
            both()
            checks.clear()
            known = both()
            assert not checks
            known_calls.forget()
            storages = [each.untyped_storage().data_ptr() for each in known if each is not None]
            assert len(set(storages)) == len(storages), "the results of an op may not share memory"
            for ours, expected in zip(known, both(), strict=True):
                assert (ours is None) == (expected is None)
                assert ours is None or (torch.equal(ours, expected) and ours.shape == expected.shape)


def known_op(checks):
    """x and weight of a call of the forward op that is known, the call, and its y."""
    x, w = rows(2, 3, N), rows(N)
    numbers = (1, 1e-5, 0.0, "once", 1.0, None, None, "cutile")
    for _ in range(2):
        checks.clear()
        y = FORWARD(x, None, w, None, *numbers)[0]
    assert not checks
    return (x, w), lambda x, w: FORWARD(x, None, w, None, *numbers)[0], y


def dispatched(monkeypatch):
    """Calls of an op, from now on, that came through PyTorch's dispatcher to its rule for autograd."""
    found, why_transformed = [], choose.why_transformed
    monkeypatch.setattr(
        choose, "why_transformed", lambda *given: found.append(given) or why_transformed(*given)
    )
    return found


def test_a_known_op_does_without_the_dispatcher(monkeypatch):
    x, w, dy, rstd = rows(6, N), rows(N), rows(6, N), torch.ones(6, 1, device=DEVICE)
    found = dispatched(monkeypatch)
    dtypes = BF16, None, BF16, None, "cutile"
    calls = (
        lambda: FORWARD(x, None, w, None, 1, 1e-5, 0.0, "once", 1.0, None, None, "cutile"),
        lambda: BACKWARD(dy, x, w, rstd, None, 3, 1, 0.0, "once", 1.0, *dtypes),
    )
    for call in calls:
        found.clear()
        call()
        assert found
        found.clear()
        call()
        assert not found


def test_modes_and_profilers_see_a_known_op(checks):
    (x, w), call, _ = known_op(checks)
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Overridden(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for mode in (Dispatched(), Overridden()):
        with mode:
            call(x, w)
        assert seen and all(each is FORWARD for each in seen)
        seen.clear()
    with torch.profiler.profile() as profile:
        call(x, w)
    assert "tilegym_rmsnorm::rms_norm_forward" in [each.key for each in profile.key_averages()]


def test_a_known_op_is_traced_and_transformed(checks):
    (x, w), call, y = known_op(checks)
    graph = make_fx(call)(x, w)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(FORWARD) == 1
    assert torch.equal(graph(x, w), y)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(call(mode.from_tensor(x), mode.from_tensor(w))) is FakeTensor
        assert type(call(x, w)) is FakeTensor
    mapped = torch.func.vmap(call, in_dims=(0, None))(x, w)
    torch.testing.assert_close(mapped, y)
    tangents = torch.randn_like(x), torch.randn_like(w)
    expected, tangent = torch.func.jvp(lambda x, w: F.rms_norm(x, (N,), w, 1e-5), (x, w), tangents)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(call(*map(forward_ad.make_dual, (x, w), tangents)))
        torch.testing.assert_close(dual.primal, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(dual.tangent, tangent, rtol=3e-2, atol=3e-2)


def test_a_known_op_is_differentiated(checks):
    (x, w), call, y = known_op(checks)
    for _ in range(3):
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        recorded = call(*leaves)
        assert torch.equal(recorded, y)
        gradients = torch.autograd.grad(recorded.float().square().sum(), leaves)
        wide = [each.detach().double().requires_grad_() for each in leaves]
        exact = F.rms_norm(wide[0], (N,), wide[1], 1e-5)
        for ours, expected in zip(gradients, torch.autograd.grad(exact.square().sum(), wide), strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=0.1)
        assert not call(x, w).requires_grad


def test_other_arguments_of_a_known_op(checks):
    (x, w), _, y = known_op(checks)
    named = {"normalized_dims": 1, "eps": 1e-5, "offset": 0.0, "casting": "once", "alpha": 1.0}
    named |= {"residual_dtype": None, "out_dtype": None, "backend": "cutile"}
    assert torch.equal(FORWARD(x=x, residual=None, weight=w, bias=None, **named)[0], y)
    with pytest.raises((RuntimeError, TypeError), match="rms_norm_forward"):
        FORWARD(x, None, w, None)
    for dims, eps in ((1, "small"), (1.0, 1e-5)):  # 1.0 equals 1
        with pytest.raises((RuntimeError, TypeError), match="rms_norm_forward"):
            FORWARD(x, None, w, None, dims, eps, 0.0, "once", 1.0, None, None, "cutile")


def test_a_compiled_graph_finds_known_calls(monkeypatch):
    def norms(x, r, w):
        for _ in range(3):
            x, r = rms_norm(x, (N,), w, 1e-5, residual=r, backend="cutile")
        return x + r

    def step(function):
        y = function(x, r, w)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    x, r, w = rows(6, N).requires_grad_(), rows(6, N), rows(N).requires_grad_()
    compiled, expected = torch.compile(norms, backend="aot_eager", fullgraph=True), step(norms)
    for _ in range(2):  # the first call compiles, among other dispatch keys
        assert all(map(torch.equal, step(compiled), expected))
    found = dispatched(monkeypatch)
    assert all(map(torch.equal, step(compiled), expected)) and not found
    with torch.profiler.profile():
        step(compiled)
    assert found, "so it is seen where it happens"


def test_rows_of_which_a_view_has_none(checks):
    """Such as an expert's without tokens: the view has an offset, and no address."""
    x, w, dy, rstd = rows(3, N)[3:], rows(N), rows(3, N)[3:], torch.ones(3, 1, device=DEVICE)[3:]
    for _ in range(3):
        assert rms_norm(x, (N,), w, 1e-5, backend="cutile").shape == (0, N)
        y, of_rows, _ = FORWARD(x, None, w, None, 1, 1e-5, 0.0, "once", 1.0, None, None, "cutile")
        assert y.shape == (0, N) and of_rows.shape == (0, 1)
        dtypes = BF16, None, BF16, None, "cutile"
        dx, dw, *_ = BACKWARD(dy, x, w, rstd, None, 3, 1, 0.0, "once", 1.0, *dtypes)
        assert dx.shape == (0, N) and torch.equal(dw, torch.zeros_like(w))
        leaf = x.clone().requires_grad_()
        rms_norm(leaf[0:], (N,), w, 1e-5, backend="cutile").sum().backward()


def test_a_gradient_that_is_not_wanted_has_the_dtype_of_x():
    x, w, dy, rstd = rows(6, N), rows(N), rows(6, N), torch.ones(6, 1, device=DEVICE)
    for _ in range(2):
        dx, dw, *_ = BACKWARD(dy, x, w, rstd, None, 2, 1, 0.0, "once", 1.0, FP32, None, None, None, "cutile")
        assert dx.dtype == BF16 and dx.numel() == 0 and dw.dtype == BF16


def test_one_gradient_for_both_results(checks, monkeypatch):
    """As the gradient of a sum of both."""
    x, r = rows(6, N).requires_grad_(), rows(6, N).requires_grad_()
    slow, gradients = [], eager.gradients
    monkeypatch.setattr(eager, "gradients", lambda *given: slow.append(given) or gradients(*given))
    dy, found = rows(6, N), []
    for _ in range(3):
        results = rms_norm(x, (N,), None, 1e-5, residual=r, backend="cutile")
        found.append(torch.autograd.grad(results, (x, r), (dy, dy)))
    assert len(slow) == 1
    assert all(map(torch.equal, found[0], found[2]))


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
        assert known_calls.ATEN_FORWARD._kinds and known_calls.ATEN_BACKWARD._kinds
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


def test_no_tensor_is_kept():
    """Not even by what the backward of a known call is bound to."""
    for name in ("residual, alpha, dtypes, bias", "weights of heads, a slice, bias", "overlapping rows"):
        make, options = FORMS[name]
        for _ in range(3):
            tensors = make()
            results = run(tensors, options, needs_grad=True)
            references = [weakref.ref(each) for each in (*results, *tensors.values()) if each is not None]
            del tensors, results
            gc.collect()
            assert not [each for each in references if each() is not None]
    assert known_calls.NORM._kinds


def test_no_tensor_of_an_op_is_kept():
    numbers = (1, 1e-5, 0.0, "once", 0.5, BF16, BF16, "cutile")
    for _ in range(3):
        x, r, w, dy = rows(3, 2 * N)[:, ::2], rows(3, N), rows(N), rows(3, N)
        y, rstd, z = FORWARD(x, r, w, None, *numbers)
        results = BACKWARD(dy, z, w, rstd, None, 7, 1, 0.0, "once", 0.5, BF16, None, BF16, BF16, "cutile")
        references = [weakref.ref(each) for each in (x, r, w, dy, y, rstd, z, *results) if each is not None]
        del x, r, w, dy, y, rstd, z, results
        gc.collect()
        assert not [each for each in references if each() is not None]
    assert known_calls.FORWARD_OP._kinds and known_calls.BACKWARD_OP._kinds


def test_no_more_calls_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_KEYS", 5)
    module = RMSNorm(N, device=DEVICE, dtype=BF16, backend="cutile")
    for m in range(1, 12):
        module(rows(m, N))
    assert len(known_calls.NORM._kinds) <= 5
    for stride in range(N, N + 40, 4):  # the same key
        module(rows(4, stride)[:, :N])
    assert all(len(kinds) <= known_calls.MOST_KINDS for kinds in known_calls.NORM._kinds.values())


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
