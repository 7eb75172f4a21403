# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Forwards and backwards of the cutile backend in the interpreter, on a machine that shuffles each launch's blocks."""

import functools

import plain_calls
import planning
import torch
from helpers import Inputs

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import Policy
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine, Machine


def run_forward(inputs: Inputs, first: Variant | None = None, **machine):
    x, _, weight, eps, offset, _ = inputs
    shuffled = ShuffledMachine(**machine)
    run = Forward(shuffled, plan_for(inputs, "forward", shuffled, first))
    y, rstd = plain_calls.forward(run, x, weight, eps, offset)
    assert interpreter.unwritten(y) == interpreter.unwritten(rstd) == 0
    return {"y": y, "rstd": rstd}


def run_backward(
    inputs: Inputs,
    first: Variant | None = None,
    has_dw=True,
    partials="shared",
    size="large",
    policy: Policy | None = None,
    **machine,
):
    """`size` names the class whose rules are taken, whatever the number of rows."""
    x, dy, weight, eps, offset, _ = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    has_dw = has_dw and weight is not None
    shuffled = ShuffledMachine(**machine)
    options = {"size": size, "partials": partials, "policy": policy or Policy()}
    plan = plan_for(inputs, "backward" if has_dw else "dx", shuffled, first, **options)
    dx, dw = plain_calls.backward(Backward(shuffled, plan), x, dy, weight, rstd, offset)
    assert interpreter.unwritten(dx) == 0
    if not has_dw:
        assert dw is None
        return {"dx": dx}
    assert interpreter.unwritten(dw) == 0
    return {"dx": dx, "dw": dw}


def plan_for(inputs: Inputs, op: str, machine: Machine, first: Variant | None = None, **options) -> Plan:
    """The plan of a call, by this first kernel, or by what the rules choose beside a weight of x's dtype."""
    x, _, weight, *_, casting = inputs
    n, dtype = x.shape[1], None if weight is None else weight.dtype
    options |= {"facts": machine.facts, "casting": casting}
    if first is None:
        first = select(planning.problem(op, n, x.dtype, **options), planning.rules_of()).first
    return planning.plan(first, op, n, x.dtype, weight=dtype, **options)


class ShuffledMachine(InterpretedMachine):
    """Runs blocks in a random order, as a GPU may, and each launch in the order given."""

    def __init__(self, seed: int = 0, sm_count: int = 3) -> None:
        super().__init__()
        self.facts = self.facts._replace(sm_count=sm_count)
        self.generator = torch.Generator().manual_seed(seed)
        self.grids: list[tuple[int, ...]] = []

    def bind(self, function, variant, constants):
        def run(grid, arguments):
            self.grids.append(grid)
            blocks = torch.Size(grid).numel()
            order = torch.randperm(blocks, generator=self.generator).tolist()
            interpreter.launch(function, grid, arguments + constants, order=order, dependent=True)

        return run


def set_launcher(monkeypatch, name, kind):
    """Have `norm.Forward` or `norm.Backward` make launchers of this class."""
    monkeypatch.setattr(norm, name, functools.partial(kind, *getattr(norm, name).args))
