# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Known calls of the library ops: they go past PyTorch's dispatcher, but for whoever must see them there."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32
from known_calls import rows
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD, KNOWN_BACKWARDS, KNOWN_FORWARDS
from tilegym_rmsnorm.routes import choose, known_calls

pytestmark = pytest.mark.usefixtures("known_kernels")

N = 40


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


def test_no_tensor_of_an_op_is_kept(quick_gc):
    numbers = (1, 1e-5, 0.0, "once", 0.5, BF16, BF16, "cutile")
    for _ in range(3):
        x, r, w, dy = rows(3, 2 * N)[:, ::2], rows(3, N), rows(N), rows(3, N)
        y, rstd, z = FORWARD(x, r, w, None, *numbers)
        results = BACKWARD(dy, z, w, rstd, None, 7, 1, 0.0, "once", 0.5, BF16, None, BF16, BF16, "cutile")
        references = [weakref.ref(each) for each in (x, r, w, dy, y, rstd, z, *results) if each is not None]
        del x, r, w, dy, y, rstd, z, results
        gc.collect()
        assert not [each for each in references if each() is not None]
    assert KNOWN_FORWARDS._kinds and KNOWN_BACKWARDS._kinds
