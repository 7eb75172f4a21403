# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope and rms_norm_rope: right values and gradients of every form."""

from __future__ import annotations

import pytest
import rope_calls
import torch
from helpers import BF16, DEVICE, FP16, FP32, FP64
from rope_calls import both_passes, case, ours

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope, rope, use_backend
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.layout import viewed
from tilegym_rmsnorm.ops.rope import eager as rope_eager
from tilegym_rmsnorm.ops.rope.passes import rope_views
from tilegym_rmsnorm.routes import choose, known_calls


def assert_near(got, want):
    for one, other in zip(got, want, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=(1e-5 * scale).item())


def test_float64_is_computed_in_float64():
    *tensors, cos, sin = case(dtype=FP64)
    tensors = *tensors, cos.double(), sin.double()
    got, want = (both_passes(call, tensors) for call in (ours, rope_calls.expected))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize("name", ["dq_out", "dk_out", "q_weight", "k_weight"])
def test_no_kernel_is_given_float64(backend, name):
    """Of one tensor alone."""
    q, k, *others = case()
    given = {"dq_out": q, "dk_out": k, "q": q, "k": k}
    given |= dict(zip(("q_weight", "k_weight", "cos", "sin"), others, strict=True))
    numbers = None, 3, rope_calls.EPS, 0.0, 8, False, "once", "end", backend
    op = torch.ops.tilegym_rmsnorm.qk_norm_rope_backward
    op(*given.values(), *numbers)
    given[name] = given[name].double()
    with pytest.raises(registry.BackendUnavailableError, match="float32, not torch.float64"):
        op(*given.values(), *numbers)
    if "weight" in name:
        with pytest.raises(registry.BackendUnavailableError, match="float32, not torch.float64"):
            ours(*list(given.values())[2:], backend=backend)


@pytest.mark.parametrize("shared", ["cos", "sin", "both"])
def test_tables_that_batches_share_by_their_strides(backend, shared):
    *leaves, cos, sin = case(tables="BT")
    tables = [
        each[:1].expand_as(each) if shared in (name, "both") else each
        for name, each in (("cos", cos), ("sin", sin))
    ]
    tensors = *leaves, *tables
    assert_near(both_passes(ours, tensors, backend=backend), both_passes(rope_calls.expected, tensors))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_reach_a_backend_as_they_are(dtype):
    positions = torch.randint(0, 8, (2, 5), device=DEVICE, dtype=dtype)
    tensors = (*case(tables="positions"), positions)
    assert viewed(tensors, rope_views(tensors))[-1] is positions


def test_a_known_call_of_positions_is_of_their_dtype(backend):
    tensors, positions = case(tables="positions"), torch.randint(0, 8, (2, 5), device=DEVICE)
    want = both_passes(ours, tensors, position_ids=positions, backend=backend)
    for dtype in (torch.int32, torch.int64, torch.int32):
        got = both_passes(ours, tensors, position_ids=positions.to(dtype), backend=backend)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_three_dimensions_are_one_batch():
    q, k, *others = case(b=1)
    got = both_passes(ours, (q[0], k[0], *others))
    want = both_passes(ours, (q, k, *others))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other.view(one.shape))


def test_one_tensor_has_the_bits_of_two():
    q, k, q_weight, k_weight, cos, sin = case()
    q_out, k_out = ours(q, k, q_weight, k_weight, cos, sin)
    assert torch.equal(rms_norm_rope(q, q_weight, cos, sin, eps=rope_calls.EPS), q_out)
    assert torch.equal(rms_norm_rope(k, k_weight, cos, sin, eps=rope_calls.EPS), k_out)
    x = q.clone().requires_grad_()
    dy = torch.randn(q.shape, device=DEVICE)
    (dx,) = torch.autograd.grad(rms_norm_rope(x, q_weight, cos, sin, eps=rope_calls.EPS), x, dy)
    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(ours(leaf, k, q_weight, k_weight, cos, sin)[0], leaf, dy)
    assert torch.equal(dx, want)


def test_what_a_backend_is_given():
    """Heads that overlap, columns and positions that lie apart are copied; interpreters would take any strides."""
    windows = torch.randn(2, 5, 20, device=DEVICE).unfold(2, 8, 4)
    k, _, *others = case(tables="positions")[1:]
    apart = torch.stack([k, k + 1], -1)[..., 0]
    positions = torch.randint(0, 8, (2, 10), device=DEVICE)[:, ::2]
    for position_ids in (positions, positions[0], positions[:1], positions[:1].expand(2, 5)):
        tensors = windows, apart, None, *others, position_ids
        q, k_given, *_, given = viewed(tensors, rope_views(tensors))
        assert torch.equal(q, windows) and min(q.stride()[:-1]) >= 8 and q.stride(-1) == 1
        assert torch.equal(k_given, k) and k_given.stride(-1) == 1
        assert torch.equal(given.expand(2, 5), position_ids.expand(2, 5))
        assert given.is_contiguous() and given.stride(-1) == 1


def test_heads_that_no_kernel_holds(backend):
    """They are composed of kernels of rms_norm and PyTorch's operations."""
    tensors = case(b=1, t=2, hq=2, hk=1, d=8704, weights="heads")
    got = both_passes(ours, tensors, backend=backend, rotary_dim=8704, interleaved=True)
    assert_near(got, both_passes(ours, tensors, backend="torch", rotary_dim=8704, interleaved=True))


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8), (0, 4, 8)])
def test_no_elements(shape):
    q = torch.randn(shape, device=DEVICE, requires_grad=True)
    k = torch.randn(*shape[:-2], 2, 8, device=DEVICE, requires_grad=True)
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    table = torch.ones(shape[-3], 8, device=DEVICE)
    q_out, k_out = ours(q, k, weight, weight, table, table)
    assert q_out.shape == q.shape and k_out.shape == k.shape
    q_out.sum().backward()
    assert q.grad.shape == q.shape and k.grad is None
    if q.numel() == 0:
        assert torch.equal(weight.grad, torch.zeros(8, device=DEVICE))


def test_known_calls_have_the_same_results(monkeypatch):
    tensors = case()
    known_calls.forget()
    first = both_passes(ours, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(rope, "_checked", None)  # a call that is not known would call it
        for one, other in zip(first, both_passes(ours, tensors), strict=True):
            assert torch.equal(one, other)
    # another grad mode, shape and layout is another call
    with torch.no_grad():
        assert not ours(*tensors)[0].requires_grad
    q, k, q_weight, k_weight, cos, sin = tensors
    shorter = ours(q[:, :3], k[:, :3], q_weight, k_weight, cos[:3], sin[:3])[0]
    assert torch.equal(shorter, first[0][:, :3])
    strided = torch.empty(2, 4, 5, 8, device=DEVICE).transpose(1, 2).copy_(q)
    torch.testing.assert_close(ours(strided, *tensors[1:])[0], first[0])


@pytest.mark.parametrize("doubled", [(2, 3), (4, 5), (0, 1), (0, 1, 2, 3, 4, 5)], ids=str)
def test_one_tensor_given_twice_is_known(doubled, monkeypatch):
    """As one weight of q and k. Each group of two indices is one tensor."""
    known_calls.forget()
    pairs = set(zip(doubled[::2], doubled[1::2], strict=True))

    def passes(seed):
        leaves = list(case(hk=4, seed=seed))
        for first, second in pairs:
            leaves[second] = leaves[first]
        want = [each.detach() for each in rope_calls.expected(*leaves)]
        *heads, cos, sin = leaves
        heads = [each.requires_grad_() for each in heads]
        outputs = ours(*heads, cos, sin)
        assert_near([each.detach() for each in outputs], want)
        return outputs, heads

    for seed in (0, 1):
        outputs, heads = passes(seed)
        found = torch.autograd.grad(sum(each.sin().sum() for each in outputs), heads, allow_unused=True)
        parts = list(case(hk=4, seed=seed))
        for first, second in pairs:
            parts[second] = parts[first]
        wide = [each.double().requires_grad_() for each in parts[:4]]
        for first, second in pairs:
            if second < 4:
                wide[second] = wide[first]
        results = rope_calls.expected(*wide, *parts[4:])
        want = torch.autograd.grad(sum(each.sin().sum() for each in results), wide)
        assert_near(found, want)
        if seed == 0:
            monkeypatch.setattr(rope, "_checked", None)  # a call that is not known would call it
            monkeypatch.setattr(rope_eager, "checked_rope_backward", None)


def test_the_backward_runs_on_the_backend_of_the_forward(monkeypatch):
    q, *others = case()
    leaf = q.requires_grad_()
    asked = []
    monkeypatch.setattr(
        choose, "backward_of", lambda *given: asked.append(given[3]) or registry.backward_of(*given)
    )
    with use_backend("torch"):
        q_out, _ = ours(leaf, *others)
    q_out.sum().backward()
    assert asked == ["torch"]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_autocast_casts_nothing(dtype):
    tensors = case(dtype=dtype)
    plain = both_passes(ours, tensors)
    with torch.autocast(DEVICE.type, dtype=FP16):
        cast = both_passes(ours, tensors)
    for one, other in zip(plain, cast, strict=True):
        assert one.dtype == dtype and torch.equal(one, other)


FORMS = {
    "plain": ({}, {}),
    "partial interleaved": ({"r": 2}, {"rotary_dim": 2, "interleaved": True}),
    "tables of one batch": ({"tables": "1T"}, {"offset": 1.0}),
    "weights of heads": ({"weights": "heads"}, {}),
    "no weights": ({"weights": "none"}, {}),
    "64 heads beside 8": ({"b": 1, "t": 3, "hq": 64, "hk": 8, "d": 16}, {}),
}


def test_results_can_be_changed_in_place(backend):
    for name, (made, options) in FORMS.items():
        q, *others = case(**made)
        outputs = ours(q.requires_grad_(), *others, backend=backend, **options)
        flat = ours(
            q[0],
            others[0][0],
            *others[1:3],
            *(t.reshape(-1, *t.shape[-1:])[: q.shape[1]] for t in others[3:]),
            backend=backend,
            **options,
        )
        for out in (*outputs, *flat):
            assert not out._is_view(), name
            out.mul_(2)


@pytest.mark.parametrize(("t", "keys"), [(0, 2), (5, 0)])
def test_results_without_elements_can_be_changed_in_place(t, keys):
    q, k = (torch.ones(t, heads, 8, requires_grad=True) for heads in (4, keys))
    for out in qk_norm_rope(q, k, None, None, *torch.ones(2, t, 8)):
        out.mul_(2)
