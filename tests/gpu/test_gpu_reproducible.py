# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton" under levels, on a GPU: rows in batches of any size, on any SM count, and vLLM's bits."""

import pytest
import torch
import variants
from helpers import BF16, DEVICE, FP16, FP32, why_skip
from rope_cases import RopeCase
from rope_cases import make as make_rope
from variants import Variant

from tilegym_rmsnorm import reproducible, rms_norm, use_backend

pytestmark = pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton")))

WIDTHS = (64, 100, 128, 640, 1024, 2880, 4096, 5120, 7168, 8192, 12288, 16384, 18432)
BATCHES = (1, 2, 255, 256, 257, 4096, 131072)
MOST_ELEMENTS = 2**28
FORMS = {
    "plain": Variant(BF16),
    "float32": Variant(FP32),
    "all but heads": Variant(FP16, residual_dtype=FP16, bias_dtype=FP32, casting="llama"),
}


def results_of(variant, inputs, rows=slice(None)):
    part = {name: getattr(inputs, name) for name in ("x", "residual", "dy", "d_residual_out")}
    part = {name: None if each is None else each[rows] for name, each in part.items()}
    return variants.run(variant, inputs._replace(**part), "triton")


@pytest.mark.much_memory
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", WIDTHS)
def test_a_row_does_not_depend_on_its_batch(n, form):
    """Nor on where it lies in memory."""
    rows = min(BATCHES[-1], MOST_ELEMENTS // n)
    variant = FORMS[form]._replace(size=(rows, n))
    inputs = variants.make(variant)
    with reproducible("batch"):
        whole, row = results_of(variant, inputs), rows // 2
        for batch in [each for each in BATCHES if each < rows]:
            for start in {row, row - batch + 1, row - batch // 2}:
                if 0 <= start <= rows - batch:
                    assert_alike(
                        results_of(variant, inputs, slice(start, start + batch)), whole, row - start, row
                    )
        few = {
            name: each[row : row + 9]
            for name, each in inputs._asdict().items()
            if each is not None and each.ndim == 2
        }
        for layout in ("offset", "gaps", "slice"):
            moved = {name: variants.arranged(each, layout) for name, each in few.items()}
            assert_alike(results_of(variant, inputs._replace(**moved)), whole, 3, row + 3)


def assert_alike(found, whole, at, row):
    for name in ("y", "residual_out", "dx", "d_residual"):
        if whole.get(name) is not None:
            assert torch.equal(found[name][at], whole[name][row]), name


@pytest.mark.parametrize(
    "case", [RopeCase(BF16, 3, 700, (8, 2), 128, 128), RopeCase(FP32, 3, 700, (5, 1), 80, 20, True)]
)
def test_a_head_does_not_depend_on_its_batch(case):
    from tilegym_rmsnorm.backends.triton import launch

    call = make_rope(case, DEVICE)
    *arrays, q_weight, k_weight, cos, sin, _ = call.tensors
    spec = call.spec._replace(reproducible=1)

    def run(batch, tokens):
        q, k, dq, dk = (each[batch, tokens] for each in (*arrays, *call.dys))
        tensors = q, k, q_weight, k_weight, cos[tokens], sin[tokens], None
        outputs = launch.qk_norm_rope_forward(spec, tensors)
        return *outputs, *launch.qk_norm_rope_backward(spec, (dq, dk, *tensors), call.wanted)[:2]

    whole = run(slice(None), slice(None))
    for start, stop in ((300, 301), (299, 301), (100, 355), (300, 700), (1, 301)):
        for one, other in zip(run(slice(1, 2), slice(start, stop)), whole, strict=True):
            assert torch.equal(one[0, 300 - start], other[1, 300])


@pytest.mark.parametrize("n", WIDTHS)
def test_sums_do_not_depend_on_the_gpu_or_on_padding(n, monkeypatch):
    from tilegym_rmsnorm.backends.triton import host

    variant = Variant(BF16, (5000, n), bias_dtype=FP32)
    inputs, found = variants.make(variant), []
    inputs.dy[3000:] = 0
    with reproducible("device"):
        for sms in (16, 78, 132, 148):
            monkeypatch.setattr(host, "sm_count", lambda device, sms=sms: sms)
            found.append(results_of(variant, inputs))
        found += [results_of(variant, inputs, slice(0, rows)) for rows in (3000, 3001, 4096)]
    for each in found[1:]:
        for name in ("dw", "db"):
            assert torch.equal(each[name].view(torch.int32), found[0][name].view(torch.int32)), name


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", [1, 72, *WIDTHS])
def test_vllms_bits(n, dtype):
    """Of rows and of a rounded sum, beside the kernel of support/vllm_kernel.py."""
    import vllm_kernel

    inputs = variants.make(Variant(dtype, (1003, n), residual_dtype=dtype))
    x, weight, residual = inputs.x, inputs.weight.to(dtype), inputs.residual
    with use_backend("triton"), reproducible(order="vllm"):
        assert torch.equal(rms_norm(x, n, weight, 1e-6), vllm_kernel.rms_norm(x, weight, 1e-6))
        strided = variants.arranged(x, "gaps")
        assert torch.equal(rms_norm(strided, n, weight, 1e-6), vllm_kernel.rms_norm(x, weight, 1e-6))
        y, total = rms_norm(x, n, weight, 1e-6, residual=residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, vllm_kernel.rms_norm(total, weight, 1e-6))
