# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls that PyTorch records, transforms or watches, in front of every kernel: recorded, or seen by nobody, not burnt
into a graph and not launched on what a mode put into memory's place. Fixtures as in gate_cases.py."""

from concurrent.futures import ThreadPoolExecutor

import by_address
import pytest
import torch
from gate_cases import CPU, M, N, check, gradients_of_theirs, make_tensors, theirs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import BackendUnavailableError, rms_norm, use_backend
from tilegym_rmsnorm.routes import choose


def ops_of(graph):
    """The names of this package's ops in a graph."""
    return [node.target.name().split("::")[1] for node in graph.graph.nodes if "tilegym" in str(node.target)]


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_make_fx_records_the_norm(asked_for, tensors, tracing_mode, pre_dispatch, is_known):
    """Any kernel is recorded as an op. With real tensors the first y was a constant of the graph."""
    x, weight = (tensor.detach() for tensor in tensors[:2])
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)

    def doubled(t):
        return rms_norm(t, (N,), weight, 1e-6, backend=asked_for) * 2

    options = {"tracing_mode": tracing_mode, "pre_dispatch": pre_dispatch, "_allow_non_fake_inputs": True}
    by_address.calls.clear()
    graph = make_fx(doubled, **options)(x)
    assert ops_of(graph) == ["rms_norm_forward"]
    assert tracing_mode == "real" or not by_address.calls, "launched on tensors without memory"
    other = torch.randn_like(x)
    check([graph(other)], [theirs(other, weight) * 2])


def test_real_tensors_in_a_fake_mode(asked_for, tensors):
    """A kernel's outputs have no memory there."""
    x, weight, dy = tensors
    rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    by_address.calls.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = rms_norm(x, (N,), weight, 1e-6, backend=asked_for), *torch.autograd.grad(y, x, dy)
        for result in results:
            assert isinstance(result, FakeTensor) and result.shape == x.shape
    assert not by_address.calls


class Silent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Wrapping(TorchDispatchMode):
    """Gives every new tensor a subclass, whose own address is 0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return tree_map_only(
            torch.Tensor, lambda t: t if isinstance(t, TwoTensor) else TwoTensor(t, t), result
        )


MODES = {
    "flop counter": lambda: FlopCounterMode(display=False),
    "saved tensors that may change": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "silent": Silent,
    "wrapping": Wrapping,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("is_known", [False, True])
def test_modes_that_watch(asked_for, tensors, mode, is_known):
    x, weight, dy = tensors
    expected = (theirs(x, weight), *gradients_of_theirs(x, weight, dy))
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with mode():
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
        got = (y, *torch.autograd.grad(y, (x, weight), dy))
    check([getattr(t, "a", t).detach() for t in got], expected)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check((y, *torch.autograd.grad(y, (x, weight), dy)), expected)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with mode():
        got = torch.autograd.grad(y, (x, weight), dy)
    check([getattr(t, "a", t) for t in got], expected[1:])


LAYOUTS = {  # of x and dy; a kernel is given rows, which are made of them
    "three dimensions": lambda t: t.view(2, M // 2, N).clone(),
    "columns first": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: torch.stack([t, t * torch.nan], dim=-1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_modes_that_watch_see_no_tensor_of_a_kernel(asked_for, tensors, mode, layout, has_residual):
    """The rows, and the sum with a residual, were made where a mode put other tensors in their place: address 0."""
    x, weight, dy = tensors
    residual = torch.randn_like(dy) if has_residual else torch.zeros_like(dy)
    leaf = (x.detach() + residual).requires_grad_()
    expected = (theirs(leaf, weight), *gradients_of_theirs(leaf, weight, dy))
    x, dy, residual = layout(x.detach()).requires_grad_(), layout(dy), layout(residual)

    def results():
        y = rms_norm(x, (N,), weight, 1e-6, residual=residual if has_residual else None, backend=asked_for)
        y = y[0] if has_residual else y
        return y, *torch.autograd.grad(y, (x, weight), dy)

    for _ in range(2):
        with mode():
            got = results()
        got = [getattr(each, "a", each).detach() for each in got]
        check([got[0].reshape(M, N), got[1].reshape(M, N), got[2]], expected)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing(asked_for, tensors, policy):
    x, weight, dy = tensors

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    def block(x):
        return rms_norm(x * 1.5, (N,), weight, 1e-6, backend=asked_for).sin()

    expected = torch.autograd.grad(theirs(x * 1.5, weight).sin(), (x, weight), dy)
    for _ in range(2):
        y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        check(torch.autograd.grad(y, (x, weight), dy), expected)


def test_a_backend_in_effect_when_the_forward_ran_serves_the_backward_in_any_thread(monkeypatch):
    """Context variables do not reach autograd's threads."""
    by_address.use(monkeypatch)
    x, weight, dy = make_tensors(CPU)
    with use_backend("cutile"):
        y = rms_norm(x, (N,), weight, 1e-6)
    functional, expected = torch._to_functional_tensor(dy), gradients_of_theirs(x, weight, dy)

    def backward():
        by_address.calls.clear()
        check(torch.autograd.grad(y, (x, weight), dy, retain_graph=True), expected)
        assert by_address.calls == ["rms_norm_backward"]
        with pytest.raises(BackendUnavailableError, match="'cutile' was asked for"):
            torch.autograd.grad(y, x, functional, retain_graph=True)

    with use_backend("torch"), ThreadPoolExecutor() as pool:
        backward()
        pool.submit(backward).result()


def test_the_log_says_once_why_an_op_replaces_a_call(caplog, monkeypatch, tensors):
    monkeypatch.setattr(choose, "_told", set())
    x, weight = tensors[:2]
    with caplog.at_level("INFO", logger="tilegym_rmsnorm"):
        for _ in range(2):
            with FlopCounterMode(display=False):
                rms_norm(x.detach(), N, weight)
            make_fx(lambda x: rms_norm(x, N, weight))(x.detach())
    found = [r.getMessage().split("replaces a call, since ") for r in caplog.records if "replaces" in r.msg]
    assert found == [
        ["op tilegym_rmsnorm::rms_norm_forward ", reason]
        for reason in ("a dispatch mode sees this call", "make_fx records this call")
    ]
