# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tensors whose data is elsewhere, or nowhere: kernels would be launched on address 0."""

import contextlib

import pytest
import torch
from every_op import each_op, note_unknown
from helpers import settle_interpreters
from processes import mesh_of_one
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilegym_rmsnorm import BackendUnavailableError, rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.ops.norm import passes
from tilegym_rmsnorm.ops.norm.op import KNOWN_FORWARDS
from tilegym_rmsnorm.routes import known_calls

X, W = torch.randn(3, 8), torch.rand(8) + 0.5
KERNELS = ("cutile", "triton")


@pytest.fixture
def every_kernel_by_auto(monkeypatch):
    """Let "auto" take kernels for what they can run, as on a GPU."""
    settle_interpreters(monkeypatch)
    for backend in KERNELS:
        monkeypatch.setattr(registry._probe(backend), "interpreting", lambda: True)


@contextlib.contextmanager
def dtensors():
    from torch.distributed.tensor import Replicate, distribute_tensor

    with mesh_of_one() as mesh:
        yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])


@contextlib.contextmanager
def fakes():
    with FakeTensorMode() as mode:
        yield mode.from_tensor


@pytest.mark.parametrize("is_known", [False, True])
@each_op
def test_freed_memory_is_refused(op, is_known, monkeypatch):
    """A call like an earlier one skips all other checks."""
    with torch.no_grad():
        for name in (first := op.make(op.alike)).leaves | first.fixed:
            call = op.make(op.alike, seed=1)
            known_calls.forget()
            if is_known:
                call.public(*call.tensors, backend="torch")
                with monkeypatch.context() as patch:
                    unknown = note_unknown(op, patch)
                    first.public(*first.tensors, backend="torch")
                    assert not unknown
            (call.leaves | call.fixed)[name].untyped_storage().resize_(0)
            with pytest.raises(ValueError, match=f"^{name}: expected memory behind its elements"):
                call.public(*call.tensors, backend="torch")


@pytest.mark.parametrize("backend", (*KERNELS, "auto"))
def test_plain_tensors_beside_dtensors_are_refused(backend):
    """An error names the plain tensor, before a kernel."""
    rstd = torch.rand(3)
    with dtensors() as stand_in:
        attempts = (
            lambda: rms_norm_forward(stand_in(X), W, backend=backend),
            lambda: rms_norm_backward(X, stand_in(X), W, rstd, backend=backend),
            lambda: rms_norm_backward(X, X, W, stand_in(rstd), backend=backend),
        )
        for attempt in attempts:
            with pytest.raises(
                TypeError, match="^[a-z]+: expected a DTensor as [a-z]+ is, got a plain tensor"
            ):
                attempt()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_dtensor_inside_of_torch_func_is_refused_by_name(backend):
    with dtensors() as stand_in:
        x = stand_in(X)
        with pytest.raises(BackendUnavailableError, match="torch.func transforms this call"):
            torch.func.grad(lambda x: rms_norm(x, 8, backend=backend).sum().to_local())(x)


@pytest.mark.parametrize("backend", (*KERNELS, "auto"))
def test_fake_tensors_give_fake_results(backend):
    with fakes() as fake:
        x, weight, rstd = fake(X), fake(W), fake(torch.rand(3))
        y = rms_norm(x, (8,), weight, backend=backend)
        *results, of_forward = rms_norm_forward(x, None, backend=backend)
        gradients = rms_norm_backward(x, x, weight, rstd, needs_db=True, backend=backend)
    assert [tuple(each.shape) for each in (y, *results, *gradients)] == [(3, 8)] * 3 + [(8,)] * 2
    assert of_forward.shape == (3,) and isinstance(y, FakeTensor) and isinstance(gradients[1], FakeTensor)


def test_auto_takes_dtensors_that_are_sharded_in_the_middle(every_kernel_by_auto):
    """Sequence parallelism shards so."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight = torch.randn(2, 4, 8), W.clone().requires_grad_()
    expected = rms_norm(x, (8,), weight, backend="auto")
    expected.sum().backward()
    with dtensors() as distribute:
        replicated = distribute(W).requires_grad_()
        y = rms_norm(
            distribute_tensor(x, replicated.device_mesh, [Shard(1)]), (8,), replicated, backend="auto"
        )
        y.sum().backward()
        assert y.placements == (Shard(1),) and torch.equal(y.full_tensor(), expected)
        torch.testing.assert_close(replicated.grad.full_tensor(), weight.grad)


def test_auto_takes_what_local_tensors_get_for_dtensors(every_kernel_by_auto):
    expected = rms_norm(X, (8,), W, backend="auto")
    with dtensors() as stand_in:
        y = rms_norm(stand_in(X), (8,), stand_in(W), backend="auto")
        assert torch.equal(y.full_tensor(), expected)


def test_auto_takes_no_kernel_for_fake_tensors(every_kernel_by_auto):
    with fakes() as stand_in:
        assert rms_norm(stand_in(X), (8,), stand_in(W), backend="auto").shape == X.shape


def test_what_auto_takes_for_them_is_not_what_others_get(every_kernel_by_auto):
    """One call under vmap would leave all later ones like it to the reference."""
    torch.func.vmap(lambda row: rms_norm(row, (8,), W, backend="auto"))(X)
    with fakes() as stand_in:
        rms_norm(stand_in(X), (8,), stand_in(W), backend="auto")
    assert not passes.KNOWN._kinds and not KNOWN_FORWARDS._kinds


@pytest.mark.parametrize("backend", ("torch", "auto"))
def test_a_fake_gradient_for_a_bias_alone(backend):
    """The saved tensors are real, and FakeTensorMode refuses operations on those."""
    bias = torch.zeros(8, requires_grad=True)
    y = rms_norm(X, (8,), W, bias=bias, backend=backend)
    with fakes() as stand_in:
        assert torch.autograd.grad(y, bias, stand_in(X))[0].shape == (8,)
