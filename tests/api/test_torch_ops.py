# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The library ops by themselves: what PyTorch asks of an op, right values, gradients, and transforms. Known calls of
theirs go past PyTorch's dispatcher, but for whoever must see them there."""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from every_op import (
    OPS,
    assert_same_bits,
    each_smooth_kind,
    few,
    fewest,
    note_backends,
    note_unknown,
    of_each_op,
    present,
    usual_kinds,
)
from gate_cases import freed
from helpers import BF16, DEVICE, FP32, FP64, why_lacked, why_skip
from test_known_calls import rows
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import rms_norm, rms_norm_backward, settings, use_backend
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD, SCHEMAS
from tilegym_rmsnorm.routes import choose, known_calls

NORM = 1e-3, 0.5, "once"  # eps, offset, casting
PLAIN = *NORM, 1.0, None, None, None  # and alpha, residual_dtype, out_dtype, backend
OF_BACKWARD = 0.5, "once", 1.0, None, None, None, None, None  # offset, casting, alpha, four dtypes, backend
BACKENDS = (None, "torch", "cutile", "triton")


@pytest.fixture(params=BACKENDS, ids=str)
def name(request):
    """A backend that an op is given."""
    if request.param in ("cutile", "triton"):
        if reason := why_skip(request.param) or why_lacked(request.param, request):
            pytest.skip(reason)
    return request.param


def tensors(*shape, of=(8,), dtype=FP32, needs_grad=False, seed=0):
    """x, residual, weight, bias."""
    torch.manual_seed(seed)
    made = (torch.randn(size, dtype=dtype, device=DEVICE) for size in (shape, shape, of, of))
    return tuple(each.requires_grad_(needs_grad) for each in made)


def on_backends(*names):
    """Give a test few kinds of calls of each op on backend "torch", on others one, which has most options."""
    cases = (
        pytest.param(op, kind, name, id=f"{op.name}, {title}, {name}")
        for op in OPS
        for name in names
        for title, kind in (few if name == "torch" else fewest)(op).items()
    )
    return pytest.mark.parametrize(("op", "kind", "name"), list(cases), indirect=["name"])


@pytest.mark.parametrize("needs_grad", [False, True])
@on_backends(*BACKENDS)
def test_pytorch_s_own_checks_of_forwards(op, kind, name, needs_grad):
    call = op.make(kind)
    leaves = call.recorded() if needs_grad else call.leaves.values()
    opcheck(op.forward, call.of_forward(*leaves, backend=name))


@on_backends(*BACKENDS[1:])  # None runs one of them
def test_pytorch_s_own_checks_of_backwards(op, kind, name):
    call = op.make(kind)
    for wanted in op.wanted(kind) if name == "torch" else op.wanted(kind)[-1:]:
        opcheck(op.backward, call.of_backward(wanted, name))


@pytest.mark.parametrize("name", BACKENDS[1:], indirect=True)
def test_pytorch_s_own_checks_of_several_normalized_dimensions(name):
    x, dy, weight, bias = tensors(3, 4, 8, of=(4, 8))
    given = x, dy, weight, bias, 2, *NORM, 0.5, None, BF16, name
    opcheck(FORWARD, given)
    _, rstd, total = FORWARD(*given)
    opcheck(BACKWARD, (dy, total, weight, rstd, x, 15, 2, 0.5, "once", 0.5, None, FP32, BF16, None, name))


@usual_kinds
def test_values_and_gradients_are_those_of_the_function(op, kind, name):
    """Bits agree: both run the same code."""
    call = op.make(kind, seed=1)
    by_op, expected = (call.both_passes(each, backend=name) for each in (call.by_op, call.public))
    assert_same_bits(by_op, expected)
    assert all(each.is_contiguous() for each in by_op)


def test_rstd_is_shaped_as_aten_s():
    x, residual, *_ = tensors(3, 4, 8)
    for dims, shape in ((1, (3, 4, 1)), (2, (3, 1, 1)), (3, (1, 1, 1))):
        for added in (None, residual):
            assert FORWARD(x, added, None, None, dims, *PLAIN)[1].shape == shape
    assert FORWARD(x[:0], None, None, None, 2, *PLAIN)[1].shape == (0, 1, 1)
    aten = torch.ops.aten._fused_rms_norm.default(x, [4, 8], None, 1e-3)[1]
    assert aten.shape == (3, 1, 1)
    torch.testing.assert_close(FORWARD(x, None, None, None, 2, *PLAIN)[1], aten)


def test_rstd_has_no_gradient():
    """Nor has residual_out where the weight alone is learned."""
    x, residual, weight, _ = tensors(3, 8, needs_grad=True)
    y, rstd, residual_out = FORWARD(x, None, weight, None, 1, *PLAIN)
    assert [y.requires_grad, rstd.requires_grad, residual_out] == [True, False, None]
    results = FORWARD(x, residual, weight, None, 1, *PLAIN)
    assert [t.requires_grad for t in results] == [True, False, True]
    results = FORWARD(x.detach(), residual.detach(), weight, None, 1, *PLAIN)
    assert [t.requires_grad for t in results] == [True, False, False]


def test_what_is_not_wanted_is_none():
    """But dx, which is then a tensor of no elements."""
    x, dy, weight, _ = tensors(3, 8)
    rstd = FORWARD(x, None, weight, None, 1, *PLAIN)[1]
    for d_residual_out in (None, x.cos()):
        for wanted in range(16):
            dx, *others = BACKWARD(dy, x, weight, rstd, d_residual_out, wanted, 1, *OF_BACKWARD)
            assert dx.shape == (x.shape if wanted & 1 else (0,))
            assert [each is not None for each in others] == [bool(wanted & bit) for bit in (2, 4, 8)]
    assert BACKWARD(dy, x, None, rstd, None, 7, 1, *OF_BACKWARD)[1] is None


@each_smooth_kind
def test_gradients_that_are_differentiated_again_are_all_there(op, kind):
    """gradgradcheck takes a missing one for zeros."""
    call = op.make(kind)
    leaves = call.recorded()
    results = call.by_op(*leaves)
    expected, again = (
        torch.autograd.grad(results, leaves, call.dys, retain_graph=True, create_graph=each)
        for each in (False, True)
    )
    torch.testing.assert_close(again, expected)


def test_backwards_are_differentiated_as_the_reference():
    x, dy, weight, _ = tensors(2, 4, of=(4,), dtype=FP64, needs_grad=True)
    rstd = FORWARD(x.detach(), None, None, None, 1, *PLAIN)[1].requires_grad_()
    d = torch.randn_like(x).requires_grad_()

    def backward(dy, x, weight, rstd):
        return BACKWARD(dy, x, weight, rstd, None, 7, 1, *OF_BACKWARD)[:3]

    def of_a_sum(dy, x, weight, rstd, d):
        return BACKWARD(dy, x, weight, rstd, d, 15, 1, 0.5, "once", 0.5, None, None, None, None, None)

    assert gradcheck(backward, (dy, x, weight, rstd)) and gradcheck(of_a_sum, (dy, x, weight, rstd, d))


def test_a_vmap_of_backwards_has_dw_of_each():
    x, dy, weight, _ = tensors(5, 3, 8)
    rstd = FORWARD(x, None, weight, None, 1, *PLAIN)[1]

    def backward(dy, x, rstd):
        return BACKWARD(dy, x, weight, rstd, None, 7, 1, *OF_BACKWARD)[:3]

    dx, dw, db = torch.vmap(backward)(dy, x, rstd)
    for i in range(5):
        of_one = rms_norm_backward(
            x[i], dy[i], weight, rstd[i].flatten(), offset=0.5, needs_db=True, backend="torch"
        )
        torch.testing.assert_close((dx[i], dw[i], db[i]), of_one)


@pytest.mark.parametrize("is_watched", [False, True])
@of_each_op()
def test_the_backward_takes_the_backend_of_the_forward(op, kind, monkeypatch, is_watched):
    """Blocks of use_backend have no effect in autograd's threads."""
    call, ran = op.make(kind), note_backends(monkeypatch)
    watching = FlopCounterMode(display=False) if is_watched else contextlib.nullcontext()
    monkeypatch.setattr(settings, "_process_backend", "triton")
    for function in (call.public, call.by_op):
        leaves = call.recorded()
        with use_backend("torch"), watching:
            results = function(*leaves)
        torch.autograd.grad(results, leaves, call.dys)
        assert ran == ["torch"] * 2
        ran.clear()


X = torch.randn(3, 8)
RSTD = torch.ones(3, 1)
ONE_OF_EACH_ROW = "rstd: expected shape (3, 1), one element per row of x, got "
MISFITS = {  # by the error
    "normalized_dims: expected 1 to 2 for x of 2 dimensions, got 3": lambda: FORWARD(
        X, None, None, None, 3, *PLAIN
    ),
    "normalized_dims: expected 1 to 2 for x of 2 dimensions, got 0": lambda: FORWARD(
        X, None, None, None, 0, *PLAIN
    ),
    "weight: expected shape (8,)": lambda: FORWARD(X, None, X[0, :7], None, 1, *PLAIN),
    "x: expected a dtype": lambda: FORWARD(X.int(), None, None, None, 1, *PLAIN),
    "residual: expected the shape of x": lambda: FORWARD(X, X[:2], None, None, 1, *PLAIN),
    "dy: expected the shape of x": lambda: BACKWARD(X[:2], X, None, RSTD, None, 1, 1, *OF_BACKWARD),
    ONE_OF_EACH_ROW + "(2, 1)": lambda: BACKWARD(X, X, None, RSTD[:2], None, 1, 1, *OF_BACKWARD),
    ONE_OF_EACH_ROW + "(3,)": lambda: BACKWARD(X, X, None, RSTD.flatten(), None, 1, 1, *OF_BACKWARD),
    "casting: expected one of": lambda: FORWARD(X, *[None] * 3, 1, 1e-3, 0.0, "gemma", 1.0, *[None] * 3),
    "backend: expected one of": lambda: FORWARD(X, None, None, None, 1, *NORM, 1.0, None, None, "cuda"),
    "eps: expected": lambda: FORWARD(X, None, None, None, 1, -1.0, 0.0, "once", 1.0, None, None, None),
    "out_dtype: expected": lambda: FORWARD(X, None, None, None, 1, *NORM, 1.0, None, torch.int32, None),
    "wanted: expected 0 to 15, got 16": lambda: BACKWARD(X, X, None, RSTD, None, 16, 1, *OF_BACKWARD),
    "normalized_dims: expected 1 to 2": lambda: BACKWARD(X, X, None, RSTD.sum(), None, 1, 0, *OF_BACKWARD),
    "rstd: expected the device of x": lambda: BACKWARD(X, X, None, RSTD.to("meta"), None, 1, 1, *OF_BACKWARD),
    "a gradient's dtype: expected": lambda: BACKWARD(
        X, X, None, RSTD, None, 5, 1, *OF_BACKWARD[:-2], torch.int32, None
    ),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
@pytest.mark.parametrize("text", MISFITS)
def test_arguments_that_do_not_fit(text, mode):
    """Making a graph raises, too."""
    given = {"allow_non_fake_inputs": True} if mode is FakeTensorMode else {}
    with mode(**given), pytest.raises(TypeError if "dtype" in text else ValueError, match=re.escape(text)):
        MISFITS[text]()


def test_the_schemas_are_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    written = " ".join(text.split())
    for name, schema in SCHEMAS.items():
        assert f"{name}{schema}" in written, name


@pytest.mark.parametrize("backend", ["torch", "cutile"], indirect=True)
def test_no_two_results_share_memory(backend):
    """Alpha 1 and one dtype make dx and d_residual the same numbers."""
    x, dy, weight, _ = tensors(3, 64, of=(64,))
    rstd = FORWARD(x, None, weight, None, 1, *PLAIN)[1]
    dx, _, _, d_residual = BACKWARD(dy, x, weight, rstd, None, 11, 1, *OF_BACKWARD[:-1], backend)
    kept = d_residual.clone()
    dx.zero_()
    assert torch.equal(d_residual, kept) and kept.any()


@pytest.mark.parametrize("dims", [1, 2])
def test_a_batch_of_vmap_is_no_dimension_of_x(dims):
    weight = None if dims == 2 else torch.ones(3, 8)
    with pytest.raises(ValueError, match="normalized_dims: expected 1 to 1|weight: expected shape"):
        torch.vmap(lambda x: FORWARD(x, None, weight, None, dims, *PLAIN)[0])(torch.randn(3, 8))


def test_an_empty_vmap():
    x, dy, weight, _ = tensors(0, 3, 8)
    y, rstd = torch.vmap(lambda x, w: FORWARD(x, None, w, None, 1, *PLAIN)[:2])(
        x, torch.ones(0, 8, device=DEVICE)
    )
    assert y.shape == (0, 3, 8) and rstd.shape == (0, 3, 1)
    results = torch.vmap(lambda dy, x, r: BACKWARD(dy, x, weight, r, None, 7, 1, *OF_BACKWARD)[:3])(
        dy, x, rstd
    )
    assert [tuple(each.shape) for each in results] == [(0, 3, 8), (0, 8), (0, 8)]


def names_of_operations(run):
    """Name the operations dispatched, by the profiler, which is no mode."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return {event.key for event in profiled.key_averages()}


@of_each_op()
def test_a_plain_call_does_not_pass_the_dispatcher(op, kind):
    """Its host time is that of a kernel's launch."""
    call = op.make(kind)
    by_op, plain = (
        names_of_operations(lambda each=each: call.both_passes(each)) for each in (call.by_op, call.public)
    )
    assert {str(each._schema.name) for each in (op.forward, op.backward)} <= by_op
    assert plain and not any("tilegym" in name for name in plain)


@pytest.mark.parametrize(
    "run",
    [
        lambda call, x: torch.jit.trace(call, (x,), check_trace=False),
        lambda call, x: torch.vmap(lambda scale: call(x) * scale)(torch.ones(2, device=DEVICE)),
        lambda call, x: torch.func.vjp(call, x),
    ],
    ids=["torch.jit.trace", "vmap", "vjp"],
)
@pytest.mark.parametrize("is_backward", [False, True])
@of_each_op()
def test_freed_memory_is_an_error_under_transforms_too(op, kind, is_backward, run):
    """PyTorch's operations would read address 0: a segmentation fault."""
    call = op.make(kind)
    run_op, given = (op.forward, call.of_forward(*call.leaves.values()))
    if is_backward:
        run_op, given = op.backward, call.of_backward(op.wanted(kind)[0])
    with pytest.raises(ValueError, match="expected memory behind its elements"):
        run(lambda first: run_op(first, *given[1:])[0], freed(given[0]))


@pytest.mark.parametrize("create_graph", [False, True])
@of_each_op()
def test_memory_freed_between_the_forward_of_an_op_and_its_backward(op, kind, create_graph):
    call = op.make(kind)
    for function in (call.by_op, call.public):
        leaves = call.recorded()
        leaves[0] = leaves[0].detach().clone().requires_grad_()
        results = function(*leaves)
        for each in (leaves[0], *results):  # the norm of a sum saves this, no x
            each.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="^[xq]: expected memory behind its elements"):
            torch.autograd.grad(results, leaves, call.dys, create_graph=create_graph)


N = 40


@pytest.mark.usefixtures("known_kernels")
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@of_each_op()
def test_the_ops(op, kind, is_backward, monkeypatch):
    call, other = op.make(kind), op.make(kind, seed=1)
    run, of = (op.backward, backward_of) if is_backward else (op.forward, forward_of)
    modes = torch.no_grad, torch.enable_grad, torch.inference_mode
    asked = op.wanted(kind) if is_backward else (0,)
    for number, wanted in enumerate(asked):
        given, others = of(call, wanted), of(other, wanted)
        run(*given)
        for grad_mode in modes if wanted == asked[-1] else modes[number : number + 1]:
            with grad_mode(), monkeypatch.context() as patch:
                run(*others)
                unknown = note_unknown(op, patch)
                known = present(run(*given))
                assert not unknown
                known_calls.forget()
                expected = present(run(*given))
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
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


@pytest.mark.usefixtures("known_kernels")
def test_a_gradient_that_is_not_wanted_has_the_dtype_of_x():
    x, w, dy, rstd = rows(6, N), rows(N), rows(6, N), torch.ones(6, 1, device=DEVICE)
    for _ in range(2):
        dx, dw, *_ = BACKWARD(dy, x, w, rstd, None, 2, 1, 0.0, "once", 1.0, FP32, None, None, None, "cutile")
        assert dx.dtype == BF16 and dx.numel() == 0 and dw.dtype == BF16
