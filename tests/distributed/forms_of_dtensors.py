# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Residual, bias, heads and dtypes of DTensors and under FSDP2, in each of four processes on a CPU.

test_four_processes.py starts it: python tests/distributed/forms_of_dtensors.py
"""

import processes
import pytest
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from helpers import Expected, assert_within
from processes import PROCESSES
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from variants import VARIANTS, Variant, VariantInputs, check_all, check_residual_out, expected, make, options

from tilegym_rmsnorm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward

SIZE = (4, 5, 4, 16)  # of x, (B, T, H, D): of five tokens two processes have two, one has one, one has none
BATCH, SEQUENCE, HEADS, COLUMNS = map(Shard, range(4))
WHOLE = Replicate()
FLOAT32 = Variant(size=SIZE, residual_dtype=torch.float32)


def run(mesh, variant: Variant, inputs: VariantInputs, placement, of_vectors=WHOLE, of_residual=None):
    """All results, whole, of DTensors that are placed so, and how y and residual_out are placed."""

    of_residual = placement if of_residual is None else of_residual
    placements = placement, of_vectors, of_vectors, of_residual
    given = [None if t is None else t.contiguous().requires_grad_() for t in inputs[:4]]
    leaves = x, weight, bias, residual = processes.placed(given, mesh, placements)
    dys = processes.placed((inputs.dy, inputs.d_residual_out), mesh, [placement] * 2)
    given = options(variant, inputs._replace(bias=bias, residual=residual))
    y, residual_out = rms_norm(x, variant.n, weight, variant.eps, **given, backend="auto"), None
    if residual is not None:
        y, residual_out = y
        torch.autograd.backward((y, residual_out), dys)
    else:
        y.backward(dys[0])
    found = {"y": y, "residual_out": residual_out}
    names = ("dx", "dw", "db", "d_residual")
    found |= {n: None if t is None else t.grad for n, t in zip(names, leaves, strict=True)}
    at = [result.placements for result in (y, residual_out) if result is not None]
    return {name: None if t is None else t.full_tensor().detach() for name, t in found.items()}, at


def check_all_of_parts(variant: Variant, inputs: VariantInputs, results) -> None:
    """`check_all`, with room for what is rounded on the way: each process rounds its part of dw and db to the dtype of
    the parameter, and PyTorch's own norm rounds its gradient before d_residual_out is added."""
    residual_out = results.pop("residual_out")
    if residual_out is not None:
        check_residual_out(variant, inputs, residual_out)
    wanted = expected(variant, inputs, residual_out)
    normalized = (inputs.x if residual_out is None else residual_out).double()
    xhat = torch.nn.functional.rms_norm(normalized, normalized.shape[-1:], None, variant.eps)
    dy, shape = inputs.dy.double(), variant.vector_shape
    terms = {"dw": dy * xhat, "db": dy}
    rounding = {
        name: torch.finfo(wanted[name].dtype).eps * term.abs().reshape(-1, *shape).sum(0)
        for name, term in terms.items()
        if name in wanted
    }
    if residual_out is not None:
        added = inputs.d_residual_out.double()
        d = wanted["d_residual"].truth - added
        eps = torch.finfo(variant.normalized_dtype).eps
        if variant.normalized_dtype != torch.promote_types(variant.dtype, variant.residual_dtype):
            eps = 0.0  # narrow, or wider than both: nothing is rounded on the way
        rounding["d_residual"] = eps * (d.abs() + (d + added).abs())
        rounding["dx"] = abs(variant.alpha) * rounding["d_residual"]
    wanted = {
        name: Expected(value, tolerance + rounding.get(name, 0.0), dtype)
        for name, (value, tolerance, dtype) in wanted.items()
    }
    assert_within(wanted, **{name: result for name, result in results.items() if result is not None})


def first_call_in_inference_mode(mesh) -> None:
    """Nothing was called before it, and autograd, whose key registers the rules of the ops, is left out."""
    inputs = make(FLOAT32)
    x, weight = (distribute_tensor(t, mesh, [at]) for t, at in ((inputs.x, SEQUENCE), (inputs.weight, WHOLE)))
    with torch.inference_mode():
        y = rms_norm(x, 16, weight, 1e-6)
    assert y.placements == (SEQUENCE,)
    expected = rms_norm(inputs.x, 16, inputs.weight, 1e-6, backend="torch")
    torch.testing.assert_close(y.full_tensor(), expected)


def each_variant(mesh) -> None:
    """Sharded in the batch, the sequence, the heads and inside of rows, and replicated: each result, placed as x is."""
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        variant = variant._replace(size=SIZE, layout="contiguous")
        inputs = make(variant, seed=seed)
        for placement in (BATCH, SEQUENCE, HEADS, COLUMNS, WHOLE):
            of_vectors = [WHOLE] + [Shard(0)] * (variant.weight == "heads" and placement is HEADS)
            for of_vector in of_vectors:
                results, placements = run(mesh, variant, inputs, placement, of_vector)
                is_placed = all(at == (placement,) for at in placements)
                assert is_placed or placement is COLUMNS, (name, placement, placements)  # which are gathered
                check_all_of_parts(variant, inputs, results)


def residual_placed_otherwise(mesh) -> None:
    """PyTorch's add says how: sharded wins over replicated."""
    inputs = make(FLOAT32)
    for placement in (BATCH, SEQUENCE, HEADS, COLUMNS):
        for pair in ((placement, WHOLE), (WHOLE, placement), (placement, BATCH), (BATCH, placement)):
            results, placements = run(mesh, FLOAT32, inputs, pair[0], of_residual=pair[1])
            assert placement is COLUMNS or all(at != (WHOLE,) for at in placements), (pair, placements)
            check_all_of_parts(FLOAT32, inputs, results)


def sum_still_to_be_made(mesh) -> None:
    """x as a linear layer sharded by rows leaves it: each process has a summand."""
    x, residual, weight = (
        tensor.detach() for tensor in (make(FLOAT32).x, make(FLOAT32).residual, make(FLOAT32).weight)
    )
    whole = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
    y, residual_out = rms_norm(whole[0], 16, whole[2], 1e-6, residual=whole[1], backend="torch")
    (y.sin().sum() + residual_out.cos().sum()).backward()
    for placement in (WHOLE, SEQUENCE):
        leaves = [distribute_tensor(t, mesh, [at]) for t, at in ((residual, placement), (weight, WHOLE))]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        part = DTensor.from_local((1 + dist.get_rank()) / 10 * x, mesh, [Partial()]).requires_grad_()
        got, sum_got = rms_norm(part, 16, leaves[1], 1e-6, residual=leaves[0])
        (got.sin().sum() + sum_got.cos().sum()).backward()
        pairs = (got, y), (sum_got, residual_out), (part.grad, whole[0].grad)
        pairs += (leaves[0].grad, whole[1].grad), (leaves[1].grad, whole[2].grad)
        for one, other in pairs:
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)


def plain_beside_distributed(mesh) -> None:
    """An error that names the plain one."""
    inputs = make(FLOAT32)
    x, weight = (distribute_tensor(t, mesh, [at]) for t, at in ((inputs.x, SEQUENCE), (inputs.weight, WHOLE)))
    with pytest.raises(TypeError, match=r"^residual: .* got a plain tensor of shape \(.*, 2, "):
        rms_norm(x, 16, weight, residual=inputs.residual[:, :2])


def below_autograd(mesh) -> None:
    variant = FLOAT32._replace(
        size=(4, 8, 4, 16), bias_dtype=torch.float32
    )  # of an uneven T PyTorch cannot flatten rows
    inputs = make(variant)
    for placement in (BATCH, HEADS, COLUMNS, WHOLE):
        if placement is HEADS and not processes.CAN_FLATTEN:  # rstd is (M,)
            continue

        def placed(tensor, at=placement):
            return distribute_tensor(tensor, mesh, [at])

        x, residual, dy, d_residual_out = map(
            placed, (inputs.x, inputs.residual, inputs.dy, inputs.d_residual_out)
        )
        weight, bias = (placed(t, WHOLE) for t in (inputs.weight, inputs.bias))
        y, residual_out, rstd = rms_norm_forward(x, weight, variant.eps, bias=bias, residual=residual)
        dx, dw, db = rms_norm_backward(
            residual_out, dy, weight, rstd, d_residual_out=d_residual_out, needs_db=True
        )
        found = {"y": y, "residual_out": residual_out, "rstd": rstd, "dx": dx, "dw": dw, "db": db}
        check_all(variant, inputs, {name: t.full_tensor() for name, t in found.items()})


def module_in_sequence_parallel(mesh) -> None:
    """The residual by name: PyTorch's SequenceParallel hands on the first positional argument alone."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm(16, residual_alpha=0.5, bias=True)

        def forward(self, x, residual):
            return self.norm(x, residual=residual)

    inputs = make(FLOAT32._replace(size=(4, 5, 16), residual_dtype=torch.float32))
    block = Block()
    torch.nn.init.normal_(block.norm.weight, generator=torch.Generator().manual_seed(0))
    y, residual_out = block(inputs.x.clone().requires_grad_(), inputs.residual)
    parameters = list(block.parameters())
    whole = torch.autograd.grad((y, residual_out), parameters[:2], (inputs.dy, inputs.d_residual_out))
    parallelize_module(block, mesh, {"norm": SequenceParallel()})
    placed = [distribute_tensor(t, mesh, [SEQUENCE]) for t in (inputs.x, inputs.residual)]
    got = block(placed[0].requires_grad_(), placed[1])
    for one, other in zip(got, (y, residual_out), strict=True):
        assert one.placements == (SEQUENCE,)
        torch.testing.assert_close(one.full_tensor(), other.detach())
    gradients = [distribute_tensor(t, mesh, [SEQUENCE]) for t in (inputs.dy, inputs.d_residual_out)]
    torch.autograd.backward(got, gradients)
    for parameter, other in zip(block.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other, rtol=1e-4, atol=1e-4)


def result_of_a_collective(mesh) -> None:
    """A residual that is still being communicated is waited for, whichever backend reads it."""
    inputs = make(FLOAT32)
    for backend in ("torch", "auto"):
        residual = collectives.all_reduce(inputs.residual.clone(), "sum", mesh)
        assert isinstance(residual, collectives.AsyncCollectiveTensor)
        _, residual_out = rms_norm(inputs.x, 16, inputs.weight, residual=residual, backend=backend)
        assert torch.equal(residual_out, inputs.x + PROCESSES * inputs.residual)


class Block(torch.nn.Module):
    """Fused residual adds, a bias, and weights of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(32, bias=True)
        self.of_heads = RMSNorm(8, heads=4)
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x, residual):
        y, residual = self.norm(x, residual)
        y = self.of_heads(y.view(*y.shape[:-1], 4, 8)).flatten(-2)
        return self.linear(y), residual


def fully_sharded(mesh) -> None:
    """FSDP2: gradients of two blocks, of which each process has a part of the batch and of each parameter."""

    def gradients(is_sharded):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList([Block() for _ in range(2)])
        for parameter in blocks.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        x = torch.randn(4, 6, 32)
        if is_sharded:
            for block in blocks:
                fully_shard(block, mesh=mesh)
            x = x.chunk(PROCESSES)[dist.get_rank()]
        h, residual = x, torch.zeros_like(x)
        for block in blocks:
            h, residual = block(h, residual)
        (h.sin().mean() + residual.cos().mean()).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    for ours, whole in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours.full_tensor(), whole, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    processes.run_cases(globals())
