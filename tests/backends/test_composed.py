# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compositions around a backend's kernels, with the reference in the kernels' place."""

import itertools

import pytest
from helpers import BF16, FP32, unchanged
from variants import (
    BACKEND_LAYOUTS,
    VARIANTS,
    Variant,
    check,
    check_residual_out,
    llama_share,
    make,
    spec_of,
    wanted_of,
)

from tilegym_rmsnorm.backends import around_kernels, torch_reference
from tilegym_rmsnorm.ops.norm.spec import Spec


def plain_forward(spec, tensors):
    x, weight, bias, residual = tensors
    assert x.ndim == 2 and x.stride(0) >= x.shape[1] and x.stride(1) == 1
    assert (weight is None or weight.ndim == 1) and bias is None and residual is None
    assert spec.alpha == 1.0 and spec.residual_dtype is None
    return torch_reference.rms_norm_forward(spec, tensors)


def plain_backward(spec, tensors, wanted):
    x, dy, weight, rstd, d_residual_out = tensors
    for rows in (x, dy):
        assert rows.ndim == 2 and rows.stride(0) >= rows.shape[1] and rows.stride(1) == 1
    assert (weight is None or weight.ndim == 1) and d_residual_out is None and rstd.is_contiguous()
    assert wanted.d_residual is None and wanted.db is None and spec.alpha == 1.0
    return torch_reference.rms_norm_backward(spec, tensors, wanted)


COMPOSED = VARIANTS | {
    "residual, alpha": Variant(BF16, residual_dtype=BF16, alpha=0.22),
    "residual of another dtype": Variant(BF16, residual_dtype=FP32),
}
CASES = [
    (name, layout) for name, variant in COMPOSED.items() for layout in BACKEND_LAYOUTS[len(variant.size)]
]


@pytest.mark.parametrize("name, layout", CASES)
def test_variants(name, layout, poisoned_empty):
    variant = COMPOSED[name]._replace(layout=layout)
    inputs = make(variant)
    x, weight, bias, residual, dy, d_residual_out = inputs

    spec, all_wanted = spec_of(variant), wanted_of(variant)
    some_wanted = all_wanted._replace(d_residual=None)  # the residual is frozen
    asked = itertools.product((d_residual_out, None), (all_wanted, some_wanted))  # None: nobody uses the sum
    with unchanged(inputs):
        y, rstd, residual_out = around_kernels.forward(plain_forward, spec, (x, weight, bias, residual))
        normalized = x
        if residual is not None:
            check_residual_out(variant, inputs, residual_out)
            normalized = residual_out
        check(variant, inputs, residual_out, y=y, rstd=rstd)
        for gradient, wanted in dict.fromkeys(asked):
            tensors = normalized, dy, weight, rstd, gradient
            gradients = around_kernels.backward(plain_backward, spec, tensors, wanted)
            assert [each is None for each in gradients] == [dtype is None for dtype in wanted]
            found = dict(zip(("dx", "d_residual", "dw", "db"), gradients, strict=True))
            given = inputs._replace(d_residual_out=gradient)
            check(variant, given, residual_out, **{k: v for k, v in found.items() if v is not None})
            for tensor in (y, residual_out, *gradients[:2]):
                assert tensor is None or (tensor.shape == x.shape and tensor.is_contiguous())
    assert not y._is_view() and (residual_out is None or not residual_out._is_view())
    if variant.casting == "llama" and normalized.itemsize == 2:
        assert llama_share(variant, inputs, normalized, y) > 0.95


def test_the_log_says_what_is_composed(caplog, monkeypatch):
    """Else a call that is twice as slow as another looks like it: the kernels that run are those of a plain call."""
    monkeypatch.setattr(around_kernels, "_told", set())
    variant = VARIANTS["all of it"]
    x, weight, bias, residual, dy, d_residual_out = make(variant)
    spec, wanted = spec_of(variant), wanted_of(variant)
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        around_kernels.forward(plain_forward, spec, (x, weight, bias, residual))
    assert not caplog.records
    with caplog.at_level("DEBUG", logger="tilegym_rmsnorm"):
        for _ in range(2):
            _, rstd, sums = around_kernels.forward(plain_forward, spec, (x, weight, bias, residual))
            around_kernels.backward(plain_backward, spec, (sums, dy, weight, rstd, d_residual_out), wanted)
            rows = x.reshape(-1, 16)
            around_kernels.forward(plain_forward, Spec(16, 1e-3, 0.0, "once"), (rows, None, bias[0], None))
    by = "by PyTorch's operations around the kernels"
    parts = "residual, bias, weights of heads, rows in the order of heads"
    assert [record.message for record in caplog.records] == [
        f"rms_norm_forward of 16 torch.bfloat16 columns: {parts} {by}",
        f"rms_norm_backward of 16 torch.bfloat16 columns: {parts} {by}",
        f"rms_norm_forward of 16 torch.bfloat16 columns: bias {by}",
    ]
