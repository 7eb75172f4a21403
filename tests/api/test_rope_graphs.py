# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""qk_norm_rope in graphs and transforms: torch.compile, torch.export, make_fx, torch.func, checkpointing, modes."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import rope_calls
import torch
from helpers import DEVICE, needs_inductor
from rope_calls import both_passes, case, ours
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import qk_norm_rope, rms_norm_rope
from tilegym_rmsnorm.ops.rope import eager as rope_eager
from tilegym_rmsnorm.ops.rope import passes as rope_passes
from tilegym_rmsnorm.ops.rope.op import BACKWARD, FORWARD
from tilegym_rmsnorm.ops.rope.spec import RopeWanted
from tilegym_rmsnorm.routes import known_calls

NUMBERS = rope_calls.EPS, 0.0, 8, False, "once", "end", None


class Module(torch.nn.Module):
    def forward(self, *tensors):
        return ours(*tensors)


def assert_equal(got, want):
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_with_the_bits_of_eager_calls(dynamic):
    torch._dynamo.reset()
    graph = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for t in (5, 7):
        tensors = case(t=t)
        assert_equal(both_passes(graph, tensors), both_passes(ours, tensors))


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


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    tensors = case()
    program = torch.export.export(Module(), tensors, strict=strict)
    assert FORWARD in [node.target for node in program.graph.nodes]
    assert_equal(program.module()(*tensors), ours(*tensors))


def test_made_by_make_fx():
    def passes(*tensors):
        leaves = [each.detach().requires_grad_() for each in tensors[:4]]
        outputs = ours(*leaves, *tensors[4:])
        return (*outputs, *torch.autograd.grad(outputs, leaves, [each.sin() for each in outputs]))

    graph = make_fx(passes)(*case())
    assert {FORWARD, BACKWARD} <= {node.target for node in graph.graph.nodes}
    assert_equal(graph(*case(seed=3)), passes(*case(seed=3)))


def test_traced_by_torch_jit():
    tensors = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(Module(), tensors, check_trace=False)
    other = case(seed=3)
    assert_equal(traced(*other), ours(*other, backend="torch"))


def test_traced_by_torch_jit_with_the_width_of_the_tables():
    """There it is a tensor of no dimension."""

    def partial(q, k, q_weight, k_weight, cos, sin):
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, rotary_dim=cos.shape[-1], backend="torch")

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(partial, case(r=4), check_trace=False)
    other = case(r=4, seed=3, b=3, t=7)
    assert_equal(traced(*other), partial(*other))


def test_checkpointed():
    again = functools.partial(checkpoint, ours, use_reentrant=False)
    assert_equal(both_passes(again, case()), both_passes(ours, case()))


def doubles(**options):
    *tensors, cos, sin = case(dtype=torch.float64, t=3, **options)
    return [each.requires_grad_() for each in tensors], cos.double(), sin.double()


@pytest.mark.parametrize("function", [ours, lambda *tensors: FORWARD(*tensors, None, *NUMBERS)])
def test_gradients_twice(function):
    leaves, cos, sin = doubles(b=1)

    def call(*leaves):
        return function(*leaves, cos, sin)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize(
    "options", [{}, {"rotary_dim": 4}, {"interleaved": True}, {"rotary_dim": 4, "interleaved": True}]
)
def test_batches_of_gradients(options):
    q, k, q_weight, k_weight, cos, sin = case(r=options.get("rotary_dim"))
    leaves = [each.requires_grad_() for each in (q, k, q_weight, k_weight)]
    outputs = ours(*leaves, cos, sin, **options)
    batch = [torch.randn(3, *each.shape, device=DEVICE) for each in outputs]
    got = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        want = torch.autograd.grad(outputs, leaves, [each[i] for each in batch], retain_graph=True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one[i], other)


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


def test_transforms_of_torch_func():
    q, k, q_weight, k_weight, cos, sin = case()
    want = ours(q, k, q_weight, k_weight, cos, sin)
    mapped = torch.func.vmap(lambda q, k: ours(q, k, q_weight, k_weight, cos, sin))(q, k)
    torch.testing.assert_close(mapped, want)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ours(leaf, k, q_weight, k_weight, cos, sin)[0].sin().sum(), leaf)
    gradient = torch.func.grad(lambda q: ours(q, k, q_weight, k_weight, cos, sin)[0].sin().sum())(q)
    torch.testing.assert_close(gradient, expected)
    tangent = torch.randn(q.shape, device=DEVICE)
    _, pushed = torch.func.jvp(lambda q: ours(q, k, q_weight, k_weight, cos, sin)[0], (q,), (tangent,))
    ahead = 1e-3 * tangent.double()
    wide = [each.double() for each in (k, q_weight, k_weight, cos, sin)]
    plus, minus = (ours(q.double() + sign * ahead, *wide)[0] for sign in (1, -1))
    torch.testing.assert_close(pushed.double(), (plus - minus) / 2e-3, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rounding", ["end", "norm"])
def test_ops_mapped_over_a_batch(rounding):
    tensors = case(dtype=torch.bfloat16)
    batched = [torch.stack([each, each + 1]) for each in tensors[:4]]
    numbers = *NUMBERS[:5], rounding, None
    got = torch.func.vmap(lambda *leaves: FORWARD(*leaves, *tensors[4:], None, *numbers))(*batched)
    for i in range(2):
        want = ours(*(each[i] for each in batched), *tensors[4:], rope_rounding=rounding)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one[i], other)


@pytest.mark.parametrize(
    "options", [{}, {"weights": "heads"}, {"weights": "none"}, {"tables": "BT"}], ids=str
)
def test_the_ops_pass_pytorchs_checks(options):
    tensors = case(**options)
    leaves = [None if each is None else each.requires_grad_() for each in tensors[:4]]
    opcheck(FORWARD, (*leaves, *tensors[4:], None, *NUMBERS))
    gradients = [torch.randn_like(each) for each in tensors[:2]]
    detached = [None if each is None else each.detach() for each in tensors]
    for wanted in (0, 1, 2, 3):
        opcheck(BACKWARD, (*gradients, *detached, None, wanted, *NUMBERS))


@pytest.mark.parametrize("rounding", ["end", "norm", "each"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_ops_of_positions_pass_pytorchs_checks(dtype, rounding):
    tensors = case(tables="positions", dtype=torch.bfloat16)
    positions = torch.randint(0, 8, (2, 5), device=DEVICE, dtype=dtype)
    numbers = *NUMBERS[:5], rounding, None
    opcheck(FORWARD, (*(each.requires_grad_() for each in tensors[:4]), *tensors[4:], positions, *numbers))
    gradients = [torch.randn_like(each) for each in tensors[:2]]
    opcheck(BACKWARD, (*gradients, *(each.detach() for each in tensors), positions, 3, *numbers))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_mapped_over_a_batch(dtype):
    tensors = case(tables="positions", t=3)
    positions = torch.randint(0, 6, (4, 2, 3), device=DEVICE, dtype=dtype)
    got = torch.func.vmap(lambda each: ours(*tensors, position_ids=each))(positions)
    for i in range(4):
        for one, other in zip(got, ours(*tensors, position_ids=positions[i]), strict=True):
            torch.testing.assert_close(one[i], other)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_selectively_checkpointed(backend):
    """Where the policy saves all results, nothing that it keeps is changed."""
    q, k, *others = case(b=1)
    tensors = q[0], k[0], *others

    def save_all(*_, **__):
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, save_all)
    call = functools.partial(ours, backend=backend)
    again = functools.partial(checkpoint, call, use_reentrant=False, context_fn=contexts)
    assert_equal(both_passes(again, tensors), both_passes(call, tensors))


def test_a_dispatch_mode_sees_an_op():
    tensors = case()
    with FlopCounterMode(display=False):
        got = both_passes(ours, tensors)
    assert_equal(got, both_passes(ours, tensors))


def test_a_function_mode_sees_the_public_function():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        got = ours(*case())
        one = rms_norm_rope(case()[0], None, *case()[4:], eps=rope_calls.EPS)
    assert {qk_norm_rope, rms_norm_rope} <= set(seen)
    assert_equal(got, ours(*case()))
    assert one.shape == case()[0].shape


def test_inference_tensors_are_saved_as_copies():
    with torch.inference_mode():
        q, k, _, _, cos, sin = (each.clone() for each in case())
    weight = torch.rand(8, device=DEVICE, requires_grad=True)
    q_out, _ = ours(q, k, weight, None, cos, sin)
    q_out.sum().backward()
    leaf = weight.detach().clone().requires_grad_()
    ours(q.clone(), k.clone(), leaf, None, cos.clone(), sin.clone())[0].sum().backward()
    assert torch.equal(weight.grad, leaf.grad)


def test_only_the_weights_gradients_that_are_needed_are_computed(monkeypatch):
    q, k, q_weight, k_weight, cos, sin = case()
    asked = []

    def gradients(call, backwards, tensors, wanted):
        asked.append(wanted)
        return rope_passes.rope_gradients_by_operations(tensors, call.spec, wanted)

    monkeypatch.setattr(rope_eager, "_gradients", gradients)
    known_calls.forget()
    q_out, _ = ours(q, k, q_weight.requires_grad_(), k_weight, cos, sin)
    q_out.sum().backward()
    known_calls.forget()
    assert asked == [RopeWanted(torch.float32, None)] and q_weight.grad is not None


def test_torch_jit_script_is_refused():
    with pytest.raises(RuntimeError, match=r"use torch.export"):
        torch.jit.script(Scripted())


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.function = qk_norm_rope

    def forward(self, q, k, w, cos, sin):
        return self.function(q, k, w, w, cos, sin)


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
