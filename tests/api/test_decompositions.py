# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Exported graphs without library ops, for runtimes that know PyTorch's operations alone."""

from __future__ import annotations

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64
from torch import nn
from torch.export import Dim, default_decompositions, export
from torch.fx.experimental.proxy_tensor import make_fx

from tilegym_rmsnorm import RMSNorm, qk_norm_rope, rms_norm, use_backend
from tilegym_rmsnorm.integrations.export import decompositions

N = 16


class Norms(nn.Module):
    """Norms with each kind of rounding, and a rotation."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.plain = RMSNorm(N, dtype=dtype)
        self.llama = RMSNorm(N, bias=True, offset=1.0, casting="llama", residual_dtype=dtype)
        self.heads = RMSNorm(N, heads=2, dtype=dtype, casting="llama")
        for parameter in self.parameters():
            nn.init.normal_(parameter, 1.0)

    def forward(self, x, residual):
        y, total = self.llama(self.plain(x), residual)
        q = self.heads(y.unflatten(-2, (-1, 2)))
        table = residual.detach()[:, ::2].float()
        return *qk_norm_rope(q, q, self.plain.weight, None, table, table, rope_rounding="each"), total


def targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target).partition(".")[0] for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("dtype", "of_pytorch", "strict"),
    [(FP32, False, False), (BF16, False, True), (FP16, True, False), (BF16, True, True)],
)
def test_an_exported_program_without_ops(dtype, of_pytorch, strict):
    """run_decompositions without a table keeps the ops."""
    torch._dynamo.reset()
    model = Norms(dtype)
    x, residual = torch.randn(3, 6, N).to(dtype), torch.randn(3, 6, N)
    batch = Dim("batch", min=2, max=64)
    program = export(model, (x, residual), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    assert "tilegym_rmsnorm" in targets(program.run_decompositions().graph)
    table = decompositions()
    if of_pytorch:
        table = default_decompositions()
        table.update(decompositions())
    program = program.run_decompositions(table)
    assert "tilegym_rmsnorm" not in targets(program.graph)
    assert "dtype" not in {getattr(node.target, "_overloadname", "") for node in program.graph.nodes}
    for count in (3, 2, 5):
        given = torch.randn(count, 6, N).to(dtype), torch.randn(count, 6, N)
        for result, expected in zip(program.module()(*given), model(*given), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
def test_a_step_without_ops(dtype):
    """The backwards are decomposed too."""
    model = Norms(dtype)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def step(x, residual, *values):
        y = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x, residual))
        return torch.autograd.grad(sum(each.double().sin().sum() for each in y), (x, residual, *values))

    given = torch.randn(3, 6, N, dtype=dtype).requires_grad_(), torch.randn(3, 6, N).requires_grad_()
    given += tuple(p.detach().requires_grad_() for p in parameters)
    with_ops = make_fx(step, tracing_mode="fake")(*given)
    assert "tilegym_rmsnorm" in targets(with_ops.graph)
    graph = make_fx(step, tracing_mode="symbolic", decomposition_table=decompositions())(*given)
    assert "tilegym_rmsnorm" not in targets(graph.graph)
    for result, expected in zip(graph(*given), step(*given), strict=True):
        assert torch.equal(result, expected)


def test_the_roundings_of_kernels_not_of_a_table():
    """`translated` ends with the call: a graph that is trained afterwards has the gradients of the rounding."""
    x = torch.randn(3, N, dtype=BF16, requires_grad=True)
    program = export(RMSNorm(N, casting="llama", dtype=BF16), (x,))
    program.run_decompositions(decompositions())
    with use_backend("torch"):
        module = export(RMSNorm(N, casting="llama", dtype=BF16), (x,)).module()
    (dx,) = torch.autograd.grad(module(x).float().sin().sum(), x)
    (expected,) = torch.autograd.grad(
        rms_norm(x, N, torch.ones(N, dtype=BF16), casting="llama").float().sin().sum(), x
    )
    torch.testing.assert_close(dx, expected)
