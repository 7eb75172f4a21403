# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Norms whose weights add to a main_grad, and exact sums to compare with."""

import torch
from helpers import BF16, DEVICE, FP32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import RMSNorm, accumulate_main_grad

N = 48


def norm_of(n=N, dtype=BF16, main=True, flag=False, **options):
    """A norm that adds, with random weights and a main_grad that holds something."""
    norm = RMSNorm(n, 1e-5, device=DEVICE, dtype=dtype, **options)
    nn.init.normal_(norm.weight)
    assert accumulate_main_grad(norm) == 1
    if main:
        norm.weight.main_grad = torch.randn(norm.weight.shape, device=DEVICE)
    if flag:
        norm.weight.grad_added_to_main_grad = False
    return norm


def rows(*shape, dtype=BF16):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def exact_dw(x, dy, heads=False):
    x, dy = x.detach().double(), dy.double()
    terms = dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return terms.flatten(0, -3 if heads else -2).sum(0)


def assert_added(found: Tensor, before: Tensor, dws: list[Tensor], terms: int) -> None:
    """Compare with float64. terms: how many products each sum has."""
    wanted = before.double() + sum(dws)
    assert found.dtype == FP32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * terms)


def two_uses(norm, way, x):
    """Use a norm's weight twice, one behind the other."""
    if way == "plain":
        return norm(norm(x))
    if way == "residual":
        return norm(*norm(x, x))[0]
    if way == "dispatch mode":
        with FlopCounterMode(display=False):
            return norm(norm(x))
    return checkpoint(lambda x: norm(norm(x)), x, use_reentrant=way == "checkpoint, reentrant")
