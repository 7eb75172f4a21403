# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""AdamW of models in half precision."""

from __future__ import annotations

import math

import torch
from torch import nn

LEARNING_RATE, LEAST_SHARE = 1e-4, 0.1  # at 3e-4 the first losses jump


class MasterAdamW:
    """AdamW on float32 copies of half-precision parameters, which are rounded from them after each step, as in
    Megatron. Parameters in float32, as FSDP2's mixed precision keeps them, are their own masters.

    The rate rises over the first third of `steps`, and falls by a cosine.
    """

    def __init__(self, parameters: list[nn.Parameter], steps: int):
        self.parameters = parameters
        self.masters = [each if each.dtype == torch.float32 else each.detach().float() for each in parameters]
        decayed = [master for master in self.masters if master.ndim > 1]
        others = [master for master in self.masters if master.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, LEARNING_RATE, betas=(0.9, 0.95), fused=parameters[0].is_cuda)
        self.steps = steps
        self.restart()

    def restart(self) -> None:
        """Begin anew with what the parameters are now."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if master is not parameter:
                with torch.no_grad():
                    master.copy_(parameter)
        self.adamw.state.clear()
        for group in self.adamw.param_groups:
            group["lr"] = LEARNING_RATE
            group.pop("initial_lr", None)
        steps, warmup = self.steps, max(1, self.steps // 3)

        def factor(step: int) -> float:
            half = 0.5 * (1 - LEAST_SHARE)
            cosine = LEAST_SHARE + half * (1 + math.cos(math.pi * min(1.0, step / steps)))
            return min((step + 1) / warmup, cosine)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, factor)

    def step(self) -> None:
        """Update parameters by their gradients, and free these."""
        rounded = [pair for pair in zip(self.parameters, self.masters, strict=True) if pair[0] is not pair[1]]
        for parameter, master in rounded:
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.schedule.step()
        self.adamw.zero_grad()
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*rounded, strict=True)))
