# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Known calls of the library ops: they go past PyTorch's dispatcher, but for whoever must see them there."""

import functools

import pytest
import torch
from every_op import assert_same_bits, fewest, note_unknown, of_each_op
from helpers import BF16, DEVICE, FP32
from known_calls import rows
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD
from tilegym_rmsnorm.routes import choose, known_calls

pytestmark = pytest.mark.usefixtures("known_kernels")

N = 40


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@of_each_op()
def test_the_ops(op, kind, is_backward, monkeypatch):
    call, other = op.make(kind), op.make(kind, seed=1)
    run, of = (op.backward, backward_of) if is_backward else (op.forward, forward_of)
    for wanted in op.wanted(kind) if is_backward else (0,):
        given, others = of(call, wanted), of(other, wanted)
        run(*given)
        for grad_mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
            with grad_mode, monkeypatch.context() as patch:
                run(*others)
                unknown = note_unknown(op, patch)
                known = [each for each in run(*given) if each is not None]
                assert not unknown
                known_calls.forget()
                expected = [each for each in run(*given) if each is not None]
                assert unknown
                storages = {each.untyped_storage().data_ptr() for each in known if each.numel()}
                assert len(storages) == sum(each.numel() > 0 for each in known), "results share memory"
                assert_same_bits(known, expected)


def forward_of(call, wanted=None):
    return call.of_forward(*call.leaves.values(), backend="cutile")


def backward_of(call, wanted):
    return call.of_backward(wanted, "cutile")


def dispatched(monkeypatch):
    """Calls of an op, from now on, that came through PyTorch's dispatcher to its rule for autograd."""
    found, why_transformed = [], choose.why_transformed
    monkeypatch.setattr(
        choose, "why_transformed", lambda *given: found.append(given) or why_transformed(*given)
    )
    return found


@of_each_op(fewest)
def test_a_known_op_does_without_the_dispatcher(op, kind, monkeypatch):
    call = op.make(kind)
    both = ((op.forward, forward_of(call)), (op.backward, backward_of(call, op.wanted(kind)[-1])))
    known_calls.forget()
    found = dispatched(monkeypatch)
    for run, given in both:
        found.clear()
        run(*given)
        assert found
        found.clear()
        run(*given)
        assert not found


def known_op(op, kind):
    """A call of the forward op that is known, and its results."""
    call = op.make(kind)
    for _ in range(2):
        results = call.by_op(*call.leaves.values(), backend="cutile")
    return call, functools.partial(call.by_op, backend="cutile"), results


@of_each_op(fewest)
def test_modes_and_profilers_see_a_known_op(op, kind):
    call, run, expected = known_op(op, kind)
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
            run(*call.leaves.values())
        assert seen and all(each is op.forward for each in seen)
        seen.clear()
    with torch.profiler.profile() as profile:
        run(*call.leaves.values())
    assert op.forward._schema.name in [each.key for each in profile.key_averages()]
    for times in (1, 2, 3):  # the function, which is known after the first time
        with Overridden():
            assert_same_bits(call.public(*call.tensors, backend="cutile"), expected)
        assert seen.count(op.function) == times
    with FlopCounterMode(display=False):
        watched = call.both_passes(backend="cutile")
    assert_same_bits(watched, call.both_passes(backend="cutile"))


@of_each_op(fewest)
def test_a_known_op_is_traced(op, kind):
    call, run, expected = known_op(op, kind)
    graph = make_fx(run)(*call.leaves.values())
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count(op.forward) == 1
    assert_same_bits(graph(*call.leaves.values()), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (map(mode.from_tensor, call.leaves.values()), call.leaves.values()):
            assert all(type(each) is FakeTensor for each in run(*given))


@of_each_op(fewest)
def test_a_known_op_is_differentiated(op, kind):
    call, run, expected = known_op(op, kind)
    results = call.both_passes(call.public, backend="torch")
    for _ in range(3):
        found = call.both_passes(run)
        assert_same_bits(found[: len(expected)], expected)
        torch.testing.assert_close(found, results, rtol=2e-2, atol=0.1, equal_nan=True)
        assert not any(each.requires_grad for each in run(*call.leaves.values()))


def known_norm(checks):
    """x and weight of a call of the norm's op that is known, and its y."""
    x, w = rows(2, 3, N), rows(N)
    for _ in range(2):
        checks.clear()
        y = FORWARD(x, None, w, None, 1, 1e-5, 0.0, "once", 1.0, None, None, "cutile")[0]
    assert not checks
    return x, w, y


def test_other_arguments_of_a_known_op(checks):
    x, w, y = known_norm(checks)
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
