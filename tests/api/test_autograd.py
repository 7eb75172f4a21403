# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rms_norm under autograd: which gradients, from which outputs and backend, and what is kept for them, with a residual
too. First and second derivatives of each op's calls, numerically, in float64; and second ones behind kernels."""

import functools
import itertools

import pytest
import torch
from every_op import assert_same_bits, each_op, each_smooth_kind, of_norm, present
from helpers import BF16, DEVICE, FP32, FP64, assert_within, expected_results, make_inputs
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.torch_version import TorchVersion
from variants import Variant, check, make, options

from tilegym_rmsnorm import rms_norm, rms_norm_backward, rms_norm_forward, use_backend
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.registry import Request, dispatch
from tilegym_rmsnorm.ops.norm import checks, eager


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


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.parametrize("by_op", [False, True])
@each_op
def test_gradients_that_nobody_needs_are_not_computed(op, by_op, calls):
    """A backend computes fewer where the first leaf alone needs one."""
    call, counts = op.make(op.alike), []
    for needing in (1, len(call.leaves)):
        leaves = [each.detach() for each in call.leaves.values()]
        needed = [leaf.requires_grad_() for leaf in leaves[:needing]]
        results = (call.by_op if by_op else call.public)(*leaves, *call.fixed.values(), backend="torch")
        torch.autograd.grad(results, needed, call.dys)
        function, given = calls[-1]
        counts.append(len(present(function(*given))))
    assert counts[0] < counts[1]


@pytest.mark.usefixtures("poisoned_empty")
def test_no_graph_where_nobody_asks(backend, monkeypatch):
    inputs, x, weight = _leaves()
    monkeypatch.setattr(eager, "_record", lambda *_: pytest.fail("recorded for autograd"))
    with torch.no_grad():
        assert not rms_norm(x, (100,), weight, backend=backend).requires_grad
    assert not rms_norm(inputs.x, (100,), inputs.weight, backend=backend).requires_grad


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("size", [(6, 64), (2, 3, 64), (64,)])
def test_in_place_operations_on_the_output(backend, size):
    x = torch.randn(size, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad((2 * rms_norm(x, (64,), backend=backend)).sum(), x)[0]
    y = rms_norm(x, (64,), backend=backend)
    y.mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.usefixtures("poisoned_empty")
def test_an_input_changed_before_the_backward_is_an_error(backend):
    _, x, weight = _leaves()
    held = x * 1
    y = rms_norm(held, (100,), weight, backend=backend)
    held.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.usefixtures("poisoned_empty")
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


@pytest.mark.usefixtures("poisoned_empty")
def test_the_reference_by_name_does_not_break_a_graph(monkeypatch):
    """A process's first call, before anything is chosen, breaks none either."""
    monkeypatch.setattr(registry, "_chosen", {})
    x, weight = torch.randn(2, 3, 100, requires_grad=True), torch.rand(100, requires_grad=True)
    torch._dynamo.reset()
    norm = torch.compile(rms_norm, backend="eager", fullgraph=True)
    y, expected = (run(x, (100,), weight, backend="torch") for run in (norm, rms_norm))
    assert torch.equal(y, expected) and y.requires_grad


@pytest.mark.usefixtures("poisoned_empty")
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


VARIANT = Variant(BF16, (6, 64), bias_dtype=FP32, residual_dtype=BF16)
NAMES = ("x", "weight", "bias", "residual")
RESULTS = {"x": "dx", "weight": "dw", "bias": "db", "residual": "d_residual"}
VARIANTS = {
    "one gradient": VARIANT,
    "alpha": VARIANT._replace(alpha=0.5),
    "two dtypes": VARIANT._replace(residual_dtype=FP32),
    "kept in float32": VARIANT._replace(residual_out_dtype=FP32, alpha=-0.5),
    "kept in 16 bits": VARIANT._replace(dtype=FP32, residual_dtype=FP32, residual_out_dtype=BF16, alpha=0.22),
}


def leaves(inputs, needing=NAMES):
    return {name: getattr(inputs, name).detach().requires_grad_(name in needing) for name in NAMES}


def norm(variant, given, backend):
    inputs = make(variant)._replace(**given)
    return rms_norm(
        inputs.x, variant.n, inputs.weight, variant.eps, **options(variant, inputs), backend=backend
    )


ASKED_FOR = [c for count in (1, 2, 3) for c in itertools.combinations(NAMES, count)]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("needing", ASKED_FOR, ids=",".join)
def test_only_what_is_asked_for(name, needing, backend):
    variant = VARIANTS[name]
    inputs = make(variant)
    given = leaves(inputs, needing)
    y, residual_out = norm(variant, given, backend)
    has_sum = "x" in needing or "residual" in needing
    assert y.requires_grad and residual_out.requires_grad == has_sum
    outputs = ((y, residual_out), (inputs.dy, inputs.d_residual_out)) if has_sum else (y, inputs.dy)
    found = torch.autograd.grad(outputs[0], [given[n] for n in needing], outputs[1])
    results = {RESULTS[n]: gradient for n, gradient in zip(needing, found, strict=True)}
    check(variant, inputs, residual_out.detach(), **results)


@pytest.mark.parametrize("name", VARIANTS)
def test_residual_out_alone(name, backend):
    """The backend is not asked: the sum's gradient is exact. weight and bias have none."""
    variant = VARIANTS[name]
    inputs = make(variant)
    given = leaves(inputs)
    _, residual_out = norm(variant, given, backend)
    dx, dw, db, d_residual = torch.autograd.grad(
        residual_out, list(given.values()), inputs.d_residual_out, allow_unused=True
    )
    assert dw is None and db is None
    wide = inputs.d_residual_out.float()
    torch.testing.assert_close(dx, (variant.alpha * wide).to(variant.dtype), rtol=0, atol=0)
    torch.testing.assert_close(d_residual, wide.to(variant.residual_dtype), rtol=0, atol=0)


def test_one_tensor_is_both_gradients(backend, monkeypatch):
    """Alpha 1 and one dtype save the memory of a row, and a write."""

    wanted_by = []
    gradients = eager.gradients
    monkeypatch.setattr(
        eager,
        "gradients",
        lambda tensors, call, wanted, *rest: (
            wanted_by.append(wanted) or gradients(tensors, call, wanted, *rest)
        ),
    )
    for variant in VARIANTS.values():
        y, residual_out = norm(variant, leaves(inputs := make(variant)), backend)
        torch.autograd.backward((y, residual_out), (inputs.dy, inputs.d_residual_out))
    assert [wanted.d_residual for wanted in wanted_by] == [None, BF16, FP32, BF16, FP32]


def test_gradients_that_are_accumulated_apart(backend):
    """x.grad and residual.grad may be changed in place, as by clipping, though one tensor came back for both."""
    given = leaves(inputs := make(VARIANT))
    y, residual_out = norm(VARIANT, given, backend)
    torch.autograd.backward((y, residual_out), (inputs.dy, inputs.d_residual_out))
    kept = given["residual"].grad.clone()
    given["x"].grad.zero_()
    assert torch.equal(given["residual"].grad, kept)


def test_residual_out_changed_in_place(backend):
    """Autograd says so: it is saved."""
    y, residual_out = norm(VARIANT, leaves(inputs := make(VARIANT)), backend)
    residual_out.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(inputs.dy)


@pytest.mark.parametrize("is_op", [False, True])
def test_residual_out_alone_needs_nothing_that_was_saved(is_op, backend):
    """A residual stream is changed in place, as by `h += mlp(y.detach())`, and its graph is used twice."""
    call, unpacked = of_norm(VARIANT), []
    x, weight, _, residual = leaves = call.recorded()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
        _, residual_out = (call.by_op if is_op else call.public)(*leaves, backend=backend)
    weight.detach().add_(1)
    residual_out.add_(1)
    for _ in range(2):
        dx, d_residual = torch.autograd.grad(residual_out.sum(), (x, residual))
        assert torch.equal(dx, torch.ones_like(dx)) and torch.equal(d_residual, torch.ones_like(dx))
    assert not unpacked


@pytest.mark.parametrize("is_op", [False, True])
def test_autograd_has_the_tensors_in_one_order(is_op, backend):
    """In it gradients of one tensor are added, so bits depend on it, and DDP makes its buckets."""
    call, seen = of_norm(VARIANT), []
    x, weight, bias, residual = leaves = call.recorded()
    y, _ = (call.by_op if is_op else call.public)(*leaves, backend=backend)
    y.grad_fn.register_hook(lambda gradients, _: seen.extend(gradients))  # of its inputs
    y.backward(call.dys[0])
    found = [each for each in seen if each is not None]
    assert_same_bits(found, [each.grad for each in (x, residual, weight, bias)])


@pytest.mark.parametrize("hooks", ["offloaded", "another copy", "strided"])
def test_hooks_of_saved_tensors(hooks, backend):
    unpack = {
        "another copy": lambda t: t.clone(),
        "strided": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], dim=-1)[..., 0],
    }
    context = (
        torch.autograd.graph.save_on_cpu()
        if hooks == "offloaded"
        else torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack[hooks])
    )
    given = leaves(inputs := make(VARIANT))
    with context:
        y, residual_out = norm(VARIANT, given, backend)
    torch.autograd.backward((y, residual_out), (inputs.dy, inputs.d_residual_out))
    results = {RESULTS[name]: tensor.grad for name, tensor in given.items()}
    check(VARIANT, inputs, residual_out.detach(), **results)


def test_rstd_of_no_rows_has_the_dtype_of_the_sum():
    """rstd of some rows has it too."""
    for rows in (0, 2):
        x, residual = torch.ones(rows, 8, device=DEVICE), torch.ones(rows, 8, dtype=FP64, device=DEVICE)
        assert rms_norm_forward(x, None, residual=residual)[2].dtype is FP64
        assert rms_norm_forward(residual, None, residual=x, residual_dtype=FP32)[2].dtype is FP32


def test_sums_that_round_up_to_infinity(backend):
    """No NaN beside it in the row: it is a value like any other."""
    x = torch.full((2, 64), 60000.0, dtype=torch.float16, device=DEVICE)
    x[1] = 1.0
    y, residual_out = rms_norm(x, 64, residual=x, backend=backend)
    assert residual_out[0].isinf().all() and torch.equal(residual_out[1], x[1] * 2)
    assert y[1].isfinite().all()


def test_the_first_norm_of_a_block_and_the_second(backend):
    """y and residual_out of one call go into the next: gradients add up along both ways."""
    variant = Variant(FP32, (5, 64), residual_dtype=FP32)
    inputs = make(variant)
    given = leaves(inputs._replace(bias=torch.zeros(64, device=DEVICE)))

    def block(norm):
        y, stream = norm(given["x"], given["residual"])
        y, stream = norm(torch.tanh(y), stream)
        return torch.autograd.grad(
            (y * inputs.dy + stream * inputs.d_residual_out).sum(),
            [given["x"], given["residual"], given["weight"]],
        )

    def ours(x, residual):
        return rms_norm(x, 64, given["weight"], 1e-3, residual=residual, backend=backend)

    def theirs(x, residual):
        total = x + residual
        return torch.nn.functional.rms_norm(total, (64,), given["weight"], 1e-3), total

    torch.testing.assert_close(block(ours), block(theirs), rtol=2e-5, atol=2e-4)


def test_a_gradient_with_a_minus_sign_pending(backend):
    """d_residual_out that is no plain memory: its values are those at its address times -1."""
    x, residual, dy, d = (torch.randn(4, 64, device=DEVICE) for _ in range(4))
    x.requires_grad_()
    y, out = rms_norm(x, 64, residual=residual, backend=backend)
    pending = torch.complex(d, d).conj().imag
    assert pending.is_neg()
    (expected,) = torch.autograd.grad((y, out), (x,), (dy, -d), retain_graph=True)
    assert torch.equal(torch.autograd.grad((y, out), (x,), (dy, pending))[0], expected)


def test_a_gradient_that_is_no_plain_memory_takes_all_checks(monkeypatch):
    """Interpreters read through a pending minus sign, kernels do not."""

    checked = []
    run = checks.check_saved
    monkeypatch.setattr(checks, "check_saved", lambda *a: checked.append(a) or run(*a))
    x, d = torch.randn(4, 64, device=DEVICE, requires_grad=True), torch.randn(4, 64, device=DEVICE)
    y, out = rms_norm(x, 64, residual=d, backend="torch")
    torch.autograd.grad((y, out), (x,), (d, torch.complex(d, d).conj().imag))
    assert len(checked) == 1


@pytest.mark.parametrize("is_op", [False, True], ids=["function", "op"])
@each_smooth_kind
def test_numerically(op, kind, is_op):
    call = op.make(kind)
    function = call.by_op if is_op else call.public
    checked = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, call.recorded(), **checked)
    assert gradgradcheck(function, call.recorded())


@each_smooth_kind
def test_of_one_output(op, kind):
    call = op.make(kind)
    for output in range(len(call.dys)) if len(call.dys) > 1 else ():
        assert gradgradcheck(lambda *given, output=output: call.public(*given)[output], call.recorded())


@each_smooth_kind
def test_behind_kernels(op, kind, backend):
    """The gradient of a penalty on gradients, against the reference in float64."""

    def penalty(dtype, name):
        call = op.make(kind)
        leaves = [each.to(dtype).requires_grad_() for each in call.leaves.values()]
        results = call.public(*leaves, backend=name)
        first = torch.autograd.grad(sum((each**2).sum() for each in results), leaves, create_graph=True)
        return torch.autograd.grad(sum((each**2).sum() for each in first), leaves)

    for one, other in zip(penalty(FP32, backend), penalty(FP64, "torch"), strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=1e-4, atol=1e-4)
        assert one.device.type == DEVICE.type


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x,weight,bias"])
def test_a_node_returns_the_gradients_that_are_needed(wanted):
    """Also that of a known call: the second."""
    x, weight, bias, dy = torch.randn(3, 8), torch.rand(8), torch.rand(8), torch.randn(3, 8)
    given = {"x": x, "weight": weight, "bias": bias}
    for name in wanted.split(","):
        given[name].requires_grad_()
    for _ in range(3):
        y = rms_norm(x, (8,), weight, 1e-6, bias=bias, backend="torch")
        with torch.no_grad():
            results = y.grad_fn.apply(dy)
        needed = [each.requires_grad for each in given.values()]
        assert [each is not None for each in results] == [False, *needed]
