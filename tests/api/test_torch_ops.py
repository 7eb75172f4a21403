# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The library ops by themselves: what PyTorch asks of an op, right values, gradients, and transforms."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import pytest
import torch
import variants
from gate_cases import freed
from helpers import BF16, DEVICE, FP16, FP32, FP64
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from tilegym_rmsnorm import rms_norm, rms_norm_backward, settings, use_backend
from tilegym_rmsnorm.ops.norm.op import BACKWARD, FORWARD, SCHEMAS

NORM = 1e-3, 0.5, "once"  # eps, offset, casting
PLAIN = *NORM, 1.0, None, None, None  # and alpha, residual_dtype, out_dtype, backend
OF_BACKWARD = 0.5, "once", 1.0, None, None, None, None, None  # offset, casting, alpha, four dtypes, backend
BACKENDS = (None, "torch", "cutile", "triton")


@pytest.fixture(params=BACKENDS, ids=str)
def name(request):
    """A backend that an op is given."""
    if request.param not in (None, "torch"):
        request.getfixturevalue("kernels_on_this_machine")(request.param)
    return request.param


@pytest.fixture
def kernels_on_this_machine():
    from helpers import why_skip

    def check(backend):
        if reason := why_skip(backend):
            pytest.skip(reason)

    return check


def tensors(*shape, of=(8,), dtype=FP32, needs_grad=False, seed=0):
    """x, residual, weight, bias."""
    torch.manual_seed(seed)
    made = (torch.randn(size, dtype=dtype, device=DEVICE) for size in (shape, shape, of, of))
    return tuple(each.requires_grad_(needs_grad) for each in made)


OF_VECTORS = {1: (8,), 2: (4, 8)}  # by the number of normalized dimensions


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("dims", OF_VECTORS)
def test_pytorch_s_own_checks_of_forwards(name, dims, needs_grad):
    x, residual, weight, bias = tensors(3, 4, 8, of=OF_VECTORS[dims], needs_grad=needs_grad)
    opcheck(FORWARD, (x, None, weight, bias, dims, *NORM, 1.0, None, None, name))
    opcheck(FORWARD, (x, None, None, None, dims, *NORM, 1.0, None, BF16, name))
    opcheck(FORWARD, (x, residual, weight, bias, dims, *NORM, 0.5, None, None, name))


@pytest.mark.parametrize("name", BACKENDS[1:], indirect=True)  # None runs one of them
@pytest.mark.parametrize(("dims", "wanted"), [(1, 1), (1, 2), (1, 5), (2, 7)])
def test_pytorch_s_own_checks_of_backwards(name, dims, wanted):
    x, dy, weight, _ = tensors(3, 4, 8, of=OF_VECTORS[dims])
    rstd = FORWARD(x, None, weight, None, dims, *NORM, 1.0, None, None, name)[1]
    numbers = dims, 0.5, "once"
    opcheck(BACKWARD, (dy, x, weight, rstd, None, wanted, *numbers, 1.0, None, None, None, FP16, name))
    given = dy, x, weight, rstd, x.cos(), wanted + 8, *numbers, 0.5, None, None, BF16, None, name
    opcheck(BACKWARD, given)


KINDS = {
    "plain": variants.Variant(BF16, weight_dtype=BF16, size=(2, 3, 64)),
    "bias": variants.Variant(FP16, weight_dtype=FP32, bias_dtype=FP32, size=(2, 3, 64), casting="llama"),
    "heads": variants.Variant(BF16, (2, 3, 4, 16), "heads", BF16, layout="heads", out_dtype=FP32),
    "residual": variants.Variant(BF16, residual_dtype=BF16, size=(2, 3, 64)),
    "two dtypes": variants.Variant(BF16, residual_dtype=FP32, size=(2, 3, 64)),
    "two gradients": variants.Variant(BF16, residual_dtype=FP32, alpha=0.22, size=(2, 3, 64), offset=1.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_rms_norm(name, kind):
    """Bits agree: both run the same code."""
    variant = KINDS[kind]
    results = []
    for by_op in (False, True):
        x, weight, bias, residual, dy, d_residual_out = inputs = variants.make(variant, seed=1)
        leaves = [each.requires_grad_() for each in (x, weight, bias, residual) if each is not None]
        if by_op:
            norm = 1, variant.eps, variant.offset, variant.casting
            dtypes = variant.residual_out_dtype, variant.out_dtype
            y, _, residual_out = FORWARD(x, residual, weight, bias, *norm, variant.alpha, *dtypes, name)
            outputs = (y,) if residual_out is None else (y, residual_out)
            assert (residual_out is None) == (residual is None)
        else:
            given = variants.options(variant, inputs)
            outputs = rms_norm(x, variant.n, weight, variant.eps, **given, backend=name)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, leaves, [dy, d_residual_out][: len(outputs)])
        results.append([*outputs, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        assert ours.is_contiguous()


def test_rstd_is_shaped_as_aten_s():
    x, residual, *_ = tensors(3, 4, 8)
    for dims, shape in ((1, (3, 4, 1)), (2, (3, 1, 1)), (3, (1, 1, 1))):
        for added in (None, residual):
            assert FORWARD(x, added, None, None, dims, *PLAIN)[1].shape == shape
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


FP64_NORMS = {
    "plain": lambda x, r, w, b: FORWARD(x, None, w, b, 1, *PLAIN)[0],
    "two dimensions": lambda x, r, w, b: FORWARD(x, None, None, None, 2, *PLAIN)[0],
    "residual": lambda x, r, w, b: FORWARD(x, r, w, b, 1, *NORM, 0.5, None, None, None)[::2],
}


@pytest.mark.parametrize("kind", FP64_NORMS)
def test_gradients_of_gradients(kind):
    inputs = tensors(2, 3, 4, of=(4,), dtype=FP64, needs_grad=True)
    assert gradcheck(FP64_NORMS[kind], inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(FP64_NORMS[kind], inputs)


@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_gradients_that_are_differentiated_again_are_all_there(kind):
    """gradgradcheck takes a missing one for zeros."""
    inputs = tensors(2, 3, 4, of=(4,), dtype=FP64, needs_grad=True)
    results = FP64_NORMS[kind](*inputs)
    results = results if isinstance(results, tuple) else (results,)
    used = [each for i, each in enumerate(inputs) if kind == "residual" or i != 1]
    options = {"grad_outputs": [each.detach().cos() for each in results], "retain_graph": True}
    expected = torch.autograd.grad(results, used, **options)
    again = torch.autograd.grad(results, used, **options, create_graph=True)
    for ours, theirs in zip(again, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


def test_backwards_are_differentiated_as_the_reference():
    x, dy, weight, _ = tensors(2, 4, of=(4,), dtype=FP64, needs_grad=True)
    rstd = FORWARD(x.detach(), None, None, None, 1, *PLAIN)[1].requires_grad_()
    d = torch.randn_like(x).requires_grad_()

    def backward(dy, x, weight, rstd):
        return BACKWARD(dy, x, weight, rstd, None, 7, 1, *OF_BACKWARD)[:3]

    def of_a_sum(dy, x, weight, rstd, d):
        return BACKWARD(dy, x, weight, rstd, d, 15, 1, 0.5, "once", 0.5, None, None, None, None, None)

    assert gradcheck(backward, (dy, x, weight, rstd)) and gradcheck(of_a_sum, (dy, x, weight, rstd, d))


def test_transforms_of_torch_func():
    x, residual, weight, bias = tensors(5, 3, 8, dtype=FP64)
    plain = functools.partial(rms_norm, normalized_shape=8, eps=1e-3, offset=0.5)

    def by_op(x, weight, bias=None):
        return FORWARD(x, None, weight, bias, 1, *PLAIN)[0]

    same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    expected = plain(x, weight=weight, bias=bias)
    same(torch.vmap(by_op, (0, None, None))(x, weight, bias), expected)
    same(torch.vmap(by_op, (1, None, None), 1)(x, weight, bias), expected)
    weights = torch.stack([weight, 2 * weight, weight.cos(), -weight, weight])
    each = torch.stack([plain(x[i], weight=weights[i]) for i in range(5)])
    same(torch.vmap(by_op)(x, weights), each)
    biases = weights.sin()
    each = torch.stack([plain(x[i], weight=weight, bias=biases[i]) for i in range(5)])
    same(torch.vmap(by_op, (0, None, 0))(x, weight, biases), each)
    added = torch.vmap(lambda r: FORWARD(x[0], r, weight, None, 1, *NORM, 0.5, None, None, None)[2])
    same(added(residual), 0.5 * x[0] + residual)

    def loss(norm, x, weight):
        return norm(x, weight).sin().sum()

    expected = torch.func.grad(functools.partial(loss, lambda x, w: plain(x, weight=w)), (0, 1))(x, weight)
    for ours, theirs in zip(
        torch.func.grad(functools.partial(loss, by_op), (0, 1))(x, weight), expected, strict=True
    ):
        same(ours, theirs)
    tangent = x.cos()
    for ours, theirs in zip(
        torch.func.jvp(lambda x: by_op(x, weight), (x,), (tangent,)),
        torch.func.jvp(lambda x: plain(x, weight=weight), (x,), (tangent,)),
        strict=True,
    ):
        same(ours, theirs)
    with forward_ad.dual_level():
        dual = by_op(forward_ad.make_dual(x, tangent), weight)
        assert forward_ad.unpack_dual(dual).tangent is not None


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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the backend that counts calls reads a CPU's addresses")
@pytest.mark.parametrize("is_watched", [False, True])
def test_the_backward_takes_the_backend_of_the_forward(monkeypatch, is_watched):
    """Blocks of use_backend have no effect in autograd's threads."""
    import by_address
    from torch.utils.flop_counter import FlopCounterMode

    by_address.use(monkeypatch)
    x, _, weight, _ = tensors(3, 8, needs_grad=True)
    watching = FlopCounterMode(display=False) if is_watched else contextlib.nullcontext()
    monkeypatch.setattr(settings, "_process_backend", "torch")
    with use_backend("cutile"), watching:
        y = FORWARD(x, None, weight, None, 1, 1e-3, 0.0, "once", 1.0, None, None, None)[0]
    y.sum().backward()
    assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]


X = torch.randn(3, 8)
RSTD = torch.ones(3, 1)
MISFITS = {
    "dims": (lambda: FORWARD(X, None, None, None, 3, *PLAIN), ValueError, "normalized_dims: expected 1 to 2"),
    "no dims": (lambda: FORWARD(X, None, None, None, 0, *PLAIN), ValueError, "normalized_dims: expected 1"),
    "weight": (
        lambda: FORWARD(X, None, X[0, :7], None, 1, *PLAIN),
        ValueError,
        r"weight: expected shape \(8,\)",
    ),
    "integers": (lambda: FORWARD(X.int(), None, None, None, 1, *PLAIN), TypeError, "x: expected a dtype"),
    "residual": (
        lambda: FORWARD(X, X[:2], None, None, 1, *PLAIN),
        ValueError,
        "residual: expected the shape of x",
    ),
    "dy": (
        lambda: BACKWARD(X[:2], X, None, RSTD, None, 1, 1, *OF_BACKWARD),
        ValueError,
        "dy: expected the shape of x",
    ),
    "rstd": (
        lambda: BACKWARD(X, X, None, RSTD[:2], None, 1, 1, *OF_BACKWARD),
        ValueError,
        r"rstd: expected shape \(3, 1\), one element per row of x",
    ),
    "casting": (
        lambda: FORWARD(X, None, None, None, 1, 1e-3, 0.0, "gemma", 1.0, None, None, None),
        ValueError,
        "casting: expected one of",
    ),
    "backend": (
        lambda: FORWARD(X, None, None, None, 1, *NORM, 1.0, None, None, "cuda"),
        ValueError,
        "backend: expected one of",
    ),
    "eps": (
        lambda: FORWARD(X, None, None, None, 1, -1.0, 0.0, "once", 1.0, None, None, None),
        ValueError,
        "eps: expected",
    ),
    "out_dtype": (
        lambda: FORWARD(X, None, None, None, 1, *NORM, 1.0, None, torch.int32, None),
        TypeError,
        "out_dtype: expected",
    ),
    "wanted": (
        lambda: BACKWARD(X, X, None, RSTD, None, 16, 1, *OF_BACKWARD),
        ValueError,
        "wanted: expected 0 to 15, got 16",
    ),
    "no dims of a backward": (
        lambda: BACKWARD(X, X, None, torch.tensor(1.0), None, 1, 0, 0.0, "once", 1.0, *[None] * 5),
        ValueError,
        "normalized_dims: expected 1 to 2",
    ),
    "flat rstd": (
        lambda: BACKWARD(X, X, None, RSTD.flatten(), None, 1, 1, *OF_BACKWARD),
        ValueError,
        r"rstd: expected shape \(3, 1\), one element per row of x",
    ),
    "rstd without memory": (
        lambda: BACKWARD(X, X, None, RSTD.to("meta"), None, 1, 1, *OF_BACKWARD),
        ValueError,
        "rstd: expected the device of x",
    ),
    "dtype of db": (
        lambda: BACKWARD(X, X, None, RSTD, None, 5, 1, *OF_BACKWARD[:-2], torch.int32, None),
        TypeError,
        "a gradient's dtype: expected",
    ),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
@pytest.mark.parametrize("kind", MISFITS)
def test_arguments_that_do_not_fit(kind, mode):
    """Making a graph raises, too."""
    call, error, text = MISFITS[kind]
    given = {"allow_non_fake_inputs": True} if mode is FakeTensorMode else {}
    with mode(**given), pytest.raises(error, match=text):
        call()


def test_the_schemas_are_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    written = " ".join(text.split())
    for name, schema in SCHEMAS.items():
        assert f"{name}{schema}" in written, name


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_no_two_results_share_memory(backend, kernels_on_this_machine):
    """Alpha 1 and one dtype make dx and d_residual the same numbers."""
    kernels_on_this_machine(backend)
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


def test_no_rows():
    x, residual, weight, bias = tensors(0, 8, needs_grad=True)
    y, rstd, residual_out = FORWARD(x, residual, weight, bias, 1, *PLAIN)
    assert y.shape == residual_out.shape == (0, 8) and rstd.shape == (0, 1)
    (y.sum() + residual_out.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and x.grad.shape == (0, 8)


def names_of_operations(run):
    """Name the operations dispatched, by the profiler, which is no mode."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return {event.key for event in profiled.key_averages()}


def test_a_plain_call_does_not_pass_the_dispatcher():
    """Its host time is that of a kernel's launch."""
    x, _, weight, _ = tensors(3, 8, needs_grad=True)
    by_op = names_of_operations(lambda: FORWARD(x, None, weight, None, 1, *PLAIN)[0].sum().backward())
    assert {"tilegym_rmsnorm::rms_norm_forward", "tilegym_rmsnorm::rms_norm_backward"} <= by_op
    plain = names_of_operations(lambda: rms_norm(x, 8, weight).sum().backward())
    assert plain and not any("tilegym" in name for name in plain)


@pytest.mark.parametrize(
    "run",
    [
        lambda call, x: torch.jit.trace(call, (x,), check_trace=False),
        lambda call, x: torch.vmap(lambda scale: call(x) * scale)(torch.ones(2)),
        lambda call, x: torch.func.vjp(call, x),
    ],
    ids=["torch.jit.trace", "vmap", "vjp"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: FORWARD(x, None, None, None, 1, *NORM, 1.0, None, None, None)[0],
        lambda x: BACKWARD(x, x, None, RSTD, None, 1, 1, 0.0, "once", 1.0, *[None] * 5)[0],
    ],
    ids=["forward", "backward"],
)
def test_freed_memory_is_an_error_under_transforms_too(call, run):
    """PyTorch's operations would read address 0: a segmentation fault."""
    with pytest.raises(ValueError, match="expected memory behind its elements"):
        run(call, freed(X.clone()))


@pytest.mark.parametrize("create_graph", [False, True])
def test_memory_freed_between_the_forward_of_an_op_and_its_backward(create_graph):
    x = X.clone().requires_grad_()
    y = FORWARD(x, None, None, None, 1, *NORM, 1.0, None, None, None)[0]
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x: expected memory behind its elements"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=create_graph)
