# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tensors made under torch.inference_mode, as of a frozen encoder, beside learned ones: gradients have the bits that
other tensors of the same values give. Autograd refuses to save such a tensor; a copy is saved."""

import os
import subprocess
import sys

import pytest
import torch
from every_op import assert_same_bits, usual_kinds
from helpers import DEVICE
from torch.utils.checkpoint import checkpoint

from tilegym_rmsnorm import RMSNorm, rms_norm
from tilegym_rmsnorm.ops.norm.op import FORWARD


def cloned(tensor):
    """An ordinary tensor as what is saved: a clone is dense, so that another kernel than that of a slice may run."""
    return tensor.detach().clone()


def made_for_inference(tensor):
    with torch.inference_mode():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(
            tensor
        )


def gradients(call, backend, learned, fixed):
    """The results and the gradient of the tensor of this name; the others are as `fixed` makes them."""
    tensors = {name: fixed(each) for name, each in (call.leaves | call.fixed).items()}
    tensors[learned] = call.leaves[learned].detach().requires_grad_()
    results = call.public(*tensors.values(), backend=backend)
    sum(each.float().sin().sum() for each in results).backward()
    return [*results, tensors[learned].grad]


@usual_kinds
def test_gradients_beside_tensors_made_for_inference(op, kind, backend):
    """Each tensor is learned alone, twice: by all checks and by what is remembered of them."""
    call = op.make(kind)
    # The sum is saved in the place of x.
    fixed = torch.detach if "residual" in call.leaves else cloned
    for learned in call.leaves if backend in ("torch", "cutile") else list(call.leaves)[1:2]:
        expected = gradients(call, backend, learned, fixed)
        for _ in range(2):
            assert_same_bits(gradients(call, backend, learned, made_for_inference), expected)


def learn(function, x):
    """y and the gradients of a weight and a bias."""
    weight, bias = ((torch.arange(16.0, device=DEVICE) + i).requires_grad_() for i in range(2))
    y = function(x, weight, bias)
    y.sin().sum().backward()
    return y, weight.grad, bias.grad


PLAIN = torch.linspace(-2, 2, 96, device=DEVICE).view(6, 16)


def by_rms_norm(x, weight, bias):
    return rms_norm(x, 16, weight, 1e-6, bias=bias)


def by_the_op(x, weight, bias):
    return FORWARD(x, None, weight, bias, 1, 1e-6, 0.0, "once", 1.0, None, None, None)[0]


def by_the_op_with_a_residual(x, weight, bias):
    return FORWARD(x, x, weight, bias, 1, 1e-6, 0.0, "once", 1.0, None, None, None)[0]


def written_by_hand(x, weight, bias):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight + bias


def checkpointed(x, weight, bias):
    """x is no argument: the checkpoint itself would save it."""
    return checkpoint(lambda *given: by_rms_norm(x, *given), weight, bias, use_reentrant=False)


@pytest.mark.parametrize("function", [by_rms_norm, by_the_op, by_the_op_with_a_residual, checkpointed])
def test_other_ways_to_a_norm(function):
    expected = learn(function, PLAIN)
    got = learn(function, made_for_inference(PLAIN))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_compiled_it_learns_where_the_formula_does(compiler, backend):
    """AOTAutograd saves what a graph is given, and raises; so it does for any norm."""
    torch._dynamo.reset()
    x = made_for_inference(PLAIN)

    def ours(x, weight, bias):
        return rms_norm(x, 16, weight, 1e-6, bias=bias, backend=backend)

    try:
        expected = learn(torch.compile(written_by_hand, backend=compiler), x)
    except RuntimeError as error:
        assert "Inference tensors cannot be saved" in str(error)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            learn(torch.compile(ours, backend=compiler, fullgraph=True), x)
        return
    got = learn(torch.compile(ours, backend=compiler, fullgraph=True), x)
    torch.testing.assert_close(got, expected)


def test_second_derivatives():
    def second(x):
        weight = torch.arange(16.0, device=DEVICE, requires_grad=True)
        first = torch.autograd.grad(rms_norm(x, 16, weight).sin().sum(), weight, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), weight)[0]

    assert torch.equal(second(made_for_inference(PLAIN)), second(PLAIN))


def test_a_module_whose_parameters_were_made_for_inference():
    with torch.inference_mode():
        norm = RMSNorm(16, device=DEVICE)
    x = PLAIN.clone().requires_grad_()
    norm(x).sin().sum().backward()
    ordinary, other = RMSNorm(16, device=DEVICE), PLAIN.clone().requires_grad_()
    ordinary(other).sin().sum().backward()
    assert torch.equal(x.grad, other.grad) and torch.equal(norm.weight.grad, ordinary.weight.grad)


@pytest.mark.parametrize("has_residual", [False, True])
def test_nothing_is_recorded_inside_inference_mode(has_residual):
    """enable_grad() inside of it changes nothing, as with F.rms_norm."""
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode(), torch.enable_grad():
            y = rms_norm(PLAIN, 16, weight, residual=PLAIN if has_residual else None)
        for each in y if has_residual else (y,):
            assert each.is_inference() and not each.requires_grad and each.grad_fn is None


def test_no_copy_where_no_gradient_is_needed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
    weight = torch.ones(16, device=DEVICE)
    for needs_gradient in (False, True):
        weight.requires_grad_(needs_gradient)
        with torch.set_grad_enabled(not needs_gradient):
            rms_norm(made_for_inference(PLAIN), 16, weight)
    rms_norm(PLAIN, 16, weight).backward(PLAIN)  # nor of other tensors


def test_what_is_copied_is_the_input_alone():
    x, weight = made_for_inference(PLAIN), torch.ones(16, device=DEVICE, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, 16, weight)
    assert saved[0].data_ptr() != x.data_ptr() and torch.equal(saved[0], x)
    assert saved[1].data_ptr() == weight.data_ptr()


def test_a_dtensor(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = torch.linspace(-2, 2, 96).view(6, 16)
    for placement in (Shard(0), Shard(1)):
        for name in (None, "torch"):
            found = []
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    given = distribute_tensor(x.clone(), mesh, [placement])
                weight = distribute_tensor(torch.arange(16.0), mesh, [Replicate()]).requires_grad_()
                rms_norm(given, 16, weight, 1e-6, backend=name).sin().sum().backward()
                found.append(weight.grad.full_tensor())
            assert given.is_inference() and torch.equal(*found)


FIRST_CALLS = {
    "eager": "y = rms_norm(x, 8, weight)",
    "residual": "y = rms_norm(x, 8, weight, residual=x)[0]",
    "compiled": "y = torch.compile(lambda x: rms_norm(x, 8, weight), backend='eager')(x)",
}
CODE = f"""
import os
import torch
from tilegym_rmsnorm import rms_norm
with torch.inference_mode():
    x = torch.ones(2, 8)
weight = torch.ones(8, requires_grad=True)
for name, call in {FIRST_CALLS}.items():
    if os.fork() == 0:
        exec(call)
        y.sum().backward()
        print(name, weight.grad[0].item(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_first_calls_of_processes():
    """One process imports torch for all of them."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.split() == [each for name in FIRST_CALLS for each in (name, "2.0")], done.stderr
