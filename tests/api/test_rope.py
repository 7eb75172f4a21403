# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope and rms_norm_rope: right values and gradients of every form, and which numbers are rounded on the way,
which gradients ignore."""

import functools
import itertools
import warnings

import pytest
import rope_calls
import torch
from helpers import BF16, DEVICE, FP16, FP32, needs_inductor
from rope_calls import both_passes, case, ours

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.call.layout import viewed
from tilegym_rmsnorm.ops.rope import passes as rope_passes
from tilegym_rmsnorm.ops.rope.passes import rope_views
from tilegym_rmsnorm.ops.rope.spec import RopeWanted
from tilegym_rmsnorm.routes import known_calls


def assert_near(got, want):
    for one, other in zip(got, want, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=(1e-5 * scale).item())


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
    for one in ours(q[0].requires_grad_(), k[0], *others):
        one.mul_(2)  # not a view, of which autograd forbids it


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


@pytest.mark.parametrize(("t", "heads", "keys"), [(0, 4, 2), (5, 4, 0), (5, 0, 2)])
def test_results_without_elements(t, heads, keys):
    q, k = (torch.ones(t, each, 8, device=DEVICE, requires_grad=True) for each in (heads, keys))
    weight, table = torch.ones(8, device=DEVICE, requires_grad=True), torch.ones(t, 8, device=DEVICE)
    q_out, k_out = ours(q, k, weight, weight, table, table)
    assert q_out.shape == q.shape and k_out.shape == k.shape
    q_out.sum().backward()
    assert q.grad.shape == q.shape and k.grad is None
    if q.numel() == 0:
        assert torch.equal(weight.grad, torch.zeros(8, device=DEVICE))
    for out in (q_out, k_out):
        out.mul_(2)


@needs_inductor
@pytest.mark.slow
def test_compiled_operations_of_backend_torch():
    torch._dynamo.reset()
    graph = torch.compile(functools.partial(ours, backend="torch"), fullgraph=True)
    torch.testing.assert_close(both_passes(graph, case()), both_passes(ours, case()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_compiled_positions_and_one_tensor(dtype):
    torch._dynamo.reset()
    q, _, weight, _, cos, sin = case(tables="positions")
    positions = torch.tensor([1, 0, 7, 3, 9], device=DEVICE, dtype=dtype)
    want = rms_norm_rope(q, weight, cos, sin, position_ids=positions.long())
    for backend in (None, "torch"):
        call = functools.partial(rms_norm_rope, position_ids=positions, backend=backend)
        got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, weight, cos, sin)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_traced_by_torch_jit_with_the_width_of_the_tables():
    """There it is a tensor of no dimension."""

    def partial(q, k, q_weight, k_weight, cos, sin):
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, rotary_dim=cos.shape[-1], backend="torch")

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(partial, case(r=4), check_trace=False)
    other = case(r=4, seed=3, b=3, t=7)
    assert all(map(torch.equal, traced(*other), partial(*other)))


def test_one_result_alone():
    """What leads to the other has no gradient: zeros would make an optimizer decay its weight."""
    q, k, q_weight, k_weight, cos, sin = case()
    leaves = [each.requires_grad_() for each in (q, k, q_weight, k_weight)]
    for index, call in itertools.product(
        (0, 1), (ours, torch.compile(ours, backend="eager", fullgraph=True))
    ):
        got = torch.autograd.grad(call(*leaves, cos, sin)[index].sin().sum(), leaves, allow_unused=True)
        total = rope_calls.expected(*leaves, cos, sin)[index].sin().sum()
        want = torch.autograd.grad(total, leaves, allow_unused=True)
        assert [each is None for each in got] == [each is None for each in want]
        assert got[1 - index] is None is got[3 - index]
        torch.testing.assert_close(got[index::2], want[index::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_mapped_over_a_batch(dtype):
    tensors = case(tables="positions", t=3)
    positions = torch.randint(0, 6, (4, 2, 3), device=DEVICE, dtype=dtype)
    got = torch.func.vmap(lambda each: ours(*tensors, position_ids=each))(positions)
    for i in range(4):
        for one, other in zip(got, ours(*tensors, position_ids=positions[i]), strict=True):
            torch.testing.assert_close(one[i], other)


def test_only_the_weights_gradients_that_are_needed_are_computed(monkeypatch):
    q, k, q_weight, k_weight, cos, sin = case()
    asked, bind = [], rope_passes.bind_backward

    def noted(tensors, call, wanted):
        asked.append(wanted)
        return bind(tensors, call, wanted)

    monkeypatch.setattr(rope_passes, "bind_backward", noted)
    known_calls.forget()
    q_out, _ = ours(q, k, q_weight.requires_grad_(), k_weight, cos, sin)
    q_out.sum().backward()
    known_calls.forget()
    assert asked == [RopeWanted(torch.float32, None)] and q_weight.grad is not None


@pytest.mark.parametrize("has_positions", [False, True])
def test_an_exported_graph_takes_as_many_sequences_as_steps(has_positions):
    def made(b, t):
        tables = torch.randn(2, 20, 8) if has_positions else torch.randn(2, b, t, 8)
        positions = torch.randint(0, 20, (b, t)) if has_positions else None
        return torch.randn(b, t, 4, 8), torch.randn(b, t, 2, 8), *tables, positions

    class Rotating(torch.nn.Module):
        def forward(self, q, k, cos, sin, positions):
            return qk_norm_rope(q, k, None, None, cos, sin, position_ids=positions)

    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    tables = (None, None, sizes) if has_positions else (sizes, sizes, None)
    exported = torch.export.export(Rotating(), made(3, 6), dynamic_shapes=(sizes, sizes, *tables)).module()
    for b, t in ((2, 9), (4, 4)):
        given = made(b, t)
        for out, expected in zip(exported(*given), Rotating()(*given), strict=True):
            assert torch.equal(out, expected)


def as_hugging_face(q, k, q_weight, k_weight, cos, sin, casting, in_float32=False):
    """Each operation rounded, as in models of Hugging Face's. in_float32: as where these rotate images, all of the
    rotation in float32 and rounded once."""

    def normalized(x, weight):
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rope_calls.EPS)
        if casting == "llama":
            return weight * xhat.to(x.dtype)
        return (xhat * weight.float()).to(x.dtype)

    def rotated_half(x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    cos, sin = cos[:, None], sin[:, None]
    outputs = (normalized(x, w) for x, w in ((q, q_weight), (k, k_weight)))
    outputs = (n.float() for n in outputs) if in_float32 else outputs
    return tuple((n * cos + rotated_half(n) * sin).to(q.dtype) for n in outputs)


@pytest.mark.parametrize("rounding", ["norm", "each"])
@pytest.mark.parametrize("casting", ["llama", "once"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_roundings_have_the_bits_of_hugging_face(dtype, casting, rounding):
    *tensors, cos, sin = case(dtype=dtype, t=64, d=64)
    tensors = *tensors, cos.to(dtype), sin.to(dtype)
    got = ours(*tensors, casting=casting, rope_rounding=rounding, backend="torch")
    want = as_hugging_face(*tensors, casting, in_float32=rounding == "norm")
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


ROUNDED_FORMS = {
    "plain": ({"tables": "BT"}, {}),
    "partial": ({"r": 48, "weights": "heads"}, {"rotary_dim": 48, "offset": 1.0}),
    "interleaved": ({"half": True, "weights": "float32"}, {"interleaved": True}),
    "partial interleaved": ({"r": 32, "weights": "none"}, {"rotary_dim": 32, "interleaved": True}),
    "positions": ({"tables": "positions", "half": True}, {"offset": 1.0}),
}


@pytest.mark.parametrize("casting", ["llama", "once"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ROUNDED_FORMS)
def test_the_norm_is_rounded_and_the_result_once(name, dtype, casting, backend):
    """As a norm that returns q's dtype, and behind it a rotation in float32. Not bit by bit: another rstd may turn a
    rounding over, and the sum is of float32."""
    made, options = ROUNDED_FORMS[name]
    tensors = case(dtype=dtype, d=64, **made)
    options = options | {"casting": casting}
    if made.get("tables") == "positions":
        options["position_ids"] = torch.randint(0, 8, (2, 5), device=DEVICE)
    got = ours(*tensors, rope_rounding="norm", backend=backend, **options)
    for one, of_norm, of_end in zip(
        got,
        rope_calls.expected(*tensors, rope_rounding="norm", **options),
        rope_calls.expected(*tensors, rope_rounding="end", **options),
        strict=True,
    ):
        shares = [(one == each.to(dtype)).double().mean().item() for each in (of_norm, of_end)]
        # with casting="llama" and no weight n is xhat, which has q's dtype
        is_other = casting == "once" or made.get("weights") != "none"
        assert shares[0] > 0.99 and (shares[1] < 0.9) is is_other, shares


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients_ignore_the_rounding_of_the_norm(dtype, backend):
    tensors = case(dtype=dtype, d=64)
    plain, rounded = (
        both_passes(ours, tensors, rope_rounding=each, backend=backend) for each in ("end", "norm")
    )
    assert not torch.equal(plain[0], rounded[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[2:], rounded[2:], strict=True))
