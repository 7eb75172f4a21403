# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Forwards and backwards of the cutile backend in the interpreter, on a machine that shuffles each launch's blocks."""

import torch
from helpers import Inputs

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.launch import Backward, Forward
from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config, forward_config
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine


def run_forward(inputs: Inputs, config=None, **machine):
    x, _, weight, eps, offset, casting = inputs
    config = config or forward_config(x.shape[1], x.dtype.itemsize, 90)
    forward = Forward(ShuffledMachine(**machine), config, x.shape[1], weight is not None, casting == "llama")
    y, rstd = forward(x, weight, eps, offset)
    assert interpreter.unwritten(y) == interpreter.unwritten(rstd) == 0
    return {"y": y, "rstd": rstd}


def run_backward(inputs: Inputs, config=None, has_dw=True, shares_partials=True, size="large", **machine):
    """`size` names the class whose config is taken, whatever the number of rows."""
    x, dy, weight, eps, offset, casting = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    has_dw = has_dw and weight is not None
    config = config or backward_config(x.shape[1], x.dtype.itemsize, 90, size, has_dw)
    machine = ShuffledMachine(**machine)
    run = Backward(
        machine, config, x.shape[1], weight is not None, has_dw, casting == "llama", shares_partials
    )
    dx, dw = run(x, dy, weight, rstd, offset)
    assert interpreter.unwritten(dx) == 0
    if not has_dw:
        assert dw is None
        return {"dx": dx}
    assert interpreter.unwritten(dw) == 0
    return {"dx": dx, "dw": dw}


class ShuffledMachine(InterpretedMachine):
    """Runs blocks in a random order, as a GPU may, and each launch in the order given."""

    def __init__(self, seed: int = 0, sm_count: int = 3) -> None:
        super().__init__()
        self.sm_count = sm_count
        self.generator = torch.Generator().manual_seed(seed)
        self.grids: list[tuple[int, ...]] = []

    def bind(self, function, config, constants):
        def run(grid, arguments):
            self.grids.append(grid)
            blocks = torch.Size(grid).numel()
            order = torch.randperm(blocks, generator=self.generator).tolist()
            interpreter.launch(function, grid, arguments + constants, order=order, dependent=True)

        return run
