# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What a launch by teams of blocks (team.py) needs beside its own arrays: a board for each, emptied by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.kernels import team
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, constants_of
from tilegym_rmsnorm.backends.cutile.plans.wide import clear_config
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine


class Boards:
    """Makes the empty boards of teams by one config (team.py)."""

    def __init__(self, machine: Machine, config: Config, n: int) -> None:
        self.machine, self.config, self.slots = machine, clear_config(), config.slots
        switches = {"SLOTS": config.slots, "DEPENDENT": machine.dependent_launch}
        constants = constants_of(team.clear_board, self.config, n, **switches)
        self.clear = machine.bind(team.clear_board, self.config, constants)

    def new(self, m: int) -> Tensor:
        """One for m rows, which has more: the last counts tickets."""
        groups = m // self.config.rows + 1
        board = self.machine.empty((groups * self.config.rows, self.slots), torch.int32)
        self.clear((groups,), (board,))
        return board
