# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The ops on every backend: values against float64 over shapes, dtypes and layouts, each a way in which norms of this
kind have been wrong elsewhere. Without a GPU the kernels run in their interpreters."""

import functools

import pytest
import torch
from helpers import (
    BACKENDS,
    BF16,
    DEVICE,
    DTYPE_PAIRS,
    FP16,
    FP32,
    HAS_GPU,
    SHAPES,
    Inputs,
    assert_llama_rounds,
    assert_within,
    expected_results,
    make_inputs,
    shape,
)
from variants import arranged

from tilegym_rmsnorm import rms_norm, rms_norm_backward, rms_norm_forward

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SWEEP = [
    (backend, name, pair)
    for backend in BACKENDS
    for name in SHAPES
    for pair in DTYPE_PAIRS
    if name in ("100 columns", "4097 columns") or pair in ((BF16, FP32), (FP32, FP32))
]


def run(inputs: Inputs, backend: str) -> dict[str, torch.Tensor | None]:
    """y, rstd, dx and dw of the public functions on rows."""
    x, dy, weight, eps, offset, casting = inputs
    y, rstd = rms_norm_forward(x, weight, eps, offset=offset, casting=casting, backend=backend)
    dx, dw = rms_norm_backward(x, dy, weight, rstd, offset=offset, casting=casting, backend=backend)
    assert y.is_contiguous() and dx.is_contiguous()
    results = {"y": y, "rstd": rstd, "dx": dx, "dw": dw}
    if weight is None:
        assert results.pop("dw") is None
    return results


@pytest.mark.parametrize(("backend", "name", "dtypes"), SWEEP, indirect=["backend"])
def test_shapes_and_dtypes(backend, name, dtypes):
    inputs = make_inputs(*shape(name), *dtypes)
    assert_within(expected_results(inputs), **run(inputs, backend))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_llama_casting_rounds_xhat_in_y_and_dw(backend, dtype):
    inputs = make_inputs(64, 128, dtype, FP32, casting="llama")
    llama, once = run(inputs, backend), run(inputs._replace(casting="once"), backend)
    assert_within(expected_results(inputs), dx=llama["dx"])  # which is that of "once"
    assert_llama_rounds(inputs, llama, once)


@pytest.mark.parametrize("eps", [None, 0.0, 0.5])
def test_eps_counts(backend, eps):
    x, dy, weight, *_ = make_inputs(9, 128, FP32, FP32)
    inputs = Inputs(x * 1e-3, dy, weight, torch.finfo(FP32).eps if eps is None else eps, 0.0, "once")
    y, rstd = rms_norm_forward(inputs.x, weight, eps, backend=backend)
    assert_within(expected_results(inputs), y=y, rstd=rstd)


LAYOUTS = {
    name: functools.partial(arranged, layout=name)
    for name in ("gaps", "offset", "slice", "columns", "transposed", "expanded")
} | {"one number": lambda x: x[:1, :1].expand(x.shape)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("n", [100, 128])
def test_layouts_of_x_and_dy(backend, layout, n):
    x, dy, weight, *rest = make_inputs(13, n, BF16, FP32)
    for inputs in (Inputs(layout(x), dy, weight, *rest), Inputs(x, layout(dy), weight, *rest)):
        before = inputs.x.clone(), inputs.dy.clone()
        assert_within(expected_results(inputs), **run(inputs, backend))
        assert torch.equal(inputs.x, before[0]) and torch.equal(inputs.dy, before[1])


@pytest.mark.parametrize(
    "layout", [lambda w: arranged(w, "columns"), lambda w: arranged(w, "offset"), lambda w: w[:1].expand(100)]
)
def test_layouts_of_weight_and_rstd(backend, layout):
    x, dy, weight, eps, *_ = inputs = make_inputs(13, 100, BF16, FP32)
    inputs = inputs._replace(weight=layout(weight))
    assert_within(expected_results(inputs), **run(inputs, backend))
    rstd = rms_norm_forward(x, weight, eps, backend=backend)[1].repeat_interleave(2)[::2]
    dx, dw = rms_norm_backward(x, dy, inputs.weight, rstd, backend=backend)
    assert_within(expected_results(inputs), dx=dx, dw=dw)


def test_single_row_and_column_with_odd_strides(backend):
    """A dimension of 1 may carry any stride: kernels that trust it read out of bounds."""
    inputs = make_inputs(1, 100, FP32, FP32)
    odd = inputs._replace(x=inputs.x.as_strided((1, 100), (0, 1)), dy=inputs.dy.as_strided((1, 100), (3, 1)))
    assert_within(expected_results(inputs), **run(odd, backend))
    inputs = make_inputs(5, 1, FP32, FP32)
    odd = inputs._replace(x=inputs.x.as_strided((5, 1), (1, 7)), weight=inputs.weight.as_strided((1,), (4,)))
    assert_within(expected_results(inputs), **run(odd, backend))


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("normalized_shape", [(64,), (4, 16), (1, 64)])
def test_leading_and_normalized_dimensions(backend, leading, normalized_shape):
    m = 6 if leading else 1
    inputs = make_inputs(m, 64, FP32, FP32)
    expected = expected_results(inputs)
    x = inputs.x.view(*leading, *normalized_shape).requires_grad_()
    weight = inputs.weight.view(normalized_shape).requires_grad_()

    y = rms_norm(x, normalized_shape, weight, inputs.eps, backend=backend)
    y.backward(inputs.dy.view(x.shape))

    assert y.shape == x.shape and x.grad.shape == x.shape and weight.grad.shape == normalized_shape
    assert_within(expected, y=y.detach().view(m, 64), dx=x.grad.view(m, 64), dw=weight.grad.view(64))


@pytest.mark.parametrize("size", [(0, 64), (3, 0, 64), (0, 2, 64)])
def test_no_rows(backend, size):
    x, weight = torch.empty(size, dtype=BF16, device=DEVICE), torch.ones(64, device=DEVICE)
    y, rstd = rms_norm_forward(x, weight, backend=backend)
    dx, dw = rms_norm_backward(x, y, weight, rstd, backend=backend)
    assert (y.shape, rstd.shape, dx.shape) == (x.shape, (0,), x.shape) and rstd.dtype == FP32
    assert torch.equal(dw, torch.zeros(64, device=DEVICE))
    assert rms_norm_backward(x, y, None, rstd, backend=backend)[1] is None


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_bad_row_stays_in_its_row(backend, poison):
    """y and dx of the other rows, and the columns of dw that the bad element does not touch, are as without it."""
    inputs = make_inputs(13, 100, FP32, FP32)
    clean = run(inputs, backend)
    x = inputs.x.clone()
    x[6, 50] = poison
    dirty = run(inputs._replace(x=x), backend)
    others = [i for i in range(13) if i != 6]
    for name in ("y", "dx"):
        assert torch.equal(dirty[name][others], clean[name][others])
        assert not dirty[name][6].isfinite().all()
    assert not dirty["dw"][50].isfinite()


def test_same_bits_on_every_run(backend):
    inputs = make_inputs(4099 if HAS_GPU else 67, 256, BF16, FP32)
    first = run(inputs, backend)
    for _ in range(20 if HAS_GPU else 1):
        again = run(inputs, backend)
        assert all(torch.equal(first[name], again[name]) for name in first)
