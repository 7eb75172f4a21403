# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Residuals, biases and heads as nobody means to give them: one tensor twice, memory that overlaps, extents of 1 and 0,
weights with strides, rows of NaN, settings of the process, threads."""

import copy
import itertools
import pickle
import threading

import pytest
import torch
from every_op import assert_same_bits, ends, fewest, of_each_op, of_norm
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU
from variants import Variant, check, check_all, check_residual_out, make, options, run

from tilegym_rmsnorm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward

ADDED = Variant(FP32, (5, 64), residual_dtype=FP32)
WHOLE = ADDED._replace(bias_dtype=FP32, alpha=0.5)


def norm(variant, inputs, backend):
    return rms_norm(
        inputs.x, variant.n, inputs.weight, variant.eps, **options(variant, inputs), backend=backend
    )


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
    call = of_norm(WHOLE)
    leaves, kept = call.recorded(), call.both_passes(backend=backend)
    leaves[-1] = call.leaves["residual"].detach().clone().requires_grad_()
    results = call.public(*leaves, backend=backend)
    leaves[-1].detach().fill_(torch.nan)
    gradients = torch.autograd.grad(results, leaves, call.dys)
    assert_same_bits([*(each.detach() for each in results), *gradients], kept)


@of_each_op(ends, is_long=True)
def test_a_graph_that_is_retained(op, kind, backend):
    """Second gradients have the same bits, also where the first were changed in place."""
    call = op.make(kind)
    leaves = call.recorded()
    results = call.public(*leaves, *call.fixed.values(), backend=backend)
    first = torch.autograd.grad(results, leaves, call.dys, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    assert_same_bits(torch.autograd.grad(results, leaves, call.dys), kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(results, leaves, call.dys)


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


SETTINGS = {  # of the process, and what they are otherwise
    torch.set_default_dtype: (torch.float64, FP32),
    torch.set_default_device: ("meta", None),
    torch.use_deterministic_algorithms: (True, False),
    torch.autograd.set_detect_anomaly: (True, False),
    torch.autograd.set_multithreading_enabled: (False, True),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
@of_each_op(fewest, is_long=True)
def test_settings_of_the_process(op, kind, setting, backend):
    """Neither the results nor their dtypes and devices depend on them."""
    call, (changed, usual) = op.make(kind), SETTINGS[setting]

    def all_results():
        leaves = call.recorded()
        results = call.public(*leaves, *call.fixed.values(), backend=backend)
        alone = (
            torch.autograd.grad(result, leaves, dy, retain_graph=True, allow_unused=True)
            for result, dy in zip(results, call.dys, strict=True)
        )
        gradients = *itertools.chain(*alone), *torch.autograd.grad(results, leaves, call.dys)
        return [*results, *(each for each in gradients if each is not None)]

    expected = all_results()
    try:
        setting(changed)
        found = all_results()
    finally:
        setting(usual)
        # get_default_device() of torch 2.9 would fail from now on
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", True) is None:
            del torch._GLOBAL_DEVICE_CONTEXT.device_context
    assert [each.device for each in found] == [each.device for each in expected]
    assert_same_bits(found, expected)


@pytest.mark.skipif(HAS_GPU, reason="streams are tested in tests/gpu")
@of_each_op(fewest, is_long=True)
def test_threads(op, kind, backend):
    """Each has the bits that one alone has."""
    calls, found = [op.make(kind, seed=seed) for seed in range(4)], {}
    expected = [call.both_passes(backend=backend) for call in calls]

    def work(k):
        found[k] = calls[k % 4].both_passes(backend=backend)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8)), "a thread raised"
    for k, results in found.items():
        assert_same_bits(results, expected[k % 4])


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
