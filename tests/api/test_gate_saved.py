# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Saved tensors that change before the backward: by hooks, `tensor.data = ...` or freed memory. Fixtures as in
gate_cases.py."""

import by_address
import pytest
import torch
from gate_cases import CPU, N, Named, check, freed, freed_minus, freed_view, gradients_of_theirs, make_tensors
from helpers import DEVICE

from tilegym_rmsnorm import BackendUnavailableError, rms_norm

UNPACKED = {  # what a hook makes of each saved tensor; the values are the same
    "other strides": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], dim=-1)[..., 0],
    "columns first": lambda t: t.t().contiguous().t() if t.ndim == 2 else t,
    "a minus sign of x": lambda t: torch._neg_view(-t) if t.ndim == 2 else t,
    "a minus sign of the others": lambda t: t if t.ndim == 2 or t.shape == (N,) else torch._neg_view(-t),
    "an offset": lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),
    "a subclass": lambda t: t.as_subclass(Named),
    "another copy": lambda t: t.clone(),
}


@pytest.mark.parametrize("unpack", UNPACKED.values(), ids=UNPACKED)
def test_what_hooks_of_saved_tensors_return(asked_for, tensors, unpack):
    """rstd with other strides was read as packed: NaN."""
    x, weight, dy = tensors
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    check(torch.autograd.grad(y, (x, weight), dy), gradients_of_theirs(x, weight, dy))


WRONG = {
    "x of another dtype": (
        0,
        lambda t: t.half(),
        TypeError,
        "x, as unpacked for the backward: .* dtype of the forward",
    ),
    "x shorter": (0, lambda t: t[1:], ValueError, "x, as unpacked for the backward: .* the shape of dy"),
    "weight longer": (1, lambda t: torch.cat([t, t]), ValueError, "weight, as unpacked .* 8 elements"),
    "weight elsewhere": (1, lambda t: t.to("meta"), ValueError, "weight, as unpacked .* the device of x"),
    "rstd shorter": (2, lambda t: t[1:], ValueError, r"rstd, as unpacked .* shape \(6,\)"),
    "rstd of 16 bits": (2, lambda t: t.bfloat16(), ValueError, "rstd, as unpacked .* torch.float32"),
    "rstd sparse": (2, lambda t: t.to_sparse(), ValueError, "rstd, as unpacked .* torch.strided"),
    "rstd freed": (2, lambda t: freed(t), ValueError, "rstd: expected memory behind its elements"),
    "x freed": (0, lambda t: freed(t), ValueError, "x: expected memory behind its elements"),
    "x a view of freed memory": (0, lambda t: freed_view(t), ValueError, "x: expected memory behind its"),
    "weight a view of freed memory": (1, lambda t: freed_view(t), ValueError, "weight: expected memory"),
}


def unpacked_by(index, unpack):
    """Hooks that change one saved tensor: x, weight or rstd."""
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())
        return len(saved) - 1

    def unpacked(number):
        return unpack(saved[number]) if number == index else saved[number]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpacked)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("index", "unpack", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_hooks_may_not_return(asked_for, tensors, index, unpack, error, text, create_graph):
    x, weight, dy = tensors
    with unpacked_by(index, unpack):
        y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    with pytest.raises(error, match=text):
        torch.autograd.grad(y, (x, weight), dy, create_graph=create_graph)


def test_x_of_another_dtype_beside_a_y_of_that_dtype(backend):
    """Each of the others then fits x."""
    x, weight, dy = make_tensors(DEVICE)
    with unpacked_by(0, lambda t: t.float()):
        y = rms_norm(x.bfloat16(), (N,), weight, 1e-6, out_dtype=torch.float32, backend=backend)
    with pytest.raises(TypeError, match="x, as unpacked .* the dtype of the forward"):
        torch.autograd.grad(y, (x, weight), dy)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("index", "unpack"), [each[:2] for each in WRONG.values()], ids=WRONG)
def test_db_alone_reads_nothing_that_was_saved(asked_for, tensors, index, unpack, residual, create_graph):
    x, weight, dy = (each.detach() for each in tensors)
    bias = torch.randn(N, device=x.device, requires_grad=True)
    with unpacked_by(index, unpack):
        y = rms_norm(x, (N,), weight, 1e-6, bias=bias, residual=x if residual else None, backend=asked_for)
    y = y[0] if residual else y
    (db,) = torch.autograd.grad(y, bias, dy, create_graph=create_graph)
    check((db,), (dy.double().flatten(0, -2).sum(0).float(),))


CHANGED = {  # by `.data =`, which autograd's versions do not see: what F.rms_norm makes of it
    "weight shorter": (1, lambda t: t[:4].clone(), ValueError, "weight, as unpacked .* 8 elements"),
    "weight longer": (1, lambda t: torch.cat([t, t]), ValueError, "weight, as unpacked .* 8 elements"),
    "x longer": (0, lambda t: torch.cat([t, t]), ValueError, "x, as unpacked .* the shape of dy"),
    "x of another dtype": (0, lambda t: t.double(), TypeError, "x, as unpacked .* the dtype of the forward"),
    "x with a minus sign": (0, lambda t: torch._neg_view(-t), None, ""),
    "weight with a minus sign": (1, lambda t: torch._neg_view(-t), None, ""),
    "weight of other strides": (1, lambda t: torch.stack([t, t * torch.nan], -1)[:, 0], None, ""),
    "rstd of other strides": (2, lambda t: torch.stack([t, t * torch.nan], -1)[:, 0], None, ""),
    "rstd shorter": (2, lambda t: t[:2].clone(), ValueError, "rstd, as unpacked"),
    "rstd freed": (2, freed, ValueError, "rstd: expected memory behind its elements"),
}


@pytest.mark.parametrize(("index", "change", "error", "text"), CHANGED.values(), ids=CHANGED)
def test_data_changed_between_forward_and_backward(asked_for, tensors, index, change, error, text):
    x, weight, dy = tensors
    expected = gradients_of_theirs(x, weight, dy)
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    tensor = y.grad_fn.saved_tensors[index]
    with torch.no_grad():
        tensor.data = change(tensor.detach())
    if error is None:
        check(torch.autograd.grad(y, (x, weight), dy), expected)
    else:
        with pytest.raises(error, match=text):
            torch.autograd.grad(y, (x, weight), dy)


def test_a_weight_made_double_after_the_forward(asked_for, tensors):
    """module.double() does so: no kernel is for that pair; "auto" has a backend that is."""
    x, weight, dy = tensors
    expected = gradients_of_theirs(x, weight, dy)[0]
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    weight.data = weight.data.double()
    if asked_for in ("cutile", "triton"):
        with pytest.raises(BackendUnavailableError, match="not torch.float64"):
            torch.autograd.grad(y, x, dy)
    else:
        check(torch.autograd.grad(y, x, dy), [expected])


@pytest.mark.parametrize("options", [{}, {"create_graph": True}, {"is_grads_batched": True}])
def test_memory_freed_before_the_backward(asked_for, tensors, options):
    """Under create_graph, and for batches of gradients, the process ended."""
    x, weight, dy = tensors
    held = x * 1.0
    y = rms_norm(held, (N,), weight, 1e-6, backend=asked_for)
    held.untyped_storage().resize_(0)
    dy = torch.stack([dy, dy]) if "is_grads_batched" in options else dy
    with pytest.raises(ValueError, match="x: expected memory behind its elements"):
        torch.autograd.grad(y, weight, dy, **options)


def test_parameters_can_be_swapped_while_y_lives(asked_for, tensors):
    """torch.utils.swap_tensors refuses tensors that are weakly referenced."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    y.backward(dy)
    torch.utils.swap_tensors(weight, torch.zeros_like(weight))


@pytest.mark.parametrize("options", [{}, {"create_graph": True}])
@pytest.mark.parametrize("make", [freed, freed_view, freed_minus])
def test_a_gradient_whose_memory_was_freed(asked_for, tensors, make, options):
    """Under create_graph the process ended, and where a minus sign was pending."""
    x, weight, dy = tensors
    y = rms_norm(x, (N,), weight, 1e-6, backend=asked_for)
    dy = make(dy)
    with pytest.raises(ValueError, match="dy: expected memory behind its elements"):
        torch.autograd.grad(y, (x, weight), dy, **options)


@pytest.mark.parametrize("options", [{}, {"create_graph": True}])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_for_a_bias_alone_whose_memory_was_freed(tensors, is_transposed, options):
    """Rows of a transposed gradient are a copy: the process ended."""
    x, _, dy = tensors
    x, dy = (each.detach().view(2, 3, N) for each in (x, dy))
    if is_transposed:
        dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    bias = torch.zeros(N, device=x.device, requires_grad=True)
    y = rms_norm(x, (N,), None, 1e-6, bias=bias, backend="torch")
    dy.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="dy: expected memory behind its elements"):
        torch.autograd.grad(y, bias, dy, **options)


def test_the_backward_of_a_wide_bias_stays_with_backends_that_take_one(monkeypatch):
    """A gradient that had to be made plain sent it to a kernel that "auto" had not taken for the forward."""
    by_address.use(monkeypatch)
    x, weight, dy = make_tensors(CPU)
    bias = torch.zeros(N, requires_grad=True, dtype=torch.float64)
    expected = gradients_of_theirs(x, weight, dy)
    for gradient in (dy, torch._neg_view(-dy)):
        y = rms_norm(x, (N,), weight, 1e-6, bias=bias, backend="auto")
        dx, dw, db = torch.autograd.grad(y, (x, weight, bias), gradient)
        check((dx, dw, db), (*expected, dy.sum(0, dtype=torch.float64)))
    assert not by_address.calls
