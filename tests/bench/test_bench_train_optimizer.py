# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""AdamW of bench.train, of parameters in half precision and in float32: its masters, its rate, and a restart."""

import pytest
import torch
from torch import nn

from bench.train.optimizer import LEARNING_RATE, LEAST_SHARE, MasterAdamW


def steps_of(optimizer, parameters, count):
    """Take some steps of the same gradients in each run; return the parameters, and their masters."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
        optimizer.step()
    return [each.detach().clone() for each in (*parameters, *optimizer.masters)]


def test_master_parameters_keep_updates_that_bfloat16_would_lose():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], 100)
    for _ in range(60):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.equal(before - LEARNING_RATE, before), "one step is lost in bfloat16"
    assert weight.dtype == torch.bfloat16 and (weight < 1).all() and weight.grad is None
    [master] = optimizer.masters
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weight)
    expected = nn.Parameter(torch.ones(4))
    reference = MasterAdamW([expected], 100)
    for _ in range(60):
        expected.grad = torch.ones_like(expected)
        reference.step()
    assert torch.equal(master, expected)


def test_parameters_in_float32_are_their_own_masters():
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = MasterAdamW(parameters, 10)
    assert optimizer.masters[0] is parameters[0] and optimizer.masters[1].dtype == torch.float32
    steps_of(optimizer, parameters, 3)
    assert all((each != 1).any() for each in optimizer.masters)
    assert all(each.grad is None for each in (*parameters, *optimizer.masters))


def test_matrices_alone_decay():
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
    optimizer = MasterAdamW(parameters, 10)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert (parameters[0] < 1).all() and (parameters[1] == 1).all()


def test_gradients_are_clipped_together():
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer, seen = MasterAdamW(parameters, 10), []
    optimizer.adamw.register_step_pre_hook(
        lambda *_: seen.append([each.grad.clone() for each in optimizer.masters])
    )
    for each, value in zip(parameters, (3.0, 4.0), strict=True):
        each.grad = torch.tensor([value, 0.0]).bfloat16()
    optimizer.step()
    torch.testing.assert_close(torch.stack(seen[0])[:, 0], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_restart_gives_the_bits_of_a_fresh_optimizer(dtype):
    def make():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(3, 4).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))]

    parameters = make()
    start = [each.detach().clone() for each in parameters]
    optimizer = MasterAdamW(parameters, 6)
    first = steps_of(optimizer, parameters, 5)
    for each, value in zip(parameters, start, strict=True):
        each.data.copy_(value)
        each.grad = torch.ones_like(each)
    [setattr(each, "grad", torch.ones_like(each)) for each in optimizer.masters]
    optimizer.restart()
    assert all(each.grad is None for each in optimizer.masters)
    again = steps_of(optimizer, parameters, 5)
    fresh = make()
    expected = steps_of(MasterAdamW(fresh, 6), fresh, 5)
    assert all(torch.equal(one, other) for one, other in zip(first, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
    assert not torch.equal(first[2], start[0].float())


def test_the_rate_rises_over_a_third_of_the_steps_and_then_falls():
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer, rates = MasterAdamW(parameters, 60), []
    for _ in range(60):
        rates.append(optimizer.adamw.param_groups[0]["lr"] / LEARNING_RATE)
        steps_of(optimizer, parameters, 1)
    assert rates[0] == pytest.approx(1 / 20) and max(rates) > 0.75
    top = rates.index(max(rates))
    assert 15 <= top < 20 and rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert LEAST_SHARE < rates[-1] < LEAST_SHARE + 0.01
    steps_of(optimizer, parameters, 20)
    assert optimizer.adamw.param_groups[0]["lr"] == pytest.approx(LEARNING_RATE * LEAST_SHARE), (
        "it stays there"
    )
