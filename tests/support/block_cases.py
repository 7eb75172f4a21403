# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""A correct provider of all of the benchmark's block ops, by PyTorch's autograd in float64; the errors of another
provider, and its records."""

import torch
from torch.nn import functional as F

from bench.block import cell as block_cell
from bench.block.check import errors_of, kind_of
from bench.block.families import BLOCK_OPS, FAMILIES, BlockInputs, family_of
from bench.block.providers import BlockProvider
from bench.measure.run_shape import Bench
from bench.providers.ours import EPS
from tilegym_rmsnorm.measure.accuracy import why_wrong

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPE = (24, 64)


def right(name: str = "right", **changes) -> BlockProvider:
    return BlockProvider(name, {op: computed(op) for op in BLOCK_OPS}, **changes)


def computed(op: str):
    """Return a function that computes an op."""
    names = family_of(op).outputs[op]

    def call(t: BlockInputs) -> tuple[torch.Tensor, ...]:
        found = results(t, is_backward=op.endswith("backward"))
        return tuple(found[name] for name in names)

    return call


def results(t: BlockInputs, is_backward: bool) -> dict[str, torch.Tensor]:
    """Every output by its name, each rounded once. A backward begins from what was saved."""
    dtype, cols = t.x.dtype, t.weight.shape
    weight = t.weight.double().requires_grad_()
    if is_backward:
        normalized = t.normalized.double().requires_grad_()
        bias = torch.zeros_like(weight).requires_grad_()
        y = F.rms_norm(normalized, cols, weight, EPS) + bias
        d, dw, db = torch.autograd.grad(y, (normalized, weight, bias), t.dy.double())
        d = d if t.d_residual_out is None else d + t.d_residual_out.double()
        found = {"dx": t.alpha * d, "d_residual": d, "dw": dw, "db": db}
        return {name: each.to(dtype) for name, each in found.items()}
    total = t.x.double() if t.residual is None else t.alpha * t.x.double() + t.residual.double()
    found = {"residual_out": total.to(dtype)}
    total = total.to(dtype).double()
    y = F.rms_norm(total, cols, t.weight.double(), EPS)
    found |= {"plain_y": y.to(dtype), "y": (y if t.bias is None else y + t.bias.double()).to(dtype)}
    return found | {"rstd": (total.square().mean(-1) + EPS).rsqrt().float()}


EVERY_OP = [(family, op) for family in FAMILIES for op in family.ops]


def reason(family, outputs, inputs, lenient=()):
    """Why outputs are wrong, None where they are right."""
    errors, allowed = errors_of({"it": outputs}, inputs, lenient)
    assert set(errors["it"]) == {kind_of(name) for name in outputs}
    return why_wrong(errors["it"], allowed)


def measured(monkeypatch, family, *providers, ops=None):
    """The records of a measurement of these providers on a CPU."""
    by_name: dict[str, list[BlockProvider]] = {}
    for each in providers:
        by_name.setdefault(each.name, []).append(each)
    monkeypatch.setattr(block_cell, "make_providers", lambda name, *_: by_name[name])
    bench = Bench(tuple(by_name), ops or family.ops, CPU)
    return bench.measure(SHAPE, BF16, lambda step: None)
