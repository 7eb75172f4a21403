# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Each kind of call on each backend: the rows of the table of docs/residual-bias-heads.md."""

from __future__ import annotations

import contextlib

import pytest
import torch
from every_op import every_kind
from guarding import guarded_arrays
from helpers import DEVICE, FP64
from variants import (
    VARIANTS,
    Variant,
    VariantInputs,
    check,
    check_all,
    check_residual_out,
    llama_share,
    make,
    options,
    run,
)

from tilegym_rmsnorm import BackendUnavailableError, rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends import around_kernels, torch_reference


@pytest.fixture
def by_kernels(backend, monkeypatch):
    """Refuse PyTorch's operations on backends with kernels, so that what passes says something of these."""
    if backend not in ("cutile", "triton"):
        return

    def refuse(*_):
        raise AssertionError(f"backend {backend!r} left it to PyTorch's operations")

    for module in (torch_reference, around_kernels):
        for name in ("rms_norm_forward", "rms_norm_backward", "forward", "backward"):
            monkeypatch.setattr(module, name, refuse, raising=False)  # what is registered as "torch" stays


@pytest.fixture
def guarded(name, backend):
    """test_triton_variants.py has the same of Triton, for each plan."""
    by_kernels = backend == "cutile" and FP64 not in VARIANTS[name]
    with guarded_arrays() if by_kernels else contextlib.nullcontext():
        yield


def skip_unless_taken(variant: Variant, backend: str) -> None:
    """float64 is for the reference."""
    if FP64 in variant and backend != "torch":
        inputs = make(variant)
        with pytest.raises(BackendUnavailableError, match="torch.float64"):
            run(variant, inputs, backend)
        pytest.skip("refused, as it says")


ROWS = torch.ones(3, 8, device=DEVICE)
NOT_FOR_KERNELS = {
    "weight": (rms_norm, {"weight": ROWS[0].double()}),
    "bias": (rms_norm, {"bias": ROWS[0].double()}),
    "residual": (rms_norm, {"residual": ROWS.double()}),
    "residual_dtype": (rms_norm, {"residual": ROWS, "residual_dtype": FP64}),
    "out_dtype": (rms_norm, {"out_dtype": FP64}),
    "dy": (rms_norm_backward, {"dy": ROWS.double()}),
    "weight of a backward": (rms_norm_backward, {"weight": ROWS[0].double()}),
    "d_residual_out": (rms_norm_backward, {"d_residual_out": ROWS.double()}),
    "dw_dtype": (rms_norm_backward, {"dw_dtype": FP64}),
    "db": (rms_norm_backward, {"weight": None, "dw_dtype": FP64, "needs_db": True}),
}


@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("function", "change"), NOT_FOR_KERNELS.values(), ids=NOT_FOR_KERNELS)
def test_no_kernel_is_given_float64(backend, function, change):
    """One tensor or result is enough."""
    given = {"input": ROWS, "normalized_shape": 8, "weight": None}
    if function is rms_norm_backward:
        given = {"x": ROWS, "dy": ROWS, "weight": ROWS[0], "rstd": ROWS[:, 0]}
    function(**given, backend=backend)
    with pytest.raises(BackendUnavailableError, match="float32, not torch.float64"):
        function(**{**given, **change}, backend=backend)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward(name, backend, poisoned_empty, by_kernels, guarded):
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=1)
    before = [None if tensor is None else tensor.clone() for tensor in inputs]
    results = rms_norm_forward(
        inputs.x, inputs.weight, variant.eps, **options(variant, inputs), backend=backend
    )
    y, rstd = results[0], results[-1]
    normalized = None
    if variant.has_residual:
        normalized = results[1]
        check_residual_out(variant, inputs, normalized)
    check(variant, inputs, normalized, y=y, rstd=rstd)
    assert all(result.is_contiguous() for result in results)
    storages = {result.untyped_storage().data_ptr() for result in results}
    of_inputs = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
    assert len(storages) == len(results) and not storages & of_inputs
    for tensor, kept in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, kept)
    x = inputs.x if normalized is None else normalized
    if variant.casting == "llama" and x.itemsize == 2 and variant.weight_dtype != FP64:
        assert llama_share(variant, inputs, x, y) > 0.95


@pytest.mark.parametrize("name", VARIANTS)
def test_backward(name, backend, poisoned_empty, by_kernels, guarded):
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=2)
    before = [None if tensor is None else tensor.clone() for tensor in inputs]
    results = run(variant, inputs, backend)
    assert [results[k] is None for k in ("dw", "db", "d_residual")] == [
        t is None for t in (inputs.weight, inputs.bias, inputs.residual)
    ]
    check_all(variant, inputs, results)
    for tensor, kept in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, kept)


@pytest.mark.parametrize("side", [-1, 4])
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_what_is_written_beside_an_array_is_seen(backend, side):
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    with pytest.raises(AssertionError, match="beside an array of 4 torch.float32 elements"):
        with guarded_arrays():
            array = machine_of(torch.device(DEVICE)).empty((4,), torch.float32)
            array.as_strided((1,), (1,), array.storage_offset() + side).zero_()


@pytest.mark.parametrize("name", VARIANTS)
def test_bitwise(name, backend, by_kernels):
    """Bits of a second run agree, and those from inputs that lie in memory otherwise, where the code does not depend on
    that: cutile reads packed heads as rows, and sums dw and db over other blocks then."""
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=3)
    packed = VariantInputs(*(None if t is None else t.contiguous() for t in inputs))
    first = run(variant, inputs, backend)
    others = [inputs] if backend == "cutile" else [inputs, packed]
    for other in others:
        for key, value in run(variant, other, backend).items():
            assert value is None or torch.equal(value, first[key]), key


@every_kind
def test_results_can_be_changed_in_place(op, kind, backend):
    """Autograd forbids it of views that a Function returns."""
    call = op.make(kind, seed=5)
    for result in call.public(*call.recorded(), backend=backend):
        result.mul_(2)


WITHOUT_AUTOGRAD = ["residual and bias", "weights of heads", "all of it", "bias without a weight"]


@pytest.mark.parametrize("dw_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", WITHOUT_AUTOGRAD)
def test_gradients_without_autograd(name, dw_dtype, backend):
    variant = VARIANTS[name]
    inputs = make(variant, seed=5, dy_dtype=torch.float32)  # not y's
    given = options(variant, inputs)
    *outputs, rstd = rms_norm_forward(inputs.x, inputs.weight, variant.eps, **given, backend=backend)
    normalized = outputs[-1] if variant.has_residual else inputs.x
    dx, dw, db = rms_norm_backward(
        normalized,
        inputs.dy,
        inputs.weight,
        rstd,
        offset=variant.offset,
        casting=variant.casting,
        d_residual_out=inputs.d_residual_out,
        dw_dtype=dw_dtype,
        needs_db=True,
        backend=backend,
    )
    # dx is that of what was normalized: alpha is the caller's
    vector_dtype = dw_dtype or (variant.weight_dtype if inputs.weight is not None else normalized.dtype)
    of_them = variant._replace(
        dtype=normalized.dtype, alpha=1.0, weight_dtype=vector_dtype, bias_dtype=vector_dtype
    )
    results = {"dx": dx, "db": db} if dw is None else {"dx": dx, "dw": dw, "db": db}
    check(of_them, inputs, normalized, **results)
