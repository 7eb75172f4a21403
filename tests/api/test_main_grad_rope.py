# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`qk_norm_rope` and `rms_norm_rope` add the gradients of their weights to a float32 main_grad."""

import pytest
import torch
from helpers import BF16, DEVICE, FP32, FP64, settle_interpreters
from main_grads import rows
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope
from tilegym_rmsnorm.routes import main_grad

pytestmark = pytest.mark.usefixtures("marks_end")


ROPE = {  # heads of q and k, D, shapes of weights
    "one weight each": ((3, 2), 16, ((16,), (16,))),
    "a weight for all": ((2, 2), 16, ((16,), None)),
    "of heads": ((2, 2), 16, ((2, 16), (2, 16))),
    "of heads of q": ((3, 1), 16, ((3, 16), (16,))),
    "one tensor": ((3, None), 16, ((16,), None)),
    "wide heads": ((1, 1), 1056, ((1056,), (1056,))),  # which no kernel of rotation takes
}


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("form", ROPE)
@pytest.mark.parametrize("marked", ["both", "q", "k", "one weight for both"])
def test_qk_norm_rope(backend, form, marked, length, monkeypatch):
    """main_grads lie behind each other in one buffer, as a trainer has them."""
    settle_interpreters(monkeypatch)
    heads, d, shapes = ROPE[form]
    if (shapes[1] is None and marked != "q") or (marked == "one weight for both" and shapes[0] != shapes[1]):
        pytest.skip("there are not two weights, or not of one shape")
    holder = nn.ParameterList(
        [nn.Parameter(torch.randn(each, device=DEVICE).to(BF16)) for each in shapes if each]
    )
    weights = [*holder, None][:2]
    if marked == "one weight for both":
        weights = [weights[0]] * 2
    buffer = torch.zeros(sum(each.numel() for each in holder), device=DEVICE)
    for each, part in zip(holder, buffer.split([each.numel() for each in holder]), strict=True):
        each.main_grad = part.view(each.shape)
    adds = [marked != "k", marked != "q" and weights[1] is not None]
    main_grad.IN_USE.append(True)
    tables = [torch.randn(length, d, device=DEVICE) for _ in range(2)]
    exact = [None if each is None else torch.zeros_like(each, dtype=FP64) for each in weights]
    for step in range(4):
        for each, is_marked in zip(
            weights, adds, strict=True
        ):  # the first two steps, which are known, without marks
            if is_marked and step == 2:
                main_grad.mark(each, True)
        if step == 2:
            assert not buffer.any()
            exact = [None if each is None else torch.zeros_like(each) for each in exact]
            for each in holder:
                each.grad = None
        q, k = (None if each is None else rows(2, length, each, d) for each in heads)
        given = (q, k, *weights, *tables) if k is not None else (q, weights[0], *tables)
        function = qk_norm_rope if k is not None else rms_norm_rope
        out = function(*given, eps=1e-5, backend=backend)
        out = out if isinstance(out, tuple) else (out,)
        dys = [torch.randn_like(each) for each in out]
        torch.autograd.backward(out, dys)
        copies = [None if each is None else each.detach().double().requires_grad_() for each in weights]
        doubles = [None if each is None else each.double() for each in (q, k)]
        given = (*doubles, *copies, *[each.double() for each in tables])
        given = given if k is not None else (doubles[0], copies[0], *given[-2:])
        outs = function(*given, eps=1e-5, backend="torch")
        torch.autograd.backward(outs, [each.double() for each in dys] if k is not None else dys[0].double())
        for i, each in enumerate(copies):
            if each is not None:
                exact[i] += each.grad
    if marked == "one weight for both":
        exact = [exact[0] + exact[1], None]
    for weight, wanted, is_added in zip(weights, exact, adds, strict=True):
        if wanted is None:
            continue
        assert (weight.grad is None) == is_added and (is_added or not weight.main_grad.any())
        if is_added:
            torch.testing.assert_close(weight.main_grad.double(), wanted, rtol=1e-5, atol=1e-4)


def test_the_sum_kernel_of_rotated_heads_adds(backend, monkeypatch):
    if backend == "torch":
        pytest.skip("it has no kernels")
    weights = [nn.Parameter(torch.randn(16, device=DEVICE)) for _ in range(2)]
    tables = [torch.randn(5, 16, device=DEVICE) for _ in range(2)]
    for each in weights:
        main_grad.mark(each, True)
        each.main_grad = torch.zeros(16, device=DEVICE)
    out = qk_norm_rope(rows(2, 5, 3, 16), rows(2, 5, 1, 16), *weights, *tables, backend=backend)
    monkeypatch.setattr(Tensor, "add_", None)
    torch.autograd.backward(out, [torch.ones_like(each) for each in out])
    assert all(each.main_grad.any() and each.grad is None for each in weights)


@pytest.mark.parametrize("way", ["a dispatch mode", "float64"])
def test_qk_norm_rope_where_no_kernel_adds(way):
    dtype = FP64 if way == "float64" else BF16
    weights = [nn.Parameter(torch.randn(16, device=DEVICE).to(dtype)) for _ in range(2)]
    q, k = rows(2, 5, 3, 16, dtype=dtype), rows(2, 5, 1, 16, dtype=dtype)
    tables = [torch.randn(5, 16, device=DEVICE, dtype=FP64 if way == "float64" else FP32) for _ in range(2)]
    for each in weights:
        main_grad.mark(each, True)
        each.main_grad = torch.zeros(16, device=DEVICE)
    with FlopCounterMode(display=False) if way == "a dispatch mode" else torch.enable_grad():
        out = qk_norm_rope(q, k, *weights, *tables, eps=1e-5)
    dys = [torch.randn_like(each) for each in out]
    torch.autograd.backward(out, dys)
    exact = [each.detach().double().requires_grad_() for each in weights]
    outs = qk_norm_rope(q.double(), k.double(), *exact, *[each.double() for each in tables], eps=1e-5)
    torch.autograd.backward(outs, [each.double() for each in dys])
    for one, other in zip(weights, exact, strict=True):
        assert one.grad is None
        torch.testing.assert_close(one.main_grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_triton_adds_one_after_the_other_where_main_grads_overlap():
    """Its interpreter runs no two programs at once, so nothing else would show."""
    pytest.importorskip("triton")
    from tilegym_rmsnorm.backends.triton import host

    buffer, partial = torch.zeros(32), torch.zeros(3, 16)
    for second, count in ((buffer[16:], 1), (buffer[:16], 2), (buffer[8:24], 2)):
        targets = buffer[:16], second
        assert len(host.sums(16, (partial, targets[0]), (partial, second), targets=targets)) == count
