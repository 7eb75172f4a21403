# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Levels of reproducibility on a GPU: each row of a batch has the bits that it has alone, at every position, wherever
it lies and however it is called; dw has the same bits however many SMs there are, and with padding behind the rows.

    python3 -m pytest tests/gpu/test_gpu_levels.py                    a case for each kernel
    python3 -m pytest tests/gpu/test_gpu_levels.py --every-config     all widths, dtypes and forms
"""

import level_rows
import level_sums
import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, every_config
from level_rows import FORMS, Case, Pool, differing, placed

from tilegym_rmsnorm import qk_norm_rope, reproducible, rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_empty")

POOL = 48  # rows, each of which is run alone
ROWS = (1, 2, 3, 16, 255, 256, 257, 1000, 1024, 1025, 4096, 30000, 131072)
EVERY_WIDTH = [
    int(each)
    for each in (
        "1 7 16 64 72 80 100 128 211 256 300 512 516 693 768 1000 1024 1165 1536 1900 2048 2051 2180 2560 "
        "2880 3001 3072 4096 5000 5120 6144 7168 8192 8200 9216 9748 10240 12288 13790 14336 16384 16400 "
        "18432 20480 24576 28672 32768 40000 65536 "
    ).split()
]
EVERY_CASE = [
    Case(n, dtype, form)
    for n in EVERY_WIDTH
    for dtype in (BF16, FP16, FP32)
    for form in FORMS
    if not ("heads" in form and n > 2048 or form == "float32 weight" and dtype == FP32)
]
A_CASE_A_KERNEL = [
    *(
        Case(n)
        for n in (7, 64, 211, 1024, 2560, 3001, 4096, 5120, 7168, 8192, 12288, 13790, 18432, 28672, 65536)
    ),
    *(Case(n, FP16) for n in (4096, 7168, 8192, 32768)),
    *(Case(n, FP32) for n in (7, 693, 5120, 8192, 13790, 16384, 28672)),
    *(Case(n, BF16, "residual") for n in (100, 516, 1900, 2180, 2880, 4096, 7168, 8192, 9216, 16384, 20480)),
    *(Case(n, FP32, "residual") for n in (9216, 13790, 16384, 20480)),
    *(Case(n, BF16, form) for form in ("float32 weight", "llama", "bias") for n in (1000, 4096, 8192, 28672)),
    *(Case(n, dtype, "heads") for dtype in (BF16, FP32) for n in (64, 80, 128, 1024)),
    *(Case(n, BF16, "one weight for heads") for n in (80, 128)),
    *(Case(n, BF16, "broadcast dy") for n in (1024, 3001)),
]


@pytest.fixture(autouse=True)
def kernels_alone(backend):
    if backend == "torch":
        pytest.skip("it has no kernels")


def some_rows(case: Case) -> list[int]:
    """Return those of ROWS that leave memory for other processes."""
    size = case.n * case.dtype.itemsize * (level_rows.HEADS if "heads" in case.form else 1)
    return [m for m in ROWS if m * size <= (2**29 if m <= 4096 else 2**28)]


@pytest.mark.parametrize("case", EVERY_CASE if every_config else A_CASE_A_KERNEL, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(case, backend):
    assert differing(Pool(case, backend, POOL), some_rows(case), 257) == []


@pytest.mark.parametrize("way", [level_rows.compiled, level_rows.captured, level_rows.exported])
@pytest.mark.parametrize("case", [Case(4096, BF16, "residual"), Case(128, BF16, "heads")], ids=str)
def test_so_it_has_in_other_ways_to_call(case, way, backend, fresh_dynamo):
    pool = Pool(case, backend, POOL)
    run = way(pool)
    for m in (1, 2, 257, 4096):
        index = pool.index(m)
        assert pool.differing(index, run(index)) == [], m


OF_FROZEN = [
    *(Case(n) for n in (7, 1024, 3001, 4096, 7168, 12288, 20480)),
    *(Case(n, FP32) for n in (693, 5120, 16384)),
    *(Case(n, BF16, "residual") for n in (2880, 9216)),
    *(Case(4096, BF16, form) for form in ("float32 weight", "llama", "bias")),
    Case(128, BF16, "heads"),
]
EVERY_FROZEN = [case for case in EVERY_CASE if case.form not in ("no weight", "broadcast dy")]


@pytest.mark.parametrize("case", EVERY_FROZEN if every_config else OF_FROZEN, ids=str)
def test_a_frozen_weight_changes_no_bit(case, backend):
    """Of dx, nor of d_residual: those of a trained one are `Pool.expected`."""
    pool = Pool(case, backend, POOL)
    with reproducible("batch"):
        for m in (1, 257, 4096):
            index = pool.index(m)
            assert pool.differing(index, pool.run(index, is_frozen=True)) == [], m


OF_SUMS = [
    *(
        Case(n, dtype, form)
        for form in ("plain", "residual", "bias")
        for n in (64, 1024, 4096, 7168, 20480)
        for dtype in (BF16, FP32)
    ),
    *(Case(n, dtype, "heads") for n in (64, 80, 1024) for dtype in (BF16, FP32)),
    *(Case(n, dtype, "main_grad") for n in (1024, 4096, 20480) for dtype in (BF16, FP32)),
]


@pytest.mark.usefixtures("marks_end")
@pytest.mark.parametrize("case", OF_SUMS, ids=str)
def test_dw_depends_on_neither_padding_nor_the_number_of_sms(case, backend):
    if backend == "cutile" and case.form == "bias" and case.n > 8192:
        pytest.skip("PyTorch's operations sum db of such rows")
    run = level_sums.of_norm(case, backend)
    # of 5 blocks, of which 8 teams have to have place
    least_sms = 8 * 5 if backend == "cutile" and case.n == 20480 else 1
    level_sums.assert_sums_are_alike(run, backend, (1, 100, 3000), (1, 77, 5000), least_sms)


SIZES_OF_ROPE = [(64, 64), (128, 128), (128, 64), (256, 256)]  # of a head, and what of it is rotated


@pytest.mark.usefixtures("marks_end")
@pytest.mark.parametrize("kind", level_sums.KINDS_OF_ROPE)
@pytest.mark.parametrize("head, rotary", SIZES_OF_ROPE)
def test_so_do_those_of_rope(head, rotary, kind, backend):
    run = level_sums.of_rope(head, rotary, kind, backend)
    level_sums.assert_sums_are_alike(run, backend, (1, 100, 3000), (1, 77, 5000))


@pytest.mark.parametrize("head, rotary", SIZES_OF_ROPE)
def test_rope(head, rotary, backend):
    """One token alone, and in batches of any B and T, wherever q, k and their gradients lie, and beside frozen
    weights."""
    q, k = (
        torch.randn(6, 40, 8, head, device=DEVICE, dtype=BF16),
        torch.randn(6, 40, 2, head, device=DEVICE, dtype=BF16),
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    weights = [torch.randn(head, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2)]
    angles = torch.randn(40, rotary // 2, device=DEVICE)
    cos, sin = (each.to(BF16).repeat(1, 2) for each in (angles.cos(), angles.sin()))

    def run(b, t, memory="packed", trained=weights):
        q_part, k_part, *dys = (placed(each[b, t].contiguous(), memory) for each in (q, k, dq, dk))
        given = [each.detach().requires_grad_() for each in (q_part, k_part)]
        own = weights if trained else [each.detach() for each in weights]
        out = qk_norm_rope(*given, *own, cos[t], sin[t], rotary_dim=rotary, backend=backend)
        return *out, *torch.autograd.grad(out, [*given, *trained], dys)[:2]

    with reproducible("batch"):
        whole = run(slice(None), slice(None))
        for b, t in (
            (slice(3, 4), slice(7, 8)),
            (slice(2, 3), slice(None)),
            (slice(None), slice(7, 8)),
            (slice(1, 4), slice(3, 20)),
        ):
            for way in (*((memory, weights) for memory in ("packed", *level_rows.MEMORIES)), ("packed", [])):
                for one, every in zip(run(b, t, *way), whole, strict=True):
                    assert torch.equal(one, every[b, t]), way


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", EVERY_WIDTH if every_config else (1, 72, 1024, 2880, 4096, 5120, 16384, 18432))
def test_vllms_bits(n, dtype, backend):
    """Of rows and of a rounded sum, beside the kernel of support/vllm_kernel.py."""
    if backend != "triton":
        pytest.skip("Triton alone has that order")
    import vllm_kernel

    x, residual = (torch.randn(1003, n, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(n, device=DEVICE).to(dtype)
    with reproducible(order="vllm"):
        for rows in (x, placed(x, "gaps"), placed(x, "odd gaps"), placed(x, "unaligned")):
            y = rms_norm(rows, n, weight, 1e-6, backend=backend)
            assert torch.equal(y, vllm_kernel.rms_norm(x, weight, 1e-6))
        y, total = rms_norm(x, n, weight, 1e-6, residual=residual, backend=backend)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, vllm_kernel.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize(
    "case", [Case(72), Case(1024, FP16), Case(4096, BF16, "residual"), Case(18432, FP32)], ids=str
)
def test_vllms_order_is_one_for_all_batches(case, backend):
    if backend != "triton":
        pytest.skip("Triton alone has that order")
    assert differing(Pool(case, backend, POOL, "vllm"), some_rows(case), 257) == []
