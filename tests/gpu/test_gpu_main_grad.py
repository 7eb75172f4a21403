# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""dw goes to main_grad in the kernel that sums it, where calls fill a GPU: on partial rows that begin as NaN, in every
run the bits of float32 dw added in order, and in replays of a CUDA graph."""

import pytest
import torch
from helpers import BF16, DEVICE, FP32
from main_grads import assert_added, exact_dw, norm_of, rows
from torch import Tensor, nn

from tilegym_rmsnorm import qk_norm_rope, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.routes import main_grad

pytestmark = pytest.mark.usefixtures("poisoned_empty", "marks_end")
# Few rows are one partial row; many are one of each block; widths that tiles end with, and not; teams, strips
SHAPES = [
    (1, 4096),
    (7, 1000),
    (64, 4096),
    (4099, 1024),
    (16384, 4096),
    (4096, 5119),
    (515, 16384),
    (300, 30001),
]


@pytest.fixture(autouse=True)
def kernels_alone(backend):
    if backend == "torch":
        pytest.skip("it has no kernels")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("m, n", SHAPES)
def test_microbatches(backend, m, n, dtype, residual, monkeypatch):
    norm = norm_of(n, dtype, backend=backend)
    before = norm.weight.main_grad.clone()
    in_order, exact = before.clone(), []
    for _ in range(4):
        x = rows(m, n, dtype=dtype).requires_grad_()
        y, normalized = norm(x, rows(m, n, dtype=dtype)) if residual else (norm(x), x)
        dy = torch.randn_like(y)
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "add_", None)
            y.backward(dy)
        exact.append(exact_dw(normalized, dy))
        x, weight = normalized.detach(), norm.weight.detach()
        rstd = rms_norm_forward(x, weight, 1e-5, backend=backend)[-1]
        given = {"d_residual_out": torch.zeros_like(x)} if residual else {}
        in_order += rms_norm_backward(x, dy, weight, rstd, dw_dtype=FP32, backend=backend, **given)[1]
    assert norm.weight.grad is None
    assert_added(norm.weight.main_grad, before, exact, 4 * int(m**0.5) + 4)
    if not residual:  # whose kernel may be another without a gradient of the sum
        assert torch.equal(norm.weight.main_grad, in_order)


def test_autocast(backend):
    """It casts the weight: a float32 copy has the gradient, which is added."""
    norm = norm_of(1024, backend=backend)
    before, x = norm.weight.main_grad.clone(), rows(64, 1024)
    with torch.autocast("cuda", torch.bfloat16):
        y = norm(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert norm.weight.grad is None
    assert_added(norm.weight.main_grad, before, [exact_dw(x, dy)], 36)


@pytest.mark.parametrize("heads", [8, None])
def test_heads(backend, heads):
    """A weight of each head, and one for all."""
    norm = norm_of(128, backend=backend, heads=heads)
    before, exact = norm.weight.main_grad.clone(), []
    for _ in range(3):
        x, dy = rows(2, 1031, 8, 128), rows(2, 1031, 8, 128)
        norm(x).backward(dy)
        exact.append(exact_dw(x, dy, bool(heads)))
    assert_added(norm.weight.main_grad, before, exact, 512)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_qk_norm_rope(backend, per_head, is_shared):
    """The main_grads lie behind each other. Of one weight the sums of q and k are launched one after the other."""
    heads, d, length = (8, 8) if is_shared or per_head else (16, 4), 128, 515
    shapes = [(each, d) if per_head else (d,) for each in heads]
    weights = [nn.Parameter(torch.randn(each, device=DEVICE).to(BF16)) for each in shapes]
    buffer = torch.zeros(sum(each.numel() for each in weights), device=DEVICE)
    parts = buffer.split([each.numel() for each in weights])
    for each, part in zip(weights, parts, strict=True):
        each.main_grad = part.view(each.shape)
        main_grad.mark(each, True)
    weights = [weights[0]] * 2 if is_shared else weights
    tables = [torch.randn(length, d, device=DEVICE) for _ in range(2)]
    exact = [torch.zeros_like(each, dtype=torch.float64) for each in weights]
    for _ in range(3):
        q, k = (rows(2, length, each, d) for each in heads)
        out = qk_norm_rope(q, k, *weights, *tables, eps=1e-5, backend=backend)
        dys = [torch.randn_like(each) for each in out]
        torch.autograd.backward(out, dys)
        copies = [each.detach().double().requires_grad_() for each in weights]
        doubles = [each.double() for each in (q, k, *tables)]
        outs = qk_norm_rope(*doubles[:2], *copies, *doubles[2:], eps=1e-5, backend="torch")
        torch.autograd.backward(outs, [each.double() for each in dys])
        for total, each in zip(exact, copies, strict=True):
            total += each.grad
    if is_shared:
        exact = [exact[0] + exact[1]] * 2
    for weight, wanted in zip(weights, exact, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad.double(), wanted, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("m", [4, 4096])
def test_replays_of_a_graph_add(backend, m, flag):
    norm = norm_of(4096, backend=backend, flag=flag)
    x, dy = rows(m, 4096), rows(m, 4096)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        norm(x).backward(dy)
    stream.synchronize()
    norm.weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        norm(x).backward(dy)
    before, exact = norm.weight.main_grad.clone(), []
    for _ in range(3):
        x.copy_(rows(m, 4096))
        dy.copy_(rows(m, 4096))
        graph.replay()
        exact.append(exact_dw(x, dy))
    torch.cuda.synchronize()
    assert_added(norm.weight.main_grad, before, exact, 4 * int(m**0.5) + 4)
    norm(x).backward(dy)
    torch.cuda.synchronize()
    exact.append(exact_dw(x, dy))
    assert_added(norm.weight.main_grad, before, exact, 4 * int(m**0.5) + 4)
