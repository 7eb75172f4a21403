# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Behaviour of GPUs alone: races of blocks, streams, devices, graphs, sizes beyond 32 bits, memory."""

import functools
import time

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Inputs,
    assert_alike,
    assert_within,
    expected_results,
    make_inputs,
)

from bench.measure.inductor import device_milliseconds
from tilegym_rmsnorm import rms_norm, rms_norm_backward, rms_norm_forward

pytestmark = pytest.mark.usefixtures("poisoned_empty")

fused = pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)

SHAPES_THAT_FILL_A_GPU = (
    (65536, 256),
    (524288, 64),
    (32768, 1024),
    (16384, 2880),
    (16384, 4096),
    (8192, 7168),
    (8192, 8192),
    (8192, 12288),
    (4096, 16384),
    (2048, 32768),
    (4096, 18432),
    (1024, 65536),
    (1024, 1024),
    (1024, 4096),
    (256, 16384),
)


def _run(inputs: Inputs, backend: str) -> dict[str, torch.Tensor]:
    x, dy, weight, eps, *_ = inputs
    y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
    dx, dw = rms_norm_backward(x, dy, weight, rstd, backend=backend)
    return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}


RUNS = {"cutile": 1000, "triton": 200}
DATA_SETS = 5


@pytest.mark.much_memory
@fused
@pytest.mark.parametrize(("m", "n"), SHAPES_THAT_FILL_A_GPU)
def test_backwards_of_many_runs_are_right_and_alike(backend, m, n):
    """Temporary buffers and results start as NaN in every run, and dw is float32, whose bits hide nothing."""
    for seed in range(DATA_SETS):
        inputs = make_inputs(m, n, BF16, FP32, seed=seed)
        x, dy, weight, eps, *_ = inputs
        _, rstd = rms_norm_forward(x, weight, eps, backend=backend)
        assert_alike(
            expected_results(inputs),
            ("dx", "dw"),
            functools.partial(rms_norm_backward, x, dy, weight, rstd, backend=backend),
            RUNS[backend] // DATA_SETS,
        )


@fused
@pytest.mark.parametrize(("m", "n"), [(16, 1024), (1003, 4096), (4096, 256), (300, 18432), (64, 40000)])
def test_a_chain_of_launches_reads_what_the_one_before_wrote(backend, m, n):
    """Kernels that are launched while the one before still runs have to wait for it: every call here reads what the
    call before wrote, into memory that was read a moment ago. Waiting for the GPU after each call changes no bit."""

    def chain(after_each_call) -> list[torch.Tensor]:
        inputs = make_inputs(m, n, BF16, FP32)
        x, dy, weight, eps, *_ = inputs
        for _ in range(20):
            y, rstd = rms_norm_forward(x, weight, eps, backend=backend)
            after_each_call()
            dx, dw = rms_norm_backward(y, dy, weight, rstd, backend=backend)
            after_each_call()
            x = (dx + y).mul_(0.5)
            weight = weight * 0.5 + dw / dw.abs().max()
            after_each_call()
        return [x, weight, y, rstd, dx, dw]

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        for value, truth in zip(chain(lambda: None), expected, strict=True):
            assert torch.equal(value, truth)


def test_tensors_on_another_device_than_the_current_one(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        inputs = make_inputs(1003, 1024, BF16, FP32, device=torch.device("cuda", 1))
        x, weight = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
        y = rms_norm(x, (1024,), weight, inputs.eps, backend=backend)
        y.backward(inputs.dy)
        assert torch.cuda.current_device() == 0
    assert_within(expected_results(inputs), y=y.detach(), dx=x.grad, dw=weight.grad)


def test_the_current_stream_is_used(backend):
    """The inputs are written late on a side stream: work on any other stream would read what was there before."""
    inputs = make_inputs(1003, 1024, BF16, FP32)
    _run(inputs, backend)  # compiles here, so that no compilation waits for the copies below
    x, dy, weight = (torch.zeros_like(t) for t in inputs[:3])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for target, source in zip((x, dy, weight), inputs[:3], strict=True):
            target.copy_(source)
        results = _run(inputs._replace(x=x, dy=dy, weight=weight), backend)
    stream.synchronize()
    assert_within(expected_results(inputs), **results)


@fused
@pytest.mark.parametrize(("m", "n"), [(1003, 1024), (37, 18432), (300, 32768)])
def test_graph_replay_sees_changed_inputs(backend, m, n):
    first, second = make_inputs(m, n, BF16, FP32), make_inputs(m, n, BF16, FP32, seed=1)
    static = first._replace(**{name: getattr(first, name).clone() for name in ("x", "dy", "weight")})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _run(static, backend)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = _run(static, backend)
    for inputs in (second, first, second):
        for name in ("x", "dy", "weight"):
            getattr(static, name).copy_(getattr(inputs, name))
        graph.replay()
        torch.cuda.synchronize()
        assert_within(expected_results(inputs), **results)


def _require_memory(n_bytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < n_bytes:
        pytest.skip(f"needs {n_bytes / 2**30:.0f} GiB of free GPU memory, has {free / 2**30:.0f}")


def _large_inputs(m: int, n: int) -> Inputs:
    """bfloat16 throughout: float32 temporaries of this size would not fit."""
    small = make_inputs(8, n, BF16, FP32)
    x, dy = (torch.empty(m, n, dtype=BF16, device=DEVICE).normal_() for _ in range(2))
    x *= torch.exp2(8 * torch.rand(m, 1, device=DEVICE) - 4).to(BF16)
    return small._replace(x=x, dy=dy)


def _assert_large(inputs: Inputs, backend: str) -> None:
    """Rows at the start, around element 2^31 and at the end; dw summed in float64 piece by piece."""
    x, dy, weight, eps, *_ = inputs
    m, n = x.shape
    results = _run(inputs, backend)
    middle = min(2**31 // n, m // 2)
    for rows in (slice(0, 64), slice(middle - 32, middle + 32), slice(m - 64, m)):
        part = {name: results[name][rows] for name in ("y", "rstd", "dx")}
        assert_within(expected_results(inputs._replace(x=x[rows], dy=dy[rows])), **part)

    dw, squares = (torch.zeros(n, dtype=torch.float64, device=DEVICE) for _ in range(2))
    step = 2**26 // n
    for start in range(0, m, step):
        rows = slice(start, start + step)
        wide = x[rows].double()
        product = dy[rows].double() * wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
        dw += product.sum(0)
        squares += product.square().sum(0)
    tolerance = (4 + m**0.5 / 8) * torch.finfo(FP32).eps * squares.sqrt()
    assert (results["dw"] - dw).abs().le(tolerance).all()


@pytest.mark.much_memory
@fused
@pytest.mark.parametrize("n", [64, 4096, 18432, 32768])
def test_more_than_2_to_the_31_elements(backend, n):
    m = 2**31 // n + 131
    _require_memory(7 * m * n * 2)
    _assert_large(_large_inputs(m, n), backend)


@pytest.mark.much_memory
@fused
@pytest.mark.parametrize("n", [8, 16])
def test_more_than_2_to_the_24_rows(backend, n):
    m = 2**24 + 131
    _require_memory(7 * m * n * 2)
    _assert_large(_large_inputs(m, n), backend)


@pytest.mark.much_memory
@fused
def test_a_row_stride_beyond_32_bits(backend):
    """Four rows a GiElement apart: the last begins beyond element 2^31."""
    stride, n = 2**30, 4096
    _require_memory(3 * (3 * stride + n) * 2)
    inputs = make_inputs(4, n, BF16, FP32)
    storage = torch.zeros(3 * stride + n, dtype=BF16, device=DEVICE)
    far = storage.as_strided((4, n), (stride, 1))
    for name in ("x", "dy"):
        far.copy_(getattr(inputs, name))
        strided = inputs._replace(**{name: far})
        assert_within(expected_results(inputs), **_run(strided, backend))


@fused
@pytest.mark.parametrize(("m", "n"), [(16384, 4096), (4096, 16384)])
def test_memory_beyond_the_results(backend, m, n):
    """The forward needs none for rows that a block holds; the backward a few float32 rows per multiprocessor, not one
    per row of x."""
    inputs = make_inputs(m, n, BF16, BF16)
    x, dy, weight, *_ = inputs
    results = _run(inputs, backend)
    size = {name: t.numel() * t.element_size() for name, t in results.items()}
    rstd = results.pop("rstd")
    results.clear()

    def peak(call) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    slack = 2**16  # the allocator rounds each size up
    forward = peak(lambda: rms_norm_forward(x, weight, backend=backend))
    assert forward <= size["y"] + size["rstd"] + slack
    backward = peak(functools.partial(rms_norm_backward, x, dy, weight, rstd, backend=backend))
    partial_rows = 4 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert backward <= size["dx"] + size["dw"] + 4 * n * partial_rows + slack
    assert partial_rows < m // 4


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_autocast_does_as_aten(backend, dtype):
    """ATen's rule changed in torch 2.12; ours is the installed torch's."""
    inputs = make_inputs(33, 256, dtype, FP32)
    x, weight = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    rms_norm(x, (256,), weight, 1e-3, backend=backend)  # a call that is known afterwards
    with torch.autocast("cuda", BF16):
        known = rms_norm(x, (256,), weight, 1e-3, backend=backend)
        y, out = rms_norm(x, (256,), weight, 1e-3, residual=torch.zeros_like(x), backend=backend)
        assert (
            torch.equal(known, y)
            and y.dtype == F.rms_norm(x, (256,), weight, 1e-3).dtype
            and out.dtype == dtype
        )
    expected = rms_norm(x.to(y.dtype), (256,), weight, 1e-3, backend=backend)
    assert torch.equal(y, expected)
    got = torch.autograd.grad(y, (x, weight), inputs.dy.to(y.dtype))
    want = torch.autograd.grad(expected, (x, weight), inputs.dy.to(y.dtype))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_backward_of_a_model_on_the_autograd_thread(backend):
    """backward() on a GPU runs in autograd's own thread, where neither the device nor a context manager is set."""
    inputs = make_inputs(1003, 1024, BF16, FP32)
    x, weight = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    y = rms_norm(x * 1, (1024,), weight, inputs.eps, backend=backend) * 1
    y.backward(inputs.dy)
    assert_within(expected_results(inputs), dx=x.grad, dw=weight.grad)


def test_what_inductor_is_told_is_the_gpu_s_time():
    """Its own timer counts the host's too, so that short kernels look alike to it."""
    x = torch.randn(1 << 16, device="cuda")

    def call():
        time.sleep(2e-3)
        x.mul_(1)

    call()
    assert 1e-3 < device_milliseconds(call) < 0.5
