# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""flashinfer's functions: values beside its arithmetic in float64."""

import random

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.integrations import flashinfer as ours

N = 256
OFFSETS = {"rmsnorm": 0.0, "gemma_rmsnorm": 1.0, "fused_add_rmsnorm": 0.0, "gemma_fused_add_rmsnorm": 1.0}


def given(dtype, *shape):
    torch.manual_seed(0)
    rows = [torch.randn(*shape, N, device=DEVICE).mul(3).to(dtype) for _ in range(2)]
    return *rows, torch.rand(N, device=DEVICE).add(0.5).to(dtype)


def norm(x, weight, offset, eps=1e-6):
    """Compute in float64: nothing is rounded."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def differing(got, expected):
    """The share of elements that are not those of `expected`, rounded once."""
    return (got != expected.to(got.dtype)).float().mean().item()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["rmsnorm", "gemma_rmsnorm"])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_norm(name, dtype, shape):
    x, _, weight = given(dtype, *shape)
    expected = norm(x, weight, OFFSETS[name])
    y = getattr(ours, name)(x, weight)
    assert y.dtype == dtype and differing(y, expected) < 0.01
    out = torch.full_like(x, torch.nan)
    assert getattr(ours, name)(x, weight, 1e-6, out, True) is out and torch.equal(out, y)
    wide = getattr(ours, name)(x, weight, out=torch.empty_like(x, dtype=FP32))
    torch.testing.assert_close(wide, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
def test_fused_add_normalizes_the_sum_before_it_is_rounded(name, dtype):
    x, residual, weight = given(dtype, 37)
    total = x.double() + residual.double()
    rounded = rms_norm(x, N, weight, 1e-6, residual=residual, offset=OFFSETS[name])[0]
    assert getattr(ours, name)(x, residual, weight) is None
    assert torch.equal(residual, total.float().to(dtype))
    expected = norm(total, weight, OFFSETS[name])
    assert differing(x, expected) < 0.01 < 0.1 < differing(rounded, expected)


def test_gradients_of_fused_add():
    """flashinfer has none."""
    leaves = [each.double().requires_grad_() for each in given(FP32, 5)]

    def by_adapter(x, residual, weight):
        x, residual = x * 1, residual * 1
        ours.fused_add_rmsnorm(x, residual, weight)
        return x, residual

    def by_formula(x, residual, weight):
        return norm(x + residual, weight, 0.0), x + residual

    found = [
        torch.autograd.grad(sum(each.sin().sum() for each in call(*leaves)), leaves)
        for call in (by_adapter, by_formula)
    ]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("out", [torch.ones(2, N), 1.0])
def test_an_out_that_does_not_fit_is_refused(out):
    with pytest.raises((TypeError, ValueError), match="out: expected .*, got "):
        ours.rmsnorm(torch.randn(3, N), torch.ones(N), out=out)


def test_nothing_is_changed_where_fused_add_is_refused():
    x, residual = torch.randn(3, N), torch.randn(2, N)
    before = x.clone(), residual.clone()
    with pytest.raises(ValueError, match="residual: expected the shape of input"):
        ours.fused_add_rmsnorm(x, residual, torch.ones(N))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def inference_tensor():
    with torch.inference_mode():
        return torch.randn(3, N)


CANNOT_BE_WRITTEN = {
    "expanded": lambda: torch.randn(1, N).expand(3, N),
    "sliding": lambda: torch.randn(N + 2).unfold(0, N, 1),
    "leaf": lambda: torch.randn(3, N, requires_grad=True),
    "view of a leaf": lambda: torch.randn(4, N, requires_grad=True)[1:],
    "inference": inference_tensor,
}


@pytest.mark.parametrize("kind", CANNOT_BE_WRITTEN)
@pytest.mark.parametrize("place", ["input", "residual"])
def test_fused_add_changes_neither_where_one_cannot_be_written(place, kind):
    given = {"input": torch.randn(3, N), "residual": torch.randn(3, N), place: CANNOT_BE_WRITTEN[kind]()}
    before = {name: each.detach().clone() for name, each in given.items()}
    for call in (ours.fused_add_rmsnorm, ours.gemma_fused_add_rmsnorm):
        with pytest.raises(ValueError, match=f"^{place}: expected .*, got "):
            call(**given, weight=torch.ones(N))
    assert all(torch.equal(each, before[name]) for name, each in given.items())


@pytest.mark.parametrize("kind", CANNOT_BE_WRITTEN)
def test_out_that_cannot_be_written(kind):
    out = CANNOT_BE_WRITTEN[kind]()
    before = out.detach().clone()
    with pytest.raises(ValueError, match="^out: expected .*, got "):
        ours.rmsnorm(torch.randn(3, N), torch.ones(N), out=out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "inference"])
def test_what_can_be_written_in_inference_mode(kind):
    x, residual = torch.randn(3, N), CANNOT_BE_WRITTEN[kind]()
    total = (x + residual).detach()
    with torch.inference_mode():
        ours.fused_add_rmsnorm(x, residual, torch.ones(N))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("name", OFFSETS)
def test_a_weight_of_a_row_per_head_is_refused(name):
    tensors = [torch.randn(3, 2, N) for _ in range(2 if "fused" in name else 1)]
    with pytest.raises(ValueError, match=r"^weight: expected shape \(256,\), got \(2, 256\)"):
        getattr(ours, name)(*tensors, torch.ones(2, N))


OVERLAPPING = {
    "the same": lambda both: (both[:3, :N], both[:3, :N]),
    "another view": lambda both: (both[:3, :N], both[:3].view(3, 2 * N)[:, :N]),
    "a row": lambda both: (both[:3, :N], both[2:5, :N]),
    "a column": lambda both: (both[:3, :N], both[:3, N - 1 : -1]),
    "in .data": lambda both: (both[:3, :N], both.data[:3, :N]),
    "other steps": lambda both: (both[:3, :N], both[::2, :N]),
    "rows that alternate": lambda both: (both[:, :N], both[:, N:]),  # they share no element, and count as if
}
APART = {"rows": lambda both: (both[:3], both[3:]), "one row": lambda both: (both[:1, :N], both[:1, N:])}


@pytest.mark.parametrize("how", OVERLAPPING)
def test_memory_that_input_and_residual_share(how):
    both = torch.randn(6, 2 * N)
    x, residual = OVERLAPPING[how](both)
    before = both.clone()
    for given in ((x, residual), (residual, x)):
        with pytest.raises(ValueError, match="^residual: expected memory apart from that of input, got "):
            ours.fused_add_rmsnorm(*given, torch.ones(N))
    assert torch.equal(both, before)


@pytest.mark.parametrize("how", APART)
def test_parts_of_one_tensor(how):
    x, residual = APART[how](torch.randn(6, 2 * N, device=DEVICE))
    weight = torch.rand(x.shape[-1], device=DEVICE) + 0.5
    total = x + residual
    ours.fused_add_rmsnorm(x, residual, weight)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(x, norm(total, weight, 0.0).float())


@pytest.mark.parametrize("how", ["itself", "detached", "a view", ".data"])
@pytest.mark.parametrize("trained", ["input", "weight"])
def test_out_in_the_memory_of_what_is_saved(trained, how):
    """Autograd does not see a write through `.data`: the gradient was wrong in silence."""
    leaf, weight = torch.randn(3, N), torch.rand(N) + 0.5
    (leaf if trained == "input" else weight).requires_grad_()
    x = leaf * 1
    places = {"itself": x, "detached": x.detach(), "a view": x.view(3, N), ".data": x.data}
    before = x.detach().clone()
    with pytest.raises(
        ValueError, match="^out: expected where a gradient is recorded, memory apart .*, got "
    ):
        ours.rmsnorm(x, weight, out=places[how])
    assert torch.equal(x, before)
    with torch.no_grad():  # as flashinfer's callers do
        ours.rmsnorm(x, weight, out=places[how])
    torch.testing.assert_close(x, norm(before, weight.detach(), 0.0).float())


def test_out_beside_a_gradient():
    x, weight = torch.randn(3, N, dtype=torch.float64, requires_grad=True), torch.rand(N, dtype=torch.float64)
    found = ours.rmsnorm(x, weight, out=torch.empty(3, N, dtype=torch.float64))
    got, expected = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, norm(x, weight, 0.0)))
    torch.testing.assert_close(got, expected)


def test_whether_random_parts_share_an_element():
    """Shared elements are never taken."""
    generator = random.Random(0)
    answers = set()
    for _ in range(400):
        buffer = torch.arange(4.0 * 6 * 8)
        views = []
        for _ in range(2):
            view = buffer.view(generator.choice([(4, 6, 8), (8, 24), (24, 8)]))
            for dim, size in enumerate(view.shape):
                start = generator.randrange(size)
                stop = generator.randrange(start, size) + 1
                view = view[(slice(None),) * dim + (slice(start, stop, generator.choice([1, 2])),)]
            views.append(view)
        x, other = views
        share = bool(set(x.flatten().tolist()) & set(other.flatten().tolist()))
        try:
            ours._check_apart("x", x, "other", other)
            is_taken = True
        except ValueError:
            is_taken = False
        assert not (share and is_taken), (x.shape, x.stride(), other.shape, other.stride())
        answers.add((share, is_taken))
    assert {(True, False), (False, True)} <= answers


def test_fused_add_in_one_graph():
    def call(x, residual, weight):
        ours.fused_add_rmsnorm(x, residual, weight)
        return ours.rmsnorm(x, weight, out=torch.empty_like(x))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x, residual, weight = given(BF16, rows)
        copies = x.clone(), residual.clone()
        assert torch.equal(compiled(x, residual, weight), call(*copies, weight))
        assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1])


def test_torch_fx_records_the_call():
    x, _, weight = given(BF16, 3)
    traced = torch.fx.symbolic_trace(lambda x, weight: ours.rmsnorm(x, weight))
    assert torch.equal(traced(x, weight), ours.rmsnorm(x, weight))
