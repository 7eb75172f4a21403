# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Residuals, biases and heads as nobody means to give them: one tensor twice, memory that overlaps, extents of 1 and 0,
weights with strides, rows of NaN, settings of the process, threads."""

import copy
import pickle
import threading

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU
from variants import Variant, check, check_all, check_residual_out, make, options, run

from tilegym_rmsnorm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward

ADDED = Variant(FP32, (5, 64), residual_dtype=FP32)
WHOLE = ADDED._replace(bias_dtype=FP32, alpha=0.5)


def norm(variant, inputs, backend):
    return rms_norm(
        inputs.x, variant.n, inputs.weight, variant.eps, **options(variant, inputs), backend=backend
    )


def with_leaves(inputs):
    """Return inputs whose x, weight, bias and residual are leaves."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs[:4]]
    return inputs._replace(**dict(zip(("x", "weight", "bias", "residual"), leaves, strict=True)))


def gradients_of(results, inputs, **more):
    leaves = [t for t in inputs[:4] if t is not None]
    return torch.autograd.grad(results, leaves, (inputs.dy, inputs.d_residual_out), **more)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_one_tensor_is_x_and_residual(alpha, backend):
    """Its gradient is the sum of both."""
    variant = ADDED._replace(alpha=alpha)
    inputs = make(variant)
    leaf = inputs.x.detach().requires_grad_()
    inputs = inputs._replace(x=leaf, residual=leaf)
    y, residual_out = norm(variant, inputs, backend)
    torch.autograd.backward((y, residual_out), (inputs.dy, inputs.d_residual_out))
    inputs = inputs._replace(x=leaf.detach(), residual=leaf.detach())
    check_residual_out(variant, inputs, residual_out.detach())
    check(variant, inputs, residual_out.detach(), y=y.detach())
    found = run(variant, inputs, backend)
    torch.testing.assert_close(leaf.grad, found["dx"] + found["d_residual"])


def test_x_and_residual_share_memory(backend):
    """Views of one leaf, a row apart."""
    inputs = make(ADDED._replace(size=(6, 64)))
    base = inputs.x.detach().requires_grad_()
    apart = inputs._replace(
        x=base[1:],
        residual=base[:-1],
        dy=inputs.dy[1:].contiguous(),
        d_residual_out=inputs.d_residual_out[1:].contiguous(),
    )
    y, residual_out = norm(ADDED, apart, backend)
    torch.autograd.backward((y, residual_out), (apart.dy, apart.d_residual_out))
    alone = apart._replace(x=base.detach()[1:].clone(), residual=base.detach()[:-1].clone())
    found = run(ADDED, alone, backend)
    expected = torch.zeros_like(base)
    expected[1:] += found["dx"]
    expected[:-1] += found["d_residual"]
    torch.testing.assert_close(base.grad, expected)
    check_all(ADDED, alone, found)


def test_rows_that_overlap(backend):
    """Windows over one sequence: x, residual and the gradients."""
    inputs = make(ADDED._replace(size=(1, 1000)))
    windows = [t.view(-1).as_strided((9, 64), (8, 1)) for t in (inputs.x, inputs.residual, inputs.dy)]
    variant = WHOLE._replace(size=(9, 64))
    inputs = make(variant)._replace(x=windows[0], residual=windows[1], dy=windows[2])
    check_all(variant, inputs, run(variant, inputs, backend))


EXTENTS = [(1, 1, 1, 16), (3, 1, 4, 16), (1, 5, 4, 16), (3, 5, 1, 16), (2, 3, 4, 1), (4, 16), (1, 1)]


@pytest.mark.parametrize("weight", ["vector", "heads"])
@pytest.mark.parametrize("size", EXTENTS, ids=str)
def test_extents_of_one(size, weight, backend):
    layout = "heads" if len(size) == 4 else "contiguous"
    variant = WHOLE._replace(size=size, weight=weight, layout=layout, residual_dtype=BF16)
    inputs = make(variant)
    check_all(variant, inputs, run(variant, inputs, backend))


@pytest.mark.parametrize("size", [(0, 5, 4, 16), (3, 0, 4, 16), (0, 4, 16)], ids=str)
def test_no_rows_of_heads(size, backend):
    x, weight = torch.empty(size, dtype=BF16, device=DEVICE), torch.ones(4, 16, device=DEVICE)
    y, residual_out, rstd = rms_norm_forward(
        x, weight, bias=weight.half(), residual=x.float(), out_dtype=FP16, backend=backend
    )
    assert (y.shape, y.dtype, residual_out.shape, residual_out.dtype) == (size, FP16, size, FP32)
    assert rstd.shape == (0,)
    dx, dw, db = rms_norm_backward(
        residual_out, y, weight, rstd, d_residual_out=x, dw_dtype=FP16, needs_db=True, backend=backend
    )
    assert (dx.shape, dx.dtype) == (size, FP32)
    for sum_of_none in (dw, db):
        assert (sum_of_none.shape, sum_of_none.dtype) == ((4, 16), FP16) and not sum_of_none.any()


def test_no_heads(backend):
    """A gradient of the bias alone was an error: a weight of no heads is no row."""
    bias = torch.zeros(0, 16, device=DEVICE, requires_grad=True)
    x, weight = torch.empty(3, 0, 16, device=DEVICE), torch.empty(0, 16, device=DEVICE)
    for create_graph in (False, True):
        y = rms_norm(x, 16, weight, bias=bias, backend=backend)
        (db,) = torch.autograd.grad(y, bias, torch.ones_like(y), create_graph=create_graph)
        assert db.shape == bias.shape


def test_residual_changed_after_the_forward(backend):
    """The residual is not saved."""
    inputs = with_leaves(make(WHOLE))
    kept = inputs.residual.detach().clone()
    y, residual_out = norm(WHOLE, inputs, backend)
    inputs.residual.detach().fill_(torch.nan)
    dx, dw, db, d_residual = gradients_of((y, residual_out), inputs)
    results = {"y": y.detach(), "residual_out": residual_out, "dx": dx, "dw": dw, "db": db}
    check_all(WHOLE, inputs._replace(residual=kept), results | {"d_residual": d_residual})


def test_a_graph_that_is_retained(backend):
    """Second gradients have the same bits, also where the first were changed in place."""
    inputs = with_leaves(make(WHOLE))
    results = norm(WHOLE, inputs, backend)
    first = gradients_of(results, inputs, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    for one, other in zip(gradients_of(results, inputs), kept, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of(results, inputs)


@pytest.mark.parametrize("n", [64, 3001])
def test_rows_that_are_no_numbers(n, backend):
    """They alone are NaN; dw and db, which sum over them, say so where their element has one."""
    variant = WHOLE._replace(size=(7, n))
    inputs = make(variant)
    x, residual = inputs.x.clone(), inputs.residual.clone()
    x[1, 3], x[3, 5], residual[5, 0] = torch.nan, torch.inf, -torch.inf
    results = run(variant, inputs._replace(x=x, residual=residual), backend)
    wrong, right = [1, 3, 5], [0, 2, 4, 6]
    for name in ("y", "dx", "d_residual"):
        assert results[name][wrong].isnan().any(dim=1).all() and results[name][right].isfinite().all(), name
    alone = inputs._replace(**{
        name: getattr(inputs, name)[right].contiguous() for name in ("x", "residual", "dy", "d_residual_out")
    })  # fmt: skip
    of_right = {name: results[name][right] for name in ("y", "residual_out", "dx", "d_residual")}
    check_all(variant._replace(size=(4, n)), alone, of_right)
    assert results["dw"].isnan().any() and results["db"].isfinite().all()


D_DTYPES = [None, FP16, BF16, FP32]


@pytest.mark.parametrize("dw_dtype", [None, FP16])
@pytest.mark.parametrize("d_dtype", D_DTYPES)
@pytest.mark.parametrize("dy_dtype", [FP16, FP32])
def test_gradients_of_any_dtype(dy_dtype, d_dtype, dw_dtype, backend):
    variant = Variant(BF16, (9, 64), weight_dtype=FP32, bias_dtype=dw_dtype or FP32)
    inputs = make(variant, dy_dtype=dy_dtype)
    added = make(ADDED._replace(size=(9, 64)), seed=1).d_residual_out
    added = None if d_dtype is None else added.to(d_dtype)
    _, rstd = rms_norm_forward(inputs.x, inputs.weight, variant.eps, backend=backend)
    dx, dw, db = rms_norm_backward(
        inputs.x,
        inputs.dy,
        inputs.weight,
        rstd,
        d_residual_out=added,
        dw_dtype=dw_dtype,
        needs_db=True,
        backend=backend,
    )
    inputs = inputs._replace(d_residual_out=added)
    variant = variant._replace(weight_dtype=dw_dtype or FP32)
    check(variant, inputs, dx=dx, dw=dw, db=db)


def test_copies_of_a_module(backend):
    kept = {"residual_alpha": 0.5, "residual_dtype": FP32, "out_dtype": FP16}
    module = RMSNorm(16, heads=4, bias=True, **kept, device=DEVICE, backend=backend)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, residual = (torch.randn(2, 4, 16, dtype=BF16, device=DEVICE) for _ in range(2))
    expected = module(x, residual)
    assert [result.dtype for result in expected] == [FP16, FP32]
    loaded = RMSNorm(16, heads=4, bias=True, **kept, device=DEVICE, backend=backend)
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert repr(other) == repr(module)
        assert all(map(torch.equal, other(x, residual), expected))
    with pytest.raises(RuntimeError, match="size mismatch"):
        RMSNorm(16, bias=True, device=DEVICE).load_state_dict(module.state_dict())
    for size in ((2, 3, 16), (16,)):
        with pytest.raises(ValueError, match="weight: expected shape"):
            module(torch.randn(size, device=DEVICE))


@pytest.mark.parametrize("setting", ["float64", "meta", "deterministic", "anomaly", "one thread"])
def test_settings_of_the_process(setting, backend):
    """Neither the results nor their dtypes and devices depend on them."""
    inputs = with_leaves(make(WHOLE._replace(dtype=BF16)))
    variant = WHOLE._replace(dtype=BF16)

    def all_results():
        results = norm(variant, inputs, backend)
        alone = [
            torch.autograd.grad(r, inputs.x, g, retain_graph=True)[0]
            for r, g in zip(results, inputs[4:], strict=True)
        ]
        return [*results, *alone, *gradients_of(results, inputs)]

    expected = all_results()
    try:
        if setting == "float64":
            torch.set_default_dtype(torch.float64)
        elif setting == "meta":
            torch.set_default_device("meta")
        elif setting == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif setting == "anomaly":
            torch.autograd.set_detect_anomaly(True)
        else:
            torch.autograd.set_multithreading_enabled(False)
        found = all_results()
    finally:
        torch.set_default_dtype(FP32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.autograd.set_multithreading_enabled(True)
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device and one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.skipif(HAS_GPU, reason="streams are tested in tests/gpu")
def test_threads(backend):
    """Each has the bits that one alone has."""
    each = [with_leaves(make(WHOLE, seed=seed)) for seed in range(4)]

    def call(inputs):
        results = norm(WHOLE, inputs, backend)
        return [*results, *gradients_of(results, inputs)]

    expected, found = [call(inputs) for inputs in each], {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: call(each[k % 4])})) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8)), "a thread raised"
    for k, results in found.items():
        assert all(map(torch.equal, results, expected[k % 4]))


@pytest.mark.parametrize(
    "options", [{}, {"residual_dtype": FP16, "casting": "llama"}, {"residual_dtype": BF16}], ids=str
)
def test_jagged_residuals(options):
    """Results and gradients are those of the values, where the sum is kept narrower too."""
    inputs = make(WHOLE)
    x, residual = (t.detach().requires_grad_() for t in (inputs.x, inputs.residual))
    offsets = torch.tensor([0, 2, 5], device=DEVICE)
    jagged = [torch.nested.nested_tensor_from_jagged(t, offsets) for t in (x, residual)]
    given = {"residual_alpha": 0.5, **options}
    y, residual_out = rms_norm(jagged[0], 64, inputs.weight, 1e-3, residual=jagged[1], **given)
    results = y.values(), residual_out.values()
    expected = rms_norm(x, 64, inputs.weight, 1e-3, residual=residual, **given, backend="torch")
    gradients = inputs.dy, inputs.d_residual_out.to(results[1].dtype)
    found = torch.autograd.grad(results, (x, residual), gradients)
    wanted = torch.autograd.grad(expected, (x, residual), gradients)
    for one, other in zip((*results, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3 if one.dtype == FP16 else 1e-5, atol=1e-5)
