# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tensors that are no plain memory, in front of every kernel: they are made plain, or the kernel is not launched.

Each ended in a wrong result, a dead CUDA context or an error that F.rms_norm does not have. Fixtures as in
gate_cases.py.
"""

import by_address
import pytest
import torch
from gate_cases import M, N, check, freed, freed_minus, freed_view, gradients_of_theirs, theirs, unwrapped
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from tilegym_rmsnorm import (
    BackendUnavailableError,
    compute_rms_norm_rstd_torch,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_torch,
    rms_norm_forward,
)


class Scattered(torch.autograd.Function):
    """A hand-written gather, as tensor parallelism has it: its backward returns what a collective will write."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(dy.clone())


needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


@needs_distributed
def test_a_gradient_that_is_still_communicated(asked_for, tensors):
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(Scattered.apply(y), (x, weight), dy), gradients_of_theirs(x, weight, dy))


def test_a_gradient_from_reduce_scatter(asked_for, tensors, mesh):
    """The collective itself runs where the process group has it."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    x, weight, dy = tensors
    if not x.is_cpu:
        pytest.skip("the process group is of CPUs")

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return collectives.all_gather_tensor(y, 0, dist.group.WORLD).clone()

        @staticmethod
        def backward(ctx, dy):
            scattered = collectives.reduce_scatter_tensor(dy, "sum", 0, dist.group.WORLD)
            assert isinstance(scattered, collectives.AsyncCollectiveTensor)
            return scattered

    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(Gather.apply(y), (x, weight), dy), gradients_of_theirs(x, weight, dy))


@needs_distributed
@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_input_that_is_still_communicated(asked_for, tensors, needs_grad):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    x, weight, dy = tensors
    waiting = AsyncCollectiveTensor(x.detach().clone()).requires_grad_(needs_grad)
    y = rms_norm(waiting, (N,), weight, 1e-6, backend=asked_for)
    assert type(y) is torch.Tensor
    check([y], [theirs(x, weight)])
    wanted = (waiting, weight) if needs_grad else (weight,)
    check(torch.autograd.grad(y, wanted, dy), gradients_of_theirs(x, weight, dy)[-len(wanted) :])
    check([rms_norm_forward(waiting, weight, 1e-6, backend=asked_for)[0]], [theirs(x, weight)])


def test_a_gradient_without_memory(asked_for, tensors):
    x, weight, _ = tensors
    zero = torch._efficientzerotensor(x.shape, device=x.device)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(y, (x, weight), zero), (torch.zeros_like(x), torch.zeros_like(weight)))


@pytest.mark.parametrize("is_known", [False, True])
def test_zeros_without_memory(asked_for, tensors, is_known):
    x, weight, dy = tensors
    zero = torch._efficientzerotensor(x.shape, device=x.device)
    zero_weight = torch._efficientzerotensor(weight.shape, device=x.device)
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    for arguments in ((zero, weight), (x, zero_weight), (zero, None)):
        y = rms_norm(arguments[0], (N,), arguments[1], 1e-6, backend=asked_for)
        assert torch.equal(y, torch.zeros_like(x))
    leaf = torch._efficientzerotensor(x.shape, device=x.device).requires_grad_()
    y = rms_norm(leaf, (N,), weight, 1.0, backend=asked_for)
    check(torch.autograd.grad(y, leaf, dy), [dy * weight])


@pytest.mark.parametrize("is_known", [False, True])
def test_a_pending_minus_sign(asked_for, tensors, is_known):
    x, weight, dy = tensors
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    minus = [torch._neg_view(-tensor.detach()).requires_grad_() for tensor in tensors]
    assert all(tensor.is_neg() for tensor in minus)
    expected, expected_grads = theirs(x, weight), gradients_of_theirs(x, weight, dy)
    for arguments in ((minus[0], weight, dy), (x, minus[1], dy), (x, weight, minus[2].detach()), minus):
        for needs_grad in (True, False) * 2:  # no such call is known afterwards
            with torch.set_grad_enabled(needs_grad):
                y = rms_norm(*(arguments[0], (N,), arguments[1], 1e-6), backend=asked_for)
            check([y], [expected])
            if needs_grad:
                check(torch.autograd.grad(y, arguments[:2], arguments[2]), expected_grads)
    with torch.no_grad():
        _, rstd = rms_norm_forward(minus[0], minus[1], 1e-6, backend=asked_for)
        got = rms_norm_backward(minus[0], minus[2], minus[1], torch._neg_view(-rstd), backend=asked_for)
    check(got, expected_grads)


def test_gradients_mapped_by_vmap(asked_for, tensors):
    """PyTorch's documented pattern for Jacobians."""
    x, weight, _ = tensors
    dys = torch.randn(3, M, N, device=x.device)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    for wanted in ((x,), (x, weight)):
        got = torch.vmap(lambda dy, wanted=wanted: torch.autograd.grad(y, wanted, dy, retain_graph=True))(dys)
        each = [torch.autograd.grad(theirs(x, weight), wanted, dy) for dy in dys]
        check(got, [torch.stack(parts) for parts in zip(*each, strict=True)])
    (got,) = torch.autograd.grad(y, x, dys, is_grads_batched=True)
    check(got, [torch.autograd.grad(theirs(x, weight), x, dy)[0] for dy in dys])


def test_gradients_asked_for_inside_a_transform(asked_for, tensors):
    """The transform does not touch the one dy."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    expected = gradients_of_theirs(x, weight, dy)

    def scaled(factor):
        return [each * factor for each in torch.autograd.grad(y, (x, weight), dy, retain_graph=True)]

    got = torch.vmap(scaled)(torch.tensor([1.0, 2.0], device=x.device))
    check(got, [torch.stack([each, each * 2]) for each in expected])


def test_freed_memory_is_an_error_in_the_forward(asked_for, tensors):
    """FSDP frees parameters between uses; the process ended."""
    x, weight, dy = (tensor.detach() for tensor in tensors)
    for make in (freed, freed_view, freed_minus, freed, freed_view):
        for arguments, name in (((make(x), weight), "input"), ((x, make(weight)), "weight")):
            with pytest.raises(
                ValueError, match=f"{name}: expected memory behind its elements, got a storage of 0"
            ):
                rms_norm(*(arguments[0], (N,), arguments[1]), backend=asked_for)
        rms_norm(x, (N,), weight, backend=asked_for)
    for make in (freed, freed_view, freed_minus):
        with pytest.raises(ValueError, match="input: expected memory"):
            torch.func.grad(lambda t: rms_norm(t, (N,), weight, backend="torch").sum())(make(x))
        with pytest.raises(ValueError, match="weight: expected memory"):
            torch.func.grad(lambda w: rms_norm(x, (N,), w, backend="torch").sum())(make(weight))
        with pytest.raises(ValueError, match="x: expected memory"):
            rms_norm_backward_torch(make(x), dy, weight, torch.ones(M, device=x.device))
        with pytest.raises(ValueError, match="x: expected memory"):
            compute_rms_norm_rstd_torch(make(x))
    with pytest.raises(ValueError, match="dy: expected memory"):
        rms_norm_backward(x, freed(dy), weight, torch.ones(M, device=x.device), backend=asked_for)


def test_a_tensor_kept_from_inside_a_transform(asked_for, tensors):
    x, weight, dy = tensors
    kept = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x.detach())
    for grad_mode in (torch.no_grad, torch.enable_grad):
        with grad_mode():
            check([rms_norm(kept[0], (N,), weight, 1e-6, backend=asked_for)], [theirs(x, weight)])
    check([rms_norm_forward(kept[0], weight, 1e-6, backend=asked_for)[0]], [theirs(x, weight)])
    nested = []
    torch.func.grad(lambda t: torch.func.grad(lambda t: (nested.append(t), t.square().sum())[1])(t).sum())(
        x.detach()
    )
    check([rms_norm(nested[0], (N,), weight, 1e-6, backend=asked_for)], [theirs(x, weight)])
    got = torch.autograd.grad(rms_norm(kept[0], (N,), weight, 1e-6, backend=asked_for), weight, dy)
    check(got, gradients_of_theirs(x, weight, dy)[1:])


@pytest.mark.parametrize("is_known", [False, True])
def test_functional_tensors(asked_for, tensors, is_known):
    """Functional tensors without their mode killed the CUDA context."""
    x, weight, dy = tensors
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    functional = torch._to_functional_tensor(x.detach())
    attempts = (
        lambda: rms_norm(functional, (N,), weight, 1e-6, backend=asked_for),
        lambda: rms_norm_forward(functional, weight, 1e-6, backend=asked_for)[0],
    )
    for attempt in attempts:
        if asked_for != "auto":
            with pytest.raises(BackendUnavailableError, match="functional tensor"):
                attempt()
        else:
            check([unwrapped(attempt())], [theirs(x, weight)])
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    functional_dy = torch._to_functional_tensor(dy)
    if asked_for != "auto":
        with pytest.raises(BackendUnavailableError, match="dy is a functional tensor"):
            torch.autograd.grad(y, x, functional_dy)
    else:
        got = torch.autograd.grad(y, (x, weight), functional_dy)
        check([unwrapped(gradient) for gradient in got], gradients_of_theirs(x, weight, dy))


@pytest.mark.parametrize("is_known", [False, True])
def test_functionalization_by_hand(asked_for, tensors, is_known):
    """A call of a known kind launched a kernel on address 0."""
    x, weight, _ = (tensor.detach() for tensor in tensors)
    if is_known:
        rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    torch._enable_functionalization(reapply_views=True)
    try:
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    finally:
        torch._disable_functionalization()
    check([unwrapped(y) if torch._is_functional_tensor(y) else y], [theirs(x, weight)])


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_functional_mode_by_itself(request, asked_for, tensors, has_residual):
    """AOTAutograd does not trace: the op below the mode computes. A kernel was refused there; "auto" did without."""
    x, weight, dy = tensors
    with FunctionalTensorMode():
        functional = [FunctionalTensor.to_functional(each.detach()) for each in (x, weight, dy)]
        leaves = [each.requires_grad_() for each in functional[:2]]
        residual = functional[2] if has_residual else None
        y = rms_norm(leaves[0], (N,), leaves[1], 1e-6, residual=residual, backend=asked_for)
        y = y[0] if has_residual else y
        gradients = torch.autograd.grad(y, leaves, functional[2])
        got = [unwrapped(each.elem) for each in (y.detach(), *gradients)]
    if "by address" in request.node.callspec.id:
        assert by_address.calls == ["rms_norm_forward", "rms_norm_backward"]
    leaves = [(x + dy if has_residual else x).detach().requires_grad_(), weight]
    check(got[:1], [theirs(*leaves)])
    check(got[1:], gradients_of_theirs(*leaves, dy))


def test_a_sparse_gradient_is_named(asked_for, tensors):
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with pytest.raises(TypeError, match="dy: expected layout torch.strided, got torch.sparse_coo"):
        torch.autograd.grad(y, (x, weight), dy.to_sparse())
